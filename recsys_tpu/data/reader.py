"""Reads a preprocessed Parquet directory as global batches, the same ones at every world size.

An epoch is one order of all rows: row groups permuted by (seed, epoch), then rows shuffled inside
windows of a few row groups.  The order is cut into `lanes` equal streams, and global batch ``i`` takes
the ``i``-th slice of every stream.  A rank owns ``lanes / world_size`` streams and reads only their row
groups.  So the rows of a step do not depend on the number of ranks, every rank has the same number of
batches, and a position is (epoch, batch index): resuming needs no other state.

No row is dropped: the last batch of an epoch is filled up with padding of weight 0.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.data.batch import Batch
from recsys_tpu.data.metadata import DatasetError, DatasetMetadata
from recsys_tpu.data.multi_hot import MultiHotTables


@dataclass(frozen=True)
class _Segment:
    """Rows ``[start, stop)`` of one row group of one file."""

    file: Path
    row_group: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Column:
    """Ids of one sparse feature over the rows of a window; offsets is None when each row has one id."""

    values: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64] | None

    def rows(self, start: int, stop: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """(ids, lengths) of rows ``[start, stop)``."""
        if self.offsets is None:
            return self.values[start:stop], np.ones(stop - start, np.int32)
        offsets = self.offsets[start : stop + 1]
        return self.values[offsets[0] : offsets[-1]], np.diff(offsets).astype(np.int32)


@dataclass(frozen=True)
class _Window:
    """Decoded rows of a stream: dense ``[rows, features]``, labels ``[rows]``, one column a feature."""

    dense: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float32]
    sparse: list[_Column]

    def __len__(self) -> int:
        return len(self.labels)


class ParquetReader:
    """Batches of one split for one rank."""

    def __init__(
        self,
        directory: Path,
        split: str,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        lanes: int,
        shuffle: bool,
        seed: int,
        window_row_groups: int = 4,
        prefetch: int = 4,
        num_embeddings: Mapping[str, int] | None = None,
        multi_hot: MultiHotTables | None = None,
    ) -> None:
        """
        Args:
            directory: holds metadata.json and the Parquet files.
            batch_size: global batch, a multiple of `lanes`.
            lanes: streams that make up a batch; a multiple of `world_size`.
            window_row_groups: row groups that are shuffled together (and held in memory) per stream.
            prefetch: batches prepared ahead by a background thread.
            num_embeddings: rows of the model's tables by feature; ids are checked against them.
            multi_hot: further ids for each id of the data.

        Raises:
            DatasetError: the directory is unfinished, a file is missing, the split is empty, a table is
                too small, or `lanes` does not fit the batch or the world.
        """
        self.metadata = DatasetMetadata.load(directory)
        if num_embeddings is not None:
            self.metadata.check_table_sizes(num_embeddings)
        self.table_rows = dict(num_embeddings or self.metadata.num_embeddings)
        if batch_size % lanes or lanes % world_size:
            raise DatasetError(
                f"a global batch of {batch_size} over {lanes} lanes and {world_size} ranks: the batch must "
                "be a multiple of data.lanes, and data.lanes a multiple of the number of ranks"
            )
        self.split = split
        self.rows = self.metadata.split(split).rows
        if self.rows == 0:
            raise DatasetError(f"{directory}: split {split!r} selects no rows")
        self._segments = _row_groups(directory, self.metadata, split)
        self._lanes, self._lane_batch = lanes, batch_size // lanes
        per_rank = lanes // world_size
        self._own_lanes = range(rank * per_rank, (rank + 1) * per_rank)
        self._shuffle, self._seed = shuffle, seed
        self._window_row_groups, self._prefetch = window_row_groups, prefetch
        self._multi_hot = multi_hot
        self.batch_size = batch_size
        self.batches_per_epoch = -(-self._lane_span(lanes - 1, width=True) // self._lane_batch)

    @property
    def order(self) -> dict[str, Any]:
        """All that decides which rows batch number `i` of an epoch holds; the world size is not among it."""
        return {
            "content": self.metadata.content_hash,
            "split": self.split,
            "batch_size": self.batch_size,
            "lanes": self._lanes,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "window_row_groups": self._window_row_groups,
            **({"multi_hot": self._multi_hot.fingerprint} if self._multi_hot else {}),
        }

    @property
    def max_ids_per_sample(self) -> dict[str, int]:
        """Of the features whose column, in the first file, is one id a row; lists have no known limit."""
        schema = pq.read_schema(self._segments[0].file)
        names = [name for name in self.metadata.sparse_features if name in schema.names]
        single = [name for name in names if pa.types.is_integer(schema.field(name).type)]
        return {name: self._multi_hot.size(name) if self._multi_hot else 1 for name in single}

    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[Batch]:
        """Batches ``start, start + 1, …`` of epoch number `epoch`, prepared by a background thread.

        Raises:
            DatasetError: a file is damaged, or a value is missing, not finite or out of its table's range;
                the message names file, row and feature.
        """
        yield from _prefetched(self._batches(epoch, start), self._prefetch)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        order = list(self._segments)
        if self._shuffle:
            permutation = np.random.default_rng([self._seed, epoch]).permutation(len(order))
            order = [self._segments[i] for i in permutation]
        streams = [self._lane(order, epoch, lane, start) for lane in self._own_lanes]
        for index in range(start, self.batches_per_epoch):
            parts = [next(stream) for stream in streams]
            yield self._assemble(parts, self._global_rows(index))

    def _lane_span(self, lane: int, *, width: bool = False) -> int:
        """First row of a lane in the epoch's order, or its number of rows."""
        first = lane * self.rows // self._lanes
        return (lane + 1) * self.rows // self._lanes - first if width else first

    def _global_rows(self, batch: int) -> int:
        done = batch * self._lane_batch
        return sum(
            min(max(self._lane_span(lane, width=True) - done, 0), self._lane_batch)
            for lane in range(self._lanes)
        )

    def _lane(self, order: list[_Segment], epoch: int, lane: int, start: int) -> Iterator[list[_Window]]:
        """Slices of `lane_batch` rows (fewer or none at the end), as pieces of windows."""
        segments = _cut(order, self._lane_span(lane), self._lane_span(lane, width=True))
        skip = start * self._lane_batch
        windows = self._windows(segments, epoch, lane, skip)
        window, position = next(windows, (None, 0))
        while True:
            pieces, needed = [], self._lane_batch
            while needed and window is not None:
                stop = min(position + needed, len(window))
                pieces.append(_slice(window, position, stop))
                needed -= stop - position
                position = stop
                if position == len(window):
                    window, position = next(windows, (None, 0))
            yield pieces

    def _windows(
        self, segments: list[_Segment], epoch: int, lane: int, skip: int
    ) -> Iterator[tuple[_Window, int]]:
        """Decoded windows and the position to begin at; windows before `skip` rows are never read."""
        for number, first in enumerate(range(0, len(segments), self._window_row_groups)):
            group = segments[first : first + self._window_row_groups]
            rows = sum(segment.stop - segment.start for segment in group)
            if skip >= rows:
                skip -= rows
                continue
            permutation = None
            if self._shuffle:
                permutation = np.random.default_rng([self._seed, epoch, lane, number]).permutation(rows)
            yield self._decode(group, permutation), skip
            skip = 0

    def _decode(self, segments: list[_Segment], permutation: npt.NDArray[np.int64] | None) -> _Window:
        names = ["label", *self.metadata.dense_features, *self.metadata.sparse_features]
        pieces = []
        for segment in segments:
            piece = _read(segment, names)
            self._check(piece, segment)
            pieces.append(piece)
        table = pa.concat_tables(pieces)
        if permutation is not None:
            table = table.take(pa.array(permutation))
        table = table.combine_chunks()
        dense = np.empty((len(table), len(self.metadata.dense_features)), np.float32)
        for j, name in enumerate(self.metadata.dense_features):
            dense[:, j] = table[name].to_numpy()
        return _Window(
            dense=dense,
            labels=table["label"].to_numpy().astype(np.float32),
            sparse=[_column(table[name]) for name in self.metadata.sparse_features],
        )

    def _check(self, table: pa.Table, segment: _Segment) -> None:
        """Every value that could poison the model is caught here, once per row group, vectorised."""
        self._check_types(table, segment)
        for name in table.column_names:
            if table[name].null_count:
                raise DatasetError(
                    f"{_place(segment)}: column {name} has {table[name].null_count} missing values"
                )
        labels = table["label"].to_numpy()
        _refuse(segment, "label", labels, (labels != 0) & (labels != 1), "is neither 0 nor 1")
        for name in self.metadata.dense_features:
            values = table[name].to_numpy()
            _refuse(segment, name, values, ~np.isfinite(values), "is not a finite number")
        for name in self.metadata.sparse_features:
            column = _column(table[name].combine_chunks())
            rows = self.table_rows[name]
            bad = (column.values < 0) | (column.values >= rows)
            if bad.any():
                first = int(np.argmax(bad))
                row = first
                if column.offsets is not None:
                    row = int(np.searchsorted(column.offsets, first, side="right")) - 1
                raise DatasetError(
                    f"{_place(segment)}, row {segment.start + row}: feature {name} has id "
                    f"{column.values[first]}, but its table has {rows:,} rows (ids 0 to {rows - 1:,}). "
                    "Enlarge the table or preprocess the data again for this size"
                )

    def _check_types(self, table: pa.Table, segment: _Segment) -> None:
        """Types are part of the format: a conversion could change a value without a word."""
        for name in table.column_names:
            kind, column = table.schema.field(name).type, table[name]
            if name in self.metadata.sparse_features:
                wanted = "int32 or a list of int32"
                if pa.types.is_list(kind) or pa.types.is_large_list(kind):
                    kind, column = kind.value_type, pc.list_flatten(column)
                right = pa.types.is_int32(kind)
            elif name == "label":
                wanted, right = "int8", pa.types.is_int8(kind)
            else:
                wanted, right = "float32", pa.types.is_float32(kind)
            if not right:
                raise DatasetError(
                    f"{segment.file}: column {name} is {table.schema.field(name).type}, must be {wanted}"
                )
            if column.null_count:
                raise DatasetError(f"{_place(segment)}: column {name} has {column.null_count} missing values")

    def _assemble(self, lanes: list[list[_Window]], global_rows: int) -> Batch:
        pieces: list[_Window] = []
        for lane in lanes:
            missing = self._lane_batch - sum(len(piece) for piece in lane)
            pieces += lane
            if missing:
                pieces.append(self._padding(missing))
        ids, lengths = [], []
        for feature, name in enumerate(self.metadata.sparse_features):
            for piece in pieces:
                values, counts = piece.sparse[feature].rows(0, len(piece))
                if self._multi_hot:
                    values, counts = self._multi_hot.expand(name, values), counts * self._multi_hot.size(name)
                ids.append(values)
                lengths.append(counts)
        labels = np.concatenate([piece.labels for piece in pieces])
        weights = np.isfinite(labels).astype(np.float32)
        return Batch(
            dense=torch.from_numpy(np.concatenate([piece.dense for piece in pieces])),
            sparse=KeyedJaggedTensor(
                keys=list(self.metadata.sparse_features),
                values=torch.from_numpy(np.concatenate(ids)),
                lengths=torch.from_numpy(np.concatenate(lengths)),
                stride=len(labels),
            ),
            labels=torch.from_numpy(np.nan_to_num(labels, nan=0.0)),
            weights=torch.from_numpy(weights),
            global_rows=global_rows,
        )

    def _padding(self, rows: int) -> _Window:
        """Rows without ids; a NaN label marks them until weights are made from it."""
        empty = _Column(np.empty(0, np.int32), np.zeros(rows + 1, np.int64))
        return _Window(
            dense=np.zeros((rows, len(self.metadata.dense_features)), np.float32),
            labels=np.full(rows, np.nan, np.float32),
            sparse=[empty] * len(self.metadata.sparse_features),
        )


