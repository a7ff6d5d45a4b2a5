"""Checkpoints move between plans, world sizes and sharding types; training goes on with the same losses."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from tests.sharding import training
from tests.sharding.ranks import on_ranks
from tests.sharding.training import SHARDED, Case, Table

# A row has one sum of squares, a table one step, whoever trains it.
PLANS = {
    "rowwise_adagrad": SHARDED,
    "adam": ("table_wise", "column_wise", "data_parallel", "row_wise"),
    "adagrad": ("data_parallel", "row_wise", "column_wise"),
}
MORE = 5


def case_of(sharding: str, optimizer: str, ranks: tuple[int, ...] = (0, 1)) -> Case:
    tables = (
        Table(40, 8, ("a",), sharding, ranks=ranks),
        Table(3, 16, ("b", "a"), sharding, ranks=ranks[::-1]),
    )
    return Case(tables, optimizer=optimizer, steps=6, split_columns=("column_wise", "table_column_wise"))


def whole(folder: Path) -> dict[str, torch.Tensor]:
    from tests.sharding.resharding import read_whole

    return read_whole(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Checkpoints of two ranks, by (plan, optimizer)."""
    folders = {
        (plan, optimizer): tmp_path_factory.mktemp(f"{plan}-{optimizer}")
        for optimizer, plans in PLANS.items()
        for plan in plans
    }
    jobs = [(case_of(*key), str(folder)) for key, folder in folders.items()]
    on_ranks("tests.sharding.resharding:train_and_save", 2, "cpu", jobs)
    return folders


def test_the_canonical_form_is_that_of_the_whole_table(saved: dict[tuple[str, str], Path]) -> None:
    for (plan, optimizer), folder in saved.items():
        if (plan, optimizer) == ("data_parallel", "adam"):
            continue  # torch's moves rows that a batch has not touched
        expected = training.train_unsharded(case_of(plan, optimizer))
        found = whole(folder)
        for index in range(2):
            name = f"embedding_bags.t{index}.weight"
            close(found[f"model/ebc.{name}"], expected["tables"][name])
            state = expected["states"][name]["momentum1"]
            if optimizer == "rowwise_adagrad":  # [column shards, rows]: a row's mean is the mean of its parts
                state = state.mean(0)
            close(found[f"optimizer/ebc.{name}/t{index}.momentum1"].double(), state)
            if optimizer == "adam":
                close(
                    found[f"optimizer/ebc.{name}/t{index}.exp_avg_sq"].double(),
                    expected["states"][name]["exp_avg_sq"],
                )
                assert int(found[f"optimizer/ebc.{name}/t{index}.step"]) == 6


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_every_plan_loads_every_other(saved: dict[tuple[str, str], Path], tmp_path: Path, world: int) -> None:
    jobs = [
        (case_of(to, optimizer), str(saved[plan, optimizer]), str(tmp_path / f"{plan}-{to}-{optimizer}"))
        for optimizer, plans in PLANS.items()
        for plan, to in itertools.permutations(plans, 2)
    ]
    on_ranks("tests.sharding.resharding:resave", world, "cpu", jobs)
    for _, folder, again in jobs:
        before, after = whole(Path(folder)), whole(Path(again))
        assert before.keys() == after.keys()
        for name, value in before.items():
            close(after[name].to(value.dtype), value, rtol=1e-6)


def test_state_of_unpooled_tables_is_canonical_too(tmp_path: Path) -> None:
    case = replace(case_of("column_wise", ""), tables=(Table(40, 8, ("a",), "column_wise", (0, 1)),))
    other = replace(case, tables=tuple(replace(table, sharding="row_wise") for table in case.tables))
    shapes = {EmbOptimType.EXACT_ROWWISE_ADAGRAD: (40,), EmbOptimType.ADAM: (40, 8)}
    jobs = [(case, other, optimizer, str(tmp_path / optimizer.name)) for optimizer in shapes]
    on_ranks("tests.sharding.resharding:unpooled", 2, "cpu", jobs)
    for optimizer, shape in shapes.items():
        before, after = whole(tmp_path / optimizer.name / "first"), whole(tmp_path / optimizer.name / "again")
        assert before.keys() == after.keys()
        for name, value in before.items():
            close(after[name], value, rtol=0)
        momentum = before["optimizer/ec.embeddings.t0.weight/t0.momentum1"]
        assert momentum.shape == shape and momentum.any()


@pytest.mark.parametrize("world", [1, 2])
def test_training_goes_on_with_the_same_losses(saved: dict[tuple[str, str], Path], world: int) -> None:
    keys = [
        ("table_wise", "row_wise"),
        ("row_wise", "table_wise"),
        ("table_wise", "column_wise"),
        ("column_wise", "row_wise"),
    ]
    jobs = []
    for plan, to in (("data_parallel", "row_wise"), ("row_wise", "data_parallel")):
        jobs.append((case_of(to, "adagrad"), str(saved[plan, "adagrad"]), MORE))
    for optimizer in ("rowwise_adagrad", "adam"):
        for plan, to in keys:
            # Row-wise sums of column shards are their own thing (as FBGEMM's): not the unsharded run's.
            if optimizer == "adam" or "column_wise" not in (plan, to):
                jobs.append((case_of(to, optimizer), str(saved[plan, optimizer]), MORE))
    results = on_ranks("tests.sharding.resharding:load_and_continue", world, "cpu", jobs)
    for index, (case, _, _) in enumerate(jobs):
        whole_run = training.train_unsharded(replace(case, steps=6 + MORE))
        losses = np.mean([rank[index]["losses"] for rank in results], axis=0)
        np.testing.assert_allclose(losses, whole_run["losses"][6:], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_and_four_ranks_go_on_from_each_others_checkpoints(tmp_path: Path) -> None:
    two, four = str(tmp_path / "two"), str(tmp_path / "four")
    case, other = case_of("row_wise", "rowwise_adagrad"), case_of("table_wise", "rowwise_adagrad")
    on_ranks("tests.sharding.resharding:train_and_save", 2, "cpu", [(case, two)])
    on_four = on_ranks(
        "tests.sharding.resharding:save_and_continue", 4, "cpu", (case, four), (case, two, MORE)
    )
    on_two = on_ranks("tests.sharding.resharding:load_and_continue", 2, "cpu", [(other, four, MORE)])
    expected = training.train_unsharded(replace(case, steps=6 + MORE))["losses"][6:]
    for ranks in (on_four, on_two):
        losses = np.mean([rank[0]["losses"] for rank in ranks], axis=0)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


def close(value: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(value, expected, rtol=rtol, atol=rtol)
