from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_tpu.data.batch import Batch
from recsys_tpu.data.metadata import DatasetError, DatasetMetadata, Split
from recsys_tpu.data.reader import ParquetReader

ROWS_OF_A, ROWS_OF_B = 1000, 50


def write_data(
    directory: Path, *, rows: int, files: int = 1, row_group: int = 7, changes: dict[str, Any] | None = None
) -> Path:
    """Row r has label r % 2, I1 = r, A = [r % 1000] (one id), B = r % 4 ids (a list)."""
    index = np.arange(rows)
    lists = [[int(r * k) % ROWS_OF_B for k in range(r % 4)] for r in index]
    columns: dict[str, Any] = {
        "label": pa.array(index % 2, pa.int8()),
        "I1": pa.array(index, pa.float32()),
        "A": pa.array(index % ROWS_OF_A, pa.int32()),
        "B": pa.array(lists, pa.list_(pa.int32())),
    }
    table = pa.table(columns | (changes or {}))
    names = []
    (directory / "train").mkdir(parents=True)
    for number, part in enumerate(np.array_split(index, files)):
        names.append(f"train/part-{number:05}.parquet")
        piece = table.slice(int(part[0]) if len(part) else 0, len(part))
        pq.write_table(piece, directory / names[-1], row_group_size=row_group)
    DatasetMetadata(
        dense_features=["I1"],
        sparse_features=["A", "B"],
        num_embeddings={"A": ROWS_OF_A, "B": ROWS_OF_B},
        row_group_rows=row_group,
        splits={"train": Split(rows=rows, positives=rows // 2, files=names)},
        recipe={},
        source={},
    ).save(directory)
    return directory


def reader(directory: Path, **changes: Any) -> ParquetReader:
    settings_: dict[str, Any] = {
        "batch_size": 16,
        "rank": 0,
        "world_size": 1,
        "lanes": 4,
        "shuffle": True,
        "seed": 3,
        "window_row_groups": 2,
    }
    return ParquetReader(directory, "train", **{**settings_, **changes})


def rows_of(batch: Batch) -> list[int]:
    return [int(value) for value in batch.dense[batch.weights > 0, 0]]


def check_content(batch: Batch) -> None:
    """Every row of the batch carries the label and ids that belong to it, and padding carries none."""
    ids = {key: jagged.to_dense() for key, jagged in batch.sparse.to_dict().items()}
    for position, (row, weight) in enumerate(
        zip(batch.dense[:, 0].tolist(), batch.weights.tolist(), strict=True)
    ):
        found = (ids["A"][position].tolist(), ids["B"][position].tolist())
        if weight == 0:
            assert found == ([], [])
            continue
        assert batch.labels[position] == row % 2
        expected = [int(row * k) % ROWS_OF_B for k in range(int(row) % 4)]
        assert found == ([row % ROWS_OF_A], expected)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 150),
    files=st.integers(1, 3),
    row_group=st.integers(1, 40),
    batch=st.integers(1, 6),
    window=st.integers(1, 4),
    shuffle=st.booleans(),
)
def test_an_epoch_has_every_row_once_and_the_same_batches_at_every_world_size(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    files: int,
    row_group: int,
    batch: int,
    window: int,
    shuffle: bool,
) -> None:
    directory = write_data(
        tmp_path_factory.mktemp("data") / "d", rows=rows, files=min(files, rows), row_group=row_group
    )
    common = {"batch_size": 4 * batch, "shuffle": shuffle, "window_row_groups": window}
    alone = list(reader(directory, **common).epoch(0))
    seen = sorted(row for item in alone for row in rows_of(item))
    assert seen == list(range(rows))
    for item in alone:
        check_content(item)
        assert item.global_rows == item.weights.sum()
        assert len(item.labels) == 4 * batch
    for world in (2, 4):
        ranks = [list(reader(directory, rank=r, world_size=world, **common).epoch(0)) for r in range(world)]
        assert {len(batches) for batches in ranks} == {len(alone)}
        for index, expected in enumerate(alone):
            parts = [batches[index] for batches in ranks]
            assert torch.equal(torch.cat([part.dense for part in parts]), expected.dense)
            assert torch.equal(torch.cat([part.weights for part in parts]), expected.weights)
            assert {part.global_rows for part in parts} == {expected.global_rows}


