"""Reduce-scatter around one mesh axis, for partial sums of row-sharded tables.

Partial sums go round the ring neighbour by neighbour, and each chip adds its own share in VMEM.  Half of
every chunk's lines travels up the ring and half down, so both directions of every link work; a link
carries half a chunk for each of the ``chips - 1`` hops.

Sums are in ring order, so a run repeats bit for bit: the half that travels up sums chunk ``c`` from chip
``c + 1`` round to chip ``c``, the other half from chip ``c - 1`` down to ``c``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from recsys_tpu.kernels.all_to_all.lines import LANES
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

# Pieces of a band that follow each other round the ring: one is added to while others are on the links.
PIECES = 4
# At 256 lines the buffers of both directions take 3.5 MiB of VMEM.
MAX_PIECE_LINES = 256


@dataclass(frozen=True)
class Bands:
    """A chunk of `lines` lines as `count` bands, each of `PIECES` pieces up and `PIECES` down the ring.

    What one direction has under way of a band fits VMEM, whatever the size of the chunk.
    """

    count: int
    piece_lines: int

    @property
    def lines(self) -> int:
        return self.count * 2 * PIECES * self.piece_lines

    @staticmethod
    def of(elements: int, *, tile: int) -> Bands:
        largest = 2 * PIECES * MAX_PIECE_LINES * LANES
        count = -(-elements // largest)
        piece_elements = -(-elements // (count * 2 * PIECES))
        return Bands(count, -(-piece_elements // (LANES * tile)) * tile)


def vmem_bytes(bands: Bands) -> int:
    """Bytes of VMEM scratch: per direction two bands' arrivals, and two pieces to load, send and store."""
    return 2 * (2 * PIECES + 6) * bands.piece_lines * LANES * 4


