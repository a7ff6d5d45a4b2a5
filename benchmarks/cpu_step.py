"""A training step of ours beside TorchRec's and beside the dense towers alone, on the CPU, taking turns.

    python benchmarks/cpu_step.py                    # both shapes
    python benchmarks/cpu_step.py --shape embedding --profile

dlrm       26 tables of 100,000 rows, dim 64, one id a bag, MLPs 512-256 and 512-512-256: bound by its towers
embedding  the same tables, 20 ids a bag, MLPs 64 and 64: bound by its tables

Ours is the trainer's step (sharder, host preparation a batch ahead, compiled towers).  TorchRec's is its
DLRM, its EmbeddingBagCollection under DistributedModelParallel with fused row-wise Adagrad, and
TrainPipelineSparseDist.  The dense step is our towers, compiled, on looked-up rows that are given, forward,
backward and optimizer.  All take the same batches, made beforehand, and the same optimizers.  Wall time on
a shared machine says little; CPU time (of all threads) is printed beside it.
"""

# ruff: noqa: E402 (the device is chosen before torch is imported)
from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recsys_tpu.runtime.activation import activate

activate("cpu")

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec_dlrm import stock_dlrm, torchrec_batch

from recsys_tpu.config import Config
from recsys_tpu.data.batch import Batch
from recsys_tpu.embeddings.initialization import initialize_tables
from recsys_tpu.models.build import build_click_model
from recsys_tpu.models.settings import DLRMConfig
from recsys_tpu.optimizers import build_optimizer, fuse_table_optimizer
from recsys_tpu.quiet import quiet_libraries
from recsys_tpu.runtime import Runtime
from recsys_tpu.sharding.pipeline import host_times, prepared_ahead
from recsys_tpu.sharding.placement import shard_model

FEATURES, DENSE = 26, 13
RATE, EPS = 0.02, 1e-8


@dataclass(frozen=True)
class Shape:
    rows: int
    dim: int
    pooling: int
    bottom_mlp: tuple[int, ...]
    over_mlp: tuple[int, ...]


