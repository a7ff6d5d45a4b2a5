"""Which rank has which row: routing of distinct ids to their owners, and of the rows back.  Host, numpy only.

Used where rows travel instead of pooled bags (unpooled embeddings, and pooled ones whose ids are
deduplicated before the exchange).  An id of a batch is sent once to each column block of its table, however
often it occurs.  On the way back each pair of ranks has one buffer a width, of an agreed number of slots:
shapes do not depend on the batch, and both sides know which id a slot belongs to from the counts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recsys_tpu.embeddings.preparation import distinct

Ints = NDArray[np.int64]
Block = tuple[str, int]  # (table, first column)
_NONE: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True)
class TableShard:
    """`rows` x `columns` of a table, from its row `first_row` and its column `first_column` on."""

    table: str
    first_row: int
    rows: int
    first_column: int
    columns: int


@dataclass(frozen=True)
class Routed:
    """What one rank sends, and where the rows that come back belong.

    ranks: of the exchange.
    ids: local row of each request, ordered by destination rank and the destination's shards.
    counts `[shards of all ranks]`: how many of them each shard gets.
    positions: for each key of the batch, where its ids are among the distinct ids of its table (ascending).
    numbers: for each block, the number of each distinct id of its table among the requests of its width.
    owners, offsets: by width, the rank that each request is sent to, and its slot of that rank's buffer.
    """

    ranks: int
    ids: Ints
    counts: Ints
    positions: list[Ints]
    numbers: dict[Block, Ints]
    owners: dict[int, Ints]
    offsets: dict[int, Ints]

    def most_for_one_rank(self, width: int) -> int:
        """The slots that a pair of ranks needs for `width`."""
        offsets = self.offsets[width]
        return int(offsets.max()) + 1 if len(offsets) else 0

    def slots(self, width: int, capacity: int) -> Ints:
        """Slot of each request among `[ranks * capacity]`, ascending."""
        return self.owners[width] * capacity + self.offsets[width]


class RowRouting:
    """The shards of all ranks: `shards[rank]` in the order of that rank's lookup."""

    def __init__(self, shards: Sequence[Sequence[TableShard]]) -> None:
        self.shards = [list(of_rank) for of_rank in shards]
        flat = [shard for of_rank in self.shards for shard in of_rank]
        self.first_shard = np.cumsum([0, *(len(of_rank) for of_rank in self.shards)])
        self._rank = np.repeat(np.arange(len(self.shards)), np.diff(self.first_shard))
        self._width = np.array([shard.columns for shard in flat], np.int64)
        self._first_row = np.array([shard.first_row for shard in flat], np.int64)
        self._end_row = self._first_row + np.array([shard.rows for shard in flat], np.int64)
        self.widths: list[int] = sorted({shard.columns for shard in flat})
        blocks: dict[Block, list[int]] = {}
        for number, shard in enumerate(flat):
            blocks.setdefault((shard.table, shard.first_column), []).append(number)
        self.blocks = {
            block: np.array(sorted(numbers, key=self._first_row.__getitem__))
            for block, numbers in sorted(blocks.items())
        }
        self.columns = {block: flat[numbers[0]].columns for block, numbers in self.blocks.items()}
        self._rows = {
            table: max(int(self._end_row[self.blocks[block]].max()) for block in self.blocks_of(table))
            for table in {table for table, _ in self.blocks}
        }

    @property
    def ranks(self) -> int:
        return len(self.shards)

    def blocks_of(self, table: str) -> list[Block]:
        """A table's column blocks, from its first column to its last."""
        return [block for block in self.blocks if block[0] == table]

    def route(self, ids: Sequence[NDArray[np.integer]], tables: Sequence[str]) -> Routed:
        """Requests for the ids of each key, which reads `tables[key]`.

        Raises ValueError for an id that its table does not have.
        """
        unique: dict[str, Ints] = {}
        positions: list[Ints] = [_NONE] * len(tables)
        for table in dict.fromkeys(tables):
            keys = [key for key, of_key in enumerate(tables) if of_key == table]
            of_table = np.concatenate([ids[key] for key in keys])
            _check_rows(table, of_table, self._rows[table])
            unique[table], inverse = distinct(of_table)
            cuts = np.cumsum([len(ids[key]) for key in keys])[:-1]
            for key, part in zip(keys, np.split(inverse, cuts), strict=True):
                positions[key] = part
        counts = np.zeros(len(self._rank), np.int64)
        for (table, _), numbers in self.blocks.items():
            if table in unique:
                ends = np.searchsorted(unique[table], self._end_row[numbers])
                counts[numbers] = ends - np.searchsorted(unique[table], self._first_row[numbers])
        starts = np.cumsum(counts) - counts
        sent = np.empty(int(counts.sum()), np.int64)
        places: dict[Block, Ints] = {}
        for block, numbers in self.blocks.items():
            if block[0] in unique:
                # Distinct ids are ascending, so those of a shard lie side by side.
                of_shard = np.repeat(numbers, counts[numbers])
                begins = np.cumsum(counts[numbers]) - counts[numbers]
                place = np.arange(len(of_shard)) + np.repeat(starts[numbers] - begins, counts[numbers])
                sent[place] = unique[block[0]] - self._first_row[of_shard]
                places[block] = place
        width_of_sent = np.repeat(self._width, counts)
        rank_of_sent = np.repeat(self._rank, counts)
        number_of_sent = np.empty(len(sent), np.int64)
        owners, offsets = {}, {}
        for width in self.widths:
            chosen = width_of_sent == width
            owners[width] = rank_of_sent[chosen]
            offsets[width] = positions_in_runs(owners[width])
            number_of_sent[chosen] = np.arange(len(owners[width]))
        numbers_of = {block: number_of_sent[place] for block, place in places.items()}
        return Routed(self.ranks, sent, counts, positions, numbers_of, owners, offsets)


@dataclass(frozen=True)
class Received:
    """What one rank is asked for.  counts `[ranks, own shards]`; ids: local rows, rank after rank."""

    counts: Ints
    ids: Ints

    def shard_of_id(self) -> Ints:
        ranks, shards = self.counts.shape
        return np.repeat(np.tile(np.arange(shards), ranks), self.counts.reshape(-1))

    def rank_of_id(self) -> Ints:
        return np.repeat(np.arange(len(self.counts)), self.counts.sum(1))


def positions_in_runs(values: Ints) -> Ints:
    """For values of which equal ones lie side by side: the position of each in its run."""
    if not len(values):
        return np.zeros(0, np.int64)
    starts = np.flatnonzero(np.r_[True, values[1:] != values[:-1]])
    return np.arange(len(values)) - np.repeat(starts, np.diff(np.r_[starts, len(values)]))


def _check_rows(table: str, ids: NDArray[np.integer], rows: int) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= rows):
        bad = int(ids[(ids < 0) | (ids >= rows)][0])
        raise ValueError(f"id {bad} is not a row of table {table}, which has {rows}")
