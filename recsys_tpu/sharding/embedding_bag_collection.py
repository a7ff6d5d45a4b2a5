"""The sharder for `EmbeddingBagCollection`: pooled embeddings over TPU chips, or CPU ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recsys_tpu.sharding.host import placed_on
from recsys_tpu.sharding.pooled_exchange import WIRE_DTYPES, Exchange, Wire, pooled_exchange
from recsys_tpu.sharding.pooled_shardings import pooled_sharding
from recsys_tpu.sharding.prepared_module import PreparedModule, data_parallel
from recsys_tpu.sharding.row_shardings import RowsTravel, deduplicated_sharding
from recsys_tpu.sharding.validation import Validation


class TpuShardedEmbeddingBagCollection(PreparedModule, ShardedEmbeddingBagCollection):
    """An EmbeddingBagCollection over the chips of a plan.

    A step: check the ids and send them to their owners (host), sort and pad them (host), look them up
    (device), send pooled rows back (device).  The backward updates the tables in place.  Of tables that are
    deduplicated, distinct ids travel and their rows come back, and bags are summed where they are needed.
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
        wire: Wire = "fp32",
        max_ids_per_sample: Mapping[str, int] | None = None,
        deduplicate: bool | Collection[str] = False,
        **options: Any,
    ) -> None:
        _check_pooling(module)
        device = device or torch.device("cpu")
        self._deduplicated = _deduplicated_tables(module, sharding, deduplicate)
        placed = {table: placed_on(of_table, device) for table, of_table in sharding.items()}
        super().__init__(module, placed, env, device=device, **options)
        # MEAN of row-sharded tables is folded into the weights before the exchange.
        self._has_mean_pooling_callback = False
        self._set_up_host(
            self._embedding_shardings, self._embedding_bag_configs, validate, max_ids_per_sample or {}
        )
        group = self._env.process_group
        assert group is not None
        if exchange is Exchange.PALLAS:
            for position, of_type in enumerate(self._embedding_shardings):
                if isinstance(of_type, RowsTravel):
                    continue
                ours = pooled_exchange(
                    of_type, self._output_dists[position], device, wire_dtype=WIRE_DTYPES[wire]
                )
                if ours is not None:
                    self._output_dists[position] = ours

    def create_grouped_sharding_infos(  # TorchRec's is a classmethod, which it calls on self
        self, *arguments: Any, **options: Any
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        """By sharding type, and apart from each other those that are deduplicated and those that are not."""
        grouped: dict[str, list[EmbeddingShardingInfo]] = {}
        for name, infos in super().create_grouped_sharding_infos(*arguments, **options).items():
            for info in infos:
                apart = info.embedding_config.name in self._deduplicated
                grouped.setdefault(f"{name}, deduplicated" if apart else name, []).append(info)
        return grouped

    def create_embedding_bag_sharding(
        self,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: Any = None,
    ) -> EmbeddingSharding[Any, Any, Any, Any]:
        if sharding_infos[0].embedding_config.name in self._deduplicated:
            return deduplicated_sharding(sharding_infos, env, device, qcomm_codecs_registry)
        return pooled_sharding(sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry)

    def init_data_parallel(self) -> None:
        if self._skip_data_parallel_grad_sync:
            return
        for position, sharding in enumerate(self._embedding_shardings):
            if isinstance(sharding, DpPooledEmbeddingSharding):
                self._lookups[position] = data_parallel(self._lookups[position], self._env)


def _check_pooling(module: EmbeddingBagCollection) -> None:
    for config in module.embedding_bag_configs():
        if module.is_weighted() and config.pooling is PoolingType.MEAN:
            raise ValueError(
                f"table {config.name}: a weighted mean is not defined (nor is it in torch); use SUM pooling "
                "and divide the weights by what you want"
            )


def _deduplicated_tables(
    module: EmbeddingBagCollection, sharding: dict[str, ParameterSharding], wanted: bool | Collection[str]
) -> frozenset[str]:
    """The tables of `module` to deduplicate: those that are named, or all that are not replicated."""
    names = {config.name for config in module.embedding_bag_configs()}
    sharded = {name for name in names if sharding[name].sharding_type != ShardingType.DATA_PARALLEL.value}
    if isinstance(wanted, bool):
        return frozenset(sharded if wanted else ())
    replicated = sorted(set(wanted) & (names - sharded))
    if replicated:
        raise ValueError(f"tables {replicated} are data-parallel: there is no exchange to deduplicate for")
    return frozenset(set(wanted) & names)


class TpuEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """Shards every EmbeddingBagCollection of a model for TPU chips; on CPU the same with reference kernels.

    fused_params: optimizer and its settings, see `embeddings.fused_params`.  validate: how much of each
    batch is checked before it is sent, see `sharding.validation`.  exchange: who moves pooled rows between
    ranks, see `sharding.pooled_exchange`.  wire: with exchange "pallas", what pooled rows and gradients are
    rounded to while they travel all to all.  max_ids_per_sample: ids that a sample has at most, by
    feature, where that is known: then no batch can need a buffer whose programs are not compiled yet.
    deduplicate: whose ids are deduplicated before the exchange: True for every sharded table, or tables by
    name; see `sharding.row_exchange`.
    """

    def __init__(
        self,
        *args: Any,
        validate: str | Validation = Validation.FULL,
        exchange: str | Exchange = Exchange.COLLECTIVE,
        wire: Wire = "fp32",
        max_ids_per_sample: Mapping[str, int] | None = None,
        deduplicate: bool | Collection[str] = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._max_ids_per_sample = max_ids_per_sample
        self._deduplicate = deduplicate
        self._validate = Validation(validate)
        self._exchange, self._wire = Exchange(exchange), wire
        if wire not in WIRE_DTYPES:
            raise ValueError(f"wire {wire!r}: expected one of {', '.join(WIRE_DTYPES)}")
        if self._exchange is Exchange.PALLAS and self.qcomm_codecs_registry:
            raise ValueError("exchange 'pallas' takes no qcomm_codecs_registry: give wire='bf16' instead")
        if self._exchange is not Exchange.PALLAS and wire != "fp32":
            raise ValueError(f"wire {wire!r} needs exchange 'pallas'; without, give a qcomm_codecs_registry")

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
            wire=self._wire,
            deduplicate=self._deduplicate,
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
