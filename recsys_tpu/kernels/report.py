"""What the kernels ask of a chip, beside the floor: nothing here is a measured speed.

    python -m recsys_tpu.kernels.report [--chip v6e ...] [--slice v6e:2x4 ...]

HBM bytes are counted from how the kernels walk (`traffic`); temporaries and aliasing are the compiler's
figures; "on chip" is the vector memory that the largest kernel reserves, of one subcore on SparseCore;
bundles are static cycles of a TensorCore kernel's loops, without waiting for memory (SparseCore programs
leave no schedule); those of a row are its copies in, its step and its copies out.  Peers: "dense" is the
counted traffic of an update through a gradient as large as the table; "plain" what XLA allocates for the
operation without kernels (`plain`).  Without options, two chips and the exchanges of two slices
(`all_to_all.report`); tables are printed as they are ready.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
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
PEERS = ("pooled-float32-128", "sgd-float32-128", "adagrad-float32-128", "rowwise_adagrad-float32-128")
CHIPS_SHOWN = ("v5e", "v6e")
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


def bundles_per_row(loops: list[dict[str, int]]) -> tuple[float, float, float]:
    """Of a touched row in an update: its copies in, its step, its copies out; `update.UNROLL` a body."""
    deepest = max(at for at, loop in enumerate(loops) if loop["depth"] == 3)
    reads = [loop for loop in loops[:deepest] if loop["depth"] == 2 and loop["copies_in"]]
    after = [loop for loop in loops[deepest + 1 :] if loop["depth"] == 2]
    step = next(loop for loop in after if loop["loads"])
    write = max(after, key=lambda loop: loop["copies_out"])
    copies_in, steps, copies_out = (loop["bundles"] / update.UNROLL for loop in (reads[1], step, write))
    return copies_in, steps, copies_out


def measure(chip: Chip, names: Sequence[str], progress: Progress) -> dict[str, dict[str, Any]]:
    """Compiles the programs in a process of their own; results by name."""
    command = [sys.executable, "-m", "recsys_tpu.kernels.compile_matrix", chip.name, *names]
    command += ["--ids", str(IDS), "--bags", str(BAGS)]
    if not chip.sparsecores:
        command.append("--schedules")
    without_kernels = sum(1 for p in MATRIX if p.name in names and p.table == "float32")
    results = _json_lines([*command, "--plain"], progress, chip.name, len(names) + without_kernels)
    kernels = {result["name"]: result for result in results if "plain" not in result}
    for result in results:
        if "plain" in result:
            kernels[result["name"]]["plain"] = result
    return kernels


def peers_table(chip: Chip, ids: int, bags: int, progress: Progress) -> Table:
    """Temporaries of XLA's own SparseCore operations as ratios of ours."""
    sizes = ["--ids", str(ids), "--bags", str(bags)]
    title = f"{chip.name}, {ids:,} ids"
    theirs = [sys.executable, "-m", "recsys_tpu.aot.xla_sparsecore", chip.name, *sizes]
    peers = _json_lines(theirs, progress, f"{title}, XLA's operations", len(PEERS))
    command = [sys.executable, "-m", "recsys_tpu.kernels.compile_matrix", chip.name, *sizes, *PEERS]
    compiled = _json_lines(command, progress, f"{title}, ours", len(PEERS))
    ours = {result["name"]: result["temporaries"] for result in compiled}
    table = Table(title=f"{chip.name}: XLA's SparseCore operations beside ours, {ids:,} ids, {bags:,} bags")
    for column in ("program", "temporaries MB", "ours MB", "ratio"):
        table.add_column(column, justify="left" if column == "program" else "right")
    for peer in peers:
        name, error = peer["name"], peer.get("error")
        found = "does not compile" if error else f"{peer['temporaries'] / 1e6:.2f}"
        ratio = error[:80] if error else f"{peer['temporaries'] / ours[name]:,.0f}"
        table.add_row(name, found, f"{ours[name] / 1e6:.2f}", ratio)
    return table


def _json_lines(command: list[str], progress: Progress, title: str, expected: int) -> list[dict[str, Any]]:
    """What a command prints; it is a process of its own, for libtpu is loaded there as a compiler."""
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    task = progress.add_task(title, total=expected)
    found = []
    with tempfile.TemporaryFile("w+") as errors:
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("{"):
                found.append(json.loads(line))
                progress.update(task, advance=1, description=f"{title}: {found[-1]['name']}")
        if run.wait():
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed: {errors.read()[-500:]}")
    progress.remove_task(task)
    return found


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
            parts = bundles_per_row(loops)
            bundles += f", {sum(parts):.1f} a row ({' + '.join(f'{part:.1f}' for part in parts)})"
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
    parser.add_argument("--chip", action="append", choices=sorted(CHIPS), help="compile its kernels")
    parser.add_argument(
        "--slice",
        action="append",
        metavar="TOPOLOGY",
        help="compile the exchanges between its chips",
    )
    parser.epilog = f"without either: {', '.join((*CHIPS_SHOWN, *SLICES))}"
    options = parser.parse_args()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as progress:
        given = options.chip or options.slice
        chips, slices = (options.chip or [], options.slice or []) if given else (CHIPS_SHOWN, SLICES)
        _print(chips, slices, progress)


def _print(chips: Sequence[str], slices: Sequence[str], progress: Progress) -> None:
    """Each table as soon as its programs are compiled; progress goes to stderr."""
    console = Console(width=160)
    console.print(f"{IDS:,} ids in {BAGS:,} bags, {UNIQUE:,} distinct rows of a table of 2^20; {GOALS}")
    for name in chips:
        chip = CHIPS[name]
        programs = [p for p in MATRIX if p.name in NAMES]
        results = measure(chip, [program.name for program in programs], progress)
        variant = "SparseCore" if chip.sparsecores else "TensorCore"
        table = Table(title=f"{chip.name}, {variant} kernels: counted and compiled, not run")
        columns = ("program", "MB", "floor MB", "ratio", "us at HBM peak", "temporaries MB", "on chip KiB")
        for column in (*columns, "bundles", "dense", "plain MB"):
            table.add_column(column, justify="left" if column in ("program", "bundles") else "right")
        for program in programs:
            table.add_row(*row(_sized(program), chip, results[program.name]))
        console.print(table)
        if chip.sparsecores:
            console.print(peers_table(chip, MATRIX[0].ids, MATRIX[0].bags, progress))
            console.print(peers_table(chip, IDS, BAGS, progress))
    console.print(exchange_report())
    for topology in slices:
        task = progress.add_task(f"{topology}: exchanges", total=None)
        console.print(compiled_report(topology))
        progress.remove_task(task)


def _sized(program: Program) -> Program:
    return replace(program, ids=IDS, bags=BAGS)


if __name__ == "__main__":
    main()
