"""Fused tables beside tables with a dense gradient, the scheme of TorchRec's UNFUSED_TPU, emulated.

    python benchmarks/dense_gradient_tables.py --rows 10000 100000 1000000

UNFUSED_TPU itself does not run without a TPU: its Pallas lookups are compiled for the chip (the first line
printed is the error).  What can be compared here is its scheme: autograd makes a gradient as large as the
table, and an optimizer walks over all of it; its lookup is replaced by XLA's own gather and segment sum.
Times are of XLA on this CPU: read the ratios and how they grow with the table, not the milliseconds.
Memory is what a step needs beside table and optimizer state, by shapes.
"""

# The device is chosen before torch is imported.
# ruff: noqa: E402

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable

from recsys_tpu.runtime import activation

activation.activate("tpu-emulated")

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.batched_embedding_kernel import BatchedTPUEmbeddingBag
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.embeddings.bags import to_device
from recsys_tpu.embeddings.capacity import rung
from recsys_tpu.embeddings.fused_params import parse_fused_params
from recsys_tpu.embeddings.fused_tables import FusedTables, PooledInput
from recsys_tpu.embeddings.preparation import sort_ids
from recsys_tpu.embeddings.stacks import LocalTable

DEVICE = torch.device("tpu", 0)
RATE = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--bag", type=int, default=4, help="ids of a bag")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores; XLA on the CPU, no TPU; {vars(arguments)}")
    print(f"TorchRec UNFUSED_TPU here: {unfused_error(arguments)}")
    for rows in arguments.rows:
        compare(rows, arguments)


def unfused_error(arguments: argparse.Namespace) -> str:
    """What TorchRec's kernel says on this device; its table's change, should it run one day."""
    table = ShardedEmbeddingTable(
        num_embeddings=1000,
        embedding_dim=arguments.dim,
        name="t",
        embedding_names=["f"],
        feature_names=["f"],
        data_type=DataType.FP32,
        pooling=PoolingType.SUM,
        is_weighted=False,
        has_feature_processor=False,
        local_rows=1000,
        local_cols=arguments.dim,
        compute_kernel=EmbeddingComputeKernel.UNFUSED_TPU,
        fused_params={},
    )
    config = GroupedEmbeddingConfig(
        data_type=DataType.FP32,
        pooling=PoolingType.SUM,
        is_weighted=False,
        has_feature_processor=False,
        compute_kernel=EmbeddingComputeKernel.UNFUSED_TPU,
        embedding_tables=[table],
        fused_params={},
    )
    features = KeyedJaggedTensor(keys=["f"], values=torch.arange(8), lengths=torch.full((4,), 2))
    try:
        import torchrec.experimental.torch_tpu.pallas.impl  # noqa: F401  (registers its lookups)

        kernel = BatchedTPUEmbeddingBag(config, None, DEVICE)
        kernel(features.to(DEVICE)).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "runs"


def compare(rows: int, arguments: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    lengths = np.full(arguments.samples, arguments.bag)
    ids = rng.integers(0, rows, lengths.sum())
    target = torch.ones(arguments.samples, arguments.dim, device=DEVICE)
    start = torch.from_numpy(rng.normal(size=(rows, arguments.dim)).astype(np.float32))

    params = parse_fused_params({"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": RATE})
    fused = FusedTables(
        [LocalTable("t", rows, arguments.dim)], [0], dtype=torch.float32, params=params, device=DEVICE
    )
    fused.split_embedding_weights()[0].copy_(start.to(DEVICE))
    sorted_ids = sort_ids(ids, num_bags=arguments.samples, num_rows=rows, lengths=lengths)
    batch = to_device(sorted_ids.pad(rung(len(ids)), rung(sorted_ids.sizes[1])), DEVICE)

    def fused_step() -> None:
        output = fused(PooledInput(arguments.samples, [batch]))
        (output - target).square().mean().backward()

    dense = torch.nn.Parameter(start.to(DEVICE))
    optimizer = torch.optim.Adagrad([dense], lr=RATE, eps=1e-8)
    positions, bags = torch.from_numpy(ids).to(DEVICE), batch.bags[: len(ids)].long()

    def dense_step() -> None:
        optimizer.zero_grad()
        output = torch.zeros(arguments.samples, arguments.dim, device=DEVICE)
        output = output.index_add(0, bags, dense.index_select(0, positions))
        (output - target).square().mean().backward()
        optimizer.step()

    seconds = side_by_side({"fused": fused_step, "dense": dense_step}, arguments.rounds)
    fused.flush()
    trained = fused.split_embedding_weights()[0].cpu()
    difference = float((trained - dense.detach().cpu()).abs().max())
    changed = int((trained != start).any(1).sum())
    gradient = rows * arguments.dim * 4
    touched = batch.unique_rows.shape[0] * arguments.dim * 4
    print(
        f"{rows:>10,} rows: fused {seconds['fused'] * 1e3:8.1f} ms, dense {seconds['dense'] * 1e3:8.1f} ms, "
        f"ratio {seconds['dense'] / seconds['fused']:5.1f}; gradient buffer {touched / 1e6:.1f} MB against "
        f"{gradient / 1e6:.1f} MB; rows changed {changed:,}; tables differ by {difference:.1e}"
    )


def side_by_side(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Best of `rounds` after two that compile, taking turns."""
    best = dict.fromkeys(steps, float("inf"))
    for turn in range(rounds + 2):
        for name, step in steps.items():
            torch.accelerator.synchronize()
            began = time.perf_counter()
            step()
            torch.accelerator.synchronize()
            if turn >= 2:
                best[name] = min(best[name], time.perf_counter() - began)
    return best


if __name__ == "__main__":
    main()
