"""The planner against what it must hold, and beside TorchRec's own planner in one run.

    python benchmarks/planner.py                                  # all of ours, TorchRec at 8 and 64 ranks
    python benchmarks/planner.py --torchrec 8,64,256,1024 --torchrec-limit 600 --cases ""
    python benchmarks/planner.py --torchrec "" --cases 26         # ours, only cases whose name contains 26

Plan times are of this machine; step times and bytes are roofline estimates, not measurements.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import argparse
import platform
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.table import Table

from recsys_tpu.sharding.planner import (
    Effort,
    InfeasibleError,
    Plan,
    ShardingType,
    TableSpec,
    Workload,
    dlrm_dense_part,
    estimate,
    make_plan,
    parse_topology,
)

# mlcommons/training, recommendation_v2/torchrec_dlrm: rows and multi-hot sizes.
ROWS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155,
    4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
DENSE = dlrm_dense_part(
    embedding_dim=128,
    dense_features=13,
    sparse_features=26,
    bottom_mlp=[512, 256, 128],
    over_mlp=[1024, 1024, 512, 256, 1],
    cross_layers=3,
    cross_rank=512,
)
MLPERF = {8: "v5p:2x2x2", 64: "v5p:4x4x4", 256: "v5p:4x8x8", 1024: "v5p:8x8x16"}


def mlperf(pooling: tuple[int, ...], batch: int) -> Workload:
    """The tables of MLPerf DLRM."""
    tables = tuple(
        TableSpec(name=f"t{i}", rows=rows, dim=128, pooling_factors=(float(ids),))
        for i, (rows, ids) in enumerate(zip(ROWS, pooling, strict=True))
    )
    return Workload(tables=tables, batch_per_rank=batch, dense=DENSE)


def many(count: int, batch: int, seed: int = 0) -> Workload:
    """Log-uniform rows from 100 to 20 million, dims 16 to 128, log-normal pooling factors."""
    random = np.random.default_rng(seed)
    tables = tuple(
        TableSpec(
            name=f"t{i}",
            rows=int(10 ** random.uniform(2, 7.3)),
            dim=int(random.choice([16, 32, 64, 128])),
            pooling_factors=(float(max(1, int(random.lognormal(1, 1)))),),
        )
        for i in range(count)
    )
    return Workload(tables=tables, batch_per_rank=batch, dense=DENSE)


def naive(plan: Plan, workload: Workload) -> str:
    """Our slowest rank against round-robin table-wise and all row-wise (which need not fit in HBM)."""
    ranks = plan.topology.ranks
    mine = float(estimate(plan, workload).time.max())
    ratios = []
    for kind in (ShardingType.TABLE_WISE, ShardingType.ROW_WISE):
        tables = tuple(
            replace(
                t, kind=kind, column_shards=((i % ranks if kind is ShardingType.TABLE_WISE else 0, t.dim),)
            )
            for i, t in enumerate(plan.tables)
        )
        ratios.append(float(estimate(replace(plan, tables=tables), workload).time.max()) / mine)
    return f"{ratios[0]:.1f} / {ratios[1]:.1f}"


def ours(console: Console, cases: list[tuple[str, Workload, str]]) -> None:
    """Plan every case and print what it must hold."""
    out = Table(title="this planner, its own cost model")
    for column in (
        "case", "ranks", "wall s", "CPU s", "slowest us", "bound us", "gap", "slowest/mean", "its bound",
        "HBM max/mean", "HBM max/bound", "round-robin / row-wise against ours",
    ):  # fmt: skip
        out.add_column(column, justify="left" if column == "case" else "right")
    for name, workload, spec in cases:
        topology = parse_topology(spec)
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            plan = make_plan(workload, topology, effort=Effort())
        except InfeasibleError as error:
            console.print(f"{name}: {error}")
            continue
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        s = plan.summary
        out.add_row(
            f"{name} on {spec}",
            f"{topology.ranks:,}",
            f"{wall:.2f}",
            f"{cpu:.2f}",
            f"{s['slowest_rank_s'] * 1e6:.1f}",
            f"{s['time_bound_s'] * 1e6:.1f}",
            f"{s['gap']:.2%}",
            f"{s['slowest_over_mean']:.3f}",
            f"{s['slowest_over_mean_bound']:.3f}" if s["slowest_over_mean_bound"] > 1 else "",
            f"{s['hbm_max_over_mean']:.3f}",
            f"{s['hbm_max_bytes'] / s['hbm_bound_bytes']:.3f}",
            naive(plan, workload),
        )
        print(f"  {name} on {spec}: {wall:.1f} s", file=sys.stderr, flush=True)
    console.print(out)


def beside_torchrec(console: Console, ranks_list: list[int], limit_s: int) -> None:
    """Both planners under TorchRec's cost model, HBM enforced, on slices as TorchRec sees them."""
    import torch
    from torch import nn
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner.perf_models import NoopPerfModel, NoopStorageModel
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    from recsys_tpu.sharding.planner.torchrec_costs import choose_options, torchrec_topology

    out = Table(title="both under TorchRec's cost model, 26 MLPerf tables, batch 2,048 a rank, HBM enforced")
    for column in (
        "slice", "ranks", "TorchRec s", "enumerate s", "our search s", "TorchRec slowest ms",
        "our slowest ms", "ours/theirs", "HBM max GB theirs", "ours",
    ):  # fmt: skip
        out.add_column(column, justify="right")
    tables = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=rows, embedding_dim=128, feature_names=[f"f{i}"])
        for i, rows in enumerate(ROWS)
    ]
    module = nn.ModuleDict({"ebc": EmbeddingBagCollection(device=torch.device("meta"), tables=tables)})
    sharders = [EmbeddingBagCollectionSharder()]
    for ranks in ranks_list:
        topology = torchrec_topology(parse_topology(MLPERF[ranks]))
        planner = EmbeddingShardingPlanner(topology=topology, batch_size=2048)
        started = time.perf_counter()
        finished = within(limit_s, lambda planner=planner: planner.plan(module, sharders))
        theirs_s = time.perf_counter() - started
        theirs = planner.get_selected_options() if finished else None
        fresh = EmbeddingShardingPlanner(topology=topology, batch_size=2048)
        started = time.perf_counter()
        constrained = fresh._storage_reservation.reserve(topology, 2048, module, sharders, None)
        options = fresh._enumerator.enumerate(module, sharders)
        enumerated_s = time.perf_counter() - started
        started = time.perf_counter()
        chosen = choose_options(options, constrained)
        search_s = time.perf_counter() - started
        rate, fullest = NoopPerfModel(topology).rate, NoopStorageModel(topology).rate
        out.add_row(
            MLPERF[ranks],
            f"{ranks:,}",
            f"{theirs_s:.1f}" if finished else f"not done in {limit_s}",
            f"{enumerated_s:.1f}",
            f"{search_s:.1f}",
            f"{rate(theirs):.3f}" if theirs else "",
            f"{rate(chosen):.3f}",
            f"{rate(chosen) / rate(theirs):.3f}" if theirs else "",
            f"{fullest(theirs) / 1e9:.2f}" if theirs else "",
            f"{fullest(chosen) / 1e9:.2f}",
        )
        print(f"  TorchRec at {ranks} ranks: {theirs_s:.1f} s", file=sys.stderr, flush=True)
    console.print(out)


