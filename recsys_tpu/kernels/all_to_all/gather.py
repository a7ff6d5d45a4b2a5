"""All-gather along one mesh axis by direct writes: the gradient of a reduce-scatter."""

from __future__ import annotations

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from recsys_tpu.kernels.all_to_all.direct import DirectCopies, exchange, semaphores
from recsys_tpu.kernels.all_to_all.lines import LANES, Pieces
from recsys_tpu.kernels.all_to_all.parts import Index, Interpret, Ref, Ring


class GatherCopies(DirectCopies):
    """Every peer gets the same chunk, ``[lines, 128]``."""

    def source(self, chunk: Index, piece: Index) -> Ref:
        return self.x.at[self.lines(piece)]


def direct_all_gather(
    x: jax.Array, *, ring: Ring, pieces: Pieces, collective_id: int, interpret: Interpret = False
) -> jax.Array:
    """``[lines, 128]`` to ``[chips, lines, 128]``: every chip's chunk, bit for bit ``lax.all_gather``."""
    assert x.shape == (pieces.lines, LANES), (x.shape, pieces)

    def kernel(x: Ref, out: Ref, own: Ref, sent: Ref, received: Ref) -> None:
        def every_piece(peer: Index) -> Index:
            return pieces.count

        exchange(GatherCopies(ring, pieces, x, out, own, sent, received), every_piece, every_piece)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((ring.size, *x.shape), x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
        out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
        scratch_shapes=semaphores(ring),
        compiler_params=pltpu.CompilerParams(collective_id=collective_id, has_side_effects=True),
        interpret=interpret,
        name="all_gather",
    )(x)
