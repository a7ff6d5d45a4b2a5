"""Compiles programs of the matrix for a chip and prints what each allocates, one JSON object a line.

    python -m recsys_tpu.kernels.compile_matrix v6e [pooled-float32-64 ...]

No TPU is needed; a process of its own is (libtpu is loaded as a compiler).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from recsys_tpu.chips import CHIPS, Chip
from recsys_tpu.kernels import plain
from recsys_tpu.kernels.ahead_of_time import compile_for, memory_of, trace_and_compile
from recsys_tpu.kernels.arg_specs import MATRIX, Program, kernels_for
from recsys_tpu.kernels.on_chip import vector_memory
from recsys_tpu.kernels.schedule import dump_flags, loops_of


def compile_program(program: Program, chip: Chip, schedules: Path | None = None) -> dict[str, object]:
    """Name, seconds, memory [bytes] in HBM and on the chip, and the compiler's error if there is one.

    schedules: the folder in which the compiler leaves the loops of TensorCore kernels; they are added.
    """
    start = time.perf_counter()
    result: dict[str, object] = {"name": program.name, "chip": chip.name}
    try:
        function = program.function(kernels_for(chip))
        traced, compiled = trace_and_compile(chip, function, program.arguments(), donate=program.donate())
        result |= asdict(memory_of(compiled)) | {"vector_memory": vector_memory(traced.jaxpr.jaxpr)}
        if schedules is not None and program.by_kernel(chip):
            result["loops"] = [asdict(loop) for loop in loops_of(schedules, program.kernel)]
    except Exception as error:  # the compiler's errors have no common type
        result["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    return result | {"seconds": round(time.perf_counter() - start, 1)}


def compile_plain(program: Program, chip: Chip) -> dict[str, object]:
    """Memory [bytes] of the same operation without kernels, and of its traffic what XLA's cost model says."""
    compiled = compile_for(
        chip, plain.function(program), plain.arguments(program), donate=plain.donate(program)
    )
    cost: Any = compiled.cost_analysis()
    found = {"name": program.name, "chip": chip.name, "plain": True, "bytes_accessed": cost["bytes accessed"]}
    return found | asdict(memory_of(compiled))


def main() -> None:
    parser = argparse.ArgumentParser(description="compile the kernel matrix ahead of time")
    parser.add_argument("chip", choices=sorted(CHIPS))
    parser.add_argument("names", nargs="*", help="programs (default: all)")
    parser.add_argument("--schedules", action="store_true", help="TensorCore kernels: add their loops")
    parser.add_argument("--plain", action="store_true", help="and the same without kernels, by XLA alone")
    parser.add_argument("--rows", type=int, help="rows of the table, instead of the matrix's")
    parser.add_argument("--ids", type=int, help="ids a step, instead of the matrix's")
    parser.add_argument("--bags", type=int, help="bags a step, instead of the matrix's")
    options = parser.parse_intermixed_args()
    unknown = set(options.names) - {program.name for program in MATRIX}
    if unknown:
        parser.error(f"no such program: {', '.join(sorted(unknown))}")
    chip = CHIPS[options.chip]
    with tempfile.TemporaryDirectory(prefix="schedules-") as folder:
        schedules = Path(folder) if options.schedules else None
        if schedules is not None:
            os.environ["LIBTPU_INIT_ARGS"] = dump_flags(schedules)  # read when libtpu is loaded, below
        for program in MATRIX:
            if options.names and program.name not in options.names:
                continue
            sized = replace(
                program,
                rows=options.rows or program.rows,
                ids=options.ids or program.ids,
                bags=options.bags or program.bags,
            )
            print(json.dumps(compile_program(sized, chip, schedules)), flush=True)
            if options.plain and program.table == "float32":
                print(json.dumps(compile_plain(sized, chip)), flush=True)


if __name__ == "__main__":
    main()
