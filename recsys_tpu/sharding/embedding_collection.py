"""The sharder for `EmbeddingCollection`: unpooled (sequence) embeddings over TPU chips, or CPU ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    LazyNoWait,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recsys_tpu.sharding.host import placed_on, written_out
from recsys_tpu.sharding.prepared_module import PreparedModule, data_parallel
from recsys_tpu.sharding.row_shardings import SEQUENCES, SequenceDataParallel, sequence_sharding
from recsys_tpu.sharding.validation import Validation


class TpuShardedEmbeddingCollection(PreparedModule, ShardedEmbeddingCollection):
    """An EmbeddingCollection over the ranks of a plan; its steps are those of `row_exchange`.

    On a device the values of an output have room for more ids than there are (static shapes): rows behind
    `offsets()[-1]` are 0, and their gradient is ignored.  On CPU they are as many as the ids.
    """

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
        placed = {table: placed_on(of_table, device) for table, of_table in sharding.items()}
        super().__init__(module, placed, env, device=device, **options)
        self._use_index_dedup = False  # TorchRec's; ours is part of the exchange
        self._set_up_host(self._sharding_type_to_sharding.values(), self._embedding_configs, validate, {})

    def create_grouped_sharding_infos(  # TorchRec's is a classmethod, which it calls on self
        self, *arguments: Any, **options: Any
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        """By sharding type; kept, as by a sharded EmbeddingBagCollection."""
        grouped = super().create_grouped_sharding_infos(*arguments, **options)
        self.sharding_type_to_sharding_infos: dict[str, list[EmbeddingShardingInfo]] = grouped
        return grouped

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

    def init_data_parallel(self) -> None:
        if self._skip_data_parallel_grad_sync:
            return
        for position, sharding in enumerate(self._sharding_type_to_sharding.values()):
            if isinstance(sharding, SequenceDataParallel):
                self._lookups[position] = data_parallel(self._lookups[position], self._env)

    def input_dist(
        self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[list[Any]]]:
        """Starts the exchange of ids; variable batch sizes are written out first, which repeats no id in it.

        Raises InvalidFeatureError for ids that no table has.
        """
        features = maybe_td_to_kjt(features)
        if features.variable_stride_per_key():
            features = written_out(features.to(torch.device("cpu")))
        return super().input_dist(ctx, features)

    def compute_and_output_dist(
        self, ctx: EmbeddingCollectionContext, input: list[Any]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Looks a prepared batch up: embeddings of every id, by name."""
        found: dict[str, JaggedTensor] = {}
        for lookup, sharding, batch in zip(
            self._lookups, self._sharding_type_to_sharding.values(), input, strict=True
        ):
            keys = iter(range(len(batch.rooms)))
            for name, values in lookup(batch).items():
                found[name] = self._jagged(batch.features, next(keys), values)
            assert next(keys, None) is None, sharding
        return LazyNoWait(found)

    def _jagged(self, features: KeyedJaggedTensor, key: int, values: Tensor) -> JaggedTensor:
        stride, first = features.stride(), features.offset_per_key()[key]
        lengths = features.lengths().view(-1, stride)[key]
        count = int(lengths.sum())
        if values.device.type == "cpu":
            values = values[:count]
        ids = None
        if self._need_indices:
            ids = torch.zeros(len(values), dtype=features.values().dtype)
            ids[:count] = features.values()[first : first + count]
            ids = ids.to(values.device)
        offsets = torch.zeros(stride + 1, dtype=lengths.dtype)
        torch.cumsum(lengths, 0, out=offsets[1:])
        return JaggedTensor(
            values, weights=ids, lengths=lengths.to(values.device), offsets=offsets.to(values.device)
        )


class TpuEmbeddingCollectionSharder(EmbeddingCollectionSharder):
    """Shards every EmbeddingCollection of a model.  Arguments as of the pooled sharder.

    Ids are always deduplicated before the exchange, so `use_index_dedup` changes nothing.
    """

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
            module_fqn=module_fqn,
            validate=self._validate,
        )

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(SEQUENCES)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        dense = sharding_type == ShardingType.DATA_PARALLEL.value
        return [(EmbeddingComputeKernel.DENSE if dense else EmbeddingComputeKernel.FUSED).value]

    def storage_usage(self, tensor: Tensor, compute_device_type: str, compute_kernel: str) -> dict[str, int]:
        """Bytes of a table on its device: HBM of a chip, DDR of a host."""
        kind = "ddr" if compute_device_type == "cpu" else "hbm"
        return {kind: tensor.element_size() * tensor.numel()}

    @property
    def sharded_module_type(self) -> type[TpuShardedEmbeddingCollection]:
        return TpuShardedEmbeddingCollection
