"""What a rank does with the rows that came back for its distinct ids: bags of them, or one an occurrence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.embeddings.bags import JaggedFeatures, StackFeatures, sort_for_stack
from recsys_tpu.embeddings.preparation import SortedIds, sort_ids
from recsys_tpu.kernels.batch import LookupBatch
from recsys_tpu.sharding.row_routing import Block, Ints, Routed


@dataclass(frozen=True)
class Column:
    """The embedding of one feature from one column block.  key: position of the feature in the batch."""

    name: str
    key: int
    block: Block
    width: int


@dataclass(frozen=True)
class SequenceSource:
    """One output row an occurrence, column after column; each column has room of its own."""

    ids: SortedIds
    lengths: Ints  # ids of each column

    @property
    def sizes(self) -> tuple[int, int]:
        """(ids, distinct rows)."""
        return self.ids.sizes

    def pad(self, slots: Ints, buffer: int, rooms: Sequence[int], unique: int) -> LookupBatch:
        """slots: of each request, in a buffer of `buffer` rows.  rooms: output rows of each column."""
        base = np.cumsum(rooms) - np.asarray(rooms)
        column = np.repeat(np.arange(len(rooms)), self.lengths)
        starts = np.cumsum(self.lengths) - self.lengths
        bags = base[column] + np.arange(len(column)) - starts[column]
        total = int(np.sum(rooms))
        offsets = np.searchsorted(bags, np.arange(total + 1))
        ids = replace(self.ids, bags=bags, num_bags=total, bag_offsets=offsets)
        return in_slots(ids, slots, buffer).pad(total, unique)


def pooled_source(features: KeyedJaggedTensor, routed: Routed, columns: Sequence[Column]) -> SortedIds:
    """Bags of `columns`, all of one width; rows are numbers of requests.

    Bags are in the order sample, column; with variable batch sizes column, sample.
    """
    lengths, strides = features.lengths().reshape(-1).numpy(), features.stride_per_key()
    weights = features.weights_or_none()
    ends, bag_ends = features.offset_per_key(), np.cumsum([0, *strides])
    keys = [column.key for column in columns]
    batch = JaggedFeatures(
        values=_joined(_requests(routed, columns)),
        weights=None
        if weights is None
        else np.concatenate([weights.numpy()[ends[key] : ends[key + 1]] for key in keys]),
        lengths=_joined([lengths[bag_ends[key] : bag_ends[key + 1]] for key in keys]),
        strides=[strides[key] for key in keys],
    )
    num_rows = max(int(batch.values.max(initial=0)) + 1, 1)
    stack = StackFeatures(np.arange(len(columns)), np.zeros(len(columns), np.int64), num_rows)
    order = np.arange(len(batch.lengths)) if features.variable_stride_per_key() else None
    return sort_for_stack(batch, stack, bag_order=order, mean=False)


def sequence_source(routed: Routed, columns: Sequence[Column]) -> SequenceSource:
    """Occurrences of `columns`, all of one width; rows are numbers of requests."""
    parts = _requests(routed, columns)
    rows = _joined(parts)
    num_rows = int(rows.max(initial=0)) + 1
    ids = sort_ids(rows, num_bags=len(rows), num_rows=num_rows, bags=np.arange(len(rows)))
    return SequenceSource(ids, np.array([len(part) for part in parts], np.int64))


def in_slots(ids: SortedIds, slots: Ints, num_rows: int) -> SortedIds:
    """From numbers of requests to their slots, which have the same order."""
    return replace(ids, rows=slots[ids.rows], sorted_rows=slots[ids.sorted_rows], num_rows=num_rows)


def _requests(routed: Routed, columns: Sequence[Column]) -> list[Ints]:
    return [routed.numbers[column.block][routed.positions[column.key]] for column in columns]


def _joined(parts: Sequence[NDArray[np.integer]]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)
