"""Between the planner and TorchRec: a model's tables in, a ShardingPlan for DistributedModelParallel out.

`TpuEmbeddingShardingPlanner` has the interface of TorchRec's `EmbeddingShardingPlanner` (`plan`,
`collective_plan`), so a training script changes one line.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import placement
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardingPlanner,
)
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS, BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recsys_tpu.sharding.planner.errors import PlanDriftError, PlanInputError
from recsys_tpu.sharding.planner.make import make_plan
from recsys_tpu.sharding.planner.plan import Plan, TablePlan
from recsys_tpu.sharding.planner.search import Effort
from recsys_tpu.sharding.planner.tables import (
    DEFAULT_TYPES,
    DensePart,
    IdStatistics,
    ShardingType,
    TableConstraint,
    TableSpec,
    Workload,
)
from recsys_tpu.sharding.planner.topology import Topology, parse_topology

_ROW_GROUP_TYPES = (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)


def workload_of(
    module: nn.Module,
    *,
    batch_per_rank: int,
    optimizer: str = "rowwise_adagrad",
    pooling_factors: Mapping[str, float] | None = None,
    statistics: Mapping[str, IdStatistics] | None = None,
    constraints: Mapping[str, TableConstraint] | None = None,
    deduplicate: bool | Collection[str] = False,
) -> Workload:
    """All tables of the embedding collections inside `module`, and its dense parameters.

    Args:
        deduplicate: tables whose distinct ids are exchanged, as the sharder's argument: all, or these.
        pooling_factors: mean ids per sample by feature; 1 where a feature is missing.
        statistics: measured ids by table.

    Raises:
        PlanInputError: there is no embedding collection, or two tables share a name.
    """
    tables = [
        TableSpec(
            name=config.name,
            rows=config.num_embeddings,
            dim=config.embedding_dim,
            pooling_factors=tuple((pooling_factors or {}).get(name, 1.0) for name in config.feature_names),
            feature_names=tuple(config.feature_names),
            weight_bytes=DATA_TYPE_NUM_BITS[config.data_type] // 8,
            optimizer=optimizer,
            pooled=isinstance(collection, EmbeddingBagCollection),
            deduplicated=deduplicate if isinstance(deduplicate, bool) else config.name in deduplicate,
            statistics=(statistics or {}).get(config.name),
            module=path,
        )
        for path, collection in _collections(module)
        for config in _configs(collection)
    ]
    if not tables:
        raise PlanInputError("the model has no EmbeddingBagCollection or EmbeddingCollection to shard")
    embeddings = sum(table.rows * table.dim for table in tables)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return Workload(
        tables=tuple(tables),
        batch_per_rank=batch_per_rank,
        dense=DensePart(parameters=max(parameters - embeddings, 0)),
        constraints=constraints or {},
    )


def to_sharding_plan(plan: Plan, module: nn.Module, *, device_type: str = "cpu") -> ShardingPlan:
    """TorchRec's ShardingPlan for `module`.

    Args:
        device_type: where tables live: cpu or tpu.

    Raises:
        PlanDriftError: tables of module and plan differ, or LOCAL_WORLD_SIZE is not the plan's row group.
    """
    _check_tables(plan, module)
    _check_row_group(plan)
    modules: dict[str, EmbeddingModuleShardingPlan] = {}
    for path, collection in _collections(module):
        modules[path] = EmbeddingModuleShardingPlan(
            {
                config.name: _parameter_sharding(plan, plan.table(config.name), device_type)
                for config in _configs(collection)
            }
        )
    return ShardingPlan(dict(modules))


def _parameter_sharding(plan: Plan, table: TablePlan, device_type: str) -> ParameterSharding:
    shards = list(table.shards(plan.topology.ranks, plan.row_group))
    replicated = table.kind is ShardingType.DATA_PARALLEL
    kernel = EmbeddingComputeKernel.DENSE if replicated else EmbeddingComputeKernel.FUSED
    spec = None
    if not replicated:
        spec = EnumerableShardingSpec(
            [
                ShardMetadata(
                    shard_offsets=[shard.first_row, shard.first_column],
                    shard_sizes=[shard.rows, shard.columns],
                    placement=placement(device_type, shard.rank, plan.row_group),
                )
                for shard in shards
            ]
        )
    return ParameterSharding(
        sharding_type=table.kind.value,
        compute_kernel=kernel.value,
        ranks=[shard.rank for shard in shards],
        sharding_spec=spec,
    )


def _check_tables(plan: Plan, module: nn.Module) -> None:
    planned = {table.name: (table.rows, table.dim) for table in plan.tables}
    present = {
        config.name: (config.num_embeddings, config.embedding_dim)
        for _, collection in _collections(module)
        for config in _configs(collection)
    }
    changes = [f"table {name} is not in the plan" for name in present if name not in planned]
    changes += [f"table {name} of the plan is not in the model" for name in planned if name not in present]
    changes += [
        f"table {name}: the plan has {planned[name]} rows and columns, the model {present[name]}"
        for name in planned.keys() & present.keys()
        if planned[name] != present[name]
    ]
    if changes:
        raise PlanDriftError("the plan is not of this model: " + "; ".join(sorted(changes)))


def _check_row_group(plan: Plan) -> None:
    """TorchRec splits rows over LOCAL_WORLD_SIZE ranks, whatever the plan says."""
    split = [table.name for table in plan.tables if table.kind in _ROW_GROUP_TYPES]
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if split and local is not None and int(local) != plan.row_group:
        raise PlanDriftError(
            f"the plan splits rows of {len(split)} tables ({', '.join(split[:3])}...) over groups of "
            f"{plan.row_group} ranks, but LOCAL_WORLD_SIZE={local}: set LOCAL_WORLD_SIZE={plan.row_group} "
            f"for TorchRec's process groups, or plan again with --row-group {local}"
        )


def _collections(module: nn.Module) -> Iterator[tuple[str, EmbeddingBagCollection | EmbeddingCollection]]:
    for path, child in module.named_modules():
        if isinstance(child, EmbeddingBagCollection | EmbeddingCollection):
            yield path, child


def _configs(collection: EmbeddingBagCollection | EmbeddingCollection) -> Sequence[BaseEmbeddingConfig]:
    if isinstance(collection, EmbeddingBagCollection):
        return collection.embedding_bag_configs()
    return collection.embedding_configs()


class TpuEmbeddingShardingPlanner(ShardingPlanner):
    """Drop-in for TorchRec's `EmbeddingShardingPlanner` on TPU slices.

    Args:
        topology: a slice (`v5p:4x4x4`, a YAML file) or a `Topology`; its ranks must be the job's.
        batch_size: samples per rank.
        constraints: TorchRec's ParameterConstraints by table; sharding_types, pooling_factors and
            min_partition are used, others raise.
        optimizer, statistics: as in `workload_of`.
        row_group: ranks that share rows; None: LOCAL_WORLD_SIZE if set, else the best.
        device_type: where tables live: cpu or tpu.
        deduplicate: as the sharder's argument: tables whose distinct ids are exchanged.
    """

    def __init__(
        self,
        topology: Topology | str,
        *,
        batch_size: int,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        optimizer: str = "rowwise_adagrad",
        statistics: Mapping[str, IdStatistics] | None = None,
        row_group: int | None = None,
        device_type: str = "cpu",
        deduplicate: bool | Collection[str] = False,
        effort: Effort | None = None,
    ) -> None:
        self._topology = parse_topology(topology) if isinstance(topology, str) else topology
        self._batch_size = batch_size
        self._constraints = constraints or {}
        self._optimizer = optimizer
        self._statistics = statistics
        local = os.environ.get("LOCAL_WORLD_SIZE")
        self._row_group = row_group if row_group is not None or local is None else int(local)
        self._device_type = device_type
        self._deduplicate = deduplicate
        self._effort = effort

    def make(self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> Plan:
        """The plan, as this package's object: to save, explain or draw."""
        factors: dict[str, float] = {}
        specs = workload_of(module, batch_per_rank=self._batch_size, optimizer=self._optimizer).tables
        for table in specs:
            given = self._constraints.get(table.name)
            if given is not None and given.pooling_factors:
                # TorchRec's default is one factor, also for a table that several features read
                several = len(given.pooling_factors) > 1
                given_factors = given.pooling_factors * (1 if several else len(table.feature_names))
                factors |= dict(zip(table.feature_names, given_factors, strict=True))
        workload = workload_of(
            module,
            batch_per_rank=self._batch_size,
            optimizer=self._optimizer,
            pooling_factors=factors,
            statistics=self._statistics,
            deduplicate=self._deduplicate,
            constraints={table.name: self._constraint(table, module, sharders) for table in specs},
        )
        return make_plan(workload, self._topology, row_group=self._row_group, effort=self._effort)

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """TorchRec's plan, made on this rank."""
        return to_sharding_plan(self.make(module, sharders), module, device_type=self._device_type)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Made on rank 0 and sent to all ranks of `pg` (default: the default group)."""
        group = pg or dist.group.WORLD
        assert group is not None, "init_process_group first, or call plan()"
        if group.size() != self._topology.ranks:
            raise PlanInputError(
                f"the job has {group.size()} ranks but {self._topology} has {self._topology.ranks}"
            )
        result = invoke_on_rank_and_broadcast_result(group, 0, self.plan, module, sharders or [])
        return cast(ShardingPlan, result)

    def _constraint(
        self, table: TableSpec, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]
    ) -> TableConstraint:
        kind = type(module.get_submodule(table.module))
        types: list[ShardingType] = [t for t in DEFAULT_TYPES if self._supported(t, kind, sharders)]
        given = self._constraints.get(table.name)
        if given is None:
            return TableConstraint(types=tuple(types))
        unused = {
            "compute_kernels": given.compute_kernels,
            "batch_sizes": given.batch_sizes,
            "cache_params": given.cache_params,
            "key_value_params": given.key_value_params,
            "device_group": given.device_group,
        }
        refused = [name for name, value in unused.items() if value]
        if refused:
            raise PlanInputError(f"table {table.name}: constraints this planner does not know: {refused}")
        if given.sharding_types:
            types = [ShardingType(name) for name in given.sharding_types]
        return TableConstraint(types=tuple(types), min_width=given.min_partition)

    def _supported(
        self, kind: ShardingType, module_type: type[nn.Module], sharders: Sequence[ModuleSharder[nn.Module]]
    ) -> bool:
        for sharder in sharders:
            if issubclass(module_type, sharder.module_type):
                # TorchRec's own sharder leaves row splits out for "cpu", though they work there.
                device = "cuda" if torch.device(self._device_type).type == "cpu" else self._device_type
                return kind.value in sharder.sharding_types(device)
        return True
