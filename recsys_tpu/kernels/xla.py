"""Lookup and update in plain JAX: gathers, segment sums, scatters, for XLA to compile.

Runs on every device, and is how the emulated `tpu` computes.  Signatures are those of
`sparsecore.py` and `tensorcore.py`; arguments as in `LookupBatch`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from recsys_tpu.kernels import rounding
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
) -> jax.Array:
    """`[R * dim]` table, ids `[N]` in bag order -> float32 `[B, dim]`."""
    del bag_offsets  # for kernels that deal out bags
    gathered = flat.reshape(-1, dim)[rows].astype(jnp.float32)
    if weights is not None:
        gathered = gathered * weights[:, None]
    pooled = jnp.zeros((num_bags, dim), jnp.float32)
    return pooled.at[bags].add(gathered, indices_are_sorted=True, mode="drop")


def sequence_lookup(
    flat: jax.Array, rows: jax.Array, bags: jax.Array, *, num_bags: int, dim: int
) -> jax.Array:
    """`[R * dim]` table, ids `[N]` -> float32 `[N, dim]`, padding 0."""
    gathered = flat.reshape(-1, dim)[rows].astype(jnp.float32)
    return jnp.where((bags < num_bags)[:, None], gathered, 0.0)


def weight_gradient(flat: jax.Array, rows: jax.Array, bags: jax.Array, grad_output: jax.Array) -> jax.Array:
    """Gradient of a pooled lookup with respect to its per-id weights, float32 `[N]`, padding 0."""
    num_bags, dim = grad_output.shape
    gathered = flat.reshape(-1, dim)[rows].astype(jnp.float32)
    upstream = grad_output.astype(jnp.float32).at[bags].get(mode="clip")
    return jnp.where(bags < num_bags, (gathered * upstream).sum(1), 0.0)


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
) -> tuple[jax.Array, ...]:
    """New (table, *state); in place when these are donated."""
    del row_offsets  # for kernels that deal out rows
    dim = grad_output.shape[1]
    table = flat.reshape(-1, dim)
    gradient = _row_gradients(grad_output, unique_rows.shape[0], sorted_bags, segments, sorted_weights)
    # Padding becomes distinct rows beyond the table, which a scatter drops.
    beyond = table.shape[0] + jnp.arange(unique_rows.shape[0], dtype=jnp.int32)
    rows = jnp.where(unique_rows < table.shape[0], unique_rows, beyond)
    weight = table.at[rows].get(mode="clip").astype(jnp.float32)
    buffers = state if spec.has_row_state else tuple(buffer.reshape(-1, dim) for buffer in state)
    current = tuple(buffer.at[rows].get(mode="clip") for buffer in buffers)
    gradient = regularised(spec, weight, gradient)
    divisor, updated = None, current
    if spec.needs_square_sum:
        square_sum = (gradient * gradient).sum(1, keepdims=True)
        row_state = current[0][:, None] if spec.has_row_state else None
        scale, divisor, new_row_state = row_terms(jnp, spec, dim, square_sum, row_state)
        gradient = gradient if scale is None else gradient * scale
        if new_row_state is not None:
            updated = (new_row_state[:, 0],)
    elements = () if spec.has_row_state else current
    weight, elements = update_elements(jnp, spec, hyper, weight, gradient, elements, divisor)
    if not spec.has_row_state:
        updated = elements
    rounded = _round(weight, rows, spec, hyper, table.dtype)
    new = [_scatter(buffer, rows, values) for buffer, values in zip(buffers, updated, strict=True)]
    return (_scatter(table, rows, rounded).reshape(-1), *(buffer.reshape(-1) for buffer in new))


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


def _scatter(buffer: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    return buffer.at[rows].set(values, mode="drop", unique_indices=True, indices_are_sorted=True)


def _round(
    weight: jax.Array, rows: jax.Array, spec: OptimizerSpec, hyper: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    if dtype != jnp.bfloat16 or not spec.stochastic_rounding:
        return weight.astype(dtype)
    columns = jnp.arange(weight.shape[1], dtype=jnp.int32)
    random = rounding.noise(hyper[STEP].astype(jnp.int32), rows[:, None] * weight.shape[1] + columns)
    bits = rounding.add_noise(jax.lax.bitcast_convert_type(weight, jnp.int32), random, jnp.where)
    return jax.lax.bitcast_convert_type(bits & -65536, jnp.float32).astype(dtype)