SHAPES = {
    "dlrm": Shape(100_000, 64, 1, (512, 256), (512, 512, 256)),
    "embedding": Shape(100_000, 64, 20, (64,), (64,)),
}
Step = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--skew", type=float, default=0.0, help="Zipf exponent of the ids; 0: uniform")
    parser.add_argument("--steps", type=int, default=8, help="steps of one turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each; medians are printed")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--profile", action="store_true", help="operators of our step and of TorchRec's")
    parser.add_argument("--output", type=Path, help="JSON of all turns")
    arguments = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(arguments.threads)
    print(f"command: {' '.join(sys.argv)}")
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, {arguments.threads} threads")
    results = {name: compare(name, SHAPES[name], arguments) for name in arguments.shape}
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def compare(name: str, shape: Shape, arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    batches = make_batches(shape, arguments)
    with tempfile.TemporaryDirectory() as folder:
        config = Config.model_validate(
            {
                "run": {"output_dir": folder},
                "runtime": {"device": "cpu"},
                "train": {"batch_size": arguments.batch_size},
                "optimizer": {
                    "sparse": {"kind": "rowwise_adagrad", "learning_rate": RATE, "eps": EPS},
                    "dense": {"kind": "adagrad", "learning_rate": RATE, "eps": EPS},
                },
            }
        )
        with Runtime.start(config.runtime) as runtime:
            model, ours = our_step(shape, batches, runtime, config)
            steps = {
                "ours": ours,
                "dense only": dense_step(shape, batches, runtime, config),
                "torchrec": torchrec_step(shape, batches, config),
            }
            if arguments.profile:
                for one in ("ours", "torchrec"):
                    profile(one, steps[one])
            turns = take_turns(steps, arguments)
            overlap = host_times(model).overlap
    report(name, turns, arguments.batch_size, overlap)
    return turns


def make_batches(shape: Shape, arguments: argparse.Namespace, number: int = 4) -> list[Batch]:
    rng = np.random.default_rng(0)
    size, result = arguments.batch_size, []
    for _ in range(number):
        count = FEATURES * size * shape.pooling
        if arguments.skew:
            ids = (rng.zipf(arguments.skew, count) * 7919) % shape.rows
        else:
            ids = rng.integers(0, shape.rows, count)
        sparse = KeyedJaggedTensor(
            keys=[f"f{index}" for index in range(FEATURES)],
            values=torch.from_numpy(ids.astype(np.int32)),
            lengths=torch.full((FEATURES * size,), shape.pooling, dtype=torch.int32),
            stride=size,
        )
        dense = torch.from_numpy(rng.standard_normal((size, DENSE), np.float32))
        labels = torch.from_numpy(rng.integers(0, 2, size).astype(np.float32))
        result.append(Batch(dense, sparse, labels, torch.ones(size), size))
    return result


def build(shape: Shape) -> Any:
    torch.manual_seed(0)
    config = DLRMConfig(
        embedding_dim=shape.dim, bottom_mlp=list(shape.bottom_mlp), over_mlp=list(shape.over_mlp)
    )
    rows = {f"f{index}": shape.rows for index in range(FEATURES)}
    return build_click_model(config, rows, dense_in_features=DENSE)


def our_step(shape: Shape, batches: list[Batch], runtime: Runtime, config: Config) -> tuple[nn.Module, Step]:
    plain = build(shape)
    tables = plain.sparse_arch.embedding_bag_collection
    configs = {table.name: table for table in tables.embedding_bag_configs()}
    fuse_table_optimizer(tables, config.optimizer.sparse)
    plain.compile_towers(runtime.compile)
    model = shard_model(plain, runtime, config)
    initialize_tables(model.state_dict(), configs, 0)
    optimizer = build_optimizer(model, config.optimizer.dense)
    # a batch of its own each time: one that is prepared already cannot be announced again
    endless = (fresh(batch) for batch in itertools.cycle(batches))
    ready = prepared_ahead(model, endless, features_of=lambda batch: batch.sparse)

    def step() -> None:
        batch = next(ready)
        optimizer.zero_grad()
        loss = loss_of(model(batch.dense, batch.sparse), batch.labels)
        loss.item()  # as the trainer, which stops at a loss that is no number
        loss.backward()
        optimizer.step()

    return model, step


def fresh(batch: Batch) -> Batch:
    sparse = KeyedJaggedTensor(
        keys=batch.sparse.keys(),
        values=batch.sparse.values(),
        lengths=batch.sparse.lengths(),
        stride=batch.sparse.stride(),
    )
    return Batch(batch.dense, sparse, batch.labels, batch.weights, batch.global_rows)


def dense_step(shape: Shape, batches: list[Batch], runtime: Runtime, config: Config) -> Step:
    plain = build(shape)
    towers = runtime.compile(plain.towers)
    parameters = [p for name, p in plain.named_parameters() if "embedding_bags" not in name]
    rate = config.optimizer.dense
    optimizer = torch.optim.Adagrad(parameters, lr=rate.learning_rate, eps=rate.eps)
    rows = torch.randn(len(batches[0].labels), FEATURES, shape.dim)
    endless = itertools.cycle(batches)

    def step() -> None:
        batch = next(endless)
        optimizer.zero_grad()
        loss = loss_of(towers(batch.dense, rows.detach().requires_grad_()), batch.labels)
        loss.item()
        loss.backward()
        optimizer.step()

    return step


def torchrec_step(shape: Shape, batches: list[Batch], config: Config) -> Step:
    torch.manual_seed(0)
    stock = stock_dlrm(
        {f"f{index}": shape.rows for index in range(FEATURES)},
        embedding_dim=shape.dim,
        dense_in_features=DENSE,
        bottom_mlp=shape.bottom_mlp,
        over_mlp=shape.over_mlp,
        dense=config.optimizer.dense,
        sparse=config.optimizer.sparse,
    )
    endless = itertools.cycle([torchrec_batch(batch) for batch in batches])

    def step() -> None:
        stock.step(endless)

    return step


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def take_turns(steps: dict[str, Step], arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Milliseconds of wall and CPU time a step, of every turn."""
    for step, _ in itertools.product(steps.values(), range(3)):
        step()
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            step()  # brings the caches, and the preparation ahead, back to where they are in a run
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(arguments.steps):
                step()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            turns[name].append(
                {"wall_ms": 1e3 * wall / arguments.steps, "cpu_ms": 1e3 * cpu / arguments.steps}
            )
    return turns


def report(shape: str, turns: dict[str, list[dict[str, float]]], batch_size: int, overlap: float) -> None:
    wall, cpu = (
        {name: statistics.median(turn[kind] for turn in of_name) for name, of_name in turns.items()}
        for kind in ("wall_ms", "cpu_ms")
    )
    print(f"\n{shape}, batch {batch_size:,}; medians of {len(turns['ours'])} turns")
    print(f"{'':12} {'wall ms':>9} {'CPU ms':>9} {'samples/s':>10}")
    for name in turns:
        print(f"{name:12} {wall[name]:9.1f} {cpu[name]:9.1f} {batch_size / wall[name] * 1e3:10,.0f}")
    for what, times in (("wall", wall), ("CPU", cpu)):
        whole, stock = times["ours"] / times["dense only"], times["torchrec"] / times["ours"]
        print(f"{what}: our step is {whole:.2f} x the dense step; TorchRec's is {stock:.2f} x ours")
    print(f"our preparation of ids: {overlap:.0%} of it ran beside the steps")


def profile(name: str, step: Step) -> None:
    for _ in range(3):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        for _ in range(3):
            step()
    print(f"\n{name}, three steps")
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=22, max_name_column_width=50))


if __name__ == "__main__":
    main()
