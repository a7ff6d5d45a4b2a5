"""Compiles an exchange for a whole TPU slice through libtpu, on a machine without one, and reads it.

libtpu is configured by the environment and may abort: run this in a process of its own, under
`recsys_tpu.libtpu.environment`.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import tpu
from jax._src.lib.mlir import ir
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from recsys_tpu.kernels.all_to_all import api, reference
from recsys_tpu.kernels.all_to_all.links import grid_of

_SIGNATURE = re.compile(r"function_type = \((.*?)\) -> \(\), ")
_MEMREF = re.compile(r"memref<((?:\d+x)*)([^,<>]+?), #tpu\.memory_space<(\w+)>>")
_ELEMENT_BYTES = {"f32": 4, "i32": 4, "bf16": 2}


@dataclass(frozen=True)
class Program:
    """A compiled exchange as one device sees it.  Sizes in bytes."""

    devices: int
    argument_bytes: int
    temp_bytes: int
    readable: bool
    """False for programs with XLA's own asynchronous SparseCore calls, which JAX 0.10.2 cannot print: what
    follows is then empty."""
    collectives: tuple[str, ...]
    """XLA's own collectives in it."""
    kernels: int
    entry_barrier: bool
    """Whether every kernel asks for the barrier semaphore that `enter_barrier` uses."""
    semaphores: int
    """DMA semaphores of the kernel that needs most; the chip has 512 words for all of a program's."""
    vmem_bytes: int
    """VMEM scratch of the kernel that needs most."""


def compile_on_slice(
    topology: str,
    function: Callable[..., Any],
    arguments: Sequence[jax.ShapeDtypeStruct],
    *,
    axes: dict[str, int] | None = None,
) -> Program:
    """Compile `function`, written for one device, for all devices of `topology`.

    arguments: of one device.  axes: name and length of the mesh axes, one axis ``x`` over all by default.
    Raises what the compiler raises.
    """
    devices: np.ndarray[Any, Any] = np.array(
        topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    )
    axes = axes or {"x": devices.size}
    mesh = Mesh(devices.reshape(tuple(axes.values())), tuple(axes))
    spec = PartitionSpec(tuple(axes))

    def one_device(*slices: jax.Array) -> Any:
        return jax.tree.map(lambda result: result[None], function(*(part[0] for part in slices)))

    sharded = jax.shard_map(one_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    whole = [
        jax.ShapeDtypeStruct((devices.size, *part.shape), part.dtype, sharding=NamedSharding(mesh, spec))
        for part in arguments
    ]
    return _read(jax.jit(sharded).lower(*whole).compile(), devices.size)


def _read(compiled: jax.stages.Compiled, devices: int) -> Program:
    memory, text = compiled.memory_analysis(), _text(compiled)
    assert memory is not None
    scratch = [_scratch(base64.b64decode(body)) for body in re.findall(r'"body":"([^"]+)"', text)]
    return Program(
        devices=devices,
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        readable=bool(text),
        collectives=tuple(
            re.findall(r" (all-to-all|reduce-scatter|all-gather|all-reduce)(?:-start)?\(", text)
        ),
        kernels=len(scratch),
        entry_barrier=bool(scratch) and text.count('"barrier_type":"CUSTOM"') == len(scratch),
        semaphores=max((semaphores for semaphores, _ in scratch), default=0),
        vmem_bytes=max((vmem for _, vmem in scratch), default=0),
    )


def _text(compiled: jax.stages.Compiled) -> str:
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError:
        return ""


def _scratch(body: bytes) -> tuple[int, int]:
    """DMA semaphores and VMEM bytes among the operands of a Mosaic kernel."""
    with mlir.make_ir_context() as context:
        tpu.register_dialect(context)
        context.allow_unregistered_dialects = True
        text = str(ir.Module.parse(body))
    semaphores = vmem = 0
    (signature,) = _SIGNATURE.findall(text)
    for shape, element, space in _MEMREF.findall(signature):
        count = math.prod(int(side) for side in shape.split("x") if side)
        if space == "semaphore_mem":
            semaphores += count
        elif space == "vmem":
            vmem += count * _ELEMENT_BYTES[element]
    return semaphores, vmem


def main(topology: str, rows: int, dim: int) -> None:
    """Print one JSON object: exchange -> [our kernel, XLA's collective] as dictionaries of `Program`."""
    devices = grid_of(topology).devices
    chunks = jax.ShapeDtypeStruct((devices, rows, dim), jnp.float32)
    bf16 = {"wire_dtype": jnp.bfloat16}
    modules = (api, reference)
    pairs: dict[str, Any] = {
        name: [functools.partial(getattr(module, operation), axis="x", **options) for module in modules]
        for name, operation, options in (
            ("all-to-all", "all_to_all", {}),
            ("all-to-all, bf16 wire", "all_to_all", bf16),
            ("reduce-scatter", "reduce_scatter", {}),
        )
    }
    programs = {
        name: [dataclasses.asdict(compile_on_slice(topology, function, [chunks])) for function in pair]
        for name, pair in pairs.items()
    }
    print(json.dumps(programs))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
