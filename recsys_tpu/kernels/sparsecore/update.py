"""Fused optimizer update on SparseCore, in place.

Two launches of one kernel.  The first gives every worker equally many ids: it sums the gradients of each
touched row, reads the row and its state, steps and writes back, each row once.  Where a row's run of ids
was cut between workers (a hot row may span many), the workers leave partial sums; the second launch, a
few rows on one worker, adds those up and updates their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from recsys_tpu.kernels.flat_rows import stored_words
from recsys_tpu.kernels.optimizer import HYPER_SIZE, OptimizerSpec
from recsys_tpu.kernels.sparsecore import partition, segments
from recsys_tpu.kernels.sparsecore.rows import RowStep
from recsys_tpu.kernels.sparsecore.segments import FIRST, LAST, OWN_HIGH, OWN_LOW, Sizes
from recsys_tpu.kernels.sparsecore.streams import IGNORED, Ref, Target


def fused_update(
    flat: jax.Array,
    state: tuple[jax.Array, ...],
    grad_output: jax.Array,
    unique_rows: jax.Array,
    row_offsets: jax.Array,
    sorted_bags: jax.Array,
    segments_of_ids: jax.Array,
    sorted_weights: jax.Array | None,
    hyper: jax.Array,
    *,
    spec: OptimizerSpec,
    target: Target,
) -> tuple[jax.Array, ...]:
    """As `xla.fused_update`; `flat` is float32, or bfloat16 pairs in int32 words."""
    dim, packed = grad_output.shape[1], flat.dtype == jnp.int32
    words = stored_words(flat, dim, multiple=target.lanes)
    num_rows, workers = flat.shape[0] // words, target.workers
    shapes = [(num_rows,) if spec.has_row_state else (num_rows, dim)] * len(state)
    buffers = tuple(x.reshape(shape) for x, shape in zip(state, shapes, strict=True))
    references = [jax.new_ref(x) for x in (flat.reshape(num_rows, words), *buffers)]

    sorted_bags = partition.in_registers(sorted_bags, 0)
    segments_of_ids = partition.in_registers(segments_of_ids, 0)
    if sorted_weights is not None:
        sorted_weights = partition.in_registers(sorted_weights, 0.0)
    sizes = _sizes(dim, sorted_bags.shape[0], unique_rows.shape[0], spec, sorted_weights is not None)
    limits = partition.equal_ids(row_offsets, segments_of_ids, sizes, workers)
    work = _Work(sorted_bags, segments_of_ids, sorted_weights, unique_rows, row_offsets, limits)
    partial = _launch(target, sizes, spec, packed, references, grad_output.astype(jnp.float32), work, hyper)

    ids, shared, rows, offsets = partition.shared_rows(row_offsets, unique_rows, limits, workers, num_rows)
    slots = partition.edge_slots(workers)
    sizes = _sizes(dim, slots, slots, spec, weighted=False)
    limits = partition.one_worker(offsets, sizes, workers)
    work = _Work(ids, shared, None, rows, offsets, limits)
    _launch(target, sizes, spec, packed, references, partial.reshape(slots, dim), work, hyper)
    return tuple(jax.freeze(reference).reshape(-1) for reference in references)


@dataclass(frozen=True)
class _Work:
    """One launch: ids into the gradients, their segments and weights; the rows of segments; limits."""

    ids: jax.Array
    segments: jax.Array
    weights: jax.Array | None
    unique_rows: jax.Array
    offsets: jax.Array
    limits: jax.Array


def _sizes(dim: int, ids: int, unique: int, spec: OptimizerSpec, weighted: bool) -> Sizes:
    # per parity: sums, table rows, element states
    window, block = segments.window_and_block(dim, ids, unique, element_buffers=4 + 2 * spec.element_states)
    return Sizes(dim, window, block, ids, -(-unique // block), packed=False, weighted=weighted)


def _launch(
    target: Target,
    sizes: Sizes,
    spec: OptimizerSpec,
    packed: bool,
    references: Sequence[Any],
    gradients: jax.Array,
    work: _Work,
    hyper: jax.Array,
) -> jax.Array:
    """One kernel over `work`, writing through `references`; returns the workers' edge sums, flat."""
    states, block, lanes = len(references) - 1, sizes.block, target.lanes
    bounds = partition.block_bounds(work.offsets, sizes)
    rows = jnp.pad(work.unique_rows, (0, sizes.blocks * block - work.unique_rows.shape[0]))

    def body(table: Ref, *rest: Ref, **buffers: Ref) -> None:
        state, rest = rest[:states], rest[states:]
        gradients_h, ids_h, segments_h, rows_h, limits_h, bounds_h, hyper_h, *weights_h, edges = rest
        own = {name: buffers.pop(name) for name in own_scratch}
        rows_v, table_v, state_v = own["touched_v"], own["table_v"], own["state_v"]
        pltpu.sync_copy(hyper_h, own["hyper_v"])
        step = RowStep(target, spec, sizes.dim, packed, own["hyper_v"])

        def streams(number: Any) -> list[tuple[Ref, Ref, Ref, Ref]]:
            """(HBM, touched rows, buffer, semaphore) of a block's table rows and of each state."""
            parity = number % 2
            pairs = [
                (table, table_v.at[parity]),
                *((s, v.at[parity]) for s, v in zip(state, state_v, strict=True)),
            ]
            semaphores = own["row_semaphore"]
            return [
                (hbm, rows_v.at[parity], vmem, semaphores.at[parity, i])
                for i, (hbm, vmem) in enumerate(pairs)
            ]

        def written(number: Any) -> None:
            for hbm, touched, vmem, semaphore in streams(number):
                target.scatter_wait(vmem, hbm, touched, semaphore)

        def worker(me: Any) -> None:
            mine = segments.load_limits(limits_h, buffers["limits_v"], me, target)
            low, high = mine[segments.BLOCK_LOW], mine[segments.BLOCK_HIGH]

            def begin(number: Any) -> None:
                """Reads the block's rows and states while its gradients are summed."""
                pl.when(number >= low + 2)(lambda: written(number - 2))
                at, parity = pl.multiple_of(number * block, 8), number % 2
                pltpu.sync_copy(rows_h.at[pl.ds(at, block)], rows_v.at[parity])

                @pl.loop(0, block // lanes)
                def _(group: Any) -> None:
                    span = pl.ds(group * lanes, lanes)
                    segment = at + group * lanes + jax.lax.iota(jnp.int32, lanes)
                    mine_only = (segment >= mine[OWN_LOW]) & (segment < mine[OWN_HIGH])
                    rows_v[parity, span] = jnp.where(mine_only, rows_v[parity, span], IGNORED)

                for stream in streams(number):
                    target.gather(*stream)

            def finish(number: Any) -> None:
                parity = number % 2
                for edge, segment in enumerate((mine[FIRST], mine[LAST])):

                    @pl.when(segment // block == number)
                    def _(edge: int = edge, segment: Any = segment) -> None:
                        at = pl.multiple_of((2 * me + edge) * sizes.dim, 8)
                        sums = buffers["sums"].at[parity, segment - number * block]
                        pltpu.sync_copy(sums, edges.at[pl.ds(at, sizes.dim)])

                for stream in streams(number):
                    target.gather_wait(*stream)
                sums, values = buffers["sums"].at[parity], table_v.at[parity]
                step.block(block, sums, values, [v.at[parity] for v in state_v], rows_v.at[parity])
                for hbm, touched, vmem, semaphore in streams(number):
                    target.scatter(vmem, hbm, touched, semaphore)

            weights = weights_h[0] if weights_h else None
            source = (gradients_h, ids_h, segments_h, weights)
            segments.sum_segments(target, sizes, *source, bounds_h, mine, buffers, begin, finish)
            pl.when(high >= low + 2)(lambda: written(high - 2))
            pl.when(high >= low + 1)(lambda: written(high - 1))

        target.each_worker(worker)

    words = sizes.dim // 2 if packed else sizes.dim
    state_shape = (2, block) if spec.has_row_state else (2, block, sizes.dim)
    own_scratch = {
        "touched_v": pltpu.VMEM((2, block), jnp.int32),
        "table_v": pltpu.VMEM((2, block, words), jnp.int32 if packed else jnp.float32),
        "state_v": [pltpu.VMEM(state_shape, jnp.float32) for _ in range(states)],
        "hyper_v": pltpu.VMEM((HYPER_SIZE,), jnp.float32),
        "row_semaphore": pltpu.SemaphoreType.DMA((2, 1 + states)),
    }
    kernel = target.kernel(
        body,
        name=f"fused_{spec.optimizer.value}",
        out_type=jax.ShapeDtypeStruct((partition.edge_slots(target.workers) * sizes.dim,), jnp.float32),
        scratch=segments.scratch(sizes, target) | own_scratch,
    )
    weights = () if work.weights is None else (work.weights,)
    return kernel(*references, gradients, work.ids, work.segments, rows, work.limits, bounds, hyper, *weights)