class _TookTooLong(Exception):
    """The alarm of `within`."""


def within(seconds: int, call: Callable[[], object]) -> bool:
    """Whether the call came back in that many seconds; it is stopped if not."""

    def stop(*_: object) -> None:
        raise _TookTooLong

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        call()
    except _TookTooLong:
        return False
    finally:
        signal.alarm(0)
    return True


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--torchrec", default="8,64", help="ranks at which TorchRec's planner runs too; empty: none"
    )
    parser.add_argument("--torchrec-limit", type=int, default=900, help="seconds after which it is stopped")
    parser.add_argument("--cases", help="only cases whose name contains this; empty: none")
    options = parser.parse_args()
    console = Console(width=190)
    load = os.getloadavg()[0]
    console.print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {load:.1f}")
    cases = [
        (f"26 MLPerf tables, multi-hot, {ranks}", mlperf(MULTI_HOT, 2048), spec)
        for ranks, spec in MLPERF.items()
    ]
    cases += [
        (f"26 MLPerf tables, single id, {ranks}", mlperf((1,) * 26, 2048), spec)
        for ranks, spec in MLPERF.items()
    ]
    cases += [
        ("26 MLPerf tables, multi-hot, two slices", mlperf(MULTI_HOT, 2048), "2*v5p:4x4x4"),
        ("500 tables", many(500, 2048), "v5p:4x8x8"),
        ("2,000 tables, 8,192 chips", many(2000, 512), "tpu7x:16x16x32"),
        ("2,000 tables, two slices of 4,096 chips", many(2000, 512), "2*v5p:16x16x16"),
    ]
    if options.cases is not None:
        cases = [case for case in cases if options.cases and options.cases in case[0]]
    if cases:
        ours(console, cases)
    if options.torchrec:
        beside_torchrec(
            console, [int(ranks) for ranks in options.torchrec.split(",")], options.torchrec_limit
        )


if __name__ == "__main__":
    main()
