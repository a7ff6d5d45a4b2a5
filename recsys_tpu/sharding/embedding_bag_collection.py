"""The sharder for `EmbeddingBagCollection`: pooled embeddings over TPU chips, or CPU ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recsys_tpu.embeddings.capacity import Capacities, CapacityCounters
from recsys_tpu.sharding.ahead import Ahead
from recsys_tpu.sharding.host import (
    PreparedSplits,
    host_group,
    kind_of_batch,
    max_over_ranks,
    placed_on,
    prepare,
)
from recsys_tpu.sharding.lookups import LookupInput
from recsys_tpu.sharding.pooled_exchange import Exchange, pooled_exchange
from recsys_tpu.sharding.pooled_shardings import pooled_sharding
from recsys_tpu.sharding.validation import FeatureLimits, Validation, check_features

_Prepared = tuple[EmbeddingBagCollectionContext, list[LookupInput]]
# torch_tpu builds a program when it first runs, and once more when it runs again on another program's result.
_REHEARSALS = 3


class TpuShardedEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """An EmbeddingBagCollection over the chips of a plan.

    A step: check the ids and send them to their owners (host), sort and pad them (host), look them up
    (device), send pooled rows back (device).  The backward updates the tables in place.
    """

    def __init__(
        self,
        module: EmbeddingBagCollection,
        sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        *,
        device: torch.device | None = None,
        validate: Validation = Validation.FULL,
        exchange: Exchange = Exchange.COLLECTIVE,
        max_ids_per_sample: Mapping[str, int] | None = None,
        **options: Any,
    ) -> None:
        _check_pooling(module)
        device = device or torch.device("cpu")
        placed = {table: placed_on(of_table, device) for table, of_table in sharding.items()}
        super().__init__(module, placed, env, device=device, **options)
        self._validate = validate
        # MEAN of row-sharded tables is folded into the weights before the exchange.
        self._has_mean_pooling_callback = False
        group = self._env.process_group
        assert group is not None, "the sharder needs a process group, of one rank at least"
        self._host_pg = host_group(group)
        for of_type in self._embedding_shardings:
            of_type.host_pg = self._host_pg
        if exchange is Exchange.PALLAS:
            for position, of_type in enumerate(self._embedding_shardings):
                ours = pooled_exchange(of_type, self._output_dists[position], device)
                if ours is not None:
                    self._output_dists[position] = ours
        self._capacities = Capacities(max_over_ranks(self._host_pg))
        self._max_ids = dict(max_ids_per_sample or {})
        self._rehearsed: set[tuple[int, ...]] = set()
        self._limits = FeatureLimits.of_tables(self._embedding_bag_configs)
        self.ahead: Ahead[KeyedJaggedTensor, _Prepared] = Ahead(self._exchange_and_prepare)

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: Any = None,
    ) -> EmbeddingSharding[Any, Any, Any, Any]:
        return pooled_sharding(sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry)

    @property
    def host_group(self) -> dist.ProcessGroup:
        """The group of this module's exchange of ids: CPU tensors, and nobody else's collectives."""
        return self._host_pg

    @property
    def capacity_counters(self) -> CapacityCounters:
        """Padding and ladder moves of this module so far."""
        return self._capacities.counters

    def init_data_parallel(self) -> None:
        if self._skip_data_parallel_grad_sync:
            return
        for position, sharding in enumerate(self._embedding_shardings):
            if isinstance(sharding, DpPooledEmbeddingSharding):
                # As TorchRec's, but without device_ids, which the tpu device doesn't take, and without
                # static_graph, which needs pinned host memory, which the emulated device doesn't have.
                self._lookups[position] = DistributedDataParallel(
                    self._lookups[position],
                    process_group=self._env.process_group,
                    gradient_as_bucket_view=True,
                    broadcast_buffers=False,
                )

    def _create_input_dist(self, input_feature_names: list[str]) -> None:
        super()._create_input_dist(input_feature_names)
        if self._has_features_permute:
            order = torch.tensor(self._features_order, dtype=torch.int32)
            self.register_buffer("_features_order_tensor", order, persistent=False)

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[list[LookupInput]]]:
        """Starts the exchange of ids, on the host.  Raises InvalidFeatureError for ids that no table has."""
        features = features.to(torch.device("cpu"))
        check_features(features, self._limits, self._validate)
        return PreparedSplits(super().input_dist(ctx, features), self.prepare)

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]:
        """Pooled embeddings of a batch, whose host part may have been begun by `ahead.start`."""
        ctx, prepared = self.ahead.take(features)
        self._rehearse(prepared)
        return self.compute_and_output_dist(ctx, prepared)

    def _exchange_and_prepare(self, features: KeyedJaggedTensor) -> _Prepared:
        ctx = self.create_context()
        return ctx, self.input_dist(ctx, features).wait().wait()

    def prepare(self, features: KJTList) -> list[LookupInput]:
        """Sorts and pads the ids that this rank received.  A collective call: ranks agree on capacities."""
        return prepare(self._lookups, features, self._capacities, self._max_ids)

    def _rehearse(self, prepared: list[LookupInput]) -> None:
        """Has the programs of all buffer sizes compiled when the first batch of its kind comes to train.

        On a CPU nothing is compiled; for an evaluation a size is compiled when it is met.
        """
        kind = kind_of_batch(of_lookup.num_samples for of_lookup in prepared)
        if self._device.type == "cpu" or not self.training or kind in self._rehearsed:
            return
        self._rehearsed.add(kind)
        for _ in range(_REHEARSALS):
            levels = iter(self._capacities.levels(kind))
            for lookup, of_lookup in zip(self._lookups, prepared, strict=True):
                unwrapped: Any = getattr(lookup, "module", lookup)  # out of DDP
                unwrapped.rehearse(of_lookup, levels)


def _check_pooling(module: EmbeddingBagCollection) -> None:
    for config in module.embedding_bag_configs():
        if module.is_weighted() and config.pooling is PoolingType.MEAN:
            raise ValueError(
                f"table {config.name}: a weighted mean is not defined (nor is it in torch); use SUM pooling "
                "and divide the weights by what you want"
            )


class TpuEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """Shards every EmbeddingBagCollection of a model for TPU chips; on CPU the same with reference kernels.

    fused_params: optimizer and its settings, see `embeddings.fused_params`.  validate: how much of each
    batch is checked before it is sent, see `sharding.validation`.  exchange: who moves pooled rows between
    ranks, see `sharding.pooled_exchange`.  max_ids_per_sample: ids that a sample has at most, by
    feature, where that is known: then no batch can need a buffer whose programs are not compiled yet.
    """

    def __init__(
        self,
        *args: Any,
        validate: str | Validation = Validation.FULL,
        exchange: str | Exchange = Exchange.COLLECTIVE,
        max_ids_per_sample: Mapping[str, int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._max_ids_per_sample = max_ids_per_sample
        self._validate = Validation(validate)
        self._exchange = Exchange(exchange)

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> TpuShardedEmbeddingBagCollection:
        return TpuShardedEmbeddingBagCollection(
            module,
            params,
            env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            sharded_module_order_overwrite=self._sharded_module_order_overwrite,
            validate=self._validate,
            exchange=self._exchange,
            max_ids_per_sample=self._max_ids_per_sample,
        )

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [
            ShardingType.DATA_PARALLEL.value,
            ShardingType.TABLE_WISE.value,
            ShardingType.COLUMN_WISE.value,
            ShardingType.TABLE_COLUMN_WISE.value,
            ShardingType.ROW_WISE.value,
            ShardingType.TABLE_ROW_WISE.value,
            ShardingType.GRID_SHARD.value,
        ]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        dense = sharding_type == ShardingType.DATA_PARALLEL.value
        return [(EmbeddingComputeKernel.DENSE if dense else EmbeddingComputeKernel.FUSED).value]

    def storage_usage(self, tensor: Tensor, compute_device_type: str, compute_kernel: str) -> dict[str, int]:
        """Bytes of a table on its device: HBM of a chip, DDR of a host."""
        kind = "ddr" if compute_device_type == "cpu" else "hbm"
        return {kind: tensor.element_size() * tensor.numel()}

    @property
    def sharded_module_type(self) -> type[TpuShardedEmbeddingBagCollection]:
        return TpuShardedEmbeddingBagCollection
