"""Compiles programs of the matrix for a chip and prints what each allocates, one JSON object a line.

    python -m recsys_tpu.kernels.compile_matrix v6e [pooled-float32-64 ...]

No TPU is needed; a process of its own is (libtpu is loaded as a compiler).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict

from recsys_tpu.kernels.ahead_of_time import compile_for, memory_of
from recsys_tpu.kernels.arg_specs import MATRIX, Program, kernels_for
from recsys_tpu.kernels.chips import CHIPS, Chip


def compile_program(program: Program, chip: Chip) -> dict[str, object]:
    """Name, seconds, memory [bytes], and the compiler's error if there is one."""
    start = time.perf_counter()
    result: dict[str, object] = {"name": program.name, "chip": chip.name}
    try:
        function = program.function(kernels_for(chip))
        compiled = compile_for(chip, function, program.arguments(), donate=program.donate())
        result |= asdict(memory_of(compiled))
    except Exception as error:  # the compiler's errors have no common type
        result["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    return result | {"seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description="compile the kernel matrix ahead of time")
    parser.add_argument("chip", choices=sorted(CHIPS))
    parser.add_argument("names", nargs="*", help="programs (default: all)")
    options = parser.parse_args()
    unknown = set(options.names) - {program.name for program in MATRIX}
    if unknown:
        parser.error(f"no such program: {', '.join(sorted(unknown))}")
    chip = CHIPS[options.chip]
    for program in MATRIX:
        if (not options.names or program.name in options.names) and program.supported_on(chip):
            print(json.dumps(compile_program(program, chip)), flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
