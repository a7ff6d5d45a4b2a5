"""Write Parquet parts with row groups of one size, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_tpu.data.criteo.schema import DENSE_FEATURES, SPARSE_FEATURES

SCHEMA = pa.schema(
    [
        pa.field("label", pa.int8(), nullable=False),
        *(pa.field(name, pa.float32(), nullable=False) for name in DENSE_FEATURES),
        *(pa.field(name, pa.int32(), nullable=False) for name in SPARSE_FEATURES),
    ]
)


class PartWriter:
    """One Parquet file, gathered in a row group's worth of memory and renamed into place when complete.

    Use as a context manager: without an exception the file appears at `path`, otherwise nothing does.
    `temporary` is where it is written before, in the same file system.
    """

    def __init__(self, path: Path, *, temporary: Path, row_group_rows: int, compression: str) -> None:
        self.rows = 0
        self.positives = 0
        self._path = path
        self._temporary = temporary
        self._labels = np.empty(row_group_rows, np.int8)
        self._dense = np.empty((len(DENSE_FEATURES), row_group_rows), np.float32)
        self._ids = np.empty((len(SPARSE_FEATURES), row_group_rows), np.int32)
        self._filled = 0
        self._compression = compression

    def __enter__(self) -> PartWriter:
        self._file = self._temporary.open("wb")
        self._writer = pq.ParquetWriter(self._file, SCHEMA, compression=self._compression)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if self._filled:
                    self._write_row_group()
                self._writer.close()
                self._file.flush()
                os.fsync(self._file.fileno())
                self._temporary.replace(self._path)
        finally:
            # After an error Arrow's writer would write its footer when it is collected, and fail again.
            self._writer.is_open = False
            try:
                self._file.close()
            finally:
                self._temporary.unlink(missing_ok=True)

    def add(self, labels: NDArray[np.int8], dense: NDArray[np.float32], ids: NDArray[np.int32]) -> None:
        """Append rows: labels ``[B]``, dense ``[13, B]``, ids ``[26, B]``."""
        start = 0
        while start < len(labels):
            count = min(len(labels) - start, len(self._labels) - self._filled)
            source, target = slice(start, start + count), slice(self._filled, self._filled + count)
            self._labels[target] = labels[source]
            self._dense[:, target] = dense[:, source]
            self._ids[:, target] = ids[:, source]
            self._filled += count
            start += count
            if self._filled == len(self._labels):
                self._write_row_group()

    def _write_row_group(self) -> None:
        rows = slice(0, self._filled)
        columns = [self._labels[rows], *self._dense[:, rows], *self._ids[:, rows]]
        table = pa.Table.from_arrays([pa.array(column) for column in columns], schema=SCHEMA)
        self._writer.write_table(table, row_group_size=self._filled)
        self.rows += self._filled
        self.positives += int(np.count_nonzero(self._labels[rows] == 1))
        self._filled = 0
