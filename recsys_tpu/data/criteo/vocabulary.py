"""Count the hashes of the training split and keep the frequent ones, in bounded memory.

Each part of the training split is counted on its own; what doesn't fit the memory limit is spilled as a
sorted run.  The runs of a feature are then merged piece by piece over ranges of the hash, so the memory
of neither step grows with the log.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_tpu.data.criteo.encode import FIRST_HASH_ID, map_hashes
from recsys_tpu.data.criteo.schema import SPARSE_FEATURES

MEMORY_ENTRIES = 16_000_000  # (hash, count) pairs held at once: about 0.4 GB while they are merged
_HASH_RANGE = 1 << 32

VOCABULARY_SCHEMA = pa.schema([("hash", pa.uint32()), ("id", pa.int32()), ("count", pa.int64())])

_Counted = tuple[NDArray[np.uint32], NDArray[np.int64]]  # ascending distinct hashes, how often each


@dataclass(frozen=True)
class Run:
    """Counts of a stretch of rows on disk: feature ``f`` has entries ``[offsets[f], offsets[f + 1])``.

    `stem`.hashes holds uint32 and `stem`.counts int64, raw little-endian, hashes ascending per feature.
    """

    stem: str
    offsets: list[int]


class HashCounter:
    """Counts the hashes of one part; `finish` gives its runs."""

    def __init__(self, stem: Path, *, memory_entries: int = MEMORY_ENTRIES) -> None:
        self._stem = stem
        self._memory_entries = memory_entries
        self._pending: list[list[_Counted]] = [[] for _ in SPARSE_FEATURES]
        self._entries = 0
        self._runs: list[Run] = []

    def add(self, hashes: NDArray[np.uint32], missing: NDArray[np.bool_]) -> None:
        """Count hashes ``[26, B]``, leaving out the missing ones."""
        for feature, pending in enumerate(self._pending):
            values, counts = np.unique(hashes[feature][~missing[feature]], return_counts=True)
            pending.append((values, counts.astype(np.int64)))
            self._entries += len(values)
        if self._entries > self._memory_entries:
            self._pending = [[_sum_counts(pending)] for pending in self._pending]
            self._entries = sum(len(pending[0][0]) for pending in self._pending)
            if self._entries > self._memory_entries // 2:
                self._spill()

    def finish(self) -> list[Run]:
        if self._entries:
            self._spill()
        return self._runs

    def _spill(self) -> None:
        stem = f"{self._stem}.{len(self._runs)}"
        merged = [_sum_counts(pending) for pending in self._pending]
        offsets = [0, *itertools.accumulate(len(values) for values, _ in merged)]
        with Path(f"{stem}.hashes").open("wb") as hash_file, Path(f"{stem}.counts").open("wb") as count_file:
            for values, counts in merged:
                hash_file.write(values.astype("<u4").data)
                count_file.write(counts.astype("<i8").data)
        self._runs.append(Run(stem, offsets))
        self._pending = [[] for _ in SPARSE_FEATURES]
        self._entries = 0


def write_vocabulary(
    feature: int,
    runs: Sequence[Run],
    *,
    min_count: int,
    table_file: Path,
    hash_file: Path,
    memory_entries: int = MEMORY_ENTRIES,
) -> int:
    """Merge the runs of one feature and keep the hashes counted at least `min_count` times.

    Writes `table_file` (Parquet: hash, id, count; ascending in hash) and `hash_file` (raw ascending
    uint32, for `VocabularyEncoder`).

    Returns:
        Number of hashes kept; the table needs ``FIRST_HASH_ID`` rows more.
    """
    kept = 0
    temporary = hash_file.with_suffix(".tmp")  # where an unfinished run leaves no trace among the output
    with (
        hash_file.open("wb") as raw,
        pq.ParquetWriter(temporary, VOCABULARY_SCHEMA, compression="zstd") as table,
    ):
        for values, counts in _merge(feature, runs, memory_entries):
            frequent = counts >= min_count
            values, counts = values[frequent], counts[frequent]
            ids = np.arange(kept + FIRST_HASH_ID, kept + FIRST_HASH_ID + len(values), dtype=np.int32)
            table.write_table(pa.table([values, ids, counts], schema=VOCABULARY_SCHEMA))
            raw.write(values.astype("<u4").data)
            kept += len(values)
    temporary.replace(table_file)
    return kept


def _merge(feature: int, runs: Sequence[Run], memory_entries: int) -> Iterator[_Counted]:
    """Summed counts of a feature, in ascending ranges of the hash of about `memory_entries` entries."""
    slices = [_map_run(run, feature) for run in runs]
    entries = sum(len(values) for values, _ in slices)
    pieces = max(1, -(-entries // memory_entries))
    starts = [np.zeros(1, np.intp)[0]] * len(slices)
    for piece in range(1, pieces + 1):
        bound = piece * _HASH_RANGE // pieces
        stops = [
            len(values) if piece == pieces else np.searchsorted(values, np.uint32(bound))
            for values, _ in slices
        ]
        yield _sum_counts(
            [
                (values[start:stop], counts[start:stop])
                for (values, counts), start, stop in zip(slices, starts, stops, strict=True)
            ]
        )
        starts = stops


def _map_run(run: Run, feature: int) -> _Counted:
    start, stop = run.offsets[feature], run.offsets[feature + 1]
    hashes = map_hashes(Path(f"{run.stem}.hashes"))
    if len(hashes) == 0:
        return hashes, np.empty(0, np.int64)
    counts = np.memmap(f"{run.stem}.counts", "<i8", mode="r")
    return hashes[start:stop], counts[start:stop]


def _sum_counts(counted: Sequence[_Counted]) -> _Counted:
    """One entry per distinct hash, ascending, with the sum of its counts."""
    if not counted:
        return np.empty(0, np.uint32), np.empty(0, np.int64)
    values = np.concatenate([values for values, _ in counted])
    counts = np.concatenate([counts for _, counts in counted])
    if len(counted) == 1 or len(values) == 0:
        return values, counts
    order = np.argsort(values)
    values, counts = values[order], counts[order]
    first = np.flatnonzero(np.diff(values, prepend=values[0]) != 0)
    first = np.append(0, first)
    return values[first], np.add.reduceat(counts, first)
