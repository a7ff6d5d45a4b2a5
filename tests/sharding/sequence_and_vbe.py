"""On a rank: unpooled embeddings, and pooled ones with a batch size of their own for each feature."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torchrec.distributed.sharding_plan as plans
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recsys_tpu.runtime import Runtime
from recsys_tpu.sharding.embedding_collection import TpuEmbeddingCollectionSharder
from tests.sharding.sharded import dense_optimizer, pieces, shard, sharding_of
from tests.sharding.training import Case, batch_of

RATE = 0.1


class Sequences(torch.nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.ec = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    num_embeddings=table.rows,
                    embedding_dim=table.dim,
                    name=f"t{index}",
                    feature_names=list(table.features),
                )
                for index, table in enumerate(case.tables)
            ]
        )


def sequence_loss(case: Case, output: dict[str, JaggedTensor], samples: int) -> Tensor:
    """Each id counts by its place in its bag: rows that come back in another order change it."""
    device = output[min(output)].values().device
    total = torch.zeros((), device=device)
    for name in sorted(output):
        values, lengths = output[name].values(), output[name].lengths().cpu()
        count = int(lengths.sum())
        assert len(values) >= count and not values[count:].any(), "padding must be zero"
        place = torch.cat([torch.zeros(0), *(torch.arange(int(n)) for n in lengths)])
        weight = torch.zeros(len(values))
        weight[:count] = 1 + place
        direction = torch.linspace(-1, 1, case.tables[0].dim, device=device)
        # What lies behind the ids is given a gradient that must not arrive anywhere.
        used = (torch.arange(len(values)) < count).float()
        term = (values @ direction * weight.to(device) - 1).square() * used.to(device)
        total = total + term.sum() + (values * (1 - used[:, None]).to(device)).sum()
    return total / samples


def train_sequences(runtime: Runtime, cases: list[Case]) -> list[dict[str, Any]]:
    return [_train_sequences(runtime, case) for case in cases]


def shard_sequences(case: Case, runtime: Runtime, optimizer: Any) -> DistributedModelParallel:
    """The unpooled model of a case, sharded by its plan, with the case's initial tables loaded."""
    sharder = TpuEmbeddingCollectionSharder(
        fused_params={"optimizer": optimizer, "learning_rate": RATE, "eps": 1e-8}
    )
    model = Sequences(case)
    world = runtime.world_size
    plan = plans.construct_module_sharding_plan(
        model.ec,
        {f"t{index}": sharding_of(table, world) for index, table in enumerate(case.tables)},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type=runtime.device.type,
    )
    for sharding in plan.values():
        if sharding.sharding_type != "data_parallel":
            sharding.compute_kernel = "fused"
    dmp = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(runtime.process_group),
        device=runtime.device,
        plan=ShardingPlan({"ec": plan}),
        sharders=[sharder],
    )
    dmp.load_state_dict({f"ec.{name}": value for name, value in sequence_tables(case).items()})
    return dmp


def sequence_step(
    dmp: DistributedModelParallel,
    case: Case,
    runtime: Runtime,
    step: int,
    shapes: set[tuple[int, ...]] | None = None,
) -> Tensor:
    """The loss of a step's batch.  shapes: gets the lengths of the outputs."""
    world = runtime.world_size
    output = dmp.module.ec(batch_of(case, step, runtime.rank, world)).wait()
    if shapes is not None:
        shapes.add(tuple(len(output[name].values()) for name in sorted(output)))
    return sequence_loss(case, output, case.batch // world)


def _train_sequences(runtime: Runtime, case: Case) -> dict[str, Any]:
    dmp = shard_sequences(case, runtime, EmbOptimType.EXACT_ADAGRAD)
    dense = dense_optimizer(dmp, replace(case, optimizer="adagrad", rate=RATE))
    losses: list[float] = []
    shapes: set[tuple[int, ...]] = set()
    for step in range(case.steps):
        loss = sequence_step(dmp, case, runtime, step, shapes)
        if dense is not None:
            dense.zero_grad()
        loss.backward()
        if dense is not None:
            dense.step()
        losses.append(float(loss.detach()))
    counters = dmp.module.ec.capacity_counters
    tables = {name: pieces(value) for name, value in dmp.module.ec.state_dict().items()}
    return {"losses": losses, "tables": tables, "shapes": shapes, "late": counters.late}


def sequence_tables(case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(case.seed)
    return {
        f"embeddings.t{index}.weight": torch.randn(table.rows, table.dim, generator=generator) * 0.3
        for index, table in enumerate(case.tables)
    }


def train_sequences_unsharded(case: Case) -> dict[str, Any]:
    model = Sequences(case)
    model.ec.load_state_dict(sequence_tables(case))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=RATE, eps=1e-8)
    losses = []
    for step in range(case.steps):
        loss = sequence_loss(case, model.ec(batch_of(case, step)), case.batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "tables": dict(model.ec.state_dict())}


def variable_batch(case: Case, rank: int) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """(a batch whose features have their own numbers of distinct samples, the same batch written out)."""
    rng = np.random.default_rng([7, rank])
    samples = 6
    values, lengths, strides, inverse, written = [], [], [], [], []
    for feature in case.features:
        rows = min(table.rows for table in case.tables if feature in table.features)
        distinct = int(rng.integers(1, samples + 1))
        bags = [rng.integers(0, rows, rng.integers(0, 4)) for _ in range(distinct)]
        where = rng.integers(0, distinct, samples)
        values += bags
        lengths += [len(bag) for bag in bags]
        strides.append([distinct])
        inverse.append(where)
        written += [bags[index] for index in where]
    short = KeyedJaggedTensor(
        keys=case.features,
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.tensor(lengths),
        stride_per_key_per_rank=strides,
        inverse_indices=(case.features, torch.from_numpy(np.stack(inverse))),
    )
    whole = KeyedJaggedTensor(
        keys=case.features,
        values=torch.from_numpy(np.concatenate(written)),
        lengths=torch.tensor([len(bag) for bag in written]),
    )
    return short, whole


def variable_batches(runtime: Runtime, cases: list[Case]) -> list[dict[str, Any]]:
    """Output and tables after one step, for the short form and for the written-out form of the same batch."""
    results = []
    for case in cases:
        outcome: dict[str, Any] = {}
        for form in (0, 1):
            dmp = shard(case, runtime)
            output = dmp.module.ebc(variable_batch(case, runtime.rank)[form])
            names = output.keys()
            columns = torch.cat([output[name] for name in sorted(names)], dim=1)
            scale = torch.linspace(0.1, 1, columns.shape[1]).to(columns.device)
            (columns * scale).square().sum().backward()
            tables = {name: pieces(value) for name, value in dmp.module.ebc.state_dict().items()}
            outcome["short" if form == 0 else "whole"] = {"output": columns.detach().cpu(), "tables": tables}
        results.append(outcome)
    return results
