"""The process that loads libtpu: compiles one program, writes one JSON report.  See `compilation`."""

from __future__ import annotations

import collections
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax.experimental import topologies

_COLLECTIVE = re.compile(
    r"= .*?\b(all-to-all|ragged-all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute)"
    r"(-start)?\("
)
_STABLEHLO_COLLECTIVE = re.compile(
    r"stablehlo\.(all_to_all|all_reduce|all_gather|reduce_scatter|collective_permute)\b"
)
_STABLEHLO_CUSTOM_CALL = re.compile(r"stablehlo\.custom_call @(\w+)")
_CUSTOM_CALL = re.compile(r'custom_call_target="([^"]+)"')
# A channel handle on all_to_all means "between partitions".  Ours are between replicas, and libtpu aborts
# on a handle there.
_ALL_TO_ALL_CHANNEL = re.compile(r'(stablehlo\.all_to_all"\([^)]*\) <\{)channel_handle = [^>]*>, ')


def main(request: dict[str, Any]) -> None:
    started = time.perf_counter()
    try:
        report = compile_program(
            Path(request["program"]).read_text(encoding="utf-8"),
            request["topology"],
            request["num_replicas"],
            dict(request["aliases"]),
        )
        report["compile_seconds"] = time.perf_counter() - started
    except Exception as error:  # every failure of the compiler is the answer asked for
        report = {"error": f"{type(error).__name__}: {error}"}
    Path(request["result"]).write_text(json.dumps(report), encoding="utf-8")


def compile_program(text: str, topology: str, num_replicas: int, aliases: dict[int, int]) -> dict[str, Any]:
    """Compile and describe.

    Raises:
        ValueError: `num_replicas` is neither 1 nor the size of the slice.
    """
    devices: tuple[Any, ...] = tuple(
        topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    )
    if num_replicas not in (1, len(devices)):
        raise ValueError(
            f"{topology} has {len(devices)} devices; a program is compiled for 1 or all, not {num_replicas}"
        )
    used = devices[:num_replicas]
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = num_replicas, 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[d.id] for d in used]))
    with mlir.make_ir_context():
        module = ir.Module.parse(_ALL_TO_ALL_CHANNEL.sub(r"\1", text))
        _alias(module, aliases)
        executable = devices[0].client.compile(module, xla_client.DeviceList(used), options)
    return _describe(executable, text)


def _alias(module: Any, aliases: dict[int, int]) -> None:
    """Mark arguments of @main as donated to outputs."""
    if not aliases:
        return
    (main_function,) = (
        op
        for op in module.body.operations
        if getattr(op, "sym_name", None) is not None and ir.StringAttr(op.sym_name).value == "main"
    )
    attributes: list[Any] = [ir.DictAttr(a) for a in main_function.arg_attrs]
    integer = ir.IntegerType.get_signless(32)
    for argument, output in aliases.items():
        # a kernel's own donation mark names no output, and excludes one that does
        kept = {n.name: n.attr for n in attributes[argument] if n.name != "jax.buffer_donor"}
        kept["tf.aliasing_output"] = ir.IntegerAttr.get(integer, output)
        attributes[argument] = ir.DictAttr.get(kept)
    main_function.arg_attrs = ir.ArrayAttr.get(attributes)


def _describe(executable: Any, text: str) -> dict[str, Any]:
    memory = executable.get_compiled_memory_stats()
    (cost, *_) = costs if isinstance(costs := executable.cost_analysis(), list) else [costs]
    collectives, custom_calls, readable = _count_operations(executable, text)
    return {
        "hlo_readable": readable,
        "flops": cost.get("flops", 0.0),
        "bytes_accessed": cost.get("bytes accessed", 0.0),
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "collectives": collectives,
        "custom_calls": custom_calls,
    }


def _count_operations(executable: Any, text: str) -> tuple[dict[str, int], dict[str, int], bool]:
    """Collectives and custom calls, and whether of the compiled program: where this jaxlib cannot read back
    asynchronous SparseCore calls, they are those of the program that was given to the compiler."""
    try:
        hlo = executable.hlo_modules()[0].to_string()
    except jax.errors.JaxRuntimeError:
        found = [name.replace("_", "-") for name in _STABLEHLO_COLLECTIVE.findall(text)]
        targets, readable = _STABLEHLO_CUSTOM_CALL.findall(text), False
    else:
        found = [m.group(1) for line in hlo.splitlines() if (m := _COLLECTIVE.search(line))]
        targets, readable = _CUSTOM_CALL.findall(hlo), True
    return dict(collections.Counter(found)), dict(collections.Counter(targets)), readable


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
