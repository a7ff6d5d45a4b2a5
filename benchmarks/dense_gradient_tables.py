"""Fused tables beside TorchRec's UNFUSED_TPU on the emulated device: step time, memory, trained tables.

    python benchmarks/dense_gradient_tables.py --rows 10000 100000 1000000

UNFUSED_TPU's module (TPUEmbeddingBagUnfused), its backward and its autograd are TorchRec's; only the Pallas
lookup, which is compiled for a chip, is replaced by the same sum in plain JAX.  Its backward makes a gradient
as large as the table, and the optimizer walks over all of it.  Times are of XLA on this CPU: read the ratios
and how they grow with the table, not the milliseconds.  Memory is what a step needs beside table and
optimizer state, by shapes.  The last line says what a model that TorchRec shards with this kernel trains.
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

import jax
import jax.numpy as jnp
import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.experimental.torch_tpu.modules.embedding_modules import TPUEmbeddingBagUnfused
from torchrec.experimental.torch_tpu.pallas import pooled_lookup_offset
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
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
    use_plain_lookup()
    for rows in arguments.rows:
        compare(rows, arguments)
    print(f"a model sharded by TorchRec with UNFUSED_TPU, one step of SGD: {sharded_by_torchrec()}")


def use_plain_lookup() -> None:
    """TorchRec's lookups with a sum that every device computes in the place of its SparseCore kernel."""

    def lookup(indices: jax.Array, offsets: jax.Array, dev_weights: jax.Array, emb_dim: int) -> jax.Array:
        places = jnp.arange(indices.shape[0], dtype=offsets.dtype)
        bags = jnp.searchsorted(offsets[1:], places, side="right")
        pooled = jnp.zeros((offsets.shape[0] - 1, emb_dim), dev_weights.dtype)
        return pooled.at[bags].add(dev_weights[indices])

    pooled_lookup_offset.embedding_pooled_lookup_jax = lookup
    import torchrec.experimental.torch_tpu.pallas.impl  # noqa: F401  (registers the lookups, with ours)


def sharded_by_torchrec() -> str:
    """Whether a step of the optimizer that a user would make changes the table."""
    try:
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        config = EmbeddingBagConfig(num_embeddings=64, embedding_dim=16, name="t", feature_names=["f"])
        ebc = EmbeddingBagCollection(tables=[config], device=torch.device("cpu"))
        sharder = EmbeddingBagCollectionSharder()
        plan = construct_module_sharding_plan(
            ebc,
            {"t": table_wise(rank=0, compute_kernel="unfused_tpu")},
            sharder=sharder,
            local_size=1,
            world_size=1,
            device_type="tpu",
        )
        model = DistributedModelParallel(
            torch.nn.Sequential(ebc),
            env=ShardingEnv.from_process_group(torch.distributed.group.WORLD),
            device=DEVICE,
            plan=ShardingPlan({"0": plan}),
            sharders=[sharder],
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        (before,) = [shard.tensor.cpu().clone() for shard in shards_of(model)]
        offsets = torch.arange(0, 9, 2, dtype=torch.int32)
        features = KeyedJaggedTensor(
            keys=["f"], values=torch.arange(8), lengths=torch.full((4,), 2), offsets=offsets
        )
        model(features.to(DEVICE)).values().sum().backward()
        optimizer.step()
        (after,) = [shard.tensor.cpu() for shard in shards_of(model)]
    except Exception as error:
        return f"not run here, {type(error).__name__}: {str(error).splitlines()[0]}"
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    return f"{int((after != before).any(1).sum())} of 8 rows changed; its parameters have shapes {shapes}"


def shards_of(model: DistributedModelParallel) -> list:
    (value,) = model.state_dict().values()
    return value.local_shards()


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

    theirs = TPUEmbeddingBagUnfused(rows, arguments.dim, DEVICE, torch.float32, mode="sum")
    with torch.no_grad():
        theirs.weight.copy_(start.to(DEVICE))
    optimizer = torch.optim.Adagrad(theirs.parameters(), lr=RATE, eps=1e-8)
    positions = torch.from_numpy(ids).to(DEVICE)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).to(DEVICE)

    def dense_step() -> None:
        optimizer.zero_grad()
        (theirs(positions, offsets) - target).square().mean().backward()
        optimizer.step()

    seconds = side_by_side({"fused": fused_step, "unfused": dense_step}, arguments.rounds)
    fused.flush()
    trained = fused.split_embedding_weights()[0].cpu()
    table = theirs.weight.detach().cpu()
    difference = float((trained - table).abs().max())
    gradient = rows * arguments.dim * 4
    touched = batch.unique_rows.shape[0] * arguments.dim * 4
    ours, dense = seconds["fused"], seconds["unfused"]
    print(
        f"{rows:>10,} rows: ours {ours * 1e3:8.1f} ms, UNFUSED_TPU {dense * 1e3:8.1f} ms, ratio "
        f"{dense / ours:5.1f}; gradient buffer {touched / 1e6:.1f} MB against {gradient / 1e6:.1f} MB, ratio "
        f"{gradient / touched:.1f}; rows changed {int((trained != start).any(1).sum()):,} by ours, "
        f"{int((table != start).any(1).sum()):,} by theirs; tables differ by {difference:.1e}"
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
