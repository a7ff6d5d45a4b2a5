"""Golden values: mlcommons/training aa344c7 (torchrec_dlrm/multi_hot.py), class Multihot with these sizes."""

import hashlib
import multiprocessing
import shutil
from pathlib import Path

import numpy as np
import pytest

from recsys_tpu.data import multi_hot as module
from recsys_tpu.data.criteo.__main__ import main
from recsys_tpu.data.metadata import DatasetError
from recsys_tpu.data.multi_hot import MultiHot, ensure_multi_hot_tables
from tests.data.test_reader import reader, write_data

ROWS = {"A": 7, "B": 4, "C": 11}
SIZES = {"A": 3, "B": 1, "C": 5}
REFERENCE = {
    "uniform": {
        "A": [[0, 4, 5], [1, 0, 3], [2, 3, 3], [3, 1, 3], [4, 5, 2], [5, 4, 6], [6, 0, 0]],
        "B": [[0], [1], [2], [3]],
        "C": [
            [0, 10, 1, 6, 7], [1, 7, 8, 1, 5], [2, 9, 8, 9, 4], [3, 3, 0, 3, 5], [4, 0, 2, 3, 8],
            [5, 1, 3, 3, 3], [6, 7, 0, 1, 9], [7, 9, 0, 10, 4], [8, 7, 3, 2, 7], [9, 2, 0, 0, 4],
            [10, 5, 5, 6, 8],
        ],
    },
    "pareto": {
        "A": [[0, 2, 3], [1, 4, 1], [2, 1, 6], [3, 1, 0], [4, 3, 5], [5, 5, 5], [6, 6, 2]],
        "B": [[0], [1], [2], [3]],
        "C": [
            [0, 0, 0, 0, 8], [1, 4, 3, 4, 8], [2, 10, 1, 0, 3], [3, 0, 10, 7, 7], [4, 2, 9, 10, 5],
            [5, 0, 1, 10, 1], [6, 3, 8, 4, 8], [7, 8, 0, 3, 6], [8, 1, 0, 3, 5], [9, 6, 9, 6, 0],
            [10, 1, 1, 2, 2],
        ],
    },
}  # fmt: skip
# (rows, size, first half of the SHA-256 of the reference's table as int32): some of MLPerf's tables
LARGER = {
    "uniform": [
        (39060, 3, "947316a7300ef4c9"), (17295, 2, "85bfd812ce8536af"), (7424, 1, "3d3c1c783eb0c67f"),
        (20265, 2, "683e6637814ae8c0"), (3, 6, "db9ececc62366caa"), (7122, 7, "3dc39b6dd3775460"),
        (50000, 100, "4f5f845127f41f00"), (1543, 27, "5f3b4a65c02beaf6"),
    ],
    "pareto": [
        (39060, 3, "183da8100519a3e2"), (17295, 2, "01da8c9b75015c07"), (7424, 1, "3d3c1c783eb0c67f"),
        (20265, 2, "2ff0cd730fb6f8a5"), (3, 6, "3c2b3f27bba26ebc"), (7122, 7, "b2afe401274216a3"),
        (50000, 100, "09e990d1f2bf4f37"), (1543, 27, "bf4d40473021dca8"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("distribution", REFERENCE)
def test_the_same_ids_as_the_reference(distribution: str, tmp_path: Path) -> None:
    settings = MultiHot(sizes=SIZES, distribution=distribution)  # type: ignore[arg-type]
    tables = ensure_multi_hot_tables(settings, ROWS, tmp_path)
    for name, expected in REFERENCE[distribution].items():
        found = tables.expand(name, np.arange(ROWS[name], dtype=np.int32))
        np.testing.assert_array_equal(found.reshape(ROWS[name], SIZES[name]), expected)


@pytest.mark.parametrize("distribution", LARGER)
def test_the_same_ids_as_the_reference_on_larger_tables_drawn_in_pieces(
    distribution: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE_IDS", 10_000)
    rows = {f"C{i}": case[0] for i, case in enumerate(LARGER[distribution])}
    sizes = {f"C{i}": case[1] for i, case in enumerate(LARGER[distribution])}
    settings = MultiHot(sizes=sizes, distribution=distribution)  # type: ignore[arg-type]
    tables = ensure_multi_hot_tables(settings, rows, tmp_path)
    for name, (count, _, digest) in zip(rows, LARGER[distribution], strict=True):
        found = tables.expand(name, np.arange(count, dtype=np.int32))
        assert hashlib.sha256(found.astype("<i4").tobytes()).hexdigest()[:16] == digest, name


def test_tables_are_drawn_once_and_depend_on_everything_that_decides_them(tmp_path: Path) -> None:
    settings = MultiHot(sizes=SIZES)
    first = ensure_multi_hot_tables(settings, ROWS, tmp_path)
    marker = tmp_path / first.fingerprint / "A.ids"
    stamp = marker.stat().st_mtime_ns
    assert ensure_multi_hot_tables(settings, ROWS, tmp_path).fingerprint == first.fingerprint
    assert marker.stat().st_mtime_ns == stamp
    for other_settings, rows in (
        (MultiHot(sizes=SIZES, seed=1), ROWS),
        (MultiHot(sizes=SIZES, distribution="pareto"), ROWS),
        (MultiHot(sizes=SIZES | {"C": 4}), ROWS),
        (settings, ROWS | {"B": 5}),
        (settings, dict(reversed(ROWS.items()))),
    ):
        assert ensure_multi_hot_tables(other_settings, rows, tmp_path).fingerprint != first.fingerprint


def _ensure(directory: Path) -> str:
    return ensure_multi_hot_tables(MultiHot(sizes=SIZES), ROWS, directory).fingerprint


def test_processes_that_ask_at_once_get_the_same_tables_and_a_killed_one_leaves_nothing(
    tmp_path: Path,
) -> None:
    expected = _ensure(tmp_path / "alone")
    leftover = tmp_path / "shared" / f"{expected}.partial"
    leftover.mkdir(parents=True)
    (leftover / "A.ids").write_bytes(b"half")
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert pool.map(_ensure, [tmp_path / "shared"] * 4) == [expected] * 4
    assert not leftover.exists()
    for name in ("A.ids", "C.ids"):
        content = (tmp_path / "shared" / expected / name).read_bytes()
        assert content == (tmp_path / "alone" / expected / name).read_bytes()


def test_errors_name_the_feature_and_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DatasetError, match=r"data\.multi_hot\.sizes names D, .*it has A, B, C"):
        ensure_multi_hot_tables(MultiHot(sizes={"D": 2}), ROWS, tmp_path)
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DatasetError, match=r"free; set data\.cache_dir to a larger disk"):
        ensure_multi_hot_tables(MultiHot(sizes=SIZES), ROWS, tmp_path)


def test_the_reader_expands_every_id_and_keeps_rows_order_and_padding(tmp_path: Path) -> None:
    directory = write_data(tmp_path / "data", rows=50)
    rows = {"A": 1000, "B": 50}
    tables = ensure_multi_hot_tables(MultiHot(sizes={"A": 3, "B": 2}), rows, tmp_path / "cache")
    plain, expanded = reader(directory), reader(directory, multi_hot=tables)
    assert expanded.order != plain.order
    for before, after in zip(plain.epoch(0), expanded.epoch(0), strict=True):
        assert (before.labels == after.labels).all()
        for name, size in (("A", 3), ("B", 2)):
            one, several = before.sparse[name], after.sparse[name]
            assert (several.lengths() == one.lengths() * size).all()
            assert several.values().tolist() == tables.expand(name, one.values().numpy()).tolist()


def test_the_command_draws_the_tables_that_a_run_of_the_config_looks_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    rows = "{A: 7, B: 4, C: 11}"
    text = f"data: {{cache_dir: {tmp_path}/cache, multi_hot: {{sizes: {{A: 3, C: 5}}}}}}\n"
    config.write_text(f"{text}model: {{num_embeddings: {rows}}}\n")
    assert main(["multi-hot", "--config", str(config)]) == 0
    drawn = ensure_multi_hot_tables(MultiHot(sizes={"A": 3, "C": 5}), ROWS, tmp_path / "cache")
    assert drawn.fingerprint in capsys.readouterr().err
    config.write_text(text)
    assert main(["multi-hot", "--config", str(config)]) == 1
    assert "model.num_embeddings" in capsys.readouterr().err
