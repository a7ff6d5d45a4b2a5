"""Who sums what: ranges of ids for every worker, computed by XLA from a batch's offsets.

A few hundred integers; comparisons only, since a device program may hold no `scan` and a sort compiles
slowly.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from recsys_tpu.kernels.sparsecore.segments import WIDEST, Sizes, bounds_size


def block_bounds(offsets: jax.Array, sizes: Sizes) -> jax.Array:
    """First id of every block and, behind the last, the number of ids (again in the padding)."""
    starts, total = offsets[:-1][:: sizes.block], offsets[-1]
    return jnp.concatenate([starts, jnp.broadcast_to(total, (bounds_size(sizes) - sizes.blocks,))])


def whole_blocks(offsets: jax.Array, sizes: Sizes, workers: int) -> jax.Array:
    """Limits that deal out whole blocks (a lookup), balanced by ids plus segments: int32 `[workers * 16]`."""
    starts = offsets[:-1][:: sizes.block]
    cost = starts + jnp.arange(sizes.blocks, dtype=jnp.int32) * sizes.block
    total = offsets[-1] + sizes.blocks * sizes.block
    targets = _shares(total, workers)
    splits = (cost[None, :] < targets[:, None]).sum(1, dtype=jnp.int32)
    splits = splits.at[workers].set(sizes.blocks)
    ids = jnp.append(starts, offsets[-1])[splits]
    zero = jnp.zeros((workers,), jnp.int32)
    return _limits(splits[:-1], splits[1:], ids[:-1], ids[1:], zero, zero, zero, zero)


def equal_ids(offsets: jax.Array, segments: jax.Array, sizes: Sizes, workers: int) -> jax.Array:
    """Limits that deal out equally many ids (an update), cutting a hot row's run where need be.

    A worker owns the rows whose run is wholly its own.  The first and last segment of its range may be
    shared with its neighbours: their sums are left to `shared_rows`.
    """
    splits = _shares(offsets[-1], workers)
    low, high = splits[:-1], splits[1:]
    some = high > low
    first = jnp.where(some, segments[jnp.minimum(low, sizes.ids - 1)], 0)
    last = jnp.where(some, segments[jnp.maximum(high - 1, 0)], 0)
    own_low = first + (offsets[first] < low)
    own_high = last + 1 - (offsets[last + 1] > high)
    block_high = jnp.where(some, last // sizes.block + 1, 0)
    return _limits(first // sizes.block, block_high, low, high, own_low, own_high, first, last)


def edge_slots(workers: int) -> int:
    """Room for the first and last sum of every worker, in whole registers."""
    return -(-2 * workers // WIDEST) * WIDEST


def shared_rows(
    offsets: jax.Array, unique_rows: jax.Array, limits: jax.Array, workers: int, sink: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The rows that `equal_ids` cut, as a small update of their own.

    A worker leaves two sums, of its first and last segment, at `2 * worker` and `2 * worker + 1`.  Those
    of cut rows are listed in order: (ids into the sums, segments, unique rows, offsets), each of
    `[edge_slots(workers)]` (offsets one more), padded as in `LookupBatch`.
    """
    slots = edge_slots(workers)
    table = limits.reshape(workers, 16)
    low, high, first, last = (table[:, i] for i in (2, 3, 6, 7))
    some = high > low
    cut_first = some & ((offsets[first] < low) | (offsets[first + 1] > high))
    cut_last = some & (offsets[last + 1] > high) & (last != first)
    unused = slots - 2 * workers
    cut = jnp.pad(jnp.stack([cut_first, cut_last], 1).reshape(-1), (0, unused))
    row = jnp.pad(jnp.stack([first, last], 1).reshape(-1), (0, unused))
    at = jnp.arange(slots, dtype=jnp.int32)
    before = at[None, :] < at[:, None]  # [i, j]: slot j comes before slot i
    position = (cut[None, :] & before).sum(1, dtype=jnp.int32)
    same_before = (cut[None, :] & before & (row[None, :] == row[:, None])).any(1)
    starts = cut & ~same_before
    segment = (starts[None, :] & (at[None, :] <= at[:, None])).sum(1, dtype=jnp.int32) - 1
    total = cut.sum(dtype=jnp.int32)
    where = jnp.where(cut, position, slots)
    ids = jnp.zeros((slots,), jnp.int32).at[where].set(at, mode="drop")
    segments = jnp.full((slots,), slots, jnp.int32).at[where].set(segment, mode="drop")
    start_at = jnp.where(starts, segment, slots)
    rows = jnp.full((slots,), sink, jnp.int32).at[start_at].set(unique_rows[row], mode="drop")
    new_offsets = jnp.full((slots + 1,), total, jnp.int32).at[start_at].set(position, mode="drop")
    return ids, segments, rows, new_offsets


def one_worker(offsets: jax.Array, sizes: Sizes, workers: int) -> jax.Array:
    """Limits that leave everything to worker 0: for the few rows of `shared_rows`."""
    zero = jnp.zeros((workers,), jnp.int32)
    total = zero.at[0].set(offsets[-1])
    unique = zero.at[0].set((offsets[:-1] < offsets[-1]).sum(dtype=jnp.int32))
    blocks = (unique + sizes.block - 1) // sizes.block
    return _limits(zero, blocks, zero, total, zero, unique, zero, zero)


def in_registers(array: jax.Array, padding: int | float) -> jax.Array:
    """The array, padded to whole registers (nothing is copied when its size is a multiple of 16)."""
    missing = -array.shape[0] % WIDEST
    return jnp.pad(array, (0, missing), constant_values=padding) if missing else array


def _shares(total: jax.Array, workers: int) -> jax.Array:
    """`workers + 1` points that divide [0, total] equally (without overflow)."""
    k = jnp.arange(workers + 1, dtype=jnp.int32)
    return k * (total // workers) + k * (total % workers) // workers


def _limits(*columns: jax.Array) -> jax.Array:
    padding = [jnp.zeros_like(columns[0])] * (16 - len(columns))
    return jnp.stack([*columns, *padding], axis=1).astype(jnp.int32).reshape(-1)
