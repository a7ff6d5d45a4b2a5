"""TorchRec's grouped lookup over our kernels: sorts a rank's ids on the host, looks them up on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import (
    GroupedPooledEmbeddingsLookup,
    embeddings_cat_empty_rank_handle,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.embeddings.bags import BagLayout, JaggedFeatures, StackFeatures, sort_for_stack, to_device
from recsys_tpu.embeddings.capacity import UNKNOWN, Size
from recsys_tpu.embeddings.fused_tables import PooledInput
from recsys_tpu.embeddings.preparation import SortedIds, prepare
from recsys_tpu.embeddings.stacks import features_of
from recsys_tpu.kernels.batch import LookupBatch
from recsys_tpu.sharding.kernels import DenseKernel, FusedKernel

# Bags of these types are spread over ranks, which know only their part of a bag: MEAN is folded into the
# weights before the exchange, and the parts are summed.
ROW_SHARDED = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)


# With variable batch sizes: (group, stack, first bag, last bag) of each piece of the flat output.
Pieces = list[tuple[int, int, int, int]]


@dataclass(frozen=True)
class SortedFeatures:
    """A rank's ids of one sharding, sorted for each stack of each group."""

    num_samples: int
    groups: list[list[SortedIds]]
    pieces: Pieces | None

    shared_sizes: ClassVar[list[tuple[int, int]]] = []
    smallest_shared: ClassVar[list[int]] = []

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return [stack.sizes for group in self.groups for stack in group]


@dataclass(frozen=True)
class LookupInput:
    """What a lookup takes: one `PooledInput` a group.  num_samples: ranks x local batch."""

    num_samples: int
    groups: list[PooledInput]
    pieces: Pieces | None

    num_shared: ClassVar[int] = 0


class PooledLookup(GroupedPooledEmbeddingsLookup):
    """All groups of one sharding on one rank.  `sort`, `pad`, then forward."""

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        *,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        sharding_type: ShardingType,
        env: ShardingEnv | None,
    ) -> None:
        self._sharding_type = sharding_type
        super().__init__(grouped_configs, device, pg, sharding_type=sharding_type, env=env)
        self._device = device or torch.device("cpu")
        self._stack_features = stack_features(self._emb_modules)

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        sharding_type: ShardingType | None,
        env: ShardingEnv | None,
    ) -> BaseEmbedding:
        device = device or torch.device("cpu")
        if config.compute_kernel is EmbeddingComputeKernel.FUSED:
            return FusedKernel(config, pg, device, sharding_type)
        if config.compute_kernel is EmbeddingComputeKernel.DENSE:
            if sharding_type is ShardingType.DATA_PARALLEL:
                return DenseKernel(config, pg, device, sharding_type)
            raise ValueError(
                f"tables {[table.name for table in config.embedding_tables]}: compute kernel dense is for "
                "data-parallel tables; give a sharded table compute_kernel='fused' in its plan"
            )
        raise ValueError(
            f"tables {[table.name for table in config.embedding_tables]}: compute kernel "
            f"{config.compute_kernel.value} not supported; use fused (or dense with data_parallel)"
        )

    def sort(self, features: KeyedJaggedTensor) -> SortedFeatures:
        """Sorts the ids that this rank received, on the host."""
        batch = jagged_features(features)
        layout = BagLayout(features.stride_per_key_per_rank()) if features.variable_stride_per_key() else None
        groups = []
        for config, stacks in zip(self.grouped_configs, self._stack_features, strict=True):
            mean = config.pooling is PoolingType.MEAN and self._sharding_type not in ROW_SHARDED
            orders = [None if layout is None else layout.bag_order(stack.features) for stack in stacks]
            groups.append(
                [
                    sort_for_stack(batch, stack, mean=mean, bag_order=order)
                    for stack, order in zip(stacks, orders, strict=True)
                ]
            )
        if layout is None:
            return SortedFeatures(features.stride(), groups, None)
        return SortedFeatures(0, groups, self._pieces(layout))

    def _pieces(self, layout: BagLayout) -> Pieces:
        """TorchRec's flat output: rank after rank, its features in order, a feature's samples together."""
        position_of_feature = {
            int(feature): (group, stack, place)
            for group, stacks in enumerate(self._stack_features)
            for stack, of_stack in enumerate(stacks)
            for place, feature in enumerate(of_stack.features)
        }
        bounds = [[layout.bounds(stack.features) for stack in stacks] for stacks in self._stack_features]
        pieces = []
        for rank in range(layout.num_ranks):
            for feature in sorted(position_of_feature):
                group, stack, place = position_of_feature[feature]
                first, last = bounds[group][stack][rank][place]
                pieces.append((group, stack, first, last))
        return pieces

    def limits(self, features: KeyedJaggedTensor, max_ids: Mapping[str, int]) -> list[Size]:
        """See `stack_limits`."""
        return stack_limits(self._stack_features, features, max_ids)

    def pad(self, ids: SortedFeatures, capacities: list[tuple[int, int]]) -> LookupInput:
        """Pads sorted ids to (id, distinct row) capacities, one a stack, and moves them to the device."""
        remaining = iter(capacities)
        groups = [
            PooledInput(
                ids.num_samples, [to_device(stack.pad(*next(remaining)), self._device) for stack in group]
            )
            for group in ids.groups
        ]
        return LookupInput(ids.num_samples, groups, ids.pieces)

    def rehearse(self, batch: LookupInput, levels: Iterator[Sequence[Size]]) -> None:
        """Runs lookup and update of every size in `levels` (one list a stack) on no ids, for its programs.

        Nothing is looked up or changed.  `batch` gives the number of bags, and whether ids have weights.
        """
        for kernel, group in zip(self._emb_modules, batch.groups, strict=True):
            for position, lookup in enumerate(group.batches):
                for size in next(levels):
                    nothing = no_ids(lookup, kernel.emb_module.stacks[position].num_rows, size)
                    kernel.emb_module.rehearse(position, to_device(nothing, self._device))

    def forward(self, batch: LookupInput) -> Tensor:
        """Pooled embeddings `[num_samples, sum of dims]` of the features that this rank serves.

        With variable batch sizes 1-D, see `_pieces`.
        """
        if batch.pieces is not None:
            return self._flat(batch, batch.pieces)
        outputs = [kernel(group) for kernel, group in zip(self._emb_modules, batch.groups, strict=True)]
        if not outputs:
            return self._dummy_embs_tensor.view(batch.num_samples, 0)
        return embeddings_cat_empty_rank_handle(outputs, self._dummy_embs_tensor, dim=1)

    def _flat(self, batch: LookupInput, pieces: Pieces) -> Tensor:
        outputs = [
            kernel.emb_module.pool(group.batches)
            for kernel, group in zip(self._emb_modules, batch.groups, strict=True)
        ]
        flat = [outputs[group][stack][first:last].reshape(-1) for group, stack, first, last in pieces]
        return embeddings_cat_empty_rank_handle(flat, self._dummy_embs_tensor)


