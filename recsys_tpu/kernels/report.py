"""What the kernels ask of a chip, beside the floor: nothing here is a measured speed.

    python -m recsys_tpu.kernels.report [--chip v6e ...] [--slice v6e:2x4 ...]

HBM bytes are counted from how the kernels walk (`traffic`); temporaries and aliasing are the compiler's
figures; "on chip" is the vector memory that the largest kernel reserves, of one subcore on SparseCore;
bundles are static cycles of a TensorCore kernel's loops, without waiting for memory (SparseCore programs
leave no schedule).  Peers: "dense" is the counted traffic of an update through a gradient as large as the
table; "plain" what XLA allocates for the operation without kernels (`plain`).  Behind the tables
of the chips come those of the exchanges between chips (`all_to_all.report`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from recsys_tpu.chips import CHIPS, Chip
from recsys_tpu.kernels.all_to_all.report import compiled_report, exchange_report
from recsys_tpu.kernels.arg_specs import MATRIX, Program
from recsys_tpu.kernels.tensorcore import update, windows
from recsys_tpu.kernels.traffic import dense_gradient_traffic, traffic

IDS, BAGS = 81_920, 16_384  # pooling factor 5
UNIQUE = 65_536  # distinct rows among the ids: a fifth are repeats
NAMES = (
    "pooled-float32-32",
    "pooled-float32-128",
    "pooled-packed-128",
    "sgd-float32-128",
    "rowwise_adagrad-float32-32",
    "rowwise_adagrad-float32-128",
    "rowwise_adagrad-packed-128",
    "adam-float32-128",
)
SLICES = ("v6e:2x4", "v5p:2x2x1")
GOALS = (
    "goals: bytes 1.25x the floor; TensorCore, dim 128 float32: 5 bundles an id (lookup), 16 a row (update)"
)


def bundles_per_id(loops: list[dict[str, int]]) -> float:
    """Of the loop over ids that are one block's alone, starting the next window's copies on the way.

    `windows.sum_segments` has four loops: shared ids, own ids of the last window, own ids, shared ids;
    `windows.UNROLL` ids a body.
    """
    return [loop for loop in loops if loop["depth"] == 3][2]["bundles"] / windows.UNROLL


def bundles_per_row(loops: list[dict[str, int]]) -> float:
    """Of a touched row in an update: reading it, stepping it, writing it back; `update.UNROLL` a body."""
    deepest = max(at for at, loop in enumerate(loops) if loop["depth"] == 3)
    reads = [loop for loop in loops[:deepest] if loop["depth"] == 2 and loop["copies_in"]]
    after = [loop for loop in loops[deepest + 1 :] if loop["depth"] == 2]
    step = next(loop for loop in after if loop["loads"])
    write = max(after, key=lambda loop: loop["copies_out"])
    return (reads[1]["bundles"] + step["bundles"] + write["bundles"]) / update.UNROLL


def measure(chip: Chip, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Compiles the programs in a process of their own; results by name."""
    command = [sys.executable, "-m", "recsys_tpu.kernels.compile_matrix", chip.name, *names]
    command += ["--ids", str(IDS), "--bags", str(BAGS)]
    if not chip.sparsecores:
        command.append("--schedules")
    results = _json_lines([*command, "--plain"])
    kernels = {result["name"]: result for result in results if "plain" not in result}
    for result in results:
        if "plain" in result:
            kernels[result["name"]]["plain"] = result
    return kernels


def peers_table(chip: Chip, ids: int, bags: int) -> Table:
    """Temporaries of XLA's own SparseCore operations as ratios of ours."""
    sizes = ["--ids", str(ids), "--bags", str(bags)]
    peers = _json_lines([sys.executable, "-m", "recsys_tpu.aot.xla_sparsecore", chip.name, *sizes])
    command = [sys.executable, "-m", "recsys_tpu.kernels.compile_matrix", chip.name, *sizes]
    compiled = _json_lines([*command, *(str(peer["name"]) for peer in peers)])
    ours = {result["name"]: result["temporaries"] for result in compiled}
    title = f"{chip.name}: XLA's SparseCore operations beside ours, {ids:,} ids, {bags:,} bags"
    table = Table(title=title)
    for column in ("program", "temporaries MB", "ours MB", "ratio"):
        table.add_column(column, justify="left" if column == "program" else "right")
    for peer in peers:
        name, error = peer["name"], peer.get("error")
        theirs = "does not compile" if error else f"{peer['temporaries'] / 1e6:.2f}"
        ratio = error[:80] if error else f"{peer['temporaries'] / ours[name]:,.0f}"
        table.add_row(name, theirs, f"{ours[name] / 1e6:.2f}", ratio)
    return table


