"""Places a model on the ranks: plan and sharders for the tables, data parallelism for the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingType

from recsys_tpu.runtime import Runtime
from recsys_tpu.sharding.embedding_bag_collection import TpuEmbeddingBagCollectionSharder


def shard_model(model: nn.Module, runtime: Runtime) -> DistributedModelParallel:
    """`model` with its embedding collections sharded over all ranks and its dense part replicated."""
    sharders: list[ModuleSharder[nn.Module]] = [TpuEmbeddingBagCollectionSharder()]
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
        model,
        device=runtime.device,
        plan=plan,
        sharders=sharders,
        data_parallel_wrapper=DenseDataParallel(),
    )


class DenseDataParallel(DefaultDataParallelWrapper):
    """DistributedDataParallel over the dense parameters, as TorchRec's, for the `tpu` device too.

    That device takes no device_ids, and a static graph would need pinned host memory, which it has not.
    One rank has nothing to average and gets no wrapper.
    """

    def _ddp_wrap(
        self,
        dmp: DistributedModelParallel,
        env: ShardingEnv,
        device: torch.device,
        ddp_ignore_param_names: set[str],
    ) -> None:
        module: Any = dmp._dmp_wrapped_module.to(device)
        if env.world_size > 1:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                module=module, params_and_buffers_to_ignore=ddp_ignore_param_names
            )
            module = DistributedDataParallel(
                module,
                process_group=env.process_group,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
                bucket_cap_mb=self._bucket_cap_mb,
            )
        dmp._dmp_wrapped_module = module
