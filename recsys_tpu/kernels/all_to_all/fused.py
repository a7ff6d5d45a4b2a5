"""Lookup and exchange in one TensorCore kernel: pooled rows leave for their owner as they get ready.

The pooled rows of this chip's tables are never written to its own HBM: a block of bags is summed in VMEM
and written from there into the output of the chip that owns the samples, while the next is looked up.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from recsys_tpu.kernels.all_to_all.lines import LANES
from recsys_tpu.kernels.all_to_all.parts import (
    Descriptor,
    Index,
    Interpret,
    Ref,
    Ring,
    enter_barrier,
    remote_copy,
)

# Bags summed and sent together: one tile of float32.
BLOCK = 8
# Blocks under way to other chips, and table rows under way from HBM.
BLOCKS_IN_FLIGHT = 4
ROWS_IN_FLIGHT = 16
# Ids and offsets lie in scalar memory, 1 MiB of it.
MAX_SCALARS = 200_000


class Lookup:
    """The sums of this chip's bags, block by block."""

    def __init__(self, rows: Ref, offsets: Ref, table: Ref, fetched: Ref, fetch_done: Ref) -> None:
        self._rows, self._offsets = rows, offsets
        self._table, self._fetched, self._done = table, fetched, fetch_done

    def _fetch(self, position: Index) -> Descriptor:
        """Of the id at `position`."""
        slot = jax.lax.rem(position, ROWS_IN_FLIGHT)
        row = self._table.at[pl.ds(self._rows[position], 1)]
        return pltpu.make_async_copy(row, self._fetched.at[slot], self._done.at[slot])

    def begin(self, first_bag: Index, end_bag: Index) -> None:
        """Start the first fetches of a run of bags."""
        low, high = self._offsets[first_bag], self._offsets[end_bag]
        pl.loop(low, jnp.minimum(low + ROWS_IN_FLIGHT, high))(lambda position: self._fetch(position).start())

    def sum_block(self, first_bag: Index, end_of_run: Index, sums: Ref) -> None:
        """`BLOCK` bags into `sums` ``[BLOCK, dim]``, fetching ahead to the end of the run."""
        high = self._offsets[end_of_run]
        for bag in range(BLOCK):
            sums[bag, :] = jnp.zeros(sums.shape[1:], sums.dtype)

            @pl.loop(self._offsets[first_bag + bag], self._offsets[first_bag + bag + 1])
            def _(position: jax.Array, bag: int = bag) -> None:
                self._fetch(position).wait()
                sums[bag, :] += self._fetched[jax.lax.rem(position, ROWS_IN_FLIGHT), 0, :]
                ahead = position + ROWS_IN_FLIGHT
                pl.when(ahead < high)(lambda: self._fetch(ahead).start())


