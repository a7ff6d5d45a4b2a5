"""Sums of segments on a TensorCore: the loop that lookup and update share.

As on SparseCore, ids are walked in windows and segments in blocks, independently of one another; here
the grid steps are the blocks, and the windows in flight persist from one step to the next.  A TensorCore
has no indirect stream: the scalar unit starts one copy a row, and a whole window is waited for at once.

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
        pltpu.VMEM((2 * sizes.window, sizes.lines, LINE), source),
        # a spare segment, in a tile of its own, takes what is not the block's
        pltpu.VMEM((sizes.halves, sizes.places * (sizes.block + 8), sizes.lines, LINE), jnp.float32),
        pltpu.SemaphoreType.DMA((META_SLOTS,)),
        pltpu.SemaphoreType.DMA((2,)),
    ]


def in_windows(array: jax.Array, sizes: Sizes, padding: int | float) -> jax.Array:
    """`[N]` -> `[windows, 1, window]`."""
    missing = -array.shape[0] % sizes.window
    return jnp.pad(array, (0, missing), constant_values=padding).reshape(-1, 1, sizes.window)


def block_bounds(offsets: jax.Array, sizes: Sizes) -> jax.Array:
    """First id of every block and, last, the number of ids: `[blocks + 1]`."""
    return jnp.append(offsets[:-1][:: sizes.block], offsets[-1])


def sum_segments(
    sizes: Sizes,
    bounds: Ref,
    source: Ref,
    ids: Ref,
    segments: Ref,
    weights: Ref | None,
    buffers: Sequence[Ref],
) -> Ref:
    """Sums block `pl.program_id(0)`; source is `[lines of the table, 128]`.

    Returns the accumulator `[halves, places * (block + 8), lines, 128]`: the segment `s` of place `p` at
    `p * (block + 8) + s`.
    """
    ids_s, segments_s, weights_s, rows_v, sums, meta_semaphore, row_semaphore = buffers
    block, window = pl.program_id(0), sizes.window
    low, high = bounds[block], bounds[block + 1]
    windows = (bounds[sizes.blocks] + window - 1) // window

    def meta_copies(c: Any) -> list[Any]:
        slot = c % META_SLOTS
        pairs = [(ids, ids_s), (segments, segments_s)] + ([(weights, weights_s)] if sizes.weighted else [])
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
        at, into = (c % META_SLOTS) * window + first, (c % 2) * window + first
        semaphore = row_semaphore.at[c % 2]
        for j in range(count):
            lines = source.at[pl.ds(_first_line(sizes, ids_s[at + j]), sizes.lines)]
            pltpu.make_async_copy(lines, rows_v.at[into + j], semaphore).start()

    def wait_rows(c: Any) -> None:
        whole = rows_v.at[pl.ds((c % 2) * window, window)]  # one wait for the bytes of all its rows
        pltpu.make_async_copy(whole, whole, row_semaphore.at[c % 2]).wait()

    def wait_meta(c: Any) -> None:
        @pl.when(c < windows)
        def _() -> None:
            for copy in meta_copies(c):
                copy.wait()

    def place(at: Any) -> Any:
        """Where in the accumulator the id at `at` of the scalar buffers is added."""
        # Unsigned: what lies before the block is large as well, and goes to the spare segment.
        local = (segments_s[at] - block * sizes.block).astype(jnp.uint32)
        segment = jnp.minimum(local, jnp.uint32(sizes.block)).astype(jnp.int32)
        if sizes.places == 1:
            return segment
        return segment + (ids_s[at] & (sizes.places - 1)) * (sizes.block + 8)

    def sum_rows(c: Any, first: Any, carry: Any) -> Any:
        """Adds UNROLL rows of window c; `carry`: the last place and the sum there so far."""
        before, totals = carry
        at, row = (c % META_SLOTS) * window + first, (c % 2) * window + first
        for j in range(UNROLL):
            segment = place(at + j)
            parts = _halves(sizes, rows_v[row + j])
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
        """Sums the block's rows of window c; on the way starts as many rows of the next window."""
        begin = jnp.maximum(low - c * window, 0) // UNROLL
        end = (jnp.minimum(high - c * window, window) + UNROLL - 1) // UNROLL

        def only_sum(group: Any, carry: Any) -> Any:
            return sum_rows(c, group * UNROLL, carry)

        def start_and_sum(group: Any, carry: Any) -> Any:
            start_rows(c + 1, group * UNROLL, UNROLL)
            return sum_rows(c, group * UNROLL, carry)

        # The block before has started the copies of a group that it shares with this one.
        shared = jnp.where(c * window + begin * UNROLL < low, begin + 1, begin)
        no_next = jnp.where(c + 1 < windows, jnp.minimum(shared, end), end)
        segment = place((c % META_SLOTS) * window + begin * UNROLL)
        carry = (segment, [sums[half, segment] for half in range(sizes.halves)])
        carry = jax.lax.fori_loop(begin, no_next, only_sum, carry)
        jax.lax.fori_loop(no_next, end, start_and_sum, carry)

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


def _first_line(sizes: Sizes, row: Any) -> Any:
    return row // sizes.places if sizes.places > 1 else row * sizes.lines


def _halves(sizes: Sizes, words: jax.Array) -> Sequence[jax.Array]:
    if not sizes.packed:
        return (words,)
    low = jax.lax.bitcast_convert_type(words << 16, jnp.float32)
    return low, jax.lax.bitcast_convert_type(words & jnp.int32(-65536), jnp.float32)
