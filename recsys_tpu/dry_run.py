"""Check a config of any size without its data or chips: shapes, plan, HBM, and the compiler's word.

`python -m recsys_tpu.train --config CONFIG --dry-run --topology v5p:2x4x4 --topology v6e:8x8`

No table is materialised: the planner counts bytes, the model's towers are traced on the meta device, and the
train step is compiled by libtpu (`recsys_tpu.aot`), all tables sharded by row.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from recsys_tpu.config import ClickDataConfig, Config, TwoTowerConfig, dump_config
from recsys_tpu.data.criteo.schema import DENSE_FEATURES
from recsys_tpu.errors import ConfigError, UserError
from recsys_tpu.sharding.planner import Plan, Topology, make_plan, parse_topology
from recsys_tpu.sharding.planner.estimate import estimate
from recsys_tpu.sharding.planner.inputs import read_workload

GIB = 2**30
_SHARDING = "row_wise"


class DryRunFailed(UserError):
    """Something in the config would fail on the slice."""


@dataclass(frozen=True)
class Check:
    """One line of the result."""

    name: str
    found: str
    ok: bool = True


@dataclass
class _Resources:
    """Peak resident memory of this process and all that it starts, sampled."""

    peak: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        own = psutil.Process()
        while not self.stopped.wait(0.25):
            total = 0
            for process in (own, *own.children(recursive=True)):
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.peak = max(self.peak, total)


def dry_run(
    config: Config, topologies: Sequence[str], console: Console, *, environment: Mapping[str, str]
) -> None:
    """Print what was checked; raises if anything would fail.

    Args:
        topologies: slices, such as ``v6e:8x8``.
        environment: of the compiler's process: as it was before this process chose its device.

    Raises:
        ConfigError: the config is not of a click model, or does not say its table sizes.
        DryRunFailed: a check failed.
    """
    started = time.perf_counter()
    rows = _table_rows(config)
    with _measured() as resources, tempfile.TemporaryDirectory() as scratch:
        resolved = Path(scratch) / "config.yaml"
        resolved.write_text(dump_config(config), encoding="utf-8")
        results = [("model", _model_checks(config, rows))]
        for name in topologies:
            topology = parse_topology(name)
            checks = [*_shape_checks(config, topology), *_plan_checks(resolved, topology)]
            checks += _compile_checks(resolved, name, topology, environment)
            results.append((name, checks))
    _print(results, console)
    console.print(
        f"dry run of {sum(rows.values()):,} rows took {time.perf_counter() - started:,.0f} s and at most "
        f"{resources.peak / GIB:.1f} GiB of memory. Times are roofline bounds, HBM is counted or the "
        "compiler's figure; nothing ran on a chip."
    )
    failed = [
        f"{name}: {check.name}: {check.found}" for name, checks in results for check in checks if not check.ok
    ]
    if failed:
        raise DryRunFailed("\n".join(failed))


def _table_rows(config: Config) -> dict[str, int]:
    if isinstance(config.model, TwoTowerConfig) or not isinstance(config.data, ClickDataConfig):
        raise ConfigError("--dry-run is for click models")
    if config.model.num_embeddings is None:
        raise ConfigError("--dry-run reads no data: give the rows of each table as model.num_embeddings")
    if config.data.multi_hot:
        config.data.multi_hot.check_features(config.model.num_embeddings)
    return config.model.num_embeddings


def _model_checks(config: Config, rows: Mapping[str, int]) -> list[Check]:
    """Trace the towers on the meta device."""
    import torch

    from recsys_tpu.models.build import build_click_model

    assert not isinstance(config.model, TwoTowerConfig) and isinstance(config.data, ClickDataConfig)
    dim, batch = config.model.embedding_dim, 8
    with torch.device("meta"):
        model = build_click_model(config.model, rows, dense_in_features=len(DENSE_FEATURES))
        dense = torch.empty(batch, len(DENSE_FEATURES))
        logits = model.towers(dense, torch.empty(batch, len(rows), dim))
    towers = sum(value.numel() for name, value in model.named_parameters() if "embedding_bags" not in name)
    per_sample = sum(_ids_per_sample(config, feature) for feature in rows)
    multi_hot, total = config.data.multi_hot, sum(rows.values())
    return [
        Check(
            "tables",
            f"{len(rows)}, {total:,} rows of dim {dim}: {4 * dim * total / GIB:,.1f} GiB",
        ),
        Check("dense parameters", f"{towers:,}"),
        Check("ids of a sample", str(per_sample)),
        Check("logits", f"{tuple(logits.shape)} for {batch} samples", tuple(logits.shape) == (batch,)),
        *(
            [Check("multi-hot ids on each host's disk", f"{multi_hot.bytes_on_disk(rows) / 1e9:.1f} GB")]
            if multi_hot
            else []
        ),
    ]


def _ids_per_sample(config: Config, feature: str) -> int:
    assert isinstance(config.data, ClickDataConfig)
    return config.data.multi_hot.sizes.get(feature, 1) if config.data.multi_hot else 1


def _shape_checks(config: Config, topology: Topology) -> list[Check]:
    assert isinstance(config.data, ClickDataConfig)
    ranks, lanes, batch = topology.ranks, config.data.lanes, config.train.batch_size
    return [
        Check("ranks", f"{ranks} on {topology.hosts} hosts"),
        Check("lanes over ranks", f"{lanes} over {ranks}", lanes % ranks == 0),
        Check("batch of a rank", f"{batch:,} over {ranks} = {batch / ranks:,.0f}", batch % ranks == 0),
    ]


def _plan_checks(config: Path, topology: Topology) -> list[Check]:
    workload = read_workload(config, topology.ranks)
    try:
        plan: Plan = make_plan(workload, topology)
    except UserError as error:
        return [Check("plan", str(error), ok=False)]
    numbers = estimate(plan, workload)
    fullest = float(numbers.memory.max())
    kinds: dict[str, int] = {}
    for table in plan.tables:
        kinds[table.kind.value] = kinds.get(table.kind.value, 0) + 1
    return [
        Check("plan", ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))),
        Check(
            "HBM of the fullest rank, planned",
            f"{fullest / GIB:.2f} of {topology.hbm_bytes / GIB:.0f} GiB",
            fullest <= topology.hbm_bytes,
        ),
        Check("step, at least", f"{numbers.step * 1e3:.2f} ms, waits for {numbers.limit}"),
        Check("samples/s, at most", f"{numbers.samples_per_s:,.0f}"),
    ]


def _compile_checks(
    config: Path, name: str, topology: Topology, environment: Mapping[str, str]
) -> list[Check]:
    """The step of all ranks of the slice: with the chip's own kernels, and if they are refused with XLA's."""
    checks = _compiled_with("chip", "compiled, own kernels", config, name, topology, environment)
    if not checks[0].ok:
        checks += _compiled_with("xla", "compiled, XLA's gathers", config, name, topology, environment)
    return checks


def _compiled_with(
    kernels: str,
    title: str,
    config: Path,
    name: str,
    topology: Topology,
    environment: Mapping[str, str],
) -> list[Check]:
    """One ahead-of-time compilation, in a process of its own."""
    report_file = config.with_name("aot.json")
    report_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "recsys_tpu.aot", "--config", str(config), "--topology", name]
    command += ["--sharding", _SHARDING, "--kernels", kernels, "--json", str(report_file)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if not report_file.is_file():
        return [Check(title, (done.stderr or done.stdout).strip()[-2000:], ok=False)]
    (report,) = json.loads(report_file.read_text())
    if report["error"] is not None:
        return [Check(title, str(report["error"])[:2000], ok=False)]
    return [Check(title, f"{_SHARDING}, in {report['compile_seconds']:.0f} s"), *_compiled(report, topology)]


def _compiled(report: dict[str, Any], topology: Topology) -> list[Check]:
    peak = report["peak_bytes"]
    collectives = ", ".join(f"{count} {name}" for name, count in report["collectives"].items())
    return [
        Check(
            "HBM peak, compiled",
            f"{peak / GIB:.2f} of {topology.hbm_bytes / GIB:.0f} GiB "
            f"({report['temp_bytes'] / GIB:.2f} temporary)",
            peak <= topology.hbm_bytes,
        ),
        Check("HBM bytes moved in a step", f"{report['bytes_accessed'] / GIB:.2f} GiB"),
        Check("FLOPs of a step", f"{report['flops'] / 1e12:.2f} T"),
        Check("collectives", collectives or "none"),
    ]


@contextmanager
def _measured() -> Iterator[_Resources]:
    resources = _Resources()
    thread = threading.Thread(target=resources.watch, daemon=True)
    thread.start()
    try:
        yield resources
    finally:
        resources.stopped.set()
        thread.join()


def _print(results: Sequence[tuple[str, Sequence[Check]]], console: Console) -> None:
    for title, checks in results:
        table = Table(title=title, show_header=False, title_justify="left")
        for check in checks:
            table.add_row(check.name, check.found.split("\n")[0], "ok" if check.ok else "FAILS")
        console.print(table)
