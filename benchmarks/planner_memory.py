"""HBM that the planner predicts beside HBM that libtpu's compiler reports for the same step.

    python -m recsys_tpu.aot --config configs/dlrm.yaml --json aot.json
    python benchmarks/planner_memory.py --config configs/dlrm.yaml aot.json
    python -m recsys_tpu.aot --config configs/dlrm.yaml --topology v6e:2x2 --json slice.json
    python benchmarks/planner_memory.py --config configs/dlrm.yaml slice.json

The step that is compiled places tables whole, largest first on the emptiest rank; so does the plan here.
Bytes are the compiler's: nothing ran.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from recsys_tpu.config import dump_config, load_config
from recsys_tpu.sharding.planner import (
    Plan,
    ShardingType,
    TablePlan,
    Topology,
    Workload,
    estimate,
    parse_topology,
)
from recsys_tpu.sharding.planner.inputs import read_workload

MIB = 2**20


def table_wise(workload: Workload, topology: Topology) -> Plan:
    """Tables whole, largest first on the rank with fewest rows among those with room for one more."""
    most = -(-len(workload.tables) // topology.ranks)
    rows, count = [0] * topology.ranks, [0] * topology.ranks
    owner = {}
    for table in sorted(workload.tables, key=lambda one: -one.rows):
        rank = min((r for r in range(topology.ranks) if count[r] < most), key=rows.__getitem__)
        owner[table.name] = rank
        rows[rank] += table.rows
        count[rank] += 1
    tables = tuple(
        TablePlan(
            name=table.name,
            rows=table.rows,
            dim=table.dim,
            kind=ShardingType.TABLE_WISE,
            column_shards=((owner[table.name], table.dim),),
        )
        for table in workload.tables
    )
    return Plan(topology=topology, row_group=topology.row_groups[0].ranks, tables=tables)


def predicted(config: Path, topology: Topology) -> tuple[float, dict[str, float]]:
    """Bytes of the fullest rank, and its terms."""
    workload = read_workload(config, topology.ranks)
    numbers = estimate(table_wise(workload, topology), workload)
    worst = int(numbers.memory.argmax())
    terms = {name: float(numbers.terms[name][worst]) for name in ("weights", "state", "buffers")}
    return float(numbers.memory.max()), {**terms, **numbers.fixed_memory}


def main() -> None:
    """Print both for each report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("reports", type=Path, help="of python -m recsys_tpu.aot --json")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as given to recsys_tpu.aot")
    options = parser.parse_intermixed_args()
    out = Table(title="HBM of one chip, MiB")
    for column in ("compiled for", "predicted", "compiler's peak", "predicted / peak", "predicted terms"):
        out.add_column(column, justify="left" if column in ("compiled for", "predicted terms") else "right")
    with tempfile.TemporaryDirectory() as folder:
        resolved = Path(folder) / "config.yaml"
        resolved.write_text(dump_config(load_config(options.config, options.overrides)), encoding="utf-8")
        for report in json.loads(options.reports.read_text()):
            name = report["topology"]
            if report["error"]:
                out.add_row(name, "", "", "", f"not compiled: {report['error'][:60]}")
                continue
            topology = parse_topology(name)
            if report["num_devices"] == 1:
                one = (1,) * len(topology.shape)
                device = replace(topology.chip, devices=1)
                topology = Topology(
                    chip=device, shape=one, wrap=(False,) * len(one), slices=1, host_shape=one
                )
            mine, terms = predicted(resolved, topology)
            out.add_row(
                f"{name}, {report['num_devices']} device(s)",
                f"{mine / MIB:.1f}",
                f"{report['peak_bytes'] / MIB:.1f}",
                f"{mine / report['peak_bytes']:.3f}",
                ", ".join(f"{term} {size / MIB:.1f}" for term, size in terms.items()),
            )
    Console(width=170).print(out)


if __name__ == "__main__":
    main()
