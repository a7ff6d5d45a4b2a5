"""The optimizer step of a block of touched rows, in a subcore's registers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from recsys_tpu.kernels import rounding
from recsys_tpu.kernels.optimizer import (
    STEP,
    OptimizerSpec,
    regularised,
    row_terms,
    update_elements,
)
from recsys_tpu.kernels.sparsecore.streams import Ref, Target, pack_pair, unpack_pair


def square_root(x: jax.Array) -> jax.Array:
    """SparseCore lowers no sqrt: a bit trick for 1 / sqrt and three Newton steps, within 2 ulp.

    Zero, infinity and NaN come back as they are.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    y = jax.lax.bitcast_convert_type(
        0x5F3759DF - jax.lax.shift_right_logical(bits, jnp.int32(1)), jnp.float32
    )
    for _ in range(3):
        y = y * (1.5 - 0.5 * x * y * y)
    return jnp.where((x > 0) & (x < jnp.inf), x * y, x)


_MATH = SimpleNamespace(sqrt=square_root, where=jnp.where)


class RowStep:
    """Steps the rows of a block: `sums` and element states `[block, dim]`, `values` the table's rows."""

    def __init__(self, target: Target, spec: OptimizerSpec, dim: int, packed: bool, hyper_v: Ref) -> None:
        self.target, self.spec, self.dim, self.packed = target, spec, dim, packed
        scalars = hyper_v[pl.ds(0, target.lanes)]
        self.hyper = [scalars[i] for i in range(8)]

    def block(self, size: int, sums: Ref, values: Ref, states: Sequence[Ref], touched: Ref) -> None:
        """Steps every row of the block; what comes of rows that aren't the worker's is not written."""
        lanes = self.target.lanes

        @pl.loop(0, size)
        def _(row: Any) -> None:
            span = pl.ds((row // lanes) * lanes, lanes)
            mine = jax.lax.iota(jnp.int32, lanes) == row % lanes
            row_id = jnp.sum(jnp.where(mine, touched[span], 0)) if self._rounds_stochastically else None
            if not self.spec.has_row_state:
                self._row(row, sums, values, states, row_id, None)
                return
            current = states[0][span]
            row_state = jnp.full((lanes,), jnp.sum(jnp.where(mine, current, 0.0)))
            new = self._row(row, sums, values, (), row_id, row_state)
            assert new is not None
            states[0][span] = jnp.where(mine, new, current)

    @property
    def _rounds_stochastically(self) -> bool:
        return self.packed and self.spec.stochastic_rounding

    def _row(
        self, row: Any, sums: Ref, values: Ref, states: Sequence[Ref], row_id: Any, row_state: Any
    ) -> jax.Array | None:
        """One row; returns its new row-wise state."""
        spec, lanes = self.spec, self.target.lanes
        scale = divisor = new_row_state = None
        if spec.needs_square_sum:
            squares = jnp.zeros((lanes,), jnp.float32)
            for column in self._columns():
                for weight, gradient in zip(
                    self._weights(values, row, column), self._load(sums, row, column), strict=True
                ):
                    g = regularised(spec, weight, gradient)
                    squares = squares + g * g
            total = jnp.full((lanes,), jnp.sum(squares))
            scale, divisor, new_row_state = row_terms(_MATH, spec, self.dim, total, row_state)
        for column in self._columns():
            old = self._weights(values, row, column)
            gradients = self._load(sums, row, column)
            loaded = [self._load(state, row, column) for state in states]
            new_weights, new_states = [], []
            for part, (weight, gradient) in enumerate(zip(old, gradients, strict=True)):
                gradient = regularised(spec, weight, gradient)
                gradient = gradient if scale is None else gradient * scale
                current = tuple(state[part] for state in loaded)
                new, updated = update_elements(_MATH, spec, self.hyper, weight, gradient, current, divisor)
                new_weights.append(new)
                new_states.append(updated)
            self._store_weights(values, row, column, new_weights, row_id)
            for k, state in enumerate(states):
                self._store(state, row, column, [updated[k] for updated in new_states])
        return new_row_state

    def _columns(self) -> range:
        """Element columns of the register (or, packed, the pair of registers) loaded at once."""
        return range(0, self.dim, 2 * self.target.lanes if self.packed else self.target.lanes)

    def _load(self, ref: Ref, row: Any, column: int) -> tuple[jax.Array, ...]:
        if self.packed:
            return self.target.load_pair(ref, row, column)
        return (ref[row, pl.ds(column, self.target.lanes)],)

    def _store(self, ref: Ref, row: Any, column: int, parts: Sequence[jax.Array]) -> None:
        if self.packed:
            self.target.store_pair(ref, row, column, *parts)
        else:
            ref[row, pl.ds(column, self.target.lanes)] = parts[0]

    def _weights(self, values: Ref, row: Any, column: int) -> tuple[jax.Array, ...]:
        if self.packed:
            return unpack_pair(values[row, pl.ds(column // 2, self.target.lanes)])
        return (values[row, pl.ds(column, self.target.lanes)],)

    def _store_weights(
        self, values: Ref, row: Any, column: int, parts: Sequence[jax.Array], row_id: Any
    ) -> None:
        if not self.packed:
            self._store(values, row, column, parts)
            return
        first = 0 if row_id is None else row_id * self.dim  # element number: what the noise is drawn from
        even = first + column + 2 * jax.lax.iota(jnp.int32, self.target.lanes)
        words = pack_pair(self._rounded(parts[0], even), self._rounded(parts[1], even + 1))
        values[row, pl.ds(column // 2, self.target.lanes)] = words

    def _rounded(self, weight: jax.Array, element: jax.Array) -> jax.Array:
        """Bits of a float32 whose upper half is its bfloat16 rounding: stochastic, or to nearest even."""
        bits = jax.lax.bitcast_convert_type(weight, jnp.int32)
        if self._rounds_stochastically:
            noise = rounding.noise(self.hyper[STEP].astype(jnp.int32), element)
        else:
            noise = 0x7FFF + (jax.lax.shift_right_logical(bits, jnp.int32(16)) & 1)
        return rounding.add_noise(bits, noise, jnp.where)
