"""Ahead-of-time compilation for real TPU chips on a machine that has none.

    text = aot.lower(step, example_arguments)            # torch -> StableHLO, needs the emulated device
    report = aot.compile_stablehlo(text, "v6e:2x2")      # libtpu, in a process of its own

A report says that the program compiles for the chip and what the compiler found: FLOPs, HBM bytes,
collectives.  No program runs: nothing here is a measured speed.
"""

from recsys_tpu.aot.compilation import CompileReport, compile_stablehlo
from recsys_tpu.aot.roofline import Roofline
from recsys_tpu.chips import CHIPS, Chip

__all__ = ["CHIPS", "Chip", "CompileReport", "Roofline", "compile_stablehlo", "lower"]


def __getattr__(name: str) -> object:
    if name == "lower":  # late, because it imports torch
        from recsys_tpu.aot.lowering import lower

        return lower
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