def _row_groups(directory: Path, metadata: DatasetMetadata, split: str) -> list[_Segment]:
    segments = []
    for name in metadata.split(split).files:
        path = directory / name
        try:
            footer = pq.read_metadata(path)
        except FileNotFoundError:
            raise DatasetError(
                f"{path}: named in metadata.json but missing; preprocess the data again"
            ) from None
        except pa.ArrowInvalid as error:
            raise DatasetError(f"{path}: not a readable Parquet file ({error})") from None
        segments += [
            _Segment(path, group, 0, footer.row_group(group).num_rows)
            for group in range(footer.num_row_groups)
        ]
    found = sum(segment.stop for segment in segments)
    if found != metadata.split(split).rows:
        raise DatasetError(
            f"{directory}: split {split!r} holds {found:,} rows but metadata.json says "
            f"{metadata.split(split).rows:,}; preprocess the data again"
        )
    return segments


def _cut(order: list[_Segment], first: int, count: int) -> list[_Segment]:
    """The segments that hold rows ``[first, first + count)`` of the epoch's order."""
    result, position = [], 0
    for segment in order:
        size = segment.stop - segment.start
        low, high = max(first - position, 0), min(first + count - position, size)
        if low < high:
            result.append(
                _Segment(segment.file, segment.row_group, segment.start + low, segment.start + high)
            )
        position += size
    return result


