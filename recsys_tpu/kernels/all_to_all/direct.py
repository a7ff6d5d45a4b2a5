"""All-to-all along one mesh axis: every chip writes each chunk straight into its place on the peer.

No staging buffer: a DMA reads the chunk from HBM here and writes it into the output over there, and the
chips in between only route.
"""

from __future__ import annotations

from collections.abc import Callable

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

# Peers whose sends are in flight together: enough to fill the up to six links of a chip.
PEERS_IN_FLIGHT = 6


class DirectCopies:
    """The copies of one exchange: which piece goes where, and on which semaphores."""

    def __init__(
        self, ring: Ring, pieces: Pieces, x: Ref, out: Ref, own: Ref, sent: Ref, received: Ref
    ) -> None:
        self.ring, self.pieces = ring, pieces
        self.x, self.out = x, out
        self._own, self._sent, self._received = own, sent, received

    def lines(self, piece: Index) -> Lines:
        each = self.pieces.lines_each
        return pl.ds(piece * each, each)

    def source(self, chunk: Index, piece: Index) -> Ref:
        return self.x.at[chunk, self.lines(piece)]

    def own(self, piece: Index) -> Descriptor:
        me, lines = self.ring.me, self.lines(piece)
        return pltpu.make_async_copy(self.source(me, piece), self.out.at[me, lines], self._own)

    def send(self, slot: Index, piece: Index) -> Descriptor:
        return self._remote(slot, piece, peer=self.ring.send_peer(slot), target_chunk=self.ring.me)

    def arrival(self, slot: Index, piece: Index) -> Descriptor:
        """The peer's copy to this chip as seen from here: only good for `wait_recv`."""
        peer = self.ring.receive_peer(slot)
        return self._remote(slot, piece, peer=peer, target_chunk=peer)

    def _remote(self, slot: Index, piece: Index, *, peer: jax.Array, target_chunk: jax.Array) -> Descriptor:
        lines = self.lines(piece)
        return remote_copy(
            self.ring,
            peer,
            source=self.source(peer, piece),
            target=self.out.at[target_chunk, lines],
            send=self._sent.at[jax.lax.rem(slot, PEERS_IN_FLIGHT)],
            receive=self._received.at[slot],
        )


def exchange(
    copies: DirectCopies, send_count: Callable[[Index], Index], receive_count: Callable[[Index], Index]
) -> None:
    """Run one exchange: `send_count(peer)` pieces go to a peer, `receive_count(peer)` come from it."""
    ring = copies.ring
    enter_barrier(ring)
    pl.loop(0, send_count(ring.me))(lambda piece: copies.own(piece).start())

    def await_sent(slot: Index) -> None:
        pl.loop(0, send_count(ring.send_peer(slot)))(lambda piece: copies.send(slot, piece).wait_send())

    @pl.loop(0, ring.peers)
    def _(slot: jax.Array) -> None:
        pl.when(slot >= PEERS_IN_FLIGHT)(lambda: await_sent(slot - PEERS_IN_FLIGHT))
        pl.loop(0, send_count(ring.send_peer(slot)))(lambda piece: copies.send(slot, piece).start())

    pl.loop(0, send_count(ring.me))(lambda piece: copies.own(piece).wait())

    @pl.loop(0, ring.peers)
    def _(slot: jax.Array) -> None:
        pl.loop(0, receive_count(ring.receive_peer(slot)))(
            lambda piece: copies.arrival(slot, piece).wait_recv()
        )

    pl.loop(max(0, ring.peers - PEERS_IN_FLIGHT), ring.peers)(await_sent)


def semaphores(ring: Ring) -> list[pltpu.SemaphoreType]:
    """One for the chunk that stays; one for each peer in flight; one for each peer's arrival."""
    return [
        pltpu.SemaphoreType.DMA(()),
        pltpu.SemaphoreType.DMA((min(ring.peers, PEERS_IN_FLIGHT),)),
        pltpu.SemaphoreType.DMA((ring.peers,)),
    ]


def direct_all_to_all(
    x: jax.Array, *, ring: Ring, pieces: Pieces, collective_id: int, interpret: Interpret = False
) -> jax.Array:
    """Equal-split exchange of ``[chips, lines, 128]``: chunk ``i`` of the result came from chip ``i``.

    Runs inside `jax.shard_map`; equals ``lax.all_to_all(x, axis, 0, 0)`` bit for bit, for any 2- or 4-byte
    dtype.
    """

    def kernel(x: Ref, out: Ref, *semaphores: Ref) -> None:
        def every_piece(peer: Index) -> Index:
            return pieces.count

        exchange(DirectCopies(ring, pieces, x, out, *semaphores), every_piece, every_piece)

    return _call(kernel, "all_to_all", x, ring, pieces, collective_id, interpret)


def direct_ragged_all_to_all(
    x: jax.Array,
    send_pieces: jax.Array,
    receive_pieces: jax.Array,
    *,
    ring: Ring,
    pieces: Pieces,
    collective_id: int,
    interpret: Interpret = False,
) -> jax.Array:
    """Exchange the first ``send_pieces[i]`` pieces of every chunk ``i``; the rest of the result is unset.

    ``send_pieces`` and ``receive_pieces`` are int32 ``[chips]`` and must agree between the chips:
    ``receive_pieces[i]`` here is what chip ``i`` sends to this chip.  A disagreement hangs.
    """

    def kernel(send: Ref, receive: Ref, x: Ref, out: Ref, *semaphores: Ref) -> None:
        copies = DirectCopies(ring, pieces, x, out, *semaphores)
        exchange(copies, lambda peer: send[peer], lambda peer: receive[peer])

    scalars = (send_pieces, receive_pieces)
    return _call(kernel, "ragged_all_to_all", x, ring, pieces, collective_id, interpret, scalars)


def direct_planned_all_to_all(
    x: jax.Array,
    plan: jax.Array,
    *,
    ring: Ring,
    pieces: Pieces,
    collective_id: int,
    interpret: Interpret = False,
) -> jax.Array:
    """A ragged exchange whose sizes every chip knows: ``plan[i * chips + j]`` pieces go from ``i`` to ``j``.

    `plan` is int32 ``[chips * chips]``, the same everywhere, so every chip runs the same program.
    """

    def kernel(plan: Ref, x: Ref, out: Ref, *semaphores: Ref) -> None:
        me = ring.me
        copies = DirectCopies(ring, pieces, x, out, *semaphores)
        exchange(
            copies,
            lambda peer: plan[me * ring.size + peer],
            lambda peer: plan[peer * ring.size + me],
        )

    return _call(kernel, "planned_all_to_all", x, ring, pieces, collective_id, interpret, (plan,))


def _call(
    kernel: Callable[..., None],
    name: str,
    x: jax.Array,
    ring: Ring,
    pieces: Pieces,
    collective_id: int,
    interpret: Interpret,
    scalars: tuple[jax.Array, ...] = (),
) -> jax.Array:
    assert x.shape == (ring.size, pieces.lines, LANES), (x.shape, ring, pieces)
    smem, hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[*[smem] * len(scalars), hbm],
        out_specs=hbm,
        scratch_shapes=semaphores(ring),
        compiler_params=pltpu.CompilerParams(collective_id=collective_id, has_side_effects=True),
        interpret=interpret,
        name=name,
    )(*scalars, x)
