"""Sums of segments: the loop that lookup and update share.

A worker has a range of ids, sorted by segment (a bag in a lookup, a touched row in an update).  It
walks through them in *windows* of ids, each one an indirect stream of source rows into its own memory,
and through its segments in *blocks*, summed in an accumulator that is handed on when the block is full:

    ids       |--- window c ---|-- window c+1 --|-- window c+2 --|
              summed into acc    rows streaming   ids, segments, weights streaming
    segments  |-- block 7 --|-- block 8 --|------ block 9 ------|

Windows and blocks advance independently, so every source row is fetched once.  A window belongs to the
block of its first id, which waits for it and starts the next; later blocks find it there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from recsys_tpu.kernels.sparsecore.streams import IGNORED, Ref, Target, unpack_pair

PAGE = 1024  # blocks whose bounds are on chip at once, so that a launch takes any number of segments
META_SLOTS = 4  # windows whose ids are on chip: summed, streaming, next (4: a power of two)
WIDEST = 16  # lanes of the widest register: windows, blocks and capacities are multiples of it
LIMITS = 8  # int32 of `limits` a worker
BLOCK_LOW, BLOCK_HIGH, ID_LOW, ID_HIGH, OWN_LOW, OWN_HIGH, FIRST, LAST = range(LIMITS)


@dataclass(frozen=True)
class Sizes:
    """Static sizes: dim [elements], window [ids], block [segments], ids (capacity), blocks in all."""

    dim: int
    window: int
    block: int
    ids: int
    blocks: int
    packed: bool  # source rows are bfloat16 pairs in int32 words
    weighted: bool

    @property
    def words(self) -> int:
        return self.dim // 2 if self.packed else self.dim


def window_and_block(dim: int, ids: int, segments: int, element_buffers: int) -> tuple[int, int]:
    """(window, block) that fit in 192 KiB of a subcore's memory: half for rows, half for blocks.

    Any number of segments fits: only a page of their bounds is on chip at once.
    element_buffers: float32 buffers of `[block, dim]`.
    """
    window = max(WIDEST, min(128, 12288 // dim // WIDEST * WIDEST))
    block = max(WIDEST, min(64, 24576 // (dim * element_buffers) // WIDEST * WIDEST))
    return min(window, ids), min(block, -(-segments // WIDEST) * WIDEST)


def scratch(sizes: Sizes, target: Target) -> dict[str, Any]:
    """Buffers of `sum_segments`; the accumulator's last row takes what belongs to no segment."""
    source_type = jnp.int32 if sizes.packed else jnp.float32
    meta = (META_SLOTS, sizes.window)
    return {
        "limits_v": pltpu.VMEM((16,), jnp.int32),
        "bounds_v": pltpu.VMEM((page_of(sizes) + WIDEST,), jnp.int32),
        "ids_v": pltpu.VMEM(meta, jnp.int32),
        "segments_v": pltpu.VMEM(meta, jnp.int32),
        "weights_v": pltpu.VMEM(meta if sizes.weighted else (1, 16), jnp.float32),
        "rows_v": pltpu.VMEM((2, sizes.window, sizes.words), source_type),
        "sums": pltpu.VMEM((2, sizes.block + 1, sizes.dim), jnp.float32),
        "meta_semaphore": pltpu.SemaphoreType.DMA((META_SLOTS,)),
        "rows_semaphore": pltpu.SemaphoreType.DMA((2,)),
    }


