"""The sharder for `EmbeddingCollection`: unpooled (sequence) embeddings, on CPU ranks.

The number of rows that travel back is that of the batch, so these programs have no static shapes yet:
the tpu device is refused rather than recompiled for every batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, KJTList
from torchrec.distributed.types import (
    Awaitable,
    EnumerableShardingSpec,
    LazyAwaitable,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recsys_tpu.embeddings.capacity import Capacities, CapacityCounters
from recsys_tpu.sharding.ahead import Ahead
from recsys_tpu.sharding.host import PreparedSplits, host_group, max_over_ranks, placed_on, prepare
from recsys_tpu.sharding.sequence import SEQUENCE_SHARDINGS, SequenceFeatures, sequence_sharding
from recsys_tpu.sharding.validation import FeatureLimits, Validation, check_features

_Prepared = tuple[EmbeddingCollectionContext, list[SequenceFeatures]]


class TpuShardedEmbeddingCollection(ShardedEmbeddingCollection):
    """An EmbeddingCollection over the ranks of a plan; its steps are those of the pooled collection."""

    def __init__(
        self,
        module: EmbeddingCollection,
        sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        *,
        device: torch.device | None = None,
        validate: Validation = Validation.FULL,
        **options: Any,
    ) -> None:
        device = device or torch.device("cpu")
        if device.type != "cpu":
            raise NotImplementedError(
                f"unpooled embeddings on {device.type}: not supported yet; pool them, or train on cpu"
            )
        _check_column_shards(sharding)
        placed = {table: placed_on(of_table, device) for table, of_table in sharding.items()}
        super().__init__(module, placed, env, device=device, **options)
        self._validate = validate
        group = self._env.process_group
        assert group is not None, "the sharder needs a process group, of one rank at least"
        self._host_pg = host_group(group)
        for of_type in self._sharding_type_to_sharding.values():
            of_type.host_pg = self._host_pg
        self._capacities = Capacities(max_over_ranks(self._host_pg))
        self._limits = FeatureLimits.of_tables(self._embedding_configs)
        self.ahead: Ahead[KeyedJaggedTensor, _Prepared] = Ahead(self._exchange_and_prepare)

    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: Any = None,
    ) -> EmbeddingSharding[Any, Any, Any, Any]:
        return sequence_sharding(sharding_type, sharding_infos, env, device, qcomm_codecs_registry)

    @property
    def host_group(self) -> dist.ProcessGroup:
        """The group of this module's exchange of ids."""
        return self._host_pg

    @property
    def capacity_counters(self) -> CapacityCounters:
        """Padding and ladder moves of this module so far."""
        return self._capacities.counters

    def input_dist(
        self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[list[SequenceFeatures]]]:
        """Starts the exchange of ids.  Raises InvalidFeatureError for ids that no table has."""
        check_features(features, self._limits, self._validate)
        return PreparedSplits(super().input_dist(ctx, features), self.prepare)

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Embeddings of every id of a batch, whose host part may have been begun by `ahead.start`."""
        ctx, prepared = self.ahead.take(features)
        return self.compute_and_output_dist(ctx, prepared)

    def _exchange_and_prepare(self, features: KeyedJaggedTensor) -> _Prepared:
        ctx = self.create_context()
        return ctx, self.input_dist(ctx, features).wait().wait()

    def prepare(self, features: KJTList) -> list[SequenceFeatures]:
        """Sorts and pads the ids that this rank received.  A collective call: ranks agree on capacities."""
        return prepare(self._lookups, features, self._capacities, {})


def _check_column_shards(sharding: dict[str, ParameterSharding]) -> None:
    """TorchRec sends rows of one width back per sharding type; with several it reads past their end."""
    widths = {
        table: {shard.shard_sizes[1] for shard in of_table.sharding_spec.shards}
        for table, of_table in sharding.items()
        if of_table.sharding_type == ShardingType.COLUMN_WISE.value
        and isinstance(of_table.sharding_spec, EnumerableShardingSpec)
    }
    if len({width for of_table in widths.values() for width in of_table}) > 1:
        raise ValueError(
            f"column shards of unpooled tables must all be equally wide, got {widths}: change the plan"
        )


class TpuEmbeddingCollectionSharder(EmbeddingCollectionSharder):
    """Shards every EmbeddingCollection of a model.  Arguments as of the pooled sharder."""

    def __init__(self, *args: Any, validate: str | Validation = Validation.FULL, **options: Any) -> None:
        super().__init__(*args, **options)
        self._validate = Validation(validate)

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> TpuShardedEmbeddingCollection:
        return TpuShardedEmbeddingCollection(
            module,
            params,
            env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            use_index_dedup=self._use_index_dedup,
            module_fqn=module_fqn,
            validate=self._validate,
        )

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(SEQUENCE_SHARDINGS)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]

    @property
    def sharded_module_type(self) -> type[TpuShardedEmbeddingCollection]:
        return TpuShardedEmbeddingCollection
