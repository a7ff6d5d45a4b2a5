"""`python -m recsys_tpu.aot --config configs/dlrm.yaml [--chip v6e ...] [--topology v6e:2x4]`."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from recsys_tpu import emulation
from recsys_tpu.aot.compilation import CompileReport, compile_stablehlo
from recsys_tpu.aot.roofline import MATMUL_PASSES, Roofline
from recsys_tpu.chips import CHIPS, SOURCE, chip_of, devices_of
from recsys_tpu.config import Config, load_config
from recsys_tpu.data.metadata import DatasetMetadata
from recsys_tpu.data.synthetic import NUM_DENSE
from recsys_tpu.errors import ConfigError, UserError, run_command

_EXAMPLES = """examples:
  python -m recsys_tpu.aot --config configs/dlrm.yaml
  python -m recsys_tpu.aot --config configs/dlrm.yaml --chip v6e model.embedding_dim=128
  python -m recsys_tpu.aot --config configs/dlrm.yaml --topology v6e:2x4 train.batch_size=16384

No TPU is needed and none is used: what is printed is what libtpu's compiler says of the program, and
bounds that follow from it. Nothing is measured.
"""


# v4 can be asked for by name.
_DEFAULT_CHIPS = ("v5e", "v5p", "v6e", "tpu7x")


class CompilationFailed(UserError):
    """libtpu refused the step for a chip."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recsys_tpu.aot",
        description="Compile the train step of a config for TPU chips, with no TPU.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML config")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--chip",
        action="append",
        choices=list(CHIPS),
        help=f"one device of it (default: {', '.join(_DEFAULT_CHIPS)})",
    )
    where.add_argument("--topology", help="a slice, such as v6e:2x4: the sharded step with its collectives")
    parser.add_argument(
        "--kernels",
        choices=["chip", "xla"],
        default="chip",
        help="the chip's own embedding kernels (Pallas), or XLA's gathers and scatters",
    )
    parser.add_argument("--json", type=Path, help="write the reports to this file as well")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides of the config")
    arguments = parser.parse_intermixed_args()
    config = load_config(arguments.config, arguments.overrides)
    topologies = [arguments.topology] if arguments.topology else None
    reports = compile_step(
        config,
        topologies or [CHIPS[chip].smallest_topology for chip in arguments.chip or _DEFAULT_CHIPS],
        sharded=bool(arguments.topology),
        own_kernels=arguments.kernels == "chip",
    )
    Console().print(report_table(config, reports, sharded=bool(arguments.topology)))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(report) for report in reports], indent=1))
    failed = [report for report in reports if not report.ok]
    if failed:
        raise CompilationFailed("\n".join(f"{report.topology}: {report.error}" for report in failed))


def compile_step(
    config: Config, topologies: list[str], *, sharded: bool, own_kernels: bool
) -> list[CompileReport]:
    """Lower and compile the train step for one device of each topology, or (`sharded`) for all of one.

    Activates the emulated device: call it before torch is imported.

    Raises:
        ConfigError: the table sizes are not known, or the step cannot be built.
        ValueError: a topology names no known chip.
    """
    num_embeddings, dense_in_features = table_sizes(config)
    world_size = devices_of(topologies[0]) if sharded else 1
    emulation.activate(slice_size=world_size)
    import torch

    from recsys_tpu.aot.lowering import lower
    from recsys_tpu.aot.slice_group import slice_group
    from recsys_tpu.aot.step import build_step
    from recsys_tpu.kernels.variants import Variant, force_variant

    torch.set_float32_matmul_precision(config.runtime.matmul_precision)
    reports = []
    with contextlib.ExitStack() as stack:
        if world_size > 1:
            stack.enter_context(slice_group(world_size))
        if not own_kernels:
            stack.enter_context(force_variant(Variant.XLA))
        step = build_step(config, num_embeddings, dense_in_features=dense_in_features, world_size=world_size)
        for topology in topologies:
            text = lower(step.function, list(step.arguments.values()), chip=chip_of(topology).name)
            reports.append(compile_stablehlo(text, topology, world_size, aliases=step.aliases))
    return reports


def table_sizes(config: Config) -> tuple[Mapping[str, int], int]:
    """(rows of each table by feature, number of dense features), without reading any data.

    Raises:
        ConfigError: only the data would tell.
    """
    data = config.data
    if data.kind == "parquet" and data.path is not None:
        metadata = DatasetMetadata.load(data.path)
        return getattr(config.model, "num_embeddings", None) or metadata.num_embeddings, len(
            metadata.dense_features
        )
    sizes = getattr(config.model, "num_embeddings", None)
    if data.kind == "synthetic":
        log = data.synthetic
        return sizes or dict(zip(log.sparse_features, log.num_embeddings, strict=True)), NUM_DENSE
    if sizes is None:
        raise ConfigError(f"data.kind={data.kind}: give the rows of each table as model.num_embeddings")
    return sizes, NUM_DENSE


def report_table(config: Config, reports: list[CompileReport], *, sharded: bool) -> Table:
    """One column per chip or slice; figures are per device."""
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
        table.add_column(f"{report.topology}" if sharded else chip_of(report.topology).name, justify="right")
    cells = [_cells(report, passes) for report in reports]
    for name in next((list(c) for c in cells if len(c) > 1), ["compiled"]):
        table.add_row(name, *(c.get(name, "") for c in cells))
    return table


def _cells(report: CompileReport, passes: int) -> dict[str, str]:
    if not report.ok:
        return {"compiled": "failed"}
    chip = chip_of(report.topology)
    line = Roofline(chip, report.flops, report.bytes_accessed, passes)
    return {
        "compiled": f"in {report.compile_seconds:.0f} s",
        "devices": str(report.num_devices),
        "FLOPs": f"{report.flops / 1e9:,.2f} G",
        "HBM bytes moved": _mebibytes(report.bytes_accessed),
        "arguments": _mebibytes(report.argument_bytes),
        "of them donated": _mebibytes(report.alias_bytes),
        "temporaries": _mebibytes(report.temp_bytes),
        "peak": _mebibytes(report.peak_bytes),
        "peak of HBM": f"{report.peak_bytes / chip.hbm_bytes:.2%}",
        "FLOP / byte": f"{line.arithmetic_intensity:.2f}",
        "roofline time, at least": f"{line.seconds * 1e6:,.0f} us",
        "bound by": line.bound_by,
        "MFU, at most": f"{line.mfu_bound:.2%}",
        "collectives": ", ".join(f"{n} {name}" for name, n in report.collectives.items()) or "none",
        "Mosaic kernels": str(report.custom_calls.get("tpu_custom_call", 0)),
    }


def _mebibytes(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


if __name__ == "__main__":
    run_command(main)