def fused_lookup_all_to_all(
    table: jax.Array,
    rows: jax.Array,
    offsets: jax.Array,
    *,
    axis: str,
    collective_id: int = 0,
    interpret: Interpret = False,
) -> jax.Array:
    """Sum-pool this chip's tables for everyone's bags and deliver the sums: ``[chips, bags, dim]``.

    table: float32 ``[rows, dim]``, dim a multiple of 128.  rows: int32 ``[ids]``, each in range (not
    checked here).  offsets: int32 ``[chips * bags + 1]``; ids of bag ``b`` are
    ``rows[offsets[b] : offsets[b + 1]]``, bags of chip 0 first, `bags` a multiple of 8.
    Result ``[i, b]`` is bag ``b`` of this chip in the tables of chip ``i``.

    Runs inside `jax.shard_map`; not differentiable, as the update of a table is a kernel of its own.
    Raises ValueError for shapes that it does not take.
    """
    chips = jax.lax.axis_size(axis)
    dim, bags = table.shape[1], (offsets.shape[0] - 1) // chips
    if table.dtype != jnp.float32 or dim % LANES:
        raise ValueError(
            "fused_lookup_all_to_all(): expected a float32 table whose dim is a multiple of 128, got "
            f"{table.dtype.name} {list(table.shape)}"
        )
    if bags * chips + 1 != offsets.shape[0] or bags % BLOCK or not bags:
        raise ValueError(
            f"fused_lookup_all_to_all(): expected {chips} * bags + 1 offsets, bags a multiple of {BLOCK}, "
            f"got {offsets.shape[0]}"
        )
    if rows.shape[0] + offsets.shape[0] > MAX_SCALARS:
        raise ValueError(
            f"fused_lookup_all_to_all(): {rows.shape[0]} ids and {offsets.shape[0]} offsets exceed the "
            f"{MAX_SCALARS} that scalar memory holds; look up and exchange separately"
        )
    ring = Ring(axis, chips)

    def kernel(
        rows: Ref,
        offsets: Ref,
        table: Ref,
        out: Ref,
        fetched: Ref,
        sums: Ref,
        fetch_done: Ref,
        sent: Ref,
        received: Ref,
    ) -> None:
        lookup = Lookup(rows, offsets, table, fetched, fetch_done)
        blocks = bags // BLOCK

        def keep(block: Index, buffer: Index) -> Descriptor:
            target = out.at[ring.me, pl.ds(block * BLOCK, BLOCK)]
            return pltpu.make_async_copy(sums.at[buffer], target, sent.at[buffer])

        def send(slot: Index, block: Index, buffer: Index) -> Descriptor:
            return remote_copy(
                ring,
                ring.send_peer(slot),
                source=sums.at[buffer],
                target=out.at[ring.me, pl.ds(block * BLOCK, BLOCK)],
                send=sent.at[buffer],
                receive=received.at[slot],
            )

        def run(slot: Index) -> None:
            """Everything for the peer of `slot`; the slot after the last is this chip itself."""
            own = slot == ring.peers
            owner = jnp.where(own, ring.me, ring.send_peer(jnp.minimum(slot, ring.peers - 1)))
            end = (owner + 1) * bags
            lookup.begin(owner * bags, end)

            @pl.loop(0, blocks)
            def _(block: jax.Array) -> None:
                nth = slot * blocks + block
                buffer = jax.lax.rem(nth, BLOCKS_IN_FLIGHT)
                # A kept block counts the same bytes as a sent one.
                pl.when(nth >= BLOCKS_IN_FLIGHT)(lambda: keep(block, buffer).wait())
                lookup.sum_block(owner * bags + block * BLOCK, end, sums.at[buffer])
                pl.when(own)(lambda: keep(block, buffer).start())
                pl.when(jnp.logical_not(own))(lambda: send(slot, block, buffer).start())

        enter_barrier(ring)
        pl.loop(0, ring.size)(run)
        total = ring.size * blocks

        @pl.loop(max(0, total - BLOCKS_IN_FLIGHT), total)
        def _(nth: jax.Array) -> None:
            keep(0, jax.lax.rem(nth, BLOCKS_IN_FLIGHT)).wait()

        @pl.loop(0, ring.peers)
        def _(slot: jax.Array) -> None:
            pl.loop(0, blocks)(lambda block: send(slot, block, 0).wait_recv())

    dma = pltpu.SemaphoreType.DMA
    smem, hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((chips, bags, dim), table.dtype),
        in_specs=[smem, smem, hbm],
        out_specs=hbm,
        scratch_shapes=[
            pltpu.VMEM((ROWS_IN_FLIGHT, 1, dim), table.dtype),
            pltpu.VMEM((BLOCKS_IN_FLIGHT, BLOCK, dim), table.dtype),
            dma((ROWS_IN_FLIGHT,)),
            dma((BLOCKS_IN_FLIGHT,)),
            dma((max(1, ring.peers),)),
        ],
        compiler_params=pltpu.CompilerParams(collective_id=collective_id, has_side_effects=True),
        interpret=interpret,
        name="lookup_all_to_all",
    )(rows, offsets, table)
