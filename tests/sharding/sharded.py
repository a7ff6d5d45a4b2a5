"""The sharded side of `training`: DistributedModelParallel with our sharder, on one rank."""

from __future__ import annotations

from typing import Any

import torch
import torchrec.distributed.sharding_plan as plans
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedTensor, ShardingEnv, ShardingPlan
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recsys_tpu.kernels.batch import Optimizer
from recsys_tpu.runtime import Runtime
from recsys_tpu.sharding.clipping import GlobalNormClipping
from recsys_tpu.sharding.embedding_bag_collection import TpuEmbeddingBagCollectionSharder
from recsys_tpu.sharding.pipeline import prepared_ahead
from tests.sharding.training import Case, Model, batch_of, initial_tables, loss_of

OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
    "ftrl": Optimizer.FTRL,
}


def sharding_of(table: Any, world: int, local: int | None = None) -> Any:
    """TorchRec's generator of a sharding.  A table's ranks are hosts for types that spread over a host."""
    first = table.ranks[0] % world
    hosts = [rank % (world // (local or world)) for rank in table.ranks]
    match table.sharding:
        case "table_wise":
            return plans.table_wise(rank=first)
        case "row_wise":
            return plans.row_wise()
        case "column_wise":
            return plans.column_wise(ranks=[rank % world for rank in table.ranks])
        case "table_column_wise":
            return plans.column_wise(ranks=[rank % world for rank in table.ranks])
        case "table_row_wise":
            return plans.table_row_wise(host_index=hosts[0])
        case "grid_shard":
            return plans.grid_shard(host_indexes=list(dict.fromkeys(hosts)))
        case "data_parallel":
            return plans.data_parallel()
    raise AssertionError(table.sharding)


def shard(case: Case, runtime: Runtime, **sharder_options: Any) -> DistributedModelParallel:
    """The model of a case, sharded by its plan, with the case's initial tables loaded."""
    world, device = runtime.world_size, runtime.device
    params = {"optimizer": OPTIMIZERS[case.optimizer], "learning_rate": case.rate, "eps": 1e-8}
    sharder = TpuEmbeddingBagCollectionSharder(
        fused_params=params, deduplicate=case.deduplicate, **sharder_options
    )
    model = Model(case)
    generators = {
        f"t{index}": sharding_of(table, world, runtime.local_world_size)
        for index, table in enumerate(case.tables)
    }
    plan = plans.construct_module_sharding_plan(
        model.ebc,
        generators,
        sharder=sharder,
        local_size=runtime.local_world_size,
        world_size=world,
        device_type=device.type,
    )
    for index, table in enumerate(case.tables):
        plan[f"t{index}"].sharding_type = table.sharding
        if table.sharding != "data_parallel":
            plan[f"t{index}"].compute_kernel = "fused"
    dmp = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(runtime.process_group),
        device=device,
        plan=ShardingPlan({"ebc": plan}),
        sharders=[sharder],
    )
    tables = {f"ebc.{name}": value for name, value in initial_tables(case).items()}
    dmp.load_state_dict(tables)
    return dmp


def dense_optimizer(dmp: DistributedModelParallel, case: Case) -> KeyedOptimizerWrapper | None:
    dense = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    if not dense:
        return None
    kinds = {
        "sgd": lambda p: torch.optim.SGD(p, lr=case.rate),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=case.rate, eps=1e-8),
        "adam": lambda p: torch.optim.Adam(p, lr=case.rate),
    }
    return KeyedOptimizerWrapper(dense, kinds[case.optimizer])


def pieces(value: Any) -> list[tuple[list[int], torch.Tensor]]:
    """This rank's shards of a (sharded) tensor with their offsets, on CPU."""
    if not isinstance(value, ShardedTensor):
        return [([0] * value.dim(), value.detach().cpu().clone())]
    return [
        (list(shard.metadata.shard_offsets), shard.tensor.cpu().clone()) for shard in value.local_shards()
    ]


def train_steps(
    dmp: DistributedModelParallel,
    case: Case,
    runtime: Runtime,
    steps: range,
    dense: KeyedOptimizerWrapper | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """This rank's losses of some steps, and its outputs of the first of them.

    dense: the optimizer of replicated tables; a new one, if there are some and it is not given.
    """
    dense = dense or dense_optimizer(dmp, case)
    clipping = None if case.max_norm is None else GlobalNormClipping(dmp, case.max_norm)
    losses, first = [], {}
    batches = (batch_of(case, step, runtime.rank, runtime.world_size) for step in steps)
    if case.ahead:
        batches = prepared_ahead(dmp, batches, depth=case.ahead, features_of=lambda features: features)
    for step, batch in zip(steps, batches, strict=True):
        set_rate(case.rate_of(step), dmp, dense)
        output = dmp.module.ebc(batch)
        names = output.keys()
        columns = dict(zip(names, output.length_per_key(), strict=True))
        first = first or {key: output[key].detach().cpu() for key in names}
        loss = loss_of(output.values(), names, columns)
        if dense is not None:
            dense.zero_grad()
        loss.backward()
        if clipping is not None:
            clipping.apply()
        dmp.fused_optimizer.step()
        if dense is not None:
            dense.step()
        losses.append(float(loss.detach()))
    return losses, first


def set_rate(rate: float, dmp: DistributedModelParallel, dense: KeyedOptimizerWrapper | None) -> None:
    """As a learning rate scheduler does it."""
    for optimizer in (dmp.fused_optimizer, dense):
        for group in optimizer.param_groups if optimizer is not None else ():
            group["lr"] = rate
    dmp.fused_optimizer.zero_grad()


def train_sharded(runtime: Runtime, case: Case) -> dict[str, Any]:
    """Losses, first outputs, pieces of tables and of states of this rank."""
    # What the data has at most makes one size of every buffer enough, and one compilation on a device.
    dmp = shard(case, runtime, max_ids_per_sample=dict.fromkeys(case.features, case.longest_bag))
    losses, first = train_steps(dmp, case, runtime, range(case.steps))
    tables = {name: pieces(value) for name, value in dmp.module.ebc.state_dict().items()}
    states = {
        key.removeprefix("ebc."): {name.split(".")[-1]: pieces(value) for name, value in state.items()}
        for key, state in dmp.fused_optimizer.state_dict()["state"].items()
    }
    return {"losses": losses, "first": first, "tables": tables, "states": states}


def train_all(runtime: Runtime, cases: list[Case]) -> list[dict[str, Any]]:
    """Several cases in one set of processes, because starting one takes seconds."""
    return [train_sharded(runtime, case) for case in cases]
