"""`python -m recsys_tpu.aot --config configs/dlrm.yaml [--chip v6e ...] [--topology v6e:2x4]`."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from recsys_tpu import emulation
from recsys_tpu.aot.compilation import compile_stablehlo
from recsys_tpu.aot.report import StepReport, report_table
from recsys_tpu.chips import CHIPS, chip_of, devices_of
from recsys_tpu.config import Config, load_config
from recsys_tpu.errors import UserError, run_command

_EXAMPLES = """examples:
  python -m recsys_tpu.aot --config configs/dlrm.yaml
  python -m recsys_tpu.aot --config configs/dlrm.yaml --chip v6e model.embedding_dim=128
  python -m recsys_tpu.aot --config configs/dlrm.yaml --topology v6e:2x4 train.batch_size=16384
  python -m recsys_tpu.aot --config configs/dlrm.yaml --topology v5p:2x2x1 --sharding all
  python -m recsys_tpu.aot --config configs/dlrm.yaml --topology v6e:2x2 --sharding row_wise --exchange pallas

No TPU is needed and none is used: what is printed is what libtpu's compiler says of the program, and
bounds that follow from it. Nothing is measured, and no table is materialised.
"""
# v4 can be asked for by name.
_DEFAULT_CHIPS = ("v5e", "v5p", "v6e", "tpu7x")
# TorchRec's names; `aot.tables` gives them a meaning, after torch is imported.
SHARDING_TYPES = (
    "table_wise",
    "column_wise",
    "table_column_wise",
    "row_wise",
    "table_row_wise",
    "grid_shard",
    "data_parallel",
)
IN_ROW_GROUPS = ("table_row_wise", "grid_shard")

ExchangeChoice = Literal["collective", "pallas"]


class CompilationFailed(UserError):
    """libtpu refused the step for a chip."""


def main() -> None:
    arguments = _parser().parse_intermixed_args()
    config = load_config(arguments.config, arguments.overrides)
    own_kernels = arguments.kernels == "chip"
    if arguments.topology is None:
        topologies = [CHIPS[chip].smallest_topology for chip in arguments.chip or _DEFAULT_CHIPS]
        reports = compile_for_chips(config, topologies, own_kernels=own_kernels)
    else:
        asked = arguments.sharding or ["table_wise"]
        reports = compile_for_slice(
            config,
            arguments.topology,
            SHARDING_TYPES if "all" in asked else asked,
            exchange=arguments.exchange or config.sharding.exchange,
            own_kernels=own_kernels,
        )
    Console().print(report_table(config, reports))
    if arguments.json:
        arguments.json.write_text(json.dumps([report.as_dict() for report in reports], indent=1))
    failed = [report for report in reports if not report.compiled.ok]
    if failed:
        raise CompilationFailed(
            "\n".join(
                f"{report.compiled.topology} {report.sharding or ''}: {report.compiled.error}"
                for report in failed
            )
        )


def _parser() -> argparse.ArgumentParser:
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
        "--sharding",
        action="append",
        choices=[*SHARDING_TYPES, "all"],
        help="with --topology: how all tables are sharded (default: table_wise)",
    )
    parser.add_argument(
        "--exchange",
        choices=["collective", "pallas"],
        help="with --topology: XLA's collectives or our kernels for pooled rows (default: sharding.exchange)",
    )
    parser.add_argument(
        "--kernels",
        choices=["chip", "xla"],
        default="chip",
        help="the chip's own embedding kernels (Pallas), or XLA's gathers and scatters",
    )
    parser.add_argument("--json", type=Path, help="write the reports to this file as well")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides of the config")
    return parser


def compile_for_chips(config: Config, topologies: Sequence[str], *, own_kernels: bool) -> list[StepReport]:
    """Lower and compile the train step for one device of each topology.

    Activates the emulated device: call it before torch is imported.

    Raises:
        ConfigError: the table sizes are not known, or the step cannot be built.
        TopologyError: a topology names no known chip.
    """
    chips = [chip_of(topology).name for topology in topologies]
    emulation.activate()
    from recsys_tpu.aot.lowering import lower
    from recsys_tpu.aot.step import build_step

    reports = []
    with _settings(config, own_kernels=own_kernels):
        step = build_step(config)
        for topology, chip in zip(topologies, chips, strict=True):
            text = lower(step.function, list(step.arguments.values()), chip=chip)
            compiled = compile_stablehlo(text, topology, aliases=step.aliases)
            reports.append(StepReport(compiled, None, step.table_bytes))
    return reports


def compile_for_slice(
    config: Config,
    topology: str,
    shardings: Sequence[str],
    *,
    exchange: ExchangeChoice,
    own_kernels: bool,
) -> list[StepReport]:
    """Lower and compile the train step for all devices of a slice, once for each way to shard its tables.

    Activates the emulated device: call it before torch is imported.

    Args:
        shardings: of `SHARDING_TYPES`.
        exchange: as `sharding.exchange` of a config.

    Raises:
        ConfigError: the table sizes are not known, or the step cannot be built.
        TopologyError, PlanInputError: there is no such slice.
    """
    devices = devices_of(topology)
    emulation.activate(slice_size=devices)
    from recsys_tpu.aot.lowering import lower
    from recsys_tpu.aot.slice_group import slice_of
    from recsys_tpu.aot.step import build_step

    grouped = any(kind in IN_ROW_GROUPS for kind in shardings)
    reports = []
    with _settings(config, own_kernels=own_kernels), slice_of(topology, grouped=grouped) as ranks:
        for sharding in shardings:
            transport: Literal["kernel", "collective"] = "kernel" if exchange == "pallas" else "collective"
            step = build_step(config, ranks=ranks, sharding=sharding, transport=transport)
            text = lower(step.function, list(step.arguments.values()), chip=chip_of(topology).name)
            compiled = compile_stablehlo(text, topology, devices, aliases=step.aliases)
            reports.append(StepReport(compiled, sharding, step.table_bytes))
    return reports


@contextlib.contextmanager
def _settings(config: Config, *, own_kernels: bool) -> Iterator[None]:
    import torch

    from recsys_tpu.kernels.variants import Variant, force_variant

    torch.set_float32_matmul_precision(config.runtime.matmul_precision)
    with contextlib.nullcontext() if own_kernels else force_variant(Variant.XLA):
        yield


if __name__ == "__main__":
    run_command(main)
