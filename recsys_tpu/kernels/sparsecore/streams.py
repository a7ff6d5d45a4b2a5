"""What the interpreter can't run of SparseCore, in one place: indirect streams, indexed stores, workers.

On a chip each function is the hardware's own: one indirect stream moves a whole window of rows.  Under
`pltpu.InterpretParams` (jax 0.10.2) indirect copies are not implemented, `axis_index` is 0 in every
subcore and indexed loads and stores are missing; there a stream is one copy a row on the stream's
semaphore, started and waited for where the stream is, and one subcore plays every worker in turn.
Everything built on these functions is the same code in both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

from recsys_tpu.chips import Chip

IGNORED = -1  # a row index that no stream reads or writes
Ref = Any


@dataclass(frozen=True)
class Target:
    """Where a kernel runs: a chip, or its interpreter with a few workers."""

    chip: Chip
    interpret: pltpu.InterpretParams | None = None
    interpreted_workers: int = 3

    @property
    def lanes(self) -> int:
        return self.chip.lanes

    @property
    def workers(self) -> int:
        return self.interpreted_workers if self.interpret else self.chip.workers

    def kernel(self, body: Callable[..., None], *, name: str, out_type: Any, scratch: dict[str, Any]) -> Any:
        """`body` on every vector subcore, with linear (untiled) HBM addressing."""
        cores, subcores = (1, 1) if self.interpret else (self.chip.sparsecores, self.chip.subcores)
        return pl.kernel(
            body,
            name=name,
            out_type=out_type,
            scratch_types=scratch,
            mesh=plsc.VectorSubcoreMesh(
                core_axis_name="core", subcore_axis_name="subcore", num_cores=cores, num_subcores=subcores
            ),
            interpret=self.interpret or False,
            # Linear addressing lets a flat table of any dim be read in place; lane reductions and
            # per-lane extraction are refused by the layout passes.
            compiler_params=pltpu.CompilerParams(use_tc_tiling_on_sc=False, needs_layout_passes=False),
        )

    def each_worker(self, body: Callable[[Any], None]) -> None:
        """Runs `body(worker)` for this subcore, or for each worker in turn when interpreted."""
        if self.interpret:
            pl.loop(0, self.workers)(body)
        else:
            body(jax.lax.axis_index("subcore") * self.chip.sparsecores + jax.lax.axis_index("core"))

    def gather(self, table: Ref, rows: Ref, into: Ref, semaphore: Ref) -> None:
        """Starts `into[i] = table[rows[i]]`, leaving out rows that are IGNORED."""
        if self.interpret:
            self._each_row(rows, lambda row, i: _row_copy(table, row, into, i, semaphore).start())
        else:
            pltpu.async_copy(table.at[plsc.Indices(rows, ignored_value=IGNORED)], into, semaphore)

    def gather_wait(self, table: Ref, rows: Ref, into: Ref, semaphore: Ref) -> None:
        """Waits for the `gather` of the same arguments; `rows` must not have changed since."""
        if self.interpret:
            self._each_row(rows, lambda row, i: _row_copy(table, row, into, i, semaphore).wait())
        else:
            indices = plsc.Indices(rows, ignored_value=IGNORED)
            pltpu.make_async_copy(table.at[indices], into, semaphore).wait()

    def scatter(self, source: Ref, table: Ref, rows: Ref, semaphore: Ref) -> None:
        """Starts `table[rows[i]] = source[i]`, leaving out rows that are IGNORED."""
        if self.interpret:
            self._each_row(rows, lambda row, i: _row_copy(source, i, table, row, semaphore).start())
        else:
            pltpu.async_copy(source, table.at[plsc.Indices(rows, ignored_value=IGNORED)], semaphore)

    def scatter_wait(self, source: Ref, table: Ref, rows: Ref, semaphore: Ref) -> None:
        """Waits for the `scatter` of the same arguments; `rows` must not have changed since."""
        if self.interpret:
            self._each_row(rows, lambda row, i: _row_copy(source, i, table, row, semaphore).wait())
        else:
            indices = plsc.Indices(rows, ignored_value=IGNORED)
            pltpu.make_async_copy(source, table.at[indices], semaphore).wait()

    def _each_row(self, rows: Ref, body: Callable[[Any, Any], None]) -> None:
        @pl.loop(0, rows.shape[0])
        def _(i: Any) -> None:
            row = rows[i]
            pl.when(row != IGNORED)(lambda: body(row, i))

    def add(self, ref: Ref, index: tuple[Any, ...], values: jax.Array) -> None:
        """`ref[index] += values`, one register."""
        if self.interpret:
            ref[index] = ref[index] + values
        else:
            plsc.addupdate(ref.at[index], values)

    def load_pair(self, ref: Ref, row: Any, column: int) -> tuple[jax.Array, jax.Array]:
        """The even and the odd elements of `ref[row, column : column + 2 * lanes]`."""
        if self.interpret:
            both = ref[row, pl.ds(column, 2 * self.lanes)]
            return both[0::2], both[1::2]
        rows, even = self._pair_index(row, column)
        return plsc.load_gather(ref, [rows, even]), plsc.load_gather(ref, [rows, even + 1])

    def store_pair(self, ref: Ref, row: Any, column: int, even: jax.Array, odd: jax.Array) -> None:
        """Stores even and odd elements to `ref[row, column : column + 2 * lanes]`."""
        if self.interpret:
            ref[row, pl.ds(column, 2 * self.lanes)] = jnp.stack([even, odd], axis=1).reshape(-1)
            return
        rows, at = self._pair_index(row, column)
        plsc.store_scatter(ref, [rows, at], even)
        plsc.store_scatter(ref, [rows, at + 1], odd)

    def add_pair(self, ref: Ref, row: Any, column: int, even: jax.Array, odd: jax.Array) -> None:
        """Adds even and odd elements to `ref[row, column : column + 2 * lanes]`."""
        if self.interpret:
            was = ref[row, pl.ds(column, 2 * self.lanes)]
            ref[row, pl.ds(column, 2 * self.lanes)] = was + jnp.stack([even, odd], axis=1).reshape(-1)
            return
        rows, at = self._pair_index(row, column)
        plsc.addupdate_scatter(ref, [rows, at], even)
        plsc.addupdate_scatter(ref, [rows, at + 1], odd)

    def _pair_index(self, row: Any, column: int) -> tuple[jax.Array, jax.Array]:
        rows = jnp.full((self.lanes,), row, jnp.int32)
        return rows, 2 * jax.lax.iota(jnp.int32, self.lanes) + column


def _row_copy(source: Ref, source_row: Any, target: Ref, target_row: Any, semaphore: Ref) -> Any:
    return pltpu.make_async_copy(source.at[pl.ds(source_row, 1)], target.at[pl.ds(target_row, 1)], semaphore)


def unpack_pair(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Words of two bfloat16 -> (low, high) halves as float32."""
    low = jax.lax.bitcast_convert_type(words << 16, jnp.float32)
    return low, jax.lax.bitcast_convert_type(words & jnp.int32(-65536), jnp.float32)


def pack_pair(low_bits: jax.Array, high_bits: jax.Array) -> jax.Array:
    """Two float32 bit patterns whose upper halves are bfloat16 -> words of two bfloat16."""
    return jax.lax.shift_right_logical(low_bits, jnp.int32(16)) | (high_bits & jnp.int32(-65536))
