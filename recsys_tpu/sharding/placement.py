"""Places a model's tables on the ranks: plan, sharders, DistributedModelParallel."""

from __future__ import annotations

from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ShardingType

from recsys_tpu.runtime import Runtime


def shard_model(model: nn.Module, runtime: Runtime) -> DistributedModelParallel:
    """`model` with its embedding collections sharded over all ranks and its dense part replicated."""
    sharders: list[ModuleSharder[nn.Module]] = [EmbeddingBagCollectionSharder()]
    topology = Topology(
        world_size=runtime.world_size,
        local_world_size=runtime.local_world_size,
        compute_device=runtime.device.type,
    )
    # data-parallel tables would train outside the fused optimizer
    constraints = {
        name.removesuffix(".weight").rsplit(".", 1)[-1]: ParameterConstraints(
            sharding_types=[ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value]
        )
        for name, _ in model.named_parameters()
        if ".embedding_bags." in name
    }
    plan = EmbeddingShardingPlanner(topology=topology, constraints=constraints).collective_plan(
        model, sharders, runtime.process_group
    )
    return DistributedModelParallel(
        model, device=runtime.device, plan=plan, sharders=sharders, init_data_parallel=True
    )
