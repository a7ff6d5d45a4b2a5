"""Pooled lookup on a TensorCore."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from recsys_tpu.kernels.flat_rows import stored_words
from recsys_tpu.kernels.tensorcore import windows
from recsys_tpu.kernels.tensorcore.windows import LINE, Ref, Sizes


def pooled_lookup(
    flat: jax.Array,
    rows: jax.Array,
    bags: jax.Array,
    bag_offsets: jax.Array,
    weights: jax.Array | None,
    *,
    num_bags: int,
    dim: int,
    interpret: pltpu.InterpretParams | None = None,
    debug: bool = False,
    block: int = 128,
    window: int = windows.WINDOW,
) -> jax.Array:
    """As `xla.pooled_lookup`; `flat` is float32, or bfloat16 pairs in int32 words.

    block: bags summed together; window: ids whose rows are in flight together.
    """
    packed = flat.dtype == jnp.int32
    if flat.shape[0] % LINE:
        raise ValueError(f"a TensorCore reads tables of whole lines ({LINE} words): pad its {flat.shape[0]}")
    block = min(block, -(-num_bags // 8) * 8)
    words, blocks = stored_words(flat, dim), -(-num_bags // block)
    sizes = Sizes(words, block, blocks, packed, weights is not None, window)
    width = sizes.words * sizes.halves

    def body(bounds: Ref, table: Ref, source_h: Ref, places_h: Ref, *rest: Ref) -> None:
        weights_h, out, *buffers = rest if weights is not None else (None, *rest)
        sums = windows.sum_segments(sizes, bounds, table, source_h, places_h, weights_h, buffers)
        for half in range(sizes.halves):
            for line in range(sizes.lines):
                words = min(sizes.words, LINE)
                total = jnp.zeros((block, words), jnp.float32)
                for place in range(sizes.places):
                    start = place * (block + 8)
                    total = total + sums[half, pl.ds(start, block), line, pl.ds(place * words, words)]
                out[:, pl.ds(half * sizes.words + line * words, words)] = total

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    source_at, places = windows.addresses(rows, bags, sizes)
    inputs = [windows.in_windows(source_at, sizes, 0), windows.in_windows(places, sizes, 0)]
    inputs += [] if weights is None else [windows.in_windows(weights, sizes, 0.0)]
    pooled = pl.pallas_call(
        body,
        name="pooled_lookup",
        out_shape=jax.ShapeDtypeStruct((sizes.blocks * block, width), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(sizes.blocks,),
            in_specs=[hbm] * (1 + len(inputs)),
            out_specs=pl.BlockSpec((block, width), lambda i, *_: (i, 0)),
            scratch_shapes=windows.scratch(sizes),
        ),
        interpret=interpret or False,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=not debug
        ),
    )(windows.block_bounds(bag_offsets, sizes), flat.reshape(-1, LINE), *inputs)[:num_bags]
    if packed:  # the halves were kept apart: interleave them again
        pooled = pooled.reshape(num_bags, 2, sizes.words).swapaxes(1, 2).reshape(num_bags, dim)
    return pooled


def sequence_lookup(
    flat: jax.Array, rows: jax.Array, bags: jax.Array, *, num_bags: int, dim: int, debug: bool = False
) -> jax.Array:
    """As `xla.sequence_lookup`: a pooled lookup in which every id is its own bag."""
    ids = rows.shape[0]
    valid = (bags < num_bags).sum(dtype=jnp.int32)
    at = jnp.arange(ids + 1, dtype=jnp.int32)
    own_bag = jnp.where(at[:-1] < valid, at[:-1], ids)
    offsets = jnp.minimum(at, valid)
    return pooled_lookup(flat, rows, own_bag, offsets, None, num_bags=ids, dim=dim, debug=debug)
