"""Child process: a kernel that waits for a DMA which nobody starts, then a proof that ends."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tests.kernels.all_to_all.children import serve


def hangs() -> None:
    def kernel(x: object, out: object, done: object) -> None:
        pltpu.make_async_copy(x, out, done).wait()

    jax.block_until_ready(
        pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
            interpret=pltpu.InterpretParams(),
        )(jnp.zeros((8, 128)))
    )


def returns() -> str:
    return "reached"


if __name__ == "__main__":
    serve({"hangs": hangs, "returns": returns})
