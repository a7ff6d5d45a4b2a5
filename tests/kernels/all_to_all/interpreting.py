"""What the child processes with interpreted proofs share: a mesh of host devices, and one interpreted run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

MODES = ("eager", "on_wait")


def interpreter(mode: str) -> pltpu.InterpretParams:
    """Races on; a vector clock so large that two DMAs in flight do not share an entry of it."""
    return pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode, vector_clock_size=256)


def mesh_of(*shape: int) -> Mesh:
    axes = ("x", "y")[: len(shape)]
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), axes)


def on_chips(mesh: Mesh, function: Callable[..., Any], *arguments: Any) -> list[np.ndarray]:
    """Run `function` on every chip; arguments and results are ``[chips, ...]``, one slice for each chip."""
    spec = PartitionSpec(mesh.axis_names)

    def one_chip(*slices: jax.Array) -> Any:
        return jax.tree.map(lambda result: result[None], function(*(part[0] for part in slices)))

    sharded = jax.shard_map(one_chip, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(sharded)(*arguments))]


def races_found() -> bool:
    """Whether the interpreted kernel that ran last had a race."""
    races = interpret_pallas_call.races
    assert races is not None, "no kernel was interpreted with races on"
    return races.races_found


def differences(got: list[np.ndarray], expected: list[np.ndarray]) -> list[str]:
    """What is wrong with an interpreted run: values that differ in any bit, and races."""
    problems = ["race"] if races_found() else []
    for index, (mine, reference) in enumerate(zip(got, expected, strict=True)):
        if mine.dtype != reference.dtype or mine.shape != reference.shape:
            problems.append(
                f"result {index} is {mine.dtype}{mine.shape}, not {reference.dtype}{reference.shape}"
            )
        elif mine.tobytes() != reference.tobytes():
            wrong = np.argwhere((mine != reference) & ~(np.isnan(mine) & np.isnan(reference)))
            problems.append(f"result {index} differs in {len(wrong)} elements, first at {wrong[:1].tolist()}")
    return problems
