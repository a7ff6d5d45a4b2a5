"""Debug mode: checks on what kernels are given, which production leaves to the host's preparation.

    with kernels.debugging():
        pooled = pooled_lookup(table, batch, dim)

Within it every eager lookup and update reads its ids back and refuses those that no row has, and
TensorCore kernels are built with the compiler's bounds checks in them.  Slow: it waits for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from recsys_tpu.errors import UserError
from recsys_tpu.kernels.batch import LookupBatch

_on = False


class IdRangeError(UserError, IndexError):
    """An id that its table, or a row that its stack, does not have."""


@contextlib.contextmanager
def debugging(on: bool = True) -> Iterator[None]:
    """Debug mode within it, if `on`."""
    global _on
    before, _on = _on, on or _on
    try:
        yield
    finally:
        _on = before


def is_debugging() -> bool:
    """Whether debug mode is on; a constant to torch.compile."""
    return _on


def check_batch(op: str, batch: LookupBatch, num_rows: int) -> None:
    """Raises IdRangeError for an index that a kernel would follow out of its buffers.

    What is being traced has no values, and is not checked.
    """
    if torch.compiler.is_compiling() or isinstance(batch.rows, FakeTensor):
        return
    count, unique = batch.counts.tolist()
    _check(op, "id", batch.rows, 0, num_rows)
    _check(op, "bag of id", batch.bags[:count], 0, batch.num_bags)
    _check(op, "distinct row", batch.unique_rows[:unique], 0, num_rows)
    _check(op, "segment of id", batch.segments[:count], 0, unique)
    _check(op, "bag of sorted id", batch.sorted_bags[:count], 0, batch.num_bags)
    _check(op, "bag offset", batch.bag_offsets, 0, count + 1)
    _check(op, "row offset", batch.row_offsets, 0, count + 1)


def _check(op: str, what: str, values: Tensor, low: int, high: int) -> None:
    found = values.cpu()
    bad = ((found < low) | (found >= high)).nonzero()
    if len(bad):
        at = int(bad[0])
        raise IdRangeError(f"{op}: {what} {at} points at {int(found[at])}, which is not in [{low}, {high})")
