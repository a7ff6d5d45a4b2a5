"""What XLA makes of a lookup and its update without kernels: what the report compares with.

As autograd leaves it, and as TorchRec's UNFUSED_TPU tables train: rows are gathered and summed; backward
scatters each id's gradient into a gradient as large as the table, which the optimizer then reads whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from recsys_tpu.kernels.arg_specs import OPTIMIZERS, Program
from recsys_tpu.kernels.batch import Optimizer


def arguments(program: Program) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of `function`: table `[rows, dim]` float32, (state, gradient of the bags, of an update), rows, bags."""
    shape = jax.ShapeDtypeStruct
    table, ids = shape((program.rows, program.dim), jnp.float32), shape((program.ids,), jnp.int32)
    if not program.is_update:
        return table, ids, ids
    state = shape((program.rows,), jnp.float32)
    return table, state, shape((program.bags, program.dim), jnp.float32), ids, ids


def donate(program: Program) -> tuple[int, ...]:
    """Table and state of an update."""
    return (0, 1) if program.is_update else ()


def function(program: Program) -> Callable[..., Any]:
    """The operation of `program` on a plain table: a lookup, or SGD's or row-wise Adagrad's update."""
    if not program.is_update:

        def lookup(table: jax.Array, rows: jax.Array, bags: jax.Array) -> jax.Array:
            return jax.ops.segment_sum(table[rows], bags, program.bags)

        return lookup
    rowwise = OPTIMIZERS[program.op].optimizer is Optimizer.ROWWISE_ADAGRAD

    def update(
        table: jax.Array, state: jax.Array, grad: jax.Array, rows: jax.Array, bags: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        def loss(weights: jax.Array) -> jax.Array:
            return (jax.ops.segment_sum(weights[rows], bags, program.bags) * grad).sum()

        gradient = jax.grad(loss)(table)
        if rowwise:
            state = state + jnp.square(gradient).mean(1)
            gradient = gradient / (jnp.sqrt(state) + 1e-8)[:, None]
        return table - 0.1 * gradient, state

    return update
