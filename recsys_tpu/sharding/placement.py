"""Places a model on the ranks: plan and sharders for the tables, data parallelism for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ShardingEnv

from recsys_tpu.config import Config
from recsys_tpu.errors import ConfigError
from recsys_tpu.runtime import Runtime
from recsys_tpu.sharding.embedding_bag_collection import TpuEmbeddingBagCollectionSharder
from recsys_tpu.sharding.planner import Plan, ShardingType, Topology, emulated, parse_topology
from recsys_tpu.sharding.planner.torchrec_bridge import (
    TpuEmbeddingShardingPlanner,
    to_sharding_plan,
    workload_of,
)

PLAN_FILE = "plan.yaml"
# A data-parallel table would be trained by the dense optimizer, not by the fused one that the config names.
_FUSED_TYPES = [kind for kind in ShardingType if kind is not ShardingType.DATA_PARALLEL]
# Row-wise Adagrad's accumulator is the mean over a row: each part of a split row keeps one of its own, so
# splitting columns would change what is learnt (seen: 2e-3 in the loss after 100 steps).
_WHOLE_ROW_TYPES = [ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE]


def shard_model(
    model: nn.Module,
    runtime: Runtime,
    config: Config,
    *,
    max_ids_per_sample: Mapping[str, int] | None = None,
) -> DistributedModelParallel:
    """`model` with its embedding collections sharded over all ranks and its dense part replicated.

    The plan is read from ``sharding.plan`` or made, the same on every rank, and written to the run's folder.
    A plan that is made leaves the losses as they are on one rank, up to the order of float additions; one
    that is read may split the columns of a table that row-wise Adagrad trains, which changes them.

    max_ids_per_sample: see `TpuEmbeddingBagCollectionSharder`.

    Raises:
        ConfigError: a TPU run names no topology, the topology has another number of ranks, or a table that
            is to be deduplicated is not there.
        PlanError: the plan file is damaged or made for other tables, or the tables don't fit.
    """
    sharders: list[ModuleSharder[nn.Module]] = [
        TpuEmbeddingBagCollectionSharder(
            validate=config.sharding.validate_ids,
            exchange=config.sharding.exchange,
            wire=config.sharding.wire,
            max_ids_per_sample=max_ids_per_sample,
            deduplicate=config.sharding.deduplicate,
        )
    ]
    topology = _topology(runtime, config)
    plan = _plan(model, sharders, runtime, config, topology)
    if runtime.rank == 0:
        plan.save(config.run.directory / PLAN_FILE)
    return DistributedModelParallel(
        model,
        device=runtime.device,
        plan=to_sharding_plan(plan, model, device_type=runtime.device.type),
        sharders=sharders,
        data_parallel_wrapper=DenseDataParallel(),
    )


def _topology(runtime: Runtime, config: Config) -> Topology:
    name = config.sharding.topology
    if name is None and runtime.kind == "tpu":
        raise ConfigError("a run on TPUs needs sharding.topology, the slice it runs on, such as v6e:2x4")
    topology = parse_topology(name) if name else emulated(runtime.world_size, runtime.local_world_size)
    if topology.ranks != runtime.world_size:
        raise ConfigError(
            f"sharding.topology={name} has {topology.ranks} ranks but the run has {runtime.world_size}"
        )
    return topology


def _plan(
    model: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    runtime: Runtime,
    config: Config,
    topology: Topology,
) -> Plan:
    batch_per_rank = config.train.batch_size // runtime.world_size
    optimizer = config.optimizer.sparse.kind
    workload = workload_of(model, batch_per_rank=batch_per_rank, optimizer=optimizer)
    _check_deduplicated(config, [table.name for table in workload.tables])
    if config.sharding.plan is not None:
        plan = Plan.load(config.sharding.plan)
        plan.check_fits(workload, topology)
        return plan
    types = _WHOLE_ROW_TYPES if optimizer == "rowwise_adagrad" else _FUSED_TYPES
    names = [kind.value for kind in types]
    constraints = {table.name: ParameterConstraints(sharding_types=names) for table in workload.tables}
    planner = TpuEmbeddingShardingPlanner(
        topology,
        batch_size=batch_per_rank,
        constraints=constraints,
        optimizer=optimizer,
        device_type=runtime.device.type,
        deduplicate=config.sharding.deduplicate,
    )
    return invoke_on_rank_and_broadcast_result(runtime.process_group, 0, planner.make, model, sharders)


def _check_deduplicated(config: Config, tables: Sequence[str]) -> None:
    wanted = config.sharding.deduplicate
    unknown = [] if isinstance(wanted, bool) else [name for name in wanted if name not in tables]
    if unknown:
        raise ConfigError(
            f"sharding.deduplicate names {', '.join(unknown)}, but the tables are {', '.join(tables)}"
        )


class DenseDataParallel(DefaultDataParallelWrapper):
    """DistributedDataParallel over the dense parameters, as TorchRec's, for the `tpu` device too.

    That device takes no device_ids. One rank has nothing to average and gets no
    wrapper.
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
