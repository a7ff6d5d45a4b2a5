"""The reports of compiled steps as a table: one column per chip, slice or sharding, figures per device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from recsys_tpu.aot.compilation import CompileReport
from recsys_tpu.aot.roofline import MATMUL_PASSES, Roofline
from recsys_tpu.chips import SOURCE, chip_of
from recsys_tpu.config import Config


@dataclass(frozen=True)
class StepReport:
    """A compiled step.  sharding: None for one device.  table_bytes: tables of one device, without state."""

    compiled: CompileReport
    sharding: str | None
    table_bytes: int

    def as_dict(self) -> dict[str, Any]:
        own = {"ok": self.compiled.ok, "sharding": self.sharding, "table_bytes": self.table_bytes}
        return {**asdict(self.compiled), **own}


def report_table(config: Config, reports: Sequence[StepReport]) -> Table:
    """Nothing in it is measured."""
    precision = config.runtime.precision
    passes = 1 if precision == "bf16" else MATMUL_PASSES[config.runtime.matmul_precision]
    table = Table(
        title=f"train step of batch {config.train.batch_size:,}, per device, compiled by libtpu (not run)",
        caption=f"chip figures: {SOURCE}. FLOPs and bytes as XLA counts them. Roofline with {passes} "
        f"bf16 pass(es) a product ({precision}, matmul precision {config.runtime.matmul_precision}); links "
        "between chips are not in it.",
    )
    table.add_column("")
    for report in reports:
        topology = report.compiled.topology
        table.add_column(report.sharding or chip_of(topology).name, justify="right")
    cells = [_cells(report, passes) for report in reports]
    for name in next((list(c) for c in cells if len(c) > 1), ["compiled"]):
        table.add_row(name, *(c.get(name, "") for c in cells))
    return table


def _cells(report: StepReport, passes: int) -> dict[str, str]:
    compiled = report.compiled
    if not compiled.ok:
        return {"compiled": "failed"}
    chip = chip_of(compiled.topology)
    line = Roofline(chip, compiled.flops, compiled.bytes_accessed, passes)
    return {
        "compiled": f"in {compiled.compile_seconds:.0f} s",
        "topology": compiled.topology,
        "devices": str(compiled.num_devices),
        "FLOPs": f"{compiled.flops / 1e9:,.2f} G",
        "HBM bytes moved": _mebibytes(compiled.bytes_accessed),
        "arguments": _mebibytes(compiled.argument_bytes),
        "of them tables": _mebibytes(report.table_bytes),
        "donated": _mebibytes(compiled.alias_bytes),
        "temporaries": _mebibytes(compiled.temp_bytes),
        "peak": _mebibytes(compiled.peak_bytes),
        "peak of HBM": f"{compiled.peak_bytes / chip.hbm_bytes:.2%}",
        "FLOP / byte": f"{line.arithmetic_intensity:.2f}",
        "roofline time, at least": f"{line.seconds * 1e6:,.0f} us",
        "bound by": line.bound_by,
        "MFU, at most": f"{line.mfu_bound:.2%}",
        "collectives": _counts(compiled.collectives),
        "Mosaic kernels": str(compiled.custom_calls.get("tpu_custom_call", 0)),
    }


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in found.items()) or "none"


def _mebibytes(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"
