"""Host preparation: from a step's ids to a `LookupBatch`, sorted, deduplicated, range-checked, padded.

This is what gives device programs static shapes and lets kernels trust every index.  Ids are sorted
as 64-bit keys `row << shift | position`: one vectorised sort gives a stable order by row and the
positions with it, several times faster than a stable argsort.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from recsys_tpu.kernels.batch import LookupBatch


class CapacityError(ValueError):
    """A batch has more ids, or more distinct rows, than the static buffers hold."""

    def __init__(self, what: str, needed: int, capacity: int, option: str) -> None:
        super().__init__(
            f"{what}: {needed} needed, but {option} is {capacity}; raise {option} or split the batch"
        )
        self.what, self.needed, self.capacity, self.option = what, needed, capacity, option


@dataclass(frozen=True)
class SortedIds:
    """One step's ids of one stack in both orders, before padding; made by `sort_ids`, see `LookupBatch`."""

    num_bags: int
    num_rows: int
    rows: NDArray[np.integer]
    bags: NDArray[np.integer]
    weights: NDArray[np.floating] | None
    bag_offsets: NDArray[np.integer]
    sorted_rows: NDArray[np.integer]
    order: NDArray[np.integer]
    first: NDArray[np.integer]  # where each distinct row starts in `sorted_rows`
    segments: NDArray[np.integer]

    @property
    def sizes(self) -> tuple[int, int]:
        """(ids, distinct rows)."""
        return len(self.rows), len(self.first)

    def pad(self, id_capacity: int, unique_capacity: int, *, num_bags: int | None = None) -> LookupBatch:
        """The batch, on CPU, int32 and float32.  num_bags: more than there are; those behind are empty.

        Raises CapacityError when it doesn't fit.
        """
        count, unique = self.sizes
        num_bags = self.num_bags if num_bags is None else num_bags
        if self.num_bags > num_bags:
            raise CapacityError("bags", self.num_bags, num_bags, "num_bags")
        if count > id_capacity:
            raise CapacityError("ids", count, id_capacity, "id_capacity")
        if unique > unique_capacity:
            raise CapacityError("distinct rows", unique, unique_capacity, "unique_capacity")
        weights, order = self.weights, self.order
        return LookupBatch(
            num_bags=num_bags,
            rows=_padded(self.rows, id_capacity, 0),
            bags=_padded(self.bags, id_capacity, num_bags),
            weights=None if weights is None else _padded(weights, id_capacity, 0, np.float32),
            bag_offsets=_padded(self.bag_offsets, num_bags + 1, count),
            unique_rows=_padded(self.sorted_rows[self.first], unique_capacity, self.num_rows),
            row_offsets=_padded(self.first, unique_capacity + 1, count),
            sorted_bags=_padded(self.bags[order], id_capacity, num_bags),
            sorted_weights=None if weights is None else _padded(weights[order], id_capacity, 0, np.float32),
            segments=_padded(self.segments, id_capacity, unique_capacity),
            order=_padded(order, id_capacity, max(id_capacity - 1, 0)),
            counts=torch.tensor([count, unique], dtype=torch.int32),
        )


def prepare(
    rows: NDArray[np.integer],
    *,
    num_bags: int,
    num_rows: int,
    id_capacity: int,
    unique_capacity: int,
    lengths: NDArray[np.integer] | None = None,
    bags: NDArray[np.integer] | None = None,
    weights: NDArray[np.floating] | None = None,
) -> LookupBatch:
    """Builds the batch of one stack: `sort_ids`, then `SortedIds.pad`."""
    ids = sort_ids(rows, num_bags=num_bags, num_rows=num_rows, lengths=lengths, bags=bags, weights=weights)
    return ids.pad(id_capacity, unique_capacity)