def _read(segment: _Segment, columns: list[str]) -> pa.Table:
    try:
        with pq.ParquetFile(segment.file) as file:
            missing = [name for name in columns if name not in file.schema_arrow.names]
            if missing:
                raise DatasetError(f"{segment.file}: has no column {', '.join(missing)}")
            table = file.read_row_group(segment.row_group, columns=columns)
    except (pa.ArrowInvalid, OSError) as error:
        raise DatasetError(f"{_place(segment)}: cannot be read ({error})") from error
    return table.slice(segment.start, segment.stop - segment.start)


def _column(column: pa.Array | pa.ChunkedArray) -> _Column:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        offsets = array.offsets.to_numpy().astype(np.int64)
        return _Column(array.flatten().to_numpy(), offsets - offsets[0])
    return _Column(array.to_numpy(zero_copy_only=False), None)


def _slice(window: _Window, start: int, stop: int) -> _Window:
    sparse = []
    for column in window.sparse:
        if column.offsets is None:
            sparse.append(_Column(column.values[start:stop], None))
        else:
            offsets = column.offsets[start : stop + 1]
            sparse.append(_Column(column.values[offsets[0] : offsets[-1]], offsets - offsets[0]))
    return _Window(window.dense[start:stop], window.labels[start:stop], sparse)


def _place(segment: _Segment) -> str:
    return f"{segment.file}, row group {segment.row_group}"


def _refuse(
    segment: _Segment,
    name: str,
    values: npt.NDArray[np.generic],
    bad: npt.NDArray[np.bool_],
    reason: str,
) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        raise DatasetError(f"{_place(segment)}, row {segment.start + row}: {name} = {values[row]} {reason}")


def _prefetched(batches: Iterator[Batch], depth: int) -> Iterator[Batch]:
    """Run `batches` in a background thread, at most `depth` ahead; its errors are raised here."""
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(item: Batch | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def produce() -> None:
        try:
            for batch in batches:
                put(batch)
                if stopped.is_set():
                    return
            put(None)
        except BaseException as error:  # handed to the consumer, which raises it
            put(error)

    thread = threading.Thread(target=produce, name="batch-prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()
