"""Unpooled embeddings: TorchRec's sequence shardings with our lookup, one output row an id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup, embeddings_cat_empty_rank_handle
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.sharding.cw_sequence_sharding import CwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.embeddings.bags import JaggedFeatures, sort_for_stack
from recsys_tpu.embeddings.capacity import Size
from recsys_tpu.embeddings.fused_tables import SequenceInput
from recsys_tpu.embeddings.preparation import SortedIds
from recsys_tpu.sharding.host import on_host
from recsys_tpu.sharding.kernels import FusedSequenceKernel
from recsys_tpu.sharding.lookups import jagged_features, stack_features, stack_limits


@dataclass(frozen=True)
class SequenceFeatures:
    """What a sequence lookup takes: ids of one sharding, and the lengths by which rows are sent back."""

    features: KeyedJaggedTensor
    groups: list[SequenceInput]

    def lengths(self) -> Tensor:
        return self.features.lengths()

    def stride(self) -> int:
        return self.features.stride()


@dataclass(frozen=True)
class SortedSequences:
    """A rank's ids of one sharding, sorted for each stack of each group."""

    features: KeyedJaggedTensor
    groups: list[list[SortedIds]]
    pieces: list[list[tuple[int, int, int]]]

    @property
    def num_samples(self) -> int:
        """Samples of all ranks; 0 if they differ between features."""
        return 0 if self.features.variable_stride_per_key() else self.features.stride()


class SequenceLookup(GroupedEmbeddingsLookup):
    """All groups of one sharding on one rank.  `sort`, `pad`, then forward."""

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        *,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        env: ShardingEnv | None,
    ) -> None:
        super().__init__(grouped_configs, pg, device, env)
        self._stack_features = stack_features(self._emb_modules)

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        env: ShardingEnv | None = None,
    ) -> BaseEmbedding:
        if config.compute_kernel is not EmbeddingComputeKernel.FUSED:
            raise ValueError(
                f"tables {[table.name for table in config.embedding_tables]}: compute kernel "
                f"{config.compute_kernel.value} not supported for sequences; use compute_kernel='fused'"
            )
        return FusedSequenceKernel(config, pg, device or torch.device("cpu"))

    def sort(self, features: KeyedJaggedTensor) -> SortedSequences:
        """Sorts the ids that this rank received, on the host; the output keeps the order of the features."""
        batch = jagged_features(features)
        batch = JaggedFeatures(batch.values, None, batch.lengths, batch.strides)
        ends = np.cumsum(batch.strides)
        ids_of_feature = np.array(features.length_per_key(), np.int64)
        groups, pieces = [], []
        for stacks in self._stack_features:
            of_group, placed = [], []
            for position, stack in enumerate(stacks):
                bags = [np.arange(ends[f] - batch.strides[f], ends[f]) for f in stack.features]
                order = np.concatenate(bags) if bags else np.zeros(0, np.int64)
                of_group.append(sort_for_stack(batch, stack, bag_order=order, mean=False))
                last = np.cumsum(ids_of_feature[stack.features])
                first = last - ids_of_feature[stack.features]
                for feature, start, end in zip(stack.features, first, last, strict=True):
                    placed.append((int(feature), (position, int(start), int(end))))
            groups.append(of_group)
            pieces.append([piece for _, piece in sorted(placed)])
        return SortedSequences(features, groups, pieces)

    def limits(self, features: KeyedJaggedTensor, max_ids: Mapping[str, int]) -> list[Size]:
        """See `stack_limits`."""
        return stack_limits(self._stack_features, features, max_ids)

    def pad(self, ids: SortedSequences, capacities: Sequence[tuple[int, int]]) -> SequenceFeatures:
        """Pads sorted ids to (id, distinct row) capacities, one a stack."""
        remaining = iter(capacities)
        groups = [
            SequenceInput([stack.pad(*next(remaining)) for stack in group], pieces)
            for group, pieces in zip(ids.groups, ids.pieces, strict=True)
        ]
        return SequenceFeatures(ids.features, groups)

    def forward(self, batch: SequenceFeatures) -> Tensor:
        """Flat embeddings of the ids of this rank, in their order."""
        outputs = [
            kernel(group).view(-1) for kernel, group in zip(self._emb_modules, batch.groups, strict=True)
        ]
        return embeddings_cat_empty_rank_handle(outputs, self._dummy_embs_tensor)


class _SequenceOnHost:
    """Mixed into a TorchRec sequence sharding: the exchange of ids on the host group, and our lookup."""

    host_pg: dist.ProcessGroup | None = None

    def create_input_dist(self: Any, device: torch.device | None = None) -> Any:
        with on_host(self):
            return super().create_input_dist(device=torch.device("cpu"))  # type: ignore[misc]

    def create_lookup(
        self: Any,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> SequenceLookup:
        return SequenceLookup(
            self._grouped_embedding_configs_per_rank[self._rank],
            pg=self._pg,
            device=device if device is not None else self._device,
            env=self._env,
        )


class TableWiseSequence(_SequenceOnHost, TwSequenceEmbeddingSharding):
    pass


class RowWiseSequence(_SequenceOnHost, RwSequenceEmbeddingSharding):
    pass


class ColumnWiseSequence(_SequenceOnHost, CwSequenceEmbeddingSharding):
    pass


SEQUENCE_SHARDINGS: dict[str, type[Any]] = {
    ShardingType.TABLE_WISE.value: TableWiseSequence,
    ShardingType.ROW_WISE.value: RowWiseSequence,
    ShardingType.COLUMN_WISE.value: ColumnWiseSequence,
}


def sequence_sharding(
    name: str,
    infos: list[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None,
    qcomm_codecs_registry: Any,
) -> EmbeddingSharding[Any, Any, Any, Any]:
    """The sharding of `infos`, all of type `name`.  Raises ValueError for a type that is not supported."""
    if name not in SEQUENCE_SHARDINGS:
        raise ValueError(
            f"sharding type {name} not supported for unpooled embeddings; use {sorted(SEQUENCE_SHARDINGS)}"
        )
    return SEQUENCE_SHARDINGS[name](
        sharding_infos=infos, env=env, device=device, qcomm_codecs_registry=qcomm_codecs_registry
    )