def page_of(sizes: Sizes) -> int:
    """Blocks whose bounds are on chip at once."""
    return min(PAGE, -(-sizes.blocks // 8) * 8)


def bounds_size(sizes: Sizes) -> int:
    """Bounds in HBM: whole pages, and a register that can be loaded at the last block of each."""
    page = page_of(sizes)
    return -(-sizes.blocks // page) * page + WIDEST


def load_limits(limits: Ref, limits_v: Ref, worker: Any, target: Target) -> list[Any]:
    """The scalars of a worker, by the names above."""
    pltpu.sync_copy(limits.at[pl.ds(pl.multiple_of(worker * 16, 8), 16)], limits_v)
    values = limits_v[pl.ds(0, target.lanes)]
    return [values[i] for i in range(LIMITS)]


def sum_segments(
    target: Target,
    sizes: Sizes,
    source: Ref,
    ids: Ref,
    segments: Ref,
    weights: Ref | None,
    bounds: Ref,
    limits: list[Any],
    buffers: dict[str, Ref],
    begin_block: Callable[[Any], None],
    finish_block: Callable[[Any], None],
) -> None:
    """For each block of a worker: `begin_block(block)`, sums into `buffers["sums"][block % 2]`,
    `finish_block(block)`.  `begin_block` must leave that accumulator free.

    bounds: `partition.block_bounds`, in HBM; a worker has the page of its block on chip.
    """
    lanes, window, size = target.lanes, sizes.window, sizes.block
    ids_v, segments_v, weights_v = buffers["ids_v"], buffers["segments_v"], buffers["weights_v"]
    rows_v, sums, bounds_v = buffers["rows_v"], buffers["sums"], buffers["bounds_v"]
    page = page_of(sizes)
    id_low, id_high = limits[ID_LOW], limits[ID_HIGH]
    base = pl.multiple_of((id_low // 8) * 8, 8)
    windows = jnp.where(id_high > id_low, (id_high - base + window - 1) // window, 0)

    def fetched_from(c: Any) -> Any:
        """First id that window c holds; the last window of all is moved back inside the buffers."""
        return pl.multiple_of(jnp.minimum(base + c * window, sizes.ids - window), 8)

    def meta_copies(c: Any) -> list[Any]:
        slot, span = c % META_SLOTS, pl.ds(fetched_from(c), window)
        pairs = [(ids, ids_v), (segments, segments_v)] + ([(weights, weights_v)] if sizes.weighted else [])
        semaphore = buffers["meta_semaphore"].at[slot]
        return [pltpu.make_async_copy(hbm.at[span], vmem.at[slot], semaphore) for hbm, vmem in pairs]

    def start_meta(c: Any) -> None:
        @pl.when(c < windows)
        def _() -> None:
            for copy in meta_copies(c):
                copy.start()

    def rows_of(c: Any) -> tuple[Ref, Ref, Ref, Ref]:
        return source, ids_v.at[c % META_SLOTS], rows_v.at[c % 2], buffers["rows_semaphore"].at[c % 2]

    def ignore_others(c: Any) -> None:
        """Ids of window c that are padding, a neighbour's or already summed are not fetched."""
        begin, slot = base + c * window, c % META_SLOTS
        low, high = jnp.maximum(id_low, begin), jnp.minimum(id_high, begin + window)

        @pl.loop(0, window // lanes)
        def _(group: Any) -> None:
            span = pl.ds(group * lanes, lanes)
            position = fetched_from(c) + group * lanes + jax.lax.iota(jnp.int32, lanes)
            inside = (position >= low) & (position < high)
            ids_v[slot, span] = jnp.where(inside, ids_v[slot, span], IGNORED)

    def start_rows(c: Any) -> None:
        @pl.when(c < windows)
        def _() -> None:
            for copy in meta_copies(c):
                copy.wait()
            ignore_others(c)
            target.gather(*rows_of(c))

    def add_group(c: Any, group: Any, accumulator: Any, first_segment: Any, low: Any, high: Any) -> None:
        """Adds `lanes` rows of window c; ids outside [low, high) go to the spare row."""
        slot, span = c % META_SLOTS, pl.ds(group * lanes, lanes)
        position = fetched_from(c) + group * lanes + jax.lax.iota(jnp.int32, lanes)
        inside = (position >= low) & (position < high)
        local = jnp.where(inside, segments_v[slot, span] - first_segment, size)
        scale = weights_v[slot, span] if sizes.weighted else None
        for j in range(lanes):
            for column in range(0, sizes.words, lanes):
                row = rows_v[c % 2, group * lanes + j, pl.ds(column, lanes)]
                if sizes.packed:
                    even, odd = unpack_pair(row)
                    if scale is not None:
                        even, odd = scale[j] * even, scale[j] * odd
                    target.add_pair(sums.at[accumulator], local[j], 2 * column, even, odd)
                else:
                    row = row if scale is None else scale[j] * row
                    target.add(sums, (accumulator, local[j], pl.ds(column, lanes)), row)

    start_meta(0)
    start_meta(1)
    start_rows(0)

    @pl.loop(limits[BLOCK_LOW], limits[BLOCK_HIGH])
    def _(block: Any) -> None:
        @pl.when((block == limits[BLOCK_LOW]) | (block % page == 0))
        def _() -> None:
            at = pl.multiple_of(block // page * page, 8)
            pltpu.sync_copy(bounds.at[pl.ds(at, page + WIDEST)], bounds_v)

        ends = bounds_v[pl.ds(block % page, lanes)]
        low, high = jnp.maximum(ends[0], id_low), jnp.minimum(ends[1], id_high)
        accumulator = block % 2
        begin_block(block)

        @pl.loop(0, size)
        def _(segment: Any) -> None:
            for column in range(0, sizes.dim, lanes):
                sums[accumulator, segment, pl.ds(column, lanes)] = jnp.zeros((lanes,), jnp.float32)

        first = (low - base) // window
        last = jnp.where(high > low, (high - base + window - 1) // window, first)

        @pl.loop(first, last)
        def _(c: Any) -> None:
            begin = base + c * window

            @pl.when((begin >= low) | ((c == 0) & (low == id_low)))
            def _() -> None:
                target.gather_wait(*rows_of(c))
                start_rows(c + 1)
                start_meta(c + 2)

            inner_low, inner_high = jnp.maximum(low, begin), jnp.minimum(high, begin + window)
            fetched = fetched_from(c)

            @pl.loop((inner_low - fetched) // lanes, (inner_high - fetched + lanes - 1) // lanes)
            def _(group: Any) -> None:
                add_group(c, group, accumulator, block * size, inner_low, inner_high)

        finish_block(block)
