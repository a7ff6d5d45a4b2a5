"""Child process: exchange kernels with one fault each, built from the parts of the real one.

Each proof returns what the suite's check says about the kernel; `test_faults` expects it to say something.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from recsys_tpu.kernels.all_to_all import reference
from recsys_tpu.kernels.all_to_all.direct import PEERS_IN_FLIGHT, DirectCopies, exchange, semaphores
from recsys_tpu.kernels.all_to_all.lines import LANES, Pieces
from recsys_tpu.kernels.all_to_all.parts import Ring, enter_barrier, remote_copy
from tests.kernels.all_to_all.children import serve
from tests.kernels.all_to_all.interpreting import MODES, differences, interpreter, mesh_of, on_chips

CHIPS = 4
RING = Ring("x", CHIPS)
PIECES = Pieces(count=2, lines_each=8)


class NoReceiveWait(DirectCopies):
    """The peers' data is taken for granted."""

    def arrival(self, slot: Any, piece: Any) -> Any:
        class Skipped:
            def wait_recv(self) -> None:
                pass

        return Skipped()


class WrongPeer(DirectCopies):
    """Every chunk goes to the chip after the one that it is for."""

    def send(self, slot: Any, piece: Any) -> Any:
        right = self.ring.send_peer(slot)
        lines = self.lines(piece)
        return remote_copy(
            self.ring,
            jax.lax.rem(right + 1, CHIPS),
            source=self.x.at[right, lines],
            target=self.out.at[self.ring.me, lines],
            send=self._sent.at[jax.lax.rem(slot, PEERS_IN_FLIGHT)],
            receive=self._received.at[slot],
        )


class TwoWriters(DirectCopies):
    """Every chip writes to its peers' chunk 0, where others write too."""

    def send(self, slot: Any, piece: Any) -> Any:
        return self._remote(slot, piece, peer=self.ring.send_peer(slot), target_chunk=0)


class EarlyOverwrite(DirectCopies):
    """The source is cleared before its send is known to be done (in `clear`)."""

    def clear(self, zeros: Any, cleared: Any) -> None:
        pltpu.make_async_copy(zeros, self.x.at[self.ring.send_peer(0)], cleared).start()
        pltpu.make_async_copy(zeros, self.x.at[self.ring.send_peer(0)], cleared).wait()


def kernel_with(copies_class: type[DirectCopies], mode: str, x: jax.Array) -> jax.Array:
    """The real exchange, on the copies of `copies_class`."""

    def kernel(x: Any, out: Any, own: Any, sent: Any, received: Any) -> None:
        def every_piece(peer: Any) -> int:
            return PIECES.count

        exchange(copies_class(RING, PIECES, x, out, own, sent, received), every_piece, every_piece)

    return call(kernel, mode, x)


def early_overwrite(mode: str, x: jax.Array) -> jax.Array:
    def kernel(x: Any, zeros: Any, out: Any, x_out: Any, *semaphores: Any) -> None:
        del x  # the same memory as `x_out`
        *pairs, cleared = semaphores
        copies = EarlyOverwrite(RING, PIECES, x_out, out, *pairs)
        enter_barrier(RING)
        for piece in range(PIECES.count):
            copies.own(piece).start()
            for slot in range(RING.peers):
                copies.send(slot, piece).start()
        copies.clear(zeros, cleared)
        for piece in range(PIECES.count):
            copies.own(piece).wait()
            for slot in range(RING.peers):
                copies.send(slot, piece).wait_send()
                copies.arrival(slot, piece).wait_recv()

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    out, _ = pl.pallas_call(
        kernel,
        out_shape=[shape, shape],
        in_specs=[hbm, hbm],
        out_specs=[hbm, hbm],
        input_output_aliases={0: 1},
        scratch_shapes=[*semaphores(RING), pltpu.SemaphoreType.DMA(())],
        compiler_params=pltpu.CompilerParams(collective_id=0, has_side_effects=True),
        interpret=interpreter(mode),
    )(x, jax.numpy.zeros(x.shape[1:], x.dtype))
    return out


def call(kernel: Callable[..., None], mode: str, x: jax.Array) -> jax.Array:
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[hbm],
        out_specs=hbm,
        scratch_shapes=semaphores(RING),
        compiler_params=pltpu.CompilerParams(collective_id=0, has_side_effects=True),
        interpret=interpreter(mode),
    )(x)


def check(kernel: Callable[[str, jax.Array], jax.Array], mode: str) -> list[str]:
    x = np.random.default_rng(0).standard_normal((CHIPS, CHIPS, PIECES.lines, LANES), dtype=np.float32)
    mesh = mesh_of(CHIPS)
    got = on_chips(mesh, functools.partial(kernel, mode), x)
    return differences(got, on_chips(mesh, functools.partial(reference.all_to_all, axis="x"), x))


FAULTS: dict[str, Callable[[str, jax.Array], jax.Array]] = {
    "missing receive wait": functools.partial(kernel_with, NoReceiveWait),
    "wrong peer": functools.partial(kernel_with, WrongPeer),
    "two writers": functools.partial(kernel_with, TwoWriters),
    "early overwrite": early_overwrite,
}
SOUND = {"no fault": functools.partial(kernel_with, DirectCopies)}

PROOFS = {
    f"{name}, {mode}": functools.partial(check, kernel, mode)
    for (name, kernel), mode in itertools.product({**FAULTS, **SOUND}.items(), MODES)
}

if __name__ == "__main__":
    serve(PROOFS)
