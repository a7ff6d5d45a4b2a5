"""Sums of segments on a TensorCore: the loop that lookup and update share.

As on SparseCore, ids are walked in windows and segments in blocks, independently of one another; here
the grid steps are the blocks, and the windows in flight persist from one step to the next.  A TensorCore
has no indirect stream: the scalar unit starts one copy a row, and a whole window is waited for at once.

A source that fits into VMEM may lie there whole (`resident`); its rows are then read where they are.

A table is seen as *lines* of 128 words.  A row of 128 or more words is several lines; shorter rows share
a line, and the sum of each position in the line is kept apart until the block is finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Ref = Any
LINE = 128  # words a register has lanes, and a line of a table
WINDOW = 256  # ids whose rows are in flight together; a test may choose less
META_SLOTS = 4
UNROLL = 16  # rows whose copies are started, or that are summed, in straight-line code


@dataclass(frozen=True)
class Sizes:
    """Static sizes: words a source row, segments a block, blocks in all."""

    words: int
    block: int
    blocks: int
    packed: bool  # words are pairs of bfloat16
    weighted: bool
    window: int = WINDOW
    resident: bool = False  # the source is in VMEM: `[rows, lines, 128]`

    def __post_init__(self) -> None:
        if self.words % LINE and LINE % self.words:
            raise ValueError(
                f"a TensorCore reads rows of {LINE} words, or of a divisor or multiple of it; got "
                f"{self.words}. Pad the table's dim."
            )

    @property
    def lines(self) -> int:
        """Lines a row has."""
        return max(1, self.words // LINE)

    @property
    def places(self) -> int:
        """Rows that share a line."""
        return max(1, LINE // self.words)

    @property
    def halves(self) -> int:
        """Sums a word needs: of its two bfloat16, or of itself."""
        return 2 if self.packed else 1


def scratch(sizes: Sizes) -> list[Any]:
    """Buffers of `sum_segments`, in its order."""
    source = jnp.int32 if sizes.packed else jnp.float32
    meta = (META_SLOTS * sizes.window,)  # flat: the scalar unit's addresses are then one addition
    return [
        pltpu.SMEM(meta, jnp.int32),
        pltpu.SMEM(meta, jnp.int32),
        pltpu.SMEM(meta if sizes.weighted else (LINE,), jnp.float32),
        pltpu.VMEM((1 if sizes.resident else 2 * sizes.window, sizes.lines, LINE), source),
        # a spare segment, in a tile of its own, takes what is not the block's
        pltpu.VMEM((sizes.halves, sizes.places * (sizes.block + 8), sizes.lines, LINE), jnp.float32),
        pltpu.SemaphoreType.DMA((META_SLOTS,)),
        pltpu.SemaphoreType.DMA((2,)),
    ]


def in_windows(array: jax.Array, sizes: Sizes, padding: int | float) -> jax.Array:
    """`[N]` -> `[windows, 1, window]`."""
    missing = -array.shape[0] % sizes.window
    return jnp.pad(array, (0, missing), constant_values=padding).reshape(-1, 1, sizes.window)


def addresses(ids: jax.Array, segments: jax.Array, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """(where each id's row is in the source, where in the accumulator it is added), `[N]` each.

    Computed by XLA, a register of ids at a time: in the kernel it would be the scalar unit's work, which
    is what limits it.
    """
    place = segments % sizes.block
    if sizes.resident:
        return ids, place
    if sizes.places == 1:
        return ids * sizes.lines, place
    return ids // sizes.places, place + ids % sizes.places * (sizes.block + 8)


def block_bounds(offsets: jax.Array, sizes: Sizes) -> jax.Array:
    """First id of every block and, last, the number of ids: `[blocks + 1]`."""
    return jnp.append(offsets[:-1][:: sizes.block], offsets[-1])


def sum_segments(
    sizes: Sizes,
    bounds: Ref,
    source: Ref,
    source_at: Ref,
    places: Ref,
    weights: Ref | None,
    buffers: Sequence[Ref],
) -> Ref:
    """Sums block `pl.program_id(0)`; source is `[lines of the table, 128]`, in HBM unless it is resident.

    source_at, places: `addresses`, in windows.

    Returns the accumulator `[halves, places * (block + 8), lines, 128]`: the segment `s` of place `p` at
    `p * (block + 8) + s`.
    """
    source_s, places_s, weights_s, rows_v, sums, meta_semaphore, row_semaphore = buffers
    block, window = pl.program_id(0), sizes.window
    low, high = bounds[block], bounds[block + 1]
    windows = (bounds[sizes.blocks] + window - 1) // window

    def meta_copies(c: Any) -> list[Any]:
        slot = c % META_SLOTS
        pairs = [(source_at, source_s), (places, places_s)] + (
            [(weights, weights_s)] if sizes.weighted else []
        )
        span = pl.ds(pl.multiple_of(slot * window, window), window)
        semaphore = meta_semaphore.at[slot]
        return [pltpu.make_async_copy(hbm.at[c, 0], smem.at[span], semaphore) for hbm, smem in pairs]

    def start_meta(c: Any) -> None:
        @pl.when(c < windows)
        def _() -> None:
            for copy in meta_copies(c):
                copy.start()

    def start_rows(c: Any, first: Any, count: int) -> None:
        """Starts the copies of `count` rows of window c, in straight-line code."""
        if sizes.resident:
            return
        at, into = (c % META_SLOTS) * window + first, (c % 2) * window + first
        semaphore = row_semaphore.at[c % 2]
        for j in range(count):
            lines = source.at[pl.ds(source_s[at + j], sizes.lines)]
            pltpu.make_async_copy(lines, rows_v.at[into + j], semaphore).start()

    def wait_rows(c: Any) -> None:
        if sizes.resident:
            return
        whole = rows_v.at[pl.ds((c % 2) * window, window)]  # one wait for the bytes of all its rows
        pltpu.make_async_copy(whole, whole, row_semaphore.at[c % 2]).wait()

    def wait_meta(c: Any) -> None:
        @pl.when(c < windows)
        def _() -> None:
            for copy in meta_copies(c):
                copy.wait()

    def place(c: Any, index: Any) -> Any:
        """Where id `index` of window c is added: what is not the block's goes to the spare segment."""
        position = c * window + index
        mine = (position >= low) & (position < high)
        return jnp.where(mine, places_s[(c % META_SLOTS) * window + index], sizes.block)

    def sum_rows(c: Any, first: Any, carry: Any, *, all_mine: bool) -> Any:
        """Adds UNROLL rows of window c; `carry`: the last place and the sum there so far."""
        before, totals = carry
        at, row = (c % META_SLOTS) * window + first, (c % 2) * window + first
        for j in range(UNROLL):
            segment = places_s[at + j] if all_mine else place(c, first + j)
            parts = _halves(sizes, source[source_s[at + j]] if sizes.resident else rows_v[row + j])
            if sizes.weighted:
                parts = [weights_s[at + j] * part for part in parts]
            if sizes.places > 1:  # consecutive rows of a segment alternate between places
                totals = [sums[half, segment] for half in range(sizes.halves)]
            else:
                totals = [jnp.where(segment == before, total, 0.0) for total in totals]
            totals = [total + part for total, part in zip(totals, parts, strict=True)]
            for half, total in enumerate(totals):
                sums[half, segment] = total
            before = segment
        return before, totals

    def sum_window(c: Any) -> None:
        """Sums the block's rows of window c; on the way starts as many rows of the next window.

        Groups of UNROLL ids that are the block's alone need no check of whose an id is; only the first and
        the last group of a block may be shared.  Copies of a group that it shares with the block before
        were started by that.
        """
        begin = jnp.maximum(low - c * window, 0) // UNROLL
        end = (jnp.minimum(high - c * window, window) + UNROLL - 1) // UNROLL
        shared_low = (c * window + begin * UNROLL < low).astype(jnp.int32)
        shared_high = (c * window + end * UNROLL > jnp.minimum(high, (c + 1) * window)).astype(jnp.int32)
        first_own = jnp.minimum(begin + shared_low, end)
        last_own = jnp.maximum(end - shared_high, first_own)
        first_started = jnp.where(c + 1 < windows, first_own, end)

        def sums_of(*, all_mine: bool, start: bool) -> Any:
            def group(number: Any, carry: Any) -> Any:
                if start:
                    start_rows(c + 1, number * UNROLL, UNROLL)
                return sum_rows(c, number * UNROLL, carry, all_mine=all_mine)

            return group

        segment = place(c, begin * UNROLL)
        carry = (segment, [sums[half, segment] for half in range(sizes.halves)])
        carry = jax.lax.fori_loop(begin, first_own, sums_of(all_mine=False, start=False), carry)
        quiet_end = jnp.minimum(first_started, last_own)
        carry = jax.lax.fori_loop(first_own, quiet_end, sums_of(all_mine=True, start=False), carry)
        carry = jax.lax.fori_loop(quiet_end, last_own, sums_of(all_mine=True, start=True), carry)

        @pl.when((last_own < end) & (c + 1 < windows))
        def _() -> None:
            start_rows(c + 1, last_own * UNROLL, UNROLL)

        jax.lax.fori_loop(last_own, end, sums_of(all_mine=False, start=False), carry)

    @pl.when(block == 0)
    def _() -> None:
        start_meta(0)
        start_meta(1)
        wait_meta(0)

        @pl.when(windows > 0)
        def _() -> None:
            pl.loop(0, window, step=UNROLL)(lambda first: start_rows(0, first, UNROLL))

    sums[...] = jnp.zeros(sums.shape, jnp.float32)

    @pl.loop(low // window, jnp.where(high > low, (high + window - 1) // window, low // window))
    def _(c: Any) -> None:
        @pl.when(c * window >= low)
        def _() -> None:
            wait_rows(c)
            wait_meta(c + 1)
            start_meta(c + 2)

        sum_window(c)

    return sums


def _halves(sizes: Sizes, words: jax.Array) -> Sequence[jax.Array]:
    if not sizes.packed:
        return (words,)
    low = jax.lax.bitcast_convert_type(words << 16, jnp.float32)
    return low, jax.lax.bitcast_convert_type(words & jnp.int32(-65536), jnp.float32)
