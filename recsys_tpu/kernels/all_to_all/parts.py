"""The parts that every exchange kernel is built from: peers, entry barrier, one piece's remote copy.

Peers are numbered by *slot*: slot 0 is the neighbour one step up the axis, slot 1 the one a step down,
slot 2 two steps up, and so on.  Issuing sends in slot order puts both directions of a ring to work from the
first DMA on.  A slot is also the index of the semaphores that the pair uses: what a chip sends in slot ``s``
arrives in slot ``s`` of the peer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# Pallas publishes no type for a Ref (or a view of one), for the handle of a DMA, for a `pl.ds`.
Ref = Any
Descriptor = Any
Lines = Any
Index = int | jax.Array
# False on a chip; interpreter settings in tests.
Interpret = pltpu.InterpretParams | bool


@dataclass(frozen=True)
class Ring:
    """One mesh axis of `size` chips, as seen from the chip that runs the kernel."""

    axis: str
    size: int

    @property
    def peers(self) -> int:
        return self.size - 1

    @property
    def me(self) -> jax.Array:
        return lax.axis_index(self.axis)

    def send_peer(self, slot: Index) -> jax.Array:
        """The chip that this one sends to in `slot`."""
        return lax.rem(self.me + self._steps_up(slot), self.size)

    def receive_peer(self, slot: Index) -> jax.Array:
        """The chip whose data arrives here in `slot`."""
        return lax.rem(self.me + self.size - self._steps_up(slot), self.size)

    def device_id(self, peer: jax.Array) -> dict[str | tuple[str, ...], Index]:
        return {self.axis: peer}

    def _steps_up(self, slot: Index) -> jax.Array:
        slot = jnp.int32(slot)
        distance = lax.div(slot, 2) + 1
        return lax.select(lax.rem(slot, 2) == 0, distance, self.size - distance)


def enter_barrier(*rings: Ring) -> None:
    """Wait until every peer of every ring runs this kernel, hence until its output buffer is live.

    Without it a fast chip would write into memory that a slow peer still uses for something else.
    """
    barrier = pltpu.get_barrier_semaphore()
    for ring in rings:

        @pl.loop(0, ring.peers)
        def _(slot: jax.Array, ring: Ring = ring) -> None:
            pl.semaphore_signal(
                barrier,
                1,
                device_id=ring.device_id(ring.send_peer(slot)),
                device_id_type=pl.DeviceIdType.MESH,
            )

    pl.semaphore_wait(barrier, sum(ring.peers for ring in rings))


def remote_copy(
    ring: Ring, peer: jax.Array, *, source: Ref, target: Ref, send: Ref, receive: Ref
) -> Descriptor:
    """A DMA from `source` here to `target` on `peer`; `send` counts here, `receive` counts there."""
    return pltpu.make_async_remote_copy(
        src_ref=source,
        dst_ref=target,
        send_sem=send,
        recv_sem=receive,
        device_id=ring.device_id(peer),
        device_id_type=pl.DeviceIdType.MESH,
    )
