"""All-to-all over two mesh axes in two phases: every chunk takes one hop along each axis.

Half of every chunk travels along the first axis and then the second, the other half the other way round,
so the links of both axes work in both phases.  A chip forwards what arrived in phase one as soon as it is
there.  Compared with direct writes the number of peers is ``X + Y - 2`` instead of ``X * Y - 1`` (semaphores,
barrier signals), at the price of a staging buffer and of writing the payload to HBM twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from recsys_tpu.kernels.all_to_all.lines import LANES, Pieces
from recsys_tpu.kernels.all_to_all.parts import (
    Descriptor,
    Index,
    Interpret,
    Lines,
    Ref,
    Ring,
    enter_barrier,
    remote_copy,
)


@dataclass(frozen=True)
class HalfSemaphores:
    """Of one half: sends and arrivals of both phases, by slot of the ring that the phase runs on."""

    sent_first: Ref
    received_first: Ref
    sent_second: Ref
    received_second: Ref


@dataclass(frozen=True)
class Half:
    """One half of the lines on its way along `first`, then `second`.

    A chunk is named by two chips' coordinates, ``chunk(first, second)``.  In `x` they are those of the
    receiver, in `out` of the sender, and in `stage` of the sender (first) and the receiver (second).
    """

    first: Ring
    second: Ring
    second_is_minor: bool
    lines: Lines
    x: Ref
    out: Ref
    stage: Ref
    semaphores: HalfSemaphores

    def chunk(self, first: Index, second: Index) -> Index:
        if self.second_is_minor:
            return first * self.second.size + second
        return second * self.first.size + first

    def view(self, ref: Ref, first: Index, second: Index) -> Ref:
        return ref.at[self.chunk(first, second), self.lines]

    def hop_first(self, slot: Index, second: Index, target: Ref) -> Descriptor:
        """To the peer of `slot`: what is for the chip beside it with coordinate `second`."""
        peer = self.first.send_peer(slot)
        return remote_copy(
            self.first,
            peer,
            source=self.view(self.x, peer, second),
            target=self.view(target, self.first.me, second),
            send=self.semaphores.sent_first.at[slot],
            receive=self.semaphores.received_first.at[slot],
        )

    def hop_second(self, slot: Index, sender: Index, source: Ref) -> Descriptor:
        """To the peer of `slot`: what the chip beside this one with coordinate `sender` has for it."""
        peer = self.second.send_peer(slot)
        return remote_copy(
            self.second,
            peer,
            source=self.view(source, sender, peer),
            target=self.view(self.out, sender, self.second.me),
            send=self.semaphores.sent_second.at[slot],
            receive=self.semaphores.received_second.at[slot],
        )

    def start_first(self) -> None:
        me = self.second.me

        @pl.loop(0, self.first.peers)
        def _(slot: jax.Array) -> None:
            @pl.loop(0, self.second.size)
            def _(second: jax.Array) -> None:
                pl.when(second == me)(lambda: self.hop_first(slot, second, self.out).start())
                pl.when(second != me)(lambda: self.hop_first(slot, second, self.stage).start())

    def forward_own(self) -> None:
        """Phase two for this chip's own chunks, which wait for nothing."""
        me = self.first.me
        pl.loop(0, self.second.peers)(lambda slot: self.hop_second(slot, me, self.x).start())

    def forward(self, slot: Index) -> None:
        """Phase two for what arrives in `slot`."""
        sender = self.first.receive_peer(slot)
        # An arrival has the size of any chunk's half; only size and semaphore matter to a wait.
        pl.loop(0, self.second.size)(lambda second: self.hop_first(slot, second, self.stage).wait_recv())
        pl.loop(0, self.second.peers)(lambda to: self.hop_second(to, sender, self.stage).start())

    def finish(self) -> None:
        me = self.first.me

        @pl.loop(0, self.second.peers)
        def _(slot: jax.Array) -> None:
            @pl.loop(0, self.first.size)
            def _(_: jax.Array) -> None:
                self.hop_second(slot, me, self.x).wait_recv()
                self.hop_second(slot, me, self.x).wait_send()

        @pl.loop(0, self.first.peers)
        def _(slot: jax.Array) -> None:
            pl.loop(0, self.second.size)(lambda second: self.hop_first(slot, second, self.stage).wait_send())


def torus_all_to_all(
    x: jax.Array,
    *,
    rings: tuple[Ring, Ring],
    pieces: Pieces,
    collective_id: int,
    interpret: Interpret = False,
) -> jax.Array:
    """Equal-split exchange of ``[X * Y, lines, 128]``, chip ``(i, j)`` of the mesh being chunk ``i * Y + j``.

    Runs inside `jax.shard_map` over both axes; equals ``lax.all_to_all(x, (x_axis, y_axis), 0, 0)`` bit
    for bit.  Needs two pieces, both rings longer than one, and an HBM buffer of the payload's size.
    """
    rows, columns = rings
    assert x.shape == (rows.size * columns.size, pieces.lines, LANES), (x.shape, rings, pieces)
    assert pieces.count == 2 and rows.peers and columns.peers, (pieces, rings)

    def kernel(x: Ref, out: Ref, stage: Ref, own: Ref, *semaphores: Ref) -> None:
        lines = [pl.ds(half * pieces.lines_each, pieces.lines_each) for half in range(2)]
        halves = (
            Half(rows, columns, True, lines[0], x, out, stage, HalfSemaphores(*semaphores[:4])),
            Half(columns, rows, False, lines[1], x, out, stage, HalfSemaphores(*semaphores[4:])),
        )
        me = halves[0].chunk(rows.me, columns.me)
        enter_barrier(rows, columns)
        for half in halves:
            half.start_first()
        kept = pltpu.make_async_copy(x.at[me], out.at[me], own)
        kept.start()
        for half in halves:
            half.forward_own()
        for slot in range(max(rows.peers, columns.peers)):
            for half in halves:
                if slot < half.first.peers:
                    half.forward(slot)
        for half in halves:
            half.finish()
        kept.wait()

    def of_half(first: Ring, second: Ring) -> list[pltpu.SemaphoreType]:
        return [pltpu.SemaphoreType.DMA((ring.peers,)) for ring in (first, first, second, second)]

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    out, _ = pl.pallas_call(
        kernel,
        out_shape=[shape, shape],
        in_specs=[hbm],
        out_specs=[hbm, hbm],
        scratch_shapes=[pltpu.SemaphoreType.DMA(()), *of_half(rows, columns), *of_half(columns, rows)],
        compiler_params=pltpu.CompilerParams(collective_id=collective_id, has_side_effects=True),
        interpret=interpret,
        name="all_to_all_torus",
    )(x)
    return out