def test_ids_of_a_sample_are_limited_where_a_column_is_no_list(tmp_path: Path) -> None:
    assert reader(write_data(tmp_path / "data", rows=40)).max_ids_per_sample == {"A": 1}


def test_starting_in_mid_epoch_continues_exactly(tmp_path: Path) -> None:
    directory = write_data(tmp_path / "d", rows=333)
    whole = list(reader(directory).epoch(2))
    for start in range(len(whole) + 1):
        rest = list(reader(directory).epoch(2, start=start))
        assert len(rest) == len(whole) - start
        for found, expected in zip(rest, whole[start:], strict=True):
            assert torch.equal(found.dense, expected.dense)
            assert torch.equal(found.sparse.values(), expected.sparse.values())
            assert torch.equal(found.sparse.lengths(), expected.sparse.lengths())


def test_epochs_and_seeds_shuffle_differently(tmp_path: Path) -> None:
    directory = write_data(tmp_path / "d", rows=200)

    def order(epoch: int, **changes: Any) -> list[int]:
        return [row for batch in reader(directory, **changes).epoch(epoch) for row in rows_of(batch)]

    assert order(0) == order(0)
    assert len({tuple(order(0)), tuple(order(1)), tuple(order(0, seed=4))}) == 3
    assert order(0, shuffle=False) == order(1, shuffle=False, seed=9)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("label", pa.array([0, 1, 2] + [0] * 7, pa.int8()), r"row 2: label = 2 is neither 0 nor 1"),
        ("label", pa.array([0] * 9 + [None], pa.int8()), r"column label has 1 missing values"),
        (
            "I1",
            pa.array([0.0] * 8 + [np.nan, 0], pa.float32()),
            r"row group 1, row 1: I1 = nan is not a finite",
        ),
        ("I1", pa.array([np.inf] + [0.0] * 9, pa.float32()), r"row 0: I1 = inf is not a finite"),
        (
            "A",
            pa.array([0] * 5 + [1000] + [0] * 4, pa.int32()),
            r"row 5: feature A has id 1000, but its table",
        ),
        ("A", pa.array([0] * 6 + [-1] + [0] * 3, pa.int32()), r"row 6: feature A has id -1"),
        (
            "B",
            pa.array([[], [1, 2], [3, 50]] + [[]] * 7, pa.list_(pa.int32())),
            r"part-00000.parquet, row group 0, row 2: feature B has id 50",
        ),
    ],
)
def test_bad_values_are_named(tmp_path: Path, column: str, value: pa.Array, message: str) -> None:
    directory = write_data(tmp_path / "d", rows=10, changes={column: value})
    with pytest.raises(DatasetError, match=message):
        list(reader(directory, lanes=1, shuffle=False).epoch(0))


def test_a_smaller_table_of_the_model_is_refused(tmp_path: Path) -> None:
    directory = write_data(tmp_path / "d", rows=10)
    with pytest.raises(DatasetError, match="feature A: the table has 999 rows"):
        reader(directory, num_embeddings={"A": 999, "B": 50})


def test_files_that_do_not_fit_the_metadata_are_named(tmp_path: Path) -> None:
    directory = write_data(tmp_path / "d", rows=30, files=2)
    second = directory / "train/part-00001.parquet"
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(DatasetError, match=r"part-00001.parquet: named in metadata.json but missing"):
        reader(directory)
    second.write_bytes(content[:-20])
    with pytest.raises(DatasetError, match=r"part-00001.parquet: not a readable Parquet file"):
        reader(directory)
    pq.write_table(pq.read_table(directory / "train/part-00000.parquet").slice(0, 3), second)
    with pytest.raises(DatasetError, match=r"holds 18 rows but metadata.json says 30"):
        reader(directory)


def test_an_empty_split_and_a_misfit_of_lanes_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="selects no rows"):
        reader(write_data(tmp_path / "d", rows=0))
    directory = write_data(tmp_path / "e", rows=10)
    with pytest.raises(DatasetError, match=r"multiple of data\.lanes"):
        reader(directory, batch_size=6)
    with pytest.raises(DatasetError, match="a multiple of the number of ranks"):
        reader(directory, world_size=3)


def test_leaving_an_epoch_early_stops_the_thread(tmp_path: Path) -> None:
    import threading

    directory = write_data(tmp_path / "d", rows=500)
    before = threading.active_count()
    batches: Iterator[Batch] = reader(directory, prefetch=2).epoch(0)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
