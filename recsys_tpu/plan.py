"""Plan where a model's tables lie on a TPU slice.

python -m recsys_tpu.plan --config configs/planning/dlrm_dcnv2.yaml --topology v5p:4x4x4 --output plan.json
python -m recsys_tpu.plan diff OLD.json NEW.json
python -m recsys_tpu.plan explain TABLE --plan plan.json --config configs/planning/dlrm_dcnv2.yaml
python -m recsys_tpu.plan scale --config configs/planning/dlrm_dcnv2.yaml --chip v5p --chips 8..8192
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from recsys_tpu.errors import run_command
from recsys_tpu.sharding.planner import Effort, Plan, make_plan, parse_topology
from recsys_tpu.sharding.planner.chips import GIB
from recsys_tpu.sharding.planner.explain import alternatives
from recsys_tpu.sharding.planner.html import write_page
from recsys_tpu.sharding.planner.inputs import read_workload
from recsys_tpu.sharding.planner.report import ROOFLINE, print_diff, print_explanation, print_plan
from recsys_tpu.sharding.planner.scale import Point, parse_chips, scale, sizes
from recsys_tpu.sharding.planner.tables import Workload

_COMMANDS = ("make", "diff", "explain", "scale")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; `make` is the default command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or (words[0] not in _COMMANDS and words[0] not in ("-h", "--help")):
        words.insert(0, "make")
    options = _parser().parse_args(words)
    command: Callable[[argparse.Namespace, Console], None] = options.command
    run_command(lambda: command(options, Console()))


def _make(options: argparse.Namespace, console: Console) -> None:
    topology = parse_topology(options.topology)
    workload = _workload(options, topology.ranks)
    started = time.perf_counter()
    plan = make_plan(workload, topology, row_group=options.row_group, effort=Effort(seed=options.seed))
    seconds = time.perf_counter() - started
    print_plan(plan, workload, console)
    console.print(f"Planned in {seconds:.1f} s.")
    if options.output:
        plan.save(options.output)
        console.print(f"Wrote {options.output}")
    if options.html:
        write_page(options.html, plan, workload, partial(_workload, options))
        console.print(f"Wrote {options.html}")


def _diff(options: argparse.Namespace, console: Console) -> None:
    print_diff(Plan.load(options.old), Plan.load(options.new), console)


def _explain(options: argparse.Namespace, console: Console) -> None:
    plan = Plan.load(options.plan)
    if options.batch_per_rank is None:
        options.batch_per_rank = plan.made_for["batch_per_rank"]
    workload = _workload(options, plan.topology.ranks)
    plan.check_fits(workload, plan.topology)
    print_explanation(plan, options.table, alternatives(plan, workload, options.table), console)


def _scale(options: argparse.Namespace, console: Console) -> None:
    topologies = sizes(options.chip, parse_chips(options.chips))
    points = scale(partial(_workload, options), topologies)
    out = Table(title="predicted throughput against slice size")
    for column in ("slice", "chips", "step ms", "samples/s", "per chip", "", "HBM GiB", "waits for"):
        out.add_column(column, justify="right" if column not in ("slice", "", "waits for") else "left")
    for point in points:
        out.add_row(*_scale_row(point))
    console.print(out)
    console.print(f"Efficiency is samples/s a chip against the smallest slice that fits. {ROOFLINE}")


def _scale_row(point: Point) -> list[str]:
    name, chips = str(point.topology), f"{point.topology.chips:,}"
    if point.step is None or point.samples_per_s is None or point.efficiency is None or point.hbm is None:
        return [name, chips, "", "", "", "", "", f"does not fit: {point.limit}"]
    bar = "█" * round(20 * min(point.efficiency, 1.5))
    return [
        name,
        chips,
        f"{point.step * 1e3:.3f}",
        f"{point.samples_per_s:,.0f}",
        f"{point.efficiency:.0%}",
        bar,
        f"{point.hbm / GIB:.2f}",
        point.limit,
    ]


def _workload(options: argparse.Namespace, ranks: int) -> Workload:
    return read_workload(
        options.config, ranks, statistics=options.stats, batch_per_rank=options.batch_per_rank
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recsys_tpu.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("--config", type=Path, required=True, help="config with model.num_embeddings")
    model.add_argument("--stats", type=Path, help="id statistics of python -m recsys_tpu.data.stats")
    model.add_argument("--batch-per-rank", type=int, help="samples a rank (default: of the config)")

    make = commands.add_parser("make", parents=[model], help="make a plan (the default)")
    make.add_argument("--topology", required=True, help="v5p:4x4x4, 2*v6e:16x16, emulated:4 or a YAML file")
    make.add_argument("--output", type=Path, help="write the plan, .json or .yaml")
    make.add_argument("--html", type=Path, help="write a page that draws the plan on the slice")
    make.add_argument("--row-group", type=int, help="ranks that share rows (default: the best)")
    make.add_argument("--seed", type=int, default=0, help="of the local search")
    make.set_defaults(command=_make)

    diff = commands.add_parser("diff", help="what changed between two plans")
    diff.add_argument("old", type=Path)
    diff.add_argument("new", type=Path)
    diff.set_defaults(command=_diff)

    explain = commands.add_parser("explain", parents=[model], help="why a table is sharded as it is")
    explain.add_argument("table")
    explain.add_argument("--plan", type=Path, required=True)
    explain.set_defaults(command=_explain)

    scaling = commands.add_parser("scale", parents=[model], help="throughput against slice size")
    scaling.add_argument("--chip", default="v5p")
    scaling.add_argument("--chips", default="8..8192", help="FROM..TO, doubling, or a list")
    scaling.set_defaults(command=_scale)
    return parser


if __name__ == "__main__":
    main()
