"""Lookup and update in plain JAX: gathers, segment sums, scatters, for XLA to compile.

Runs on every device, and is how the emulated `tpu` computes.  The SparseCore and TensorCore kernels have
the same signatures.  Arguments are those of `LookupBatch`; a bfloat16 table may be packed (see `packing`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from recsys_tpu.kernels import rounding
from recsys_tpu.kernels.flat_rows import read_rows, write_rows
from recsys_tpu.kernels.optimizer import STEP, OptimizerSpec, regularised, row_terms, update_elements


def pooled_lookup(
    flat: jax.Array,
    rows: jax.Array,
    bags: jax.Array,
    bag_offsets: jax.Array,
    weights: jax.Array | None,
    *,
    num_bags: int,
    dim: int,
    by_line: bool = False,
) -> jax.Array:
    """`[R * dim]` table, ids `[N]` in bag order -> float32 `[B, dim]`.  by_line: see `flat_rows`."""
    del bag_offsets  # for kernels that deal out bags
    gathered = _values(read_rows(flat, rows, _words(flat, dim), by_line=by_line))
    if weights is not None:
        gathered = gathered * weights[:, None]
    pooled = jnp.zeros((num_bags, dim), jnp.float32)
    return pooled.at[bags].add(gathered, indices_are_sorted=True, mode="drop")


def sequence_lookup(
    flat: jax.Array, rows: jax.Array, bags: jax.Array, *, num_bags: int, dim: int, by_line: bool = False
) -> jax.Array:
    """`[R * dim]` table, ids `[N]` -> float32 `[N, dim]`, padding 0."""
    gathered = _values(read_rows(flat, rows, _words(flat, dim), by_line=by_line))
    return jnp.where((bags < num_bags)[:, None], gathered, 0.0)


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
    by_line: bool = False,
) -> tuple[jax.Array, ...]:
    """New (table, *state); in place when these are donated.  by_line: see `flat_rows`."""
    del row_offsets  # for kernels that deal out rows
    dim, capacity = grad_output.shape[1], unique_rows.shape[0]
    words, state_words = _words(flat, dim), 1 if spec.has_row_state else dim
    num_rows = flat.shape[0] // words
    gradient = _row_gradients(grad_output, capacity, sorted_bags, segments, sorted_weights)
    # Padding becomes distinct rows beyond the table, which a scatter drops.
    beyond = num_rows + jnp.arange(capacity, dtype=jnp.int32)
    rows = jnp.where(unique_rows < num_rows, unique_rows, beyond)
    weight = _values(read_rows(flat, rows, words, by_line=by_line))
    current = tuple(read_rows(buffer, rows, state_words, by_line=by_line) for buffer in state)
    gradient = regularised(spec, weight, gradient)
    divisor, new_state = None, current
    if spec.needs_square_sum:
        square_sum = (gradient * gradient).sum(1, keepdims=True)
        row_state = current[0] if spec.has_row_state else None
        scale, divisor, new_row_state = row_terms(jnp, spec, dim, square_sum, row_state)
        gradient = gradient if scale is None else gradient * scale
        new_state = (new_row_state,)
    elements = () if spec.has_row_state else current
    weight, elements = update_elements(jnp, spec, hyper, weight, gradient, elements, divisor)
    if not spec.has_row_state:
        new_state = elements
    rounded = _round(weight, rows, spec, hyper, flat.dtype)
    buffers = [write_rows(flat, rows, rounded, words, by_line=by_line)]
    for buffer, values in zip(state, new_state, strict=True):
        buffers.append(write_rows(buffer, rows, values, state_words, by_line=by_line))
    return tuple(buffers)


def _row_gradients(
    grad_output: jax.Array,
    capacity: int,
    sorted_bags: jax.Array,
    segments: jax.Array,
    sorted_weights: jax.Array | None,
) -> jax.Array:
    each = grad_output.astype(jnp.float32).at[sorted_bags].get(mode="clip")
    if sorted_weights is not None:
        each = each * sorted_weights[:, None]
    total = jnp.zeros((capacity, grad_output.shape[1]), jnp.float32)
    return total.at[segments].add(each, indices_are_sorted=True, mode="drop")


def _words(flat: jax.Array, dim: int) -> int:
    return dim // 2 if flat.dtype == jnp.int32 else dim


def _values(rows: jax.Array) -> jax.Array:
    """Rows as they are stored -> float32 `[n, dim]`."""
    if rows.dtype == jnp.int32:
        rows = jax.lax.bitcast_convert_type(rows, jnp.bfloat16).reshape(rows.shape[0], -1)
    return rows.astype(jnp.float32)


def _round(
    weight: jax.Array, rows: jax.Array, spec: OptimizerSpec, hyper: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Float32 values -> rows as they are stored."""
    if dtype == jnp.float32:
        return weight
    if spec.stochastic_rounding:
        columns = jnp.arange(weight.shape[1], dtype=jnp.int32)
        random = rounding.noise(hyper[STEP].astype(jnp.int32), rows[:, None] * weight.shape[1] + columns)
        bits = rounding.add_noise(jax.lax.bitcast_convert_type(weight, jnp.int32), random, jnp.where)
        weight = jax.lax.bitcast_convert_type(bits & -65536, jnp.float32)
    values = weight.astype(jnp.bfloat16)
    if dtype == jnp.bfloat16:
        return values
    return jax.lax.bitcast_convert_type(values.reshape(values.shape[0], -1, 2), jnp.int32)
