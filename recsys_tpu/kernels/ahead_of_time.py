"""Compiles JAX and Pallas functions for TPU chips through libtpu, on a machine that has none.

The compiler's memory analysis is the proof that a kernel copies no table: what it allocates beside
its arguments, and how much of them it aliases.  libtpu reads its environment when it is loaded and one
process can't both compile so and hold an emulated device: run this in a process of its own.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from recsys_tpu import libtpu

for _name, _value in libtpu.VARIABLES.items():
    os.environ.setdefault(_name, _value)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from recsys_tpu.chips import Chip  # noqa: E402


@dataclass(frozen=True)
class Memory:
    """HBM of a compiled program, bytes."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int


def compile_for(
    chip: Chip, function: Callable[..., Any], arguments: Sequence[Any], *, donate: Sequence[int] = ()
) -> jax.stages.Compiled:
    """The program of `function(*arguments)` for one device; arguments are (trees of) ShapeDtypeStruct.

    Raises what the compiler raises.
    """
    return trace_and_compile(chip, function, arguments, donate=donate)[1]


def trace_and_compile(
    chip: Chip, function: Callable[..., Any], arguments: Sequence[Any], *, donate: Sequence[int] = ()
) -> tuple[jax.stages.Traced, jax.stages.Compiled]:
    """`compile_for`, and what was traced on the way."""
    mesh = Mesh(np.array(_topology(chip.smallest_topology).devices[:1]), ("chip",))
    sharding = NamedSharding(mesh, PartitionSpec())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # SparseCore kernels read their chip from it
        jitted = jax.jit(
            function,
            in_shardings=jax.tree.map(lambda _: sharding, tuple(arguments)),
            out_shardings=sharding,
            donate_argnums=tuple(donate),
            keep_unused=True,  # as torch_tpu compiles it
        )
        traced = jitted.trace(*arguments)
        return traced, traced.lower().compile()


def memory_of(compiled: jax.stages.Compiled) -> Memory:
    """What the compiler says the program allocates."""
    stats = compiled.memory_analysis()
    assert stats is not None
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
    )


@functools.cache
def _topology(name: str) -> topologies.TopologyDescription:
    return topologies.get_topology_desc(platform="tpu", topology_name=name)
