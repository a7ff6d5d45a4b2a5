"""All-to-all that converts on the way: float32 in and out, scaled, bfloat16 on the wire if asked.

Each piece is read into VMEM, scaled and rounded there and sent from VMEM, so the half-size copy of the
payload is never written to HBM on the sending side.  On the receiving side the pieces land in an HBM
buffer in wire format and are widened from there, one peer behind the sends, while the links are busy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
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

# Pieces under way in a stage: a buffer is used again once the DMA that read it is done.
BUFFERS = 4
# At 512 lines the buffers of both stages take 3 MiB of VMEM, of 16 MiB that a kernel has by default.
MAX_PIECE_LINES = 512

Copy = Callable[[Index, Index], Descriptor]


def vmem_bytes(pieces: Pieces, *dtypes: jnp.dtype | type) -> int:
    """Bytes of VMEM scratch: a sending and a widening stage, each with `BUFFERS` pieces in both dtypes."""
    return 2 * BUFFERS * pieces.lines_each * LANES * sum(jnp.dtype(dtype).itemsize for dtype in dtypes)


@dataclass(frozen=True)
class Stage:
    """VMEM buffers ``[BUFFERS, lines_each, 128]`` between two DMAs, and the semaphores of these DMAs."""

    loaded: Ref
    converted: Ref
    load_done: Ref
    store_done: Ref

    @staticmethod
    def scratch(dtype: jnp.dtype, *, load_lines: int, store_lines: int) -> list[Any]:
        done = pltpu.SemaphoreType.DMA((BUFFERS,))
        buffers = [pltpu.VMEM((BUFFERS, lines, LANES), dtype) for lines in (load_lines, store_lines)]
        return [*buffers, done, done]


def stream(
    *, first: Index, count: int, load: Copy, convert: Callable[[Index], None], store: Copy, wait_store: Copy
) -> None:
    """Run pieces ``0..count`` through a stage that has seen `first` pieces before.

    The copies take (piece, buffer), `convert` a buffer.  Stores are waited for only when their buffer is
    needed again: the last `BUFFERS` are left to the next call, or to `drain`.
    """

    def buffer(piece: Index) -> Index:
        return jax.lax.rem(first + piece, BUFFERS)

    pl.loop(0, min(BUFFERS, count))(lambda piece: load(piece, buffer(piece)).start())

    @pl.loop(0, count)
    def _(piece: jax.Array) -> None:
        load(piece, buffer(piece)).wait()
        pl.when(first + piece >= BUFFERS)(lambda: wait_store(piece, buffer(piece)).wait())
        convert(buffer(piece))
        store(piece, buffer(piece)).start()
        pl.when(piece + BUFFERS < count)(lambda: load(piece + BUFFERS, buffer(piece)).start())


def drain(total: int, wait_store: Copy) -> None:
    """Wait for the stores that `stream` left under way after `total` pieces."""
    pl.loop(max(0, total - BUFFERS), total)(lambda piece: wait_store(0, jax.lax.rem(piece, BUFFERS)).wait())


def coded_all_to_all(
    x: jax.Array,
    *,
    ring: Ring,
    pieces: Pieces,
    scale: float,
    wire_dtype: jnp.dtype | type,
    collective_id: int,
    interpret: Interpret = False,
) -> jax.Array:
    """Equal-split exchange of ``round(x * scale)``, x float32 ``[chips, lines, 128]``.

    `round` is to `wire_dtype` and back; a chip's own chunk is rounded as well, so that results do not
    depend on where a table is placed.  Uses an HBM buffer of the payload's size in wire format.
    """
    assert x.shape == (ring.size, pieces.lines, LANES), (x.shape, ring, pieces)
    assert pieces.lines_each <= MAX_PIECE_LINES, pieces
    wire_lines_each = pieces.lines_each * jnp.dtype(wire_dtype).itemsize // x.dtype.itemsize

    def kernel(x: Ref, out: Ref, received: Ref, *scratch: Ref) -> None:
        sending, widening = Stage(*scratch[:4]), Stage(*scratch[4:])

        def lines(piece: Index) -> Lines:
            return pl.ds(piece * pieces.lines_each, pieces.lines_each)

        def wire_lines(piece: Index) -> Lines:
            return pl.ds(pieces.lines - (pieces.count - piece) * wire_lines_each, wire_lines_each)

        def load_chunk(chunk: jax.Array) -> Copy:
            return lambda piece, buffer: pltpu.make_async_copy(
                x.at[chunk, lines(piece)], sending.loaded.at[buffer], sending.load_done.at[buffer]
            )

        def to_wire(buffer: Index) -> jax.Array:
            return pltpu.bitcast((sending.loaded[buffer] * scale).astype(wire_dtype), x.dtype)

        def from_wire(packed: jax.Array) -> jax.Array:
            return pltpu.bitcast(packed, wire_dtype).astype(x.dtype)

        def encode(buffer: Index) -> None:
            sending.converted[buffer] = to_wire(buffer)

        def round_own(buffer: Index) -> None:
            widening.converted[buffer] = from_wire(to_wire(buffer))

        def widen(buffer: Index) -> None:
            widening.converted[buffer] = from_wire(widening.loaded[buffer])

        def send(slot: Index) -> Copy:
            peer = ring.send_peer(slot)
            return lambda piece, buffer: remote_copy(
                ring,
                peer,
                source=sending.converted.at[buffer],
                target=out.at[ring.me, wire_lines(piece)],
                send=sending.store_done.at[buffer],
                receive=received.at[slot],
            )

        def store_chunk(chunk: jax.Array) -> Copy:
            return lambda piece, buffer: pltpu.make_async_copy(
                widening.converted.at[buffer], out.at[chunk, lines(piece)], widening.store_done.at[buffer]
            )

        def load_wire(slot: Index) -> Copy:
            return lambda piece, buffer: pltpu.make_async_copy(
                out.at[ring.receive_peer(slot), wire_lines(piece)],
                widening.loaded.at[buffer],
                widening.load_done.at[buffer],
            )

        # A local copy of the same size stands in for the remote one: its wait counts the same bytes.
        def wait_send(piece: Index, buffer: Index) -> Descriptor:
            return pltpu.make_async_copy(
                sending.converted.at[buffer],
                out.at[ring.me, wire_lines(piece)],
                sending.store_done.at[buffer],
            )

        def await_arrival(slot: Index) -> None:
            pl.loop(0, pieces.count)(lambda piece: send(slot)(piece, 0).wait_recv())

        def widen_arrival(slot: Index) -> None:
            await_arrival(slot)
            stream(
                first=(slot + 1) * pieces.count,
                count=pieces.count,
                load=load_wire(slot),
                convert=widen,
                store=store_chunk(ring.receive_peer(slot)),
                wait_store=store_chunk(ring.me),
            )

        enter_barrier(ring)

        @pl.loop(0, ring.peers)
        def _(slot: jax.Array) -> None:
            stream(
                first=slot * pieces.count,
                count=pieces.count,
                load=load_chunk(ring.send_peer(slot)),
                convert=encode,
                store=send(slot),
                wait_store=wait_send,
            )
            pl.when(slot > 0)(lambda: widen_arrival(slot - 1))

            @pl.when(slot == 0)
            def _() -> None:
                stream(
                    first=0,
                    count=pieces.count,
                    load=load_chunk(ring.me),
                    convert=round_own,
                    store=store_chunk(ring.me),
                    wait_store=store_chunk(ring.me),
                )

        widen_arrival(ring.peers - 1)
        drain(ring.peers * pieces.count, wait_send)
        drain(ring.size * pieces.count, store_chunk(ring.me))

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[hbm],
        out_specs=hbm,
        scratch_shapes=[
            pltpu.SemaphoreType.DMA((ring.peers,)),
            *Stage.scratch(x.dtype, load_lines=pieces.lines_each, store_lines=wire_lines_each),
            *Stage.scratch(x.dtype, load_lines=wire_lines_each, store_lines=pieces.lines_each),
        ],
        compiler_params=pltpu.CompilerParams(collective_id=collective_id, has_side_effects=True),
        interpret=interpret,
        name="all_to_all_coded",
    )(x)
