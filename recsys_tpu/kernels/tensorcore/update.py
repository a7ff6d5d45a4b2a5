"""Fused optimizer update on a TensorCore, in place, for rows of whole lines.

Grid steps are blocks of touched rows.  While a block's gradients are summed, its table rows and element
states are on their way in, the block before is on its way out; each row is read and written once.
Gradients that fit into VMEM are read into it whole, once, however many ids a bag has; larger ones are
fetched row by row, once an id.
A row-wise state is a number a row: XLA gathers and scatters those around the kernel, which reads them as
scalars and returns them a block to a register.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from recsys_tpu.kernels.optimizer import OptimizerSpec, regularised, row_terms, update_elements
from recsys_tpu.kernels.tensorcore import windows
from recsys_tpu.kernels.tensorcore.windows import LINE, Ref, Sizes

BLOCK = LINE  # touched rows a block: the row-wise states of a block are one register
UNROLL = 8
WORKING_BYTES = 16 << 20  # VMEM of everything but the gradients, at most


def fused_update(
    flat: jax.Array,
    state: tuple[jax.Array, ...],
    grad_output: jax.Array,
    unique_rows: jax.Array,
    row_offsets: jax.Array,
    sorted_bags: jax.Array,
    segments: jax.Array,
    sorted_weights: jax.Array | None,
    hyper: jax.Array,
    *,
    spec: OptimizerSpec,
    interpret: pltpu.InterpretParams | None = None,
    debug: bool = False,
    resident_bytes: int = 0,
    block_size: int = BLOCK,
    window: int = windows.WINDOW,
) -> tuple[jax.Array, ...]:
    """As `xla.fused_update`, for float32 tables whose dim is a multiple of 128.

    resident_bytes: VMEM for the gradients of all bags; larger ones stay in HBM.
    Raises ValueError for other tables.
    """
    (num_bags, dim), capacity = grad_output.shape, unique_rows.shape[0]
    if flat.dtype != jnp.float32 or dim % LINE:
        raise ValueError(
            f"the TensorCore update takes float32 rows of whole lines ({LINE}), not {flat.dtype} of {dim}"
        )
    num_rows, blocks = flat.shape[0] // dim, -(-capacity // block_size)
    weighted = sorted_weights is not None
    resident = num_bags * dim * 4 <= resident_bytes
    sizes = Sizes(dim, block_size, blocks, packed=False, weighted=weighted, window=window, resident=resident)
    lines, elements = sizes.lines, spec.element_states
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)

    touched = jnp.pad(unique_rows, (0, blocks * block_size - capacity))
    in_blocks = jnp.minimum(touched, num_rows - 1).reshape(blocks, 1, block_size)
    count = (unique_rows < num_rows).sum(dtype=jnp.int32)
    row_inputs = [state[0].at[in_blocks].get(mode="clip")] if spec.has_row_state else []
    source_at, places = windows.addresses(jnp.minimum(sorted_bags, num_bags - 1), segments, sizes)
    ids = [windows.in_windows(source_at, sizes, 0), windows.in_windows(places, sizes, 0)]
    ids += [] if sorted_weights is None else [windows.in_windows(sorted_weights, sizes, 0.0)]
    buffers = [flat.reshape(-1, LINE)] + [s.reshape(-1, LINE) for s in state[:elements]]

    def body(bounds: Ref, counts: Ref, hyper_s: Ref, *refs: Ref) -> None:
        # The first refs, the inputs, are the memory of the outputs, which are read and written.
        rest = list(refs[len(buffers) :])
        gradients, source_h, places_h = rest[0], rest[1], rest[2]
        weights_h = rest[3] if sizes.weighted else None
        rest = rest[3 + sizes.weighted :]
        rows_h, rest = rest[0], rest[1:]
        states_h, rest = (rest[0], rest[1:]) if spec.has_row_state else (None, rest)
        tables, rest = rest[: len(buffers)], rest[len(buffers) :]
        new_states, rest = (rest[0], rest[1:]) if spec.has_row_state else (None, rest)
        rows_s, states_s, values, resident_v, meta_semaphore, semaphores, *sum_buffers = rest
        block, touched_rows = pl.program_id(0), counts[0]

        def size_of(b: Any) -> Any:
            return jnp.clip(touched_rows - b * block_size, 0, block_size)

        def copy_row(b: Any, i: Any, k: int, write: bool) -> Any:
            at = (b % 2) * block_size + i
            ends = tables[k].at[pl.ds(rows_s[at] * lines, lines)], values.at[k, at]
            return pltpu.make_async_copy(*(ends[::-1] if write else ends), semaphores.at[int(write), b % 2])

        def read(b: Any) -> None:
            """Starts reading the rows of block b; padding reads some row of the table, for nothing."""
            at = pl.multiple_of((b % 2) * block_size, block_size)
            meta = [pltpu.make_async_copy(rows_h.at[b, 0], rows_s.at[pl.ds(at, block_size)], meta_semaphore)]
            if states_h is not None:
                meta.append(
                    pltpu.make_async_copy(
                        states_h.at[b, 0], states_s.at[pl.ds(at, block_size)], meta_semaphore
                    )
                )
            for copy in meta:
                copy.start()
            for copy in meta:
                copy.wait()

            @pl.loop(0, block_size, step=UNROLL)
            def _(first: Any) -> None:
                for j in range(UNROLL):
                    for k in range(len(tables)):
                        copy_row(b, first + j, k, write=False).start()

        def write(b: Any) -> None:
            @pl.when(size_of(b) == block_size)
            def _() -> None:
                @pl.loop(0, block_size, step=UNROLL)
                def _(first: Any) -> None:
                    for j in range(UNROLL):
                        for k in range(len(tables)):
                            copy_row(b, first + j, k, write=True).start()

            @pl.when(size_of(b) < block_size)
            def _() -> None:
                @pl.loop(0, size_of(b))
                def _(i: Any) -> None:
                    for k in range(len(tables)):
                        copy_row(b, i, k, write=True).start()

        def wait_whole(b: Any, direction: int) -> None:
            for k in range(len(tables)):
                whole = values.at[k, pl.ds((b % 2) * block_size, block_size)]
                pltpu.make_async_copy(whole, whole, semaphores.at[direction, b % 2]).wait()

        def wait_written(b: Any) -> None:
            pl.when(size_of(b) == block_size)(lambda: wait_whole(b, 1))

            @pl.when(size_of(b) < block_size)
            def _() -> None:
                @pl.loop(0, size_of(b))
                def _(i: Any) -> None:
                    for k in range(len(tables)):
                        copy_row(b, i, k, write=True).wait()

        def step(sums: Ref) -> None:
            def rows(group: Any, new_row_states: jax.Array) -> jax.Array:
                for j in range(UNROLL):
                    i = group * UNROLL + j
                    at = (block % 2) * block_size + i
                    row_state = states_s[at] if spec.has_row_state else None
                    current = [values[k, at] for k in range(len(tables))]
                    new, row = _step_row(spec, dim, hyper_s, current, sums[0, i], row_state)
                    for k, value in enumerate(new):
                        values[k, at] = value
                    if row is not None:
                        lane = jax.lax.broadcasted_iota(jnp.int32, (1, block_size), 1)
                        new_row_states = jnp.where(lane == i, row, new_row_states)
                return new_row_states

            states = jax.lax.fori_loop(0, block_size // UNROLL, rows, jnp.zeros((1, block_size), jnp.float32))
            if new_states is not None:
                new_states[0] = states

        def start() -> None:
            if resident:
                whole = pltpu.make_async_copy(gradients, resident_v, meta_semaphore)
                whole.start()
                whole.wait()
            read(0)

        pl.when(block == 0)(start)

        @pl.when(size_of(block + 1) > 0)
        def _() -> None:
            pl.when(block > 0)(lambda: wait_written(block - 1))
            read(block + 1)

        source = resident_v if resident else gradients
        sums = windows.sum_segments(sizes, bounds, source, source_h, places_h, weights_h, sum_buffers)
        first_or_some = (block == 0) | (size_of(block) > 0)

        @pl.when(first_or_some)
        def _() -> None:
            wait_whole(block, 0)
            step(sums)
            write(block)

            @pl.when(size_of(block + 1) == 0)  # the last: nobody after it waits
            def _() -> None:
                pl.when(block > 0)(lambda: wait_written(block - 1))
                wait_written(block)

    scratch = [
        pltpu.SMEM((2 * block_size,), jnp.int32),
        pltpu.SMEM((2 * block_size,), jnp.float32),
        pltpu.VMEM((len(buffers), 2 * block_size, lines, LINE), jnp.float32),
        pltpu.VMEM((num_bags if resident else 1, lines, LINE), jnp.float32),
        pltpu.SemaphoreType.DMA,
        pltpu.SemaphoreType.DMA((2, 2)),
        *windows.scratch(sizes),
    ]
    gradients = grad_output.astype(jnp.float32)
    gradients = gradients.reshape(num_bags, lines, LINE) if resident else gradients.reshape(-1, LINE)
    inputs = [*buffers, gradients, *ids, in_blocks, *row_inputs]
    state_out = [jax.ShapeDtypeStruct((blocks, 1, block_size), jnp.float32)] if spec.has_row_state else []
    state_spec = [pl.BlockSpec((1, 1, block_size), lambda i, *_: (i, 0, 0))] if spec.has_row_state else []
    results = pl.pallas_call(
        body,
        name=f"fused_{spec.optimizer.value}",
        out_shape=[*(jax.ShapeDtypeStruct(b.shape, b.dtype) for b in buffers), *state_out],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(blocks,),
            in_specs=[hbm] * len(inputs),
            out_specs=[hbm] * len(buffers) + state_spec,
            scratch_shapes=scratch,
        ),
        input_output_aliases={3 + k: k for k in range(len(buffers))},
        interpret=interpret or False,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=not debug,
            vmem_limit_bytes=num_bags * dim * 4 + WORKING_BYTES if resident else None,
        ),
    )(windows.block_bounds(row_offsets, sizes), count[None], hyper, *inputs)
    new_buffers = [result.reshape(-1) for result in results[: len(buffers)]]
    if not spec.has_row_state:
        return tuple(new_buffers)
    beyond = num_rows + jnp.arange(capacity, dtype=jnp.int32)  # padding: rows that a scatter drops
    at = jnp.where(unique_rows < num_rows, unique_rows, beyond)
    new = results[-1].reshape(-1)[:capacity]
    row_state = state[0].at[at].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)
    return new_buffers[0], row_state


def _step_row(
    spec: OptimizerSpec, dim: int, hyper: Ref, current: list[jax.Array], gradient: jax.Array, row_state: Any
) -> tuple[list[jax.Array], jax.Array | None]:
    """New (table row, *states) of one row `[lines, 128]`, and its new row-wise state `[1, 1]`."""
    weight, states = current[0], tuple(current[1:])
    gradient = regularised(spec, weight, gradient)
    divisor = new_row_state = None
    if spec.needs_square_sum:
        square_sum = jnp.sum(gradient * gradient, keepdims=True)
        scale, divisor, new_row_state = row_terms(jnp, spec, dim, square_sum, row_state)
        gradient = gradient if scale is None else gradient * scale
    new, states = update_elements(jnp, spec, hyper, weight, gradient, states, divisor)
    return [new, *states], new_row_state
