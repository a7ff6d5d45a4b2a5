"""What an exchange costs: bytes on the links by formula, and the compiled programs beside XLA's own.

    python -m recsys_tpu.kernels.all_to_all.report
    python -m recsys_tpu.kernels.all_to_all.report --compile v6e:2x4 v5p:2x2x2

Nothing here is measured on a chip: bytes come from formulas and from libtpu's compiler.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from recsys_tpu import libtpu
from recsys_tpu.kernels.all_to_all.links import grid_of, link_bytes, sent_bytes

TOPOLOGIES = (
    "v6e:2x2",
    "v6e:2x4",
    "v6e:4x4",
    "v6e:8x8",
    "v6e:16x16",
    "v5p:2x2x1",
    "v5p:2x2x2",
    "v5p:4x4x4",
    "v5p:4x8x8",
    "tpu7x:2x2x1",
    "tpu7x:2x2x2",
    "tpu7x:4x4x4",
)
# MLPerf's DLRM: 26 tables of dim 128; samples of one device.
BATCH, COLUMNS = 2048, 26 * 128
COMPILE_SECONDS = 900


def exchange_report(
    topologies: Sequence[str] = TOPOLOGIES, *, batch: int = BATCH, columns: int = COLUMNS
) -> Table:
    """Bytes of one exchange of pooled embeddings, float32 ``[batch, columns]`` on every device.

    The kernels write to the peer directly, so the chips' routers choose the way.  The bound is met where they
    split the traffic between opposite chips of a ring over its two ways; the last column is the busiest
    link's load relative to the bound where they send all of it the same way round.
    """
    table = Table(
        title=f"Exchange of pooled embeddings, {batch} x {columns} float32 a device: bytes by formula"
    )
    table.add_column("slice")
    for heading in (
        "devices",
        "sent by a device",
        "busiest link, lower bound",
        "with bf16 on the wire",
        "if ties go one way",
    ):
        table.add_column(heading, justify="right")
    for topology in topologies:
        grid = grid_of(topology)
        pair = 4 * batch * columns // grid.devices
        bound = link_bytes(grid, device_pair_bytes=pair)
        one_way = link_bytes(grid, device_pair_bytes=pair, split_ties=False)
        table.add_row(
            topology,
            str(grid.devices),
            _megabytes(sent_bytes(grid, device_pair_bytes=pair)),
            _megabytes(bound),
            _megabytes(bound / 2),
            f"x {one_way / bound:.2f}",
        )
    return table


def compiled_report(topology: str, *, batch: int = BATCH, columns: int = COLUMNS) -> Table:
    """Our kernels and XLA's collectives for the same exchange, as libtpu compiled them for a slice.

    Raises RuntimeError with what the compiler said if it fails.
    """
    devices = grid_of(topology).devices
    elements = batch * columns // devices
    run = subprocess.run(
        [sys.executable, "-m", "recsys_tpu.kernels.all_to_all.slices", topology, str(elements // 128), "128"],
        env=libtpu.environment(),
        capture_output=True,
        text=True,
        timeout=COMPILE_SECONDS,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"{topology}: {run.stderr.strip().splitlines()[-1]}")
    table = Table(title=f"{topology}, {devices} devices: as compiled by libtpu, one device")
    table.add_column("exchange")
    table.add_column("by")
    for heading in ("payload", "leaves the device", "temporaries", "DMA semaphores", "VMEM", "entry barrier"):
        table.add_column(heading, justify="right")
    programs: dict[str, list[dict[str, Any]]] = json.loads(run.stdout.splitlines()[-1])
    for exchange, (kernel, xla) in programs.items():
        payload = kernel["argument_bytes"]
        travels = payload * (devices - 1) / devices / (2 if "bf16" in exchange else 1)
        table.add_row(
            exchange,
            "kernel",
            _megabytes(payload),
            _megabytes(travels),
            _megabytes(kernel["temp_bytes"]),
            str(kernel["semaphores"]),
            _megabytes(kernel["vmem_bytes"]),
            "yes" if kernel["entry_barrier"] else "NO",
        )
        collective = ", ".join(xla["collectives"]) if xla["readable"] else "not printable"
        table.add_row("", f"XLA ({collective})", _megabytes(payload), "", _megabytes(xla["temp_bytes"]))
    return table


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.2f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=BATCH, help="samples of one device")
    parser.add_argument("--columns", type=int, default=COLUMNS, help="sum of the dims of all tables")
    parser.add_argument("--compile", nargs="*", default=[], metavar="SLICE", help="also compile for these")
    options = parser.parse_args()
    console = Console()
    sizes = {"batch": options.batch, "columns": options.columns}
    console.print(exchange_report(**sizes))
    for topology in options.compile:
        console.print(compiled_report(topology, **sizes))


if __name__ == "__main__":
    main()
