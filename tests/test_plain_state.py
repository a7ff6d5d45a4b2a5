"""State_dicts of unsharded models come in, also of smaller tables, and go out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recsys_tpu.errors import CheckpointError
from recsys_tpu.plain_state import load_plain, read_plain
from tests.sharding import training
from tests.sharding.ranks import on_ranks
from tests.sharding.training import Case, Table

FILE = Path("state.pt")


def test_rows_beyond_the_file_keep_their_values_and_nothing_else_may_differ() -> None:
    target = {"table": torch.full((4, 2), 7.0), "dense": torch.zeros(3)}
    source = {"table": torch.ones(3, 2), "dense": torch.ones(3)}
    with pytest.raises(CheckpointError, match="table has 3 rows"):
        load_plain(target, source, path=FILE)
    assert not target["dense"].any(), "nothing is copied when something does not fit"
    report = load_plain(target, source, path=FILE, grow=True)
    assert report.grown == {"table": (3, 4)}
    assert target["table"].tolist() == [[1, 1], [1, 1], [1, 1], [7, 7]]
    for other in (torch.ones(5, 2), torch.ones(3, 3), torch.ones(4)):
        with pytest.raises(CheckpointError, match="table has shape"):
            load_plain(target, {**source, "table": other}, path=FILE, grow=True)


def test_missing_and_unknown_names_need_partial() -> None:
    target, source = {"a": torch.zeros(2), "b": torch.zeros(2)}, {"a": torch.ones(2), "c": torch.ones(2)}
    with pytest.raises(CheckpointError, match="lacks b, and has c beyond it"):
        load_plain(target, source, path=FILE)
    report = load_plain(target, source, path=FILE, partial=True)
    assert (report.loaded, report.kept, report.unused) == (["a"], ["b"], ["c"])
    assert target["a"].all() and not target["b"].any()
    with pytest.raises(CheckpointError, match="none of its names"):
        load_plain(target, {"c": torch.ones(2)}, path=FILE, partial=True)


def test_state_of_other_ranks_is_no_difference_but_a_missing_one_is() -> None:
    target = {"a": torch.zeros(2)}
    source = {"a": torch.ones(2), "of another rank": torch.ones(2)}
    assert load_plain(target, source, path=FILE, of_all_ranks=True).loaded == ["a"]
    with pytest.raises(CheckpointError, match="lacks b"):
        load_plain({**target, "b": torch.zeros(2)}, source, path=FILE, of_all_ranks=True)


def test_files_that_are_no_state_dicts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        read_plain(tmp_path / "absent.pt")
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes(b"not a state_dict")
    with pytest.raises(CheckpointError, match="not a state_dict"):
        read_plain(damaged)
    torch.save({"a": 1}, damaged)
    with pytest.raises(CheckpointError, match="not a mapping of names to tensors"):
        read_plain(damaged)
    torch.save({"a": torch.ones(2)}, damaged)
    assert read_plain(damaged)["model"]["a"].tolist() == [1, 1]


def test_an_unsharded_state_comes_into_every_plan_and_goes_out(tmp_path: Path) -> None:
    kinds = ("row_wise", "column_wise", "table_wise", "data_parallel")
    case = Case(
        tuple(Table(9 + index, 8, (f"f{index}",), kind, (1, 0)) for index, kind in enumerate(kinds)),
        optimizer="adagrad",
    )
    whole = {f"ebc.{name}": value + 1 for name, value in training.initial_tables(case).items()}
    smaller = {name: value[:5] for name, value in whole.items()}
    torch.save(smaller, tmp_path / "in.pt")
    on_ranks("tests.sharding.resharding:through_plain", 2, "cpu", case, str(tmp_path))
    out = read_plain(tmp_path / "out.pt")
    start = training.initial_tables(case)
    for name, value in out["model"].items():
        expected = torch.cat([smaller[name], start[name.removeprefix("ebc.")][5:]])
        torch.testing.assert_close(value, expected, rtol=0, atol=0)
    assert out["model"].keys() == whole.keys()
    name = "ebc.embedding_bags.t0.weight.t0.momentum1"
    assert out["optimizer"][name].shape == (9, 8), "one value an element, of the whole table"
