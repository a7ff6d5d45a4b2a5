"""Compile a StableHLO program with libtpu, in a process of its own.

Its own because the emulated device and libtpu are found through the same environment variable, and
because libtpu's compiler aborts its process on some faulty programs: an abort is reported, with its text.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recsys_tpu import libtpu
from recsys_tpu.chips import chip_of


@dataclass(frozen=True)
class CompileReport:
    """What libtpu made of a program.  Sizes are bytes of HBM on one device."""

    topology: str
    num_devices: int
    error: str | None = None
    """Why it did not compile; None if it did (the figures below are then set)."""
    compile_seconds: float = 0.0
    flops: float = 0.0
    """Of one device, as XLA counts them: custom kernels count as none."""
    bytes_accessed: float = 0.0
    """HBM bytes that one device reads and writes, as XLA counts them: custom kernels by their operands
    and results whole."""
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    """Outputs that take the place of donated arguments."""
    temp_bytes: int = 0
    peak_bytes: int = 0
    code_bytes: int = 0
    hlo_readable: bool = True
    """False where jaxlib can't read back what libtpu compiled (SparseCore kernels); the counts below are then
    those of the program that was given to it."""
    collectives: dict[str, int] = field(default_factory=dict)
    """HLO collective -> how many of it."""
    custom_calls: dict[str, int] = field(default_factory=dict)
    """Custom-call target -> how many of it; Mosaic kernels are `tpu_custom_call`."""

    @property
    def ok(self) -> bool:
        return self.error is None


def compile_stablehlo(
    text: str,
    topology: str,
    num_replicas: int = 1,
    *,
    aliases: Mapping[int, int] | None = None,
    timeout_s: float = 1800.0,
) -> CompileReport:
    """Compile a StableHLO module for one device of `topology`, or for the whole slice.

    Args:
        text: the module, as MLIR text.
        topology: such as ``v6e:2x2``.
        num_replicas: 1, or the number of devices of the topology for a program with collectives.
        aliases: argument number -> number of the output that takes over its memory (donation).
        timeout_s: seconds after which the compiler is stopped and reported as failed.

    Raises:
        ValueError: the topology names no known chip.
    """
    chip_of(topology)
    with tempfile.TemporaryDirectory(prefix="aot-") as folder:
        program, result = Path(folder, "program.mlir"), Path(folder, "report.json")
        program.write_text(text, encoding="utf-8")
        request = {
            "program": str(program),
            "result": str(result),
            "topology": topology,
            "num_replicas": num_replicas,
            "aliases": sorted((aliases or {}).items()),
        }
        command = [sys.executable, "-m", "recsys_tpu.aot.libtpu_worker", json.dumps(request)]
        try:
            run = subprocess.run(
                command,
                env=libtpu.environment(),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return CompileReport(topology, num_replicas, f"libtpu did not finish within {timeout_s:.0f} s")
        if run.returncode == 0 and result.exists():
            report: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
            return CompileReport(topology, num_replicas, **report)
        return CompileReport(topology, num_replicas, _abort_text(run.returncode, run.stderr))


def _abort_text(returncode: int, stderr: str) -> str:
    """The fatal lines of an aborted compiler, or the end of what it said."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("F") or "Check failed" in line]
    return f"libtpu's compiler ended with {returncode}: " + " | ".join((fatal or lines)[-5:])
