"""What each rank does in the tests of the TorchRec bridge: train planned models, return their tables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from recsys_tpu.runtime import Runtime
from recsys_tpu.sharding.embedding_bag_collection import TpuEmbeddingBagCollectionSharder
from recsys_tpu.sharding.planner.plan import Plan
from recsys_tpu.sharding.planner.torchrec_bridge import TpuEmbeddingShardingPlanner, to_sharding_plan
from tests.sharding.sharded import dense_optimizer, pieces
from tests.sharding.training import Case, Model, batch_of, initial_tables, loss_of

OPTIMIZERS = {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
Pieces = dict[str, list[tuple[list[int], Any]]]


def train_planned(runtime: Runtime, case: Case, plan_files: list[str], ours: bool) -> list[Pieces]:
    """Trains `case` under each plan; the local pieces of each table after the last step."""
    return [train_one(runtime, case, Plan.load(Path(name)), ours) for name in plan_files]


def train_with_planner_class(runtime: Runtime, case: Case) -> list[Pieces]:
    """The same, with the plan that the drop-in planner class makes collectively."""
    sharder = EmbeddingBagCollectionSharder()
    planner = TpuEmbeddingShardingPlanner(f"emulated:{runtime.world_size}", batch_size=case.batch)
    plan = planner.collective_plan(Model(case), [sharder], runtime.process_group)
    return [{name: list(map(str, sharding.ranks)) for name, sharding in plan.plan["ebc"].items()}]


def train_one(runtime: Runtime, case: Case, plan: Plan, ours: bool) -> Pieces:
    os.environ["LOCAL_WORLD_SIZE"] = str(plan.row_group)
    params = {"optimizer": OPTIMIZERS[case.optimizer], "learning_rate": case.rate}
    sharder = (TpuEmbeddingBagCollectionSharder if ours else EmbeddingBagCollectionSharder)(
        fused_params=params
    )
    model = Model(case)
    dmp = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(runtime.process_group),
        device=runtime.device,
        plan=to_sharding_plan(plan, model, device_type=runtime.device.type),
        sharders=[sharder],
    )
    dmp.load_state_dict({f"ebc.{name}": value for name, value in initial_tables(case).items()})
    dense = dense_optimizer(dmp, case)
    for step in range(case.steps):
        output = dmp.module.ebc(batch_of(case, step, runtime.rank, runtime.world_size))
        names = output.keys()
        loss = loss_of(output.values(), names, dict(zip(names, output.length_per_key(), strict=True)))
        if dense is not None:
            dense.zero_grad()
        loss.backward()
        dmp.fused_optimizer.step()
        if dense is not None:
            dense.step()
    return {name: pieces(value) for name, value in dmp.module.ebc.state_dict().items()}