def stack_features(kernels: Iterable[Any]) -> list[list[StackFeatures]]:
    """For each kernel and stack, the features that read it; features are numbered through all kernels."""
    found = []
    first_feature = 0
    for kernel in kernels:
        tables = kernel.emb_module
        of_group = []
        for stack in tables.stacks:
            features = np.array(features_of(stack, tables.feature_tables), np.int64)
            starts = [stack.first_rows[tables.feature_tables[feature]] for feature in features]
            of_group.append(
                StackFeatures(features + first_feature, np.array(starts, np.int64), stack.num_rows)
            )
        found.append(of_group)
        first_feature += len(tables.feature_tables)
    return found


def stack_limits(
    stack_features: Iterable[Iterable[StackFeatures]],
    features: KeyedJaggedTensor,
    max_ids: Mapping[str, int],
) -> list[Size]:
    """(ids, distinct rows) that a batch of this many samples can need at most, of each stack in turn.

    max_ids: ids that a sample has at most, by feature; a feature that is missing makes the ids `UNKNOWN`.
    """
    keys, samples = features.keys(), features.stride_per_key()
    limits = []
    for stack in (stack for stacks in stack_features for stack in stacks):
        known = all(keys[feature] in max_ids for feature in stack.features)
        ids = sum(max_ids[keys[f]] * samples[f] for f in stack.features) if known else UNKNOWN
        limits.append((ids, stack.num_rows))
    return limits


def no_ids(like: LookupBatch, num_rows: int, size: Size) -> LookupBatch:
    """A batch of the given size that holds no ids: all padding.  On the host."""
    nothing = np.zeros(0, np.int64)
    return prepare(
        nothing,
        bags=nothing,
        weights=None if like.weights is None else np.zeros(0, np.float32),
        num_bags=like.num_bags,
        num_rows=num_rows,
        id_capacity=size[0],
        unique_capacity=size[1],
    )


def jagged_features(features: KeyedJaggedTensor) -> JaggedFeatures:
    """A KeyedJaggedTensor on CPU as numpy arrays."""
    weights = features.weights_or_none()
    return JaggedFeatures(
        values=features.values().numpy(),
        weights=None if weights is None else weights.numpy(),
        lengths=_flat(features.lengths()),
        strides=features.stride_per_key(),
    )


def _flat(lengths: Tensor) -> NDArray[np.integer]:
    return lengths.reshape(-1).numpy()