def sort_ids(
    rows: NDArray[np.integer],
    *,
    num_bags: int,
    num_rows: int,
    lengths: NDArray[np.integer] | None = None,
    bags: NDArray[np.integer] | None = None,
    weights: NDArray[np.floating] | None = None,
) -> SortedIds:
    """Sorts one step's ids of one stack by bag and by row.

    rows `[n]`: row in the stack of each id.  Give either `lengths` `[num_bags]` (ids are in bag order)
    or `bags` `[n]` (any order; ids of a bag keep theirs).  weights `[n]`: per-id weights, or None.

    Raises ValueError for a row or bag out of range or for arrays that don't fit together.
    """
    if (lengths is None) == (bags is None):
        raise ValueError("prepare: give either lengths or bags")
    count = len(rows)
    if weights is not None and len(weights) != count:
        raise ValueError(f"prepare: {count} rows but {len(weights)} weights")
    _check_range("row", rows, num_rows)
    if lengths is not None:
        offsets = _offsets_of_lengths(lengths, num_bags, count)
        bags = np.repeat(np.arange(num_bags, dtype=np.int32), lengths)
    else:
        assert bags is not None
        if len(bags) != count:
            raise ValueError(f"prepare: {count} rows but {len(bags)} bags")
        _check_range("bag", bags, num_bags)
        if count and np.any(bags[1:] < bags[:-1]):
            order = _stable_order(bags)[1]
            rows, bags = rows[order], bags[order]
            weights = None if weights is None else weights[order]
        offsets = np.zeros(num_bags + 1, np.int64)
        np.cumsum(np.bincount(bags, minlength=num_bags), out=offsets[1:])

    sorted_rows, order = _stable_order(rows)
    starts = np.empty(count, np.bool_)
    starts[:1] = True
    np.not_equal(sorted_rows[1:], sorted_rows[:-1], out=starts[1:])
    segments = np.cumsum(starts, dtype=np.int32)
    segments -= 1
    return SortedIds(
        num_bags=num_bags,
        num_rows=num_rows,
        rows=rows,
        bags=bags,
        weights=weights,
        bag_offsets=offsets,
        sorted_rows=sorted_rows,
        order=order,
        first=np.flatnonzero(starts),
        segments=segments,
    )


def distinct(ids: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(distinct ids, ascending; position among them of each id).  Ids are non-negative, < 2**31."""
    sorted_ids, order = _stable_order(ids)
    starts = np.ones(len(ids), np.bool_)
    np.not_equal(sorted_ids[1:], sorted_ids[:-1], out=starts[1:])
    inverse = np.empty(len(ids), np.int64)
    inverse[order] = np.cumsum(starts) - 1
    return sorted_ids[starts].astype(np.int64), inverse


def _stable_order(keys: NDArray[np.integer]) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """(sorted keys, positions they came from), equal keys in their order.  Keys are non-negative, < 2**31."""
    shift = max(len(keys) - 1, 0).bit_length()
    packed = keys.astype(np.int64)
    packed <<= shift
    packed |= np.arange(len(keys), dtype=np.int64)
    packed.sort()
    return packed >> shift, packed & ((1 << shift) - 1)


def _check_range(what: str, values: NDArray[np.integer], limit: int) -> None:
    if len(values) == 0 or (values.min() >= 0 and values.max() < limit):
        return
    at = int(np.flatnonzero((values < 0) | (values >= limit))[0])
    raise ValueError(f"prepare: {what} {int(values[at])} at position {at} is not in [0, {limit})")


def _offsets_of_lengths(lengths: NDArray[np.integer], num_bags: int, count: int) -> NDArray[np.int64]:
    if len(lengths) != num_bags:
        raise ValueError(f"prepare: {len(lengths)} lengths for {num_bags} bags")
    if len(lengths) and lengths.min() < 0:
        raise ValueError(f"prepare: length {int(lengths.min())} is negative")
    offsets = np.zeros(num_bags + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] != count:
        raise ValueError(f"prepare: lengths sum to {int(offsets[-1])}, but there are {count} rows")
    return offsets


def _padded(
    values: NDArray[np.generic], size: int, padding: int, dtype: type[np.generic] = np.int32
) -> torch.Tensor:
    out = np.empty(size, dtype)
    out[: len(values)] = values
    out[len(values) :] = padding
    return torch.from_numpy(out)
