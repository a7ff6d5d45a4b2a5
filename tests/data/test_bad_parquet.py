"""Bad Parquet directories by name: every case ends in an error that names the place, or a documented result.

Public bug reports that a case stands for are in its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_tpu.data.metadata import DatasetError, DatasetMetadata, Split
from recsys_tpu.data.reader import ParquetReader


def _dataset(folder: Path, rows: int = 32, **changes: Any) -> Path:
    columns = {
        "label": pa.array(np.arange(rows) % 2, pa.int8()),
        "I1": pa.array(np.linspace(0, 1, rows), pa.float32()),
        "C1": pa.array(np.arange(rows) % 10, pa.int32()),
    } | changes
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({k: v for k, v in columns.items() if v is not None}), folder / "a.parquet")
    DatasetMetadata(
        dense_features=["I1"],
        sparse_features=["C1"],
        num_embeddings={"C1": 10},
        row_group_rows=rows,
        splits={"train": Split(rows=rows, positives=None, files=["a.parquet"])},
        recipe={},
        source={},
    ).save(folder)
    return folder


def _read(folder: Path, *, batch_size: int = 8, lanes: int = 2, **changes: Any) -> int:
    reader = ParquetReader(
        folder,
        "train",
        **{"batch_size": batch_size, "rank": 0, "world_size": 1, "lanes": lanes, "shuffle": True, "seed": 1}
        | changes,
    )
    return sum(int(batch.weights.sum()) for batch in reader.epoch(0))


def _with(kind: pa.DataType, at: int, value: Any, rows: int = 32) -> pa.Array:
    values: list[Any] = [0] * rows
    values[at] = value
    return pa.array(values, kind)


BAD_COLUMNS: dict[str, tuple[dict[str, Any], str]] = {
    "HugeCTR 46: id of the table's size": (
        {"C1": _with(pa.int32(), 5, 10)},
        "row 5: feature C1 has id 10, but",
    ),
    "id -1": ({"C1": _with(pa.int32(), 31, -1)}, "row 31: feature C1 has id -1"),
    "id 2**31-1": ({"C1": _with(pa.int32(), 0, 2**31 - 1)}, "row 0: feature C1 has id 2147483647"),
    "id missing": ({"C1": _with(pa.int32(), 3, None)}, "column C1 has 1 missing values"),
    "count NaN": ({"I1": _with(pa.float32(), 4, float("nan"))}, "row 4: I1 = nan is not a finite number"),
    "count infinite": ({"I1": _with(pa.float32(), 4, float("inf"))}, "row 4: I1 = inf"),
    "count missing": ({"I1": _with(pa.float32(), 4, None)}, "column I1 has 1 missing values"),
    "label 2": ({"label": _with(pa.int8(), 9, 2)}, "row 9: label = 2 is neither 0 nor 1"),
    "label -1 (unlabelled)": ({"label": _with(pa.int8(), 9, -1)}, "row 9: label = -1"),
    "label missing": ({"label": _with(pa.int8(), 9, None)}, "column label has 1 missing values"),
    "no column C1": ({"C1": None}, "has no column C1"),
    "id in a list over the size": (
        {"C1": pa.array([[1], [2, 10], *[[0]] * 30], pa.list_(pa.int32()))},
        "row 1: feature C1 has id 10",
    ),
    "a list that is missing": (
        {"C1": pa.array([[1], None, *[[0]] * 30], pa.list_(pa.int32()))},
        "column C1 has 1 missing values",
    ),
    "a list with a missing id": (
        {"C1": pa.array([[1], [None], *[[0]] * 30], pa.list_(pa.int32()))},
        "column C1 has 1 missing values",
    ),
    "ids as text": ({"C1": pa.array(["7"] * 32)}, "column C1 is string, must be int32 or a list"),
    "ids as float": ({"C1": pa.array(np.full(32, 0.5), pa.float32())}, "column C1 is float, must be int32"),
    "ids as int64": ({"C1": pa.array(np.full(32, 3), pa.int64())}, "column C1 is int64, must be int32"),
    "ids in lists of lists": ({"C1": pa.array([[[1]]] * 32)}, "column C1 is list<.*must be int32"),
    "counts as text": ({"I1": pa.array(["1"] * 32)}, "column I1 is string, must be float32"),
    "counts as double": ({"I1": pa.array(np.full(32, 1e300))}, "column I1 is double, must be float32"),
    "label as float": (
        {"label": pa.array(np.full(32, 0.5), pa.float32())},
        "column label is float, must be int8",
    ),
}


@pytest.mark.parametrize("case", BAD_COLUMNS)
def test_bad_column(tmp_path, case):
    changes, message = BAD_COLUMNS[case]
    with pytest.raises(DatasetError, match=rf"a\.parquet.*{message}"):
        _read(_dataset(tmp_path, **changes))


def _rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _cut_file(folder: Path) -> None:
    path = folder / "a.parquet"
    path.write_bytes(path.read_bytes()[:-30])


def _spoil_page(folder: Path) -> None:
    path = folder / "a.parquet"
    content = bytearray(path.read_bytes())
    content[8:60] = b"\xff" * 52
    path.write_bytes(bytes(content))


BAD_DIRECTORIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "file gone": (lambda d: (d / "a.parquet").unlink(), r"a\.parquet.*missing; preprocess"),
    "file truncated": (_cut_file, r"a\.parquet: not a readable Parquet file"),
    "file empty": (lambda d: (d / "a.parquet").write_bytes(b""), r"a\.parquet: not a readable Parquet file"),
    "page overwritten": (_spoil_page, r"a\.parquet, row group 0: cannot be read"),
    "inference 1344: no metadata": (
        lambda d: (d / "metadata.json").unlink(),
        "unfinished.*run the preprocess",
    ),
    "metadata cut": (lambda d: (d / "metadata.json").write_text('{"rows"'), r"metadata\.json"),
    "metadata a list": (lambda d: (d / "metadata.json").write_text("[]"), r"metadata\.json"),
    "metadata not UTF-8": (lambda d: (d / "metadata.json").write_bytes(b"\xff\xfe{}"), "not UTF-8"),
    "other version": (lambda d: _rewrite(d, format_version=2), "format_version"),
    "unknown key": (lambda d: _rewrite(d, rows=3), "rows: Extra inputs"),
    "table of 0 rows": (lambda d: _rewrite(d, num_embeddings={"C1": 0}), "num_embeddings.C1"),
    "table of 2**31 rows": (lambda d: _rewrite(d, num_embeddings={"C1": 2**31}), "num_embeddings.C1"),
    "table of no feature": (lambda d: _rewrite(d, num_embeddings={"C1": 10, "C2": 3}), "unknown .'C2'"),
    "file outside": (
        lambda d: _rewrite(d, splits={"train": {"rows": 32, "positives": 1, "files": ["../a.parquet"]}}),
        "lies outside the directory",
    ),
    "other number of rows": (
        lambda d: _rewrite(d, splits={"train": {"rows": 33, "positives": 1, "files": ["a.parquet"]}}),
        "holds 32 rows but metadata.json says 33",
    ),
    "no rows": (
        lambda d: _rewrite(d, splits={"train": {"rows": 0, "positives": 0, "files": []}}),
        "selects no rows",
    ),
    "no such split": (lambda d: _rewrite(d, splits={}), "the data has no split 'train'"),
}


@pytest.mark.parametrize("case", BAD_DIRECTORIES)
def test_bad_directory(tmp_path, case):
    spoil, message = BAD_DIRECTORIES[case]
    spoil(_dataset(tmp_path))
    with pytest.raises(DatasetError, match=message):
        _read(tmp_path)


BAD_READERS = {
    "dlrm 53: a table smaller than its data": (
        {"num_embeddings": {"C1": 9}},
        "feature C1: the table has 9 rows",
    ),
    "a table of an unknown feature": ({"num_embeddings": {"C1": 10, "X": 4}}, "feature X is not in the data"),
    "lanes do not divide the batch": ({"batch_size": 9}, "must be a multiple of data.lanes"),
    "ranks do not divide the lanes": ({"world_size": 3, "batch_size": 6}, "multiple of the number of ranks"),
}


@pytest.mark.parametrize("case", BAD_READERS)
def test_bad_reader(tmp_path, case):
    changes, message = BAD_READERS[case]
    with pytest.raises(DatasetError, match=message):
        _read(_dataset(tmp_path), **changes)


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 33])
def test_torchrec_747_one_row_more_than_full_batches_is_not_lost(tmp_path, rows):
    folder = _dataset(tmp_path, rows=rows)
    counts = [_read(folder, batch_size=8, lanes=4, rank=rank, world_size=2) for rank in (0, 1)]
    assert sum(counts) == rows