@dataclass(frozen=True)
class Direction:
    """One half of the lines on its way round.  A step is (band, hop, piece), in this order.

    At hop ``h`` the chip adds its share of the chunk whose owner is ``h + 1`` chips behind, and passes it
    on; at the last, ``h = chips - 1``, that is the chip itself, which keeps the sum.
    """

    ring: Ring
    bands: Bands
    up: bool
    x: Ref
    out: Ref
    arrived: Ref
    loaded: Ref
    sending: Ref
    kept: Ref
    load_done: Ref
    sent: Ref
    received: Ref
    kept_done: Ref
    free: Ref

    @property
    def steps(self) -> int:
        return self.bands.count * self.ring.size * PIECES

    @property
    def hops(self) -> int:
        """Hops over links, of all bands."""
        return self.bands.count * self.ring.peers

    def chip(self, steps_ahead: Index) -> jax.Array:
        ahead = steps_ahead if self.up else -steps_ahead
        return lax.rem(self.ring.me + ahead + self.ring.size, self.ring.size)

    def load(self, step: Index) -> Descriptor:
        piece, hop, band = self.split(step)
        buffer = lax.rem(step, 2)
        return pltpu.make_async_copy(
            self.x.at[self.chip(-(hop + 1)), self.lines(band, piece)],
            self.loaded.at[buffer],
            self.load_done.at[buffer],
        )

    def split(self, step: Index) -> tuple[jax.Array, jax.Array, jax.Array]:
        hops = lax.div(jnp.int32(step), PIECES)
        return lax.rem(jnp.int32(step), PIECES), lax.rem(hops, self.ring.size), lax.div(hops, self.ring.size)

    def lines(self, band: Index, piece: Index) -> Lines:
        nth = (band * 2 + (0 if self.up else 1)) * PIECES + piece
        return pl.ds(nth * self.bands.piece_lines, self.bands.piece_lines)

    def pass_on(self, hop: Index, piece: Index) -> Descriptor:
        """To the next chip (`wait_recv`: from the previous one); `hop` counts the hops of all bands."""
        slot, buffer = lax.rem(hop, 2) * PIECES + piece, lax.rem(hop * PIECES + piece, 2)
        return remote_copy(
            self.ring,
            self.chip(1),
            source=self.sending.at[buffer],
            target=self.arrived.at[slot],
            send=self.sent.at[buffer],
            receive=self.received.at[slot],
        )

    def keep(self, band: Index, piece: Index) -> Descriptor:
        buffer = lax.rem(piece, 2)
        return pltpu.make_async_copy(
            self.kept.at[buffer], self.out.at[self.lines(band, piece)], self.kept_done.at[buffer]
        )

    def run(self, step: Index) -> None:
        piece, hop, band = self.split(step)
        buffer, crossing = lax.rem(step, 2), band * self.ring.peers + hop
        self.load(step).wait()
        pl.when(step + 1 < self.steps)(lambda: self.load(step + 1).start())

        @pl.when(hop > 0)
        def _() -> None:
            before = crossing - 1
            self.pass_on(before, piece).wait_recv()
            self.loaded[buffer] += self.arrived[lax.rem(before, 2) * PIECES + piece]
            pl.when(before + 2 < self.hops)(self.tell_free)

        @pl.when(hop < self.ring.peers)
        def _() -> None:
            nth = crossing * PIECES + piece
            pl.when(nth >= 2)(lambda: self.pass_on(crossing, piece).wait_send())
            self.sending[lax.rem(nth, 2)] = self.loaded[buffer]
            pl.when(crossing >= 2)(lambda: pl.semaphore_wait(self.free, 1))
            self.pass_on(crossing, piece).start()

        @pl.when(hop == self.ring.peers)
        def _() -> None:
            pl.when(band * PIECES + piece >= 2)(lambda: self.keep(band, piece).wait())
            self.kept[lax.rem(piece, 2)] = self.loaded[buffer]
            self.keep(band, piece).start()

    def tell_free(self) -> None:
        """The previous chip may write to the arrival buffer just read."""
        pl.semaphore_signal(
            self.free,
            1,
            device_id=self.ring.device_id(self.chip(-1)),
            device_id_type=pl.DeviceIdType.MESH,
        )

    def finish(self) -> None:
        for piece in (PIECES - 2, PIECES - 1):
            self.pass_on(self.hops - 1, piece).wait_send()
            self.keep(self.bands.count - 1, piece).wait()


def ring_reduce_scatter(
    x: jax.Array, *, ring: Ring, bands: Bands, collective_id: int, interpret: Interpret = False
) -> jax.Array:
    """float32 ``[chips, lines, 128]`` partial sums to ``[lines, 128]``: the sum of this chip's chunk."""
    assert x.shape == (ring.size, bands.lines, LANES) and x.dtype == jnp.float32, (x.shape, x.dtype)

    def kernel(x: Ref, out: Ref, *scratch: Ref) -> None:
        half = len(scratch) // 2
        directions = (
            Direction(ring, bands, True, x, out, *scratch[:half]),
            Direction(ring, bands, False, x, out, *scratch[half:]),
        )
        enter_barrier(ring)
        for direction in directions:
            direction.load(0).start()

        @pl.loop(0, directions[0].steps)
        def _(step: jax.Array) -> None:
            for direction in directions:
                direction.run(step)

        for direction in directions:
            direction.finish()

    def pieces(count: int) -> Any:
        return pltpu.VMEM((count, bands.piece_lines, LANES), jnp.float32)

    def scratch() -> list[Any]:
        dma = pltpu.SemaphoreType.DMA
        buffers = [pieces(2 * PIECES), pieces(2), pieces(2), pieces(2)]
        return [*buffers, dma((2,)), dma((2,)), dma((2 * PIECES,)), dma((2,)), pltpu.SemaphoreType.REGULAR]

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
        out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
        scratch_shapes=[*scratch(), *scratch()],
        compiler_params=pltpu.CompilerParams(collective_id=collective_id, has_side_effects=True),
        interpret=interpret,
        name="reduce_scatter",
    )(x)
