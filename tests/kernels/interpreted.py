"""Runs SparseCore kernels under the Pallas TPU interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from recsys_tpu.chips import CHIPS
from recsys_tpu.kernels.sparsecore.streams import Target


def target(chip: str, mode: str) -> Target:
    """An interpreted chip; mode: when copies happen, "eager" (on issue) or "on_wait"."""
    return Target(CHIPS[chip], pltpu.InterpretParams(dma_execution_mode=mode, uninitialized_memory="nan"))


def run(where: Target, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, traced for the chip and evaluated on the CPU."""
    with jax.sharding.use_abstract_mesh(where.chip.abstract_mesh()):
        jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    flat = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *jax.tree.leaves(arguments))
    outputs = [np.asarray(x) for x in flat]
    return jax.tree.unflatten(jax.tree.structure(shape), outputs)
