"""Bytes of a training step that the planner's cost model predicts, beside bytes counted in that step.

    python benchmarks/planner_bytes.py --device tpu-emulated --ranks 2
    python benchmarks/planner_bytes.py --device cpu --ranks 4

Every table takes the same sharding type; 4 ranks are 2 hosts of 2.  Exchanged bytes are those handed to
collectives; HBM bytes are what the kernels ask for on v6e, given the ids, distinct rows and bags that the
host routed to each stack (`tests/sharding/planner/byte_counts.py`).  Nothing is timed.
"""

from __future__ import annotations

import os

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # ranks activate their own device

import argparse
import platform
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table as Printed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recsys_tpu.sharding.planner import ShardingType
from tests.sharding.planner.byte_counts import TERMS, counted, modelled
from tests.sharding.planner.strategies import plan_of_type
from tests.sharding.training import Case, Table

TYPES = [kind.value for kind in ShardingType if kind is not ShardingType.DATA_PARALLEL]
TABLES = (
    Table(100_000, 128, ("a",), ""),
    Table(20_000, 64, ("b", "c"), ""),
    Table(3_000, 32, ("d",), ""),
    Table(200, 32, ("e",), ""),
)


def main() -> None:
    """Print model, count and their ratio of each type and term."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "tpu-emulated"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    parser.add_argument("--batch", type=int, default=1024, help="samples over all ranks")
    parser.add_argument("--longest-bag", type=int, default=8, help="bags have 0 to this many ids")
    options = parser.parse_args()
    case = Case(
        TABLES, optimizer="rowwise_adagrad", batch=options.batch, longest_bag=options.longest_bag, steps=1
    )
    hosts = 1 if options.ranks == 2 else 2
    plans = [plan_of_type(case, options.ranks, hosts, ShardingType(kind)) for kind in options.types]
    found_by_plan = counted(case, plans, options.device, timeout_s=24 * 3600)
    out = Printed(title=f"bytes of a step, batch {options.batch}, {options.ranks} ranks: model / counted")
    for column in ("type", "term", "model", "counted", "model / counted"):
        out.add_column(column, justify="left" if column in ("type", "term") else "right")
    for kind, plan, found in zip(options.types, plans, found_by_plan, strict=True):
        predicted = modelled(case, plan)
        for term in TERMS:
            if found[term] or predicted[term]:
                ratio = f"{predicted[term] / found[term]:.3f}" if found[term] else ""
                out.add_row(kind, term, f"{predicted[term]:,.0f}", f"{found[term]:,}", ratio)
    console = Console(width=110)
    console.print(f"{platform.machine()}, {options.device}")
    console.print(out)


if __name__ == "__main__":
    main()
