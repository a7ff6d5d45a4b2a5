"""Pooled and sequence lookup on SparseCore."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from recsys_tpu.kernels.flat_rows import stored_words
from recsys_tpu.kernels.sparsecore import partition, segments
from recsys_tpu.kernels.sparsecore.segments import Sizes
from recsys_tpu.kernels.sparsecore.streams import Ref, Target


def pooled_lookup(
    flat: jax.Array,
    rows: jax.Array,
    bags: jax.Array,
    bag_offsets: jax.Array,
    weights: jax.Array | None,
    *,
    num_bags: int,
    dim: int,
    target: Target,
) -> jax.Array:
    """As `xla.pooled_lookup`; `flat` is float32, or bfloat16 pairs in int32 words."""
    packed = flat.dtype == jnp.int32
    stored_words(flat, dim, multiple=target.lanes)
    rows, bags = partition.in_registers(rows, 0), partition.in_registers(bags, num_bags)
    weights = None if weights is None else partition.in_registers(weights, 0.0)
    ids = rows.shape[0]
    window, block = segments.window_and_block(dim, ids, num_bags, element_buffers=2)
    # Few bags: smaller blocks, so that every worker gets some.
    while block > 16 and num_bags // block < 8 * target.workers:
        block -= 16
    blocks = -(-num_bags // block)
    sizes = Sizes(dim, window, block, ids, blocks, packed, weights is not None)
    bounds = partition.block_bounds(bag_offsets, sizes)
    limits = partition.whole_blocks(bag_offsets, sizes, target.workers)

    def body(
        table: Ref, ids_h: Ref, bags_h: Ref, limits_h: Ref, bounds_h: Ref, *rest: Ref, **buffers: Ref
    ) -> None:
        weights_h, out = rest if weights is not None else (None, rest[0])
        out_semaphore = buffers.pop("out_semaphore")

        def write(number: Any) -> Any:
            """The copy of a block's sums to the output."""
            sums = buffers["sums"].at[number % 2, pl.ds(0, block)]
            rows_out = out.at[pl.ds(pl.multiple_of(number * block, 8), block)]
            return pltpu.make_async_copy(sums, rows_out, out_semaphore.at[number % 2])

        def worker(me: Any) -> None:
            mine = segments.load_limits(limits_h, buffers["limits_v"], me, target)
            low, high = mine[segments.BLOCK_LOW], mine[segments.BLOCK_HIGH]

            def begin(number: Any) -> None:
                pl.when(number >= low + 2)(lambda: write(number - 2).wait())

            segments.sum_segments(
                target,
                sizes,
                table,
                ids_h,
                bags_h,
                weights_h,
                bounds_h,
                mine,
                buffers,
                begin,
                lambda n: write(n).start(),
            )
            pl.when(high >= low + 2)(lambda: write(high - 2).wait())
            pl.when(high >= low + 1)(lambda: write(high - 1).wait())

        target.each_worker(worker)

    scratch = segments.scratch(sizes, target) | {"out_semaphore": pltpu.SemaphoreType.DMA((2,))}
    out_type = jax.ShapeDtypeStruct((blocks * block, dim), jnp.float32)
    kernel = target.kernel(body, name="pooled_lookup", out_type=out_type, scratch=scratch)
    table = flat.reshape(-1, sizes.words)
    extra = () if weights is None else (weights,)
    return kernel(table, rows, bags, limits, bounds, *extra)[:num_bags]


def sequence_lookup(
    flat: jax.Array, rows: jax.Array, bags: jax.Array, *, num_bags: int, dim: int, target: Target
) -> jax.Array:
    """As `xla.sequence_lookup`: a pooled lookup in which every id is its own bag."""
    ids = rows.shape[0]
    valid = (bags < num_bags).sum(dtype=jnp.int32)
    at = jnp.arange(ids + 1, dtype=jnp.int32)
    own_bag = jnp.where(at[:-1] < valid, at[:-1], ids)
    return pooled_lookup(
        flat, rows, own_bag, jnp.minimum(at, valid), None, num_bags=ids, dim=dim, target=target
    )