def _json_lines(command: list[str]) -> list[dict[str, Any]]:
    """What a command prints; it is a process of its own, for libtpu is loaded there as a compiler."""
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {run.stderr[-500:]}")
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def row(program: Program, chip: Chip, result: dict[str, Any]) -> list[str]:
    """A line of the report."""
    if "error" in result:
        return [program.name, "does not compile", *[""] * 7, result["error"][:40]]
    counted = traffic(program, chip, ids=IDS, unique=UNIQUE)
    loops = result.get("loops") or []
    deep = [loop for loop in loops if loop["depth"] == 3]
    bundles = ""
    if deep:
        bundles = f"{bundles_per_id(loops):.1f} an id"
        if program.is_update:
            bundles += f", {bundles_per_row(loops):.1f} a row"
    peer = ""
    if program.is_update:
        dense = dense_gradient_traffic(program, ids=IDS)
        peer = f"{dense.issued / counted.issued:,.0f}x"
    in_place = "yes" if result["aliased"] == program.donated_bytes() else "NO"
    return [
        program.name,
        f"{counted.issued / 1e6:,.1f}",
        f"{counted.floor / 1e6:,.1f}",
        f"{counted.ratio:.2f}",
        f"{counted.issued / chip.hbm_bytes_per_second * 1e6:,.0f}",
        f"{result['temporaries'] / 1e6:.1f}" + (f", in place {in_place}" if program.is_update else ""),
        f"{result['vector_memory'] / 1024:,.0f}",
        bundles,
        peer,
        _plain(result),
    ]


def _plain(result: dict[str, Any]) -> str:
    """Temporaries of the plain program."""
    return f"{result['plain']['temporaries'] / 1e6:,.1f}" if "plain" in result else ""


def main() -> None:
    parser = argparse.ArgumentParser(description="HBM bytes, temporaries and static bundles of the kernels")
    parser.add_argument("--chip", action="append", choices=sorted(CHIPS), help="default: v5e and v6e")
    parser.add_argument(
        "--slice",
        action="append",
        metavar="TOPOLOGY",
        help=f"compile the exchanges between chips for it (default: {', '.join(SLICES)})",
    )
    options = parser.parse_args()
    console = Console(width=160)
    console.print(f"{IDS:,} ids in {BAGS:,} bags, {UNIQUE:,} distinct rows of a table of 2^20; {GOALS}")
    for name in options.chip or ["v5e", "v6e"]:
        chip = CHIPS[name]
        programs = [p for p in MATRIX if p.name in NAMES]
        results = measure(chip, tuple(program.name for program in programs))
        variant = "SparseCore" if chip.sparsecores else "TensorCore"
        table = Table(title=f"{chip.name}, {variant} kernels: counted and compiled, not run")
        columns = ("program", "MB", "floor MB", "ratio", "us at HBM peak", "temporaries MB", "on chip KiB")
        for column in (*columns, "bundles", "dense", "plain MB"):
            table.add_column(column, justify="left" if column in ("program", "bundles") else "right")
        for program in programs:
            table.add_row(*row(_sized(program), chip, results[program.name]))
        console.print(table)
        if chip.sparsecores:
            console.print(peers_table(chip, MATRIX[0].ids, MATRIX[0].bags))
            console.print(peers_table(chip, IDS, BAGS))
    console.print(exchange_report())
    for topology in options.slice or SLICES:
        console.print(compiled_report(topology))


def _sized(program: Program) -> Program:
    return replace(program, ids=IDS, bags=BAGS)


if __name__ == "__main__":
    main()
