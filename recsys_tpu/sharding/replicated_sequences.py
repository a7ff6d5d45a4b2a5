"""Unpooled embeddings of tables that every rank holds: nothing travels but gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.embeddings.bags import to_device
from recsys_tpu.embeddings.capacity import SMALLEST, Size
from recsys_tpu.embeddings.preparation import sort_ids
from recsys_tpu.kernels.batch import LookupBatch
from recsys_tpu.sharding.kernels import DenseSequenceKernel
from recsys_tpu.sharding.lookups import stack_features
from recsys_tpu.sharding.source_rows import SequenceSource


@dataclass(frozen=True)
class SortedSequences:
    """The ids of each stack, and of each key."""

    features: KeyedJaggedTensor
    sources: list[list[SequenceSource]]

    @property
    def num_samples(self) -> int:
        return self.features.stride()

    @property
    def shared_sizes(self) -> list[tuple[int, int]]:
        stacks = [source.sizes for of_kernel in self.sources for source in of_kernel]
        return stacks + [(ids, 0) for ids in self.features.length_per_key()]

    @property
    def smallest_shared(self) -> list[int]:
        return [SMALLEST] * len(self.shared_sizes)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return []


@dataclass(frozen=True)
class SequenceInput:
    """A batch on the device: by kernel and stack; rooms: output rows of each key."""

    features: KeyedJaggedTensor
    batches: list[list[LookupBatch]]
    rooms: list[int]
    num_samples: int
    num_shared: int


class ReplicatedSequenceLookup(GroupedEmbeddingsLookup):
    """All groups of replicated unpooled tables.  `sort`, `pad`, then forward."""

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        *,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        env: ShardingEnv | None,
    ) -> None:
        super().__init__(grouped_configs, pg, device, env)
        self._on = device or torch.device("cpu")
        self._names = [name for config in grouped_configs for name in config.embedding_names()]
        self._stack_features = stack_features(self._emb_modules)

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        env: ShardingEnv | None = None,
    ) -> BaseEmbedding:
        if config.compute_kernel is not EmbeddingComputeKernel.DENSE:
            raise ValueError(
                f"tables {[table.name for table in config.embedding_tables]}: compute kernel "
                f"{config.compute_kernel.value} not supported for data-parallel tables; use 'dense'"
            )
        return DenseSequenceKernel(config, pg, device or torch.device("cpu"))

    def sort(self, features: KeyedJaggedTensor) -> SortedSequences:
        """Sorts the ids of this rank's batch."""
        values, ends = features.values().numpy(), features.offset_per_key()
        sources = []
        for stacks in self._stack_features:
            of_kernel = []
            for stack in stacks:
                parts = [
                    values[ends[feature] : ends[feature + 1]] + first
                    for feature, first in zip(stack.features, stack.first_rows, strict=True)
                ]
                rows = np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)
                ids = sort_ids(rows, num_bags=len(rows), num_rows=stack.num_rows, bags=np.arange(len(rows)))
                of_kernel.append(SequenceSource(ids, np.array([len(part) for part in parts], np.int64)))
            sources.append(of_kernel)
        return SortedSequences(features, sources)

    def pad(self, ids: SortedSequences, capacities: Sequence[tuple[int, int]]) -> SequenceInput:
        """Pads to agreed capacities and moves to the device."""
        stacks = sum(len(of_kernel) for of_kernel in ids.sources)
        rooms = [room for room, _ in capacities[stacks:]]
        unique = iter(capacities[:stacks])
        batches = []
        for of_kernel, features in zip(ids.sources, self._stack_features, strict=True):
            padded = []
            for source, stack in zip(of_kernel, features, strict=True):
                rows = np.arange(stack.num_rows)
                of_features = [rooms[feature] for feature in stack.features]
                padded.append(source.pad(rows, stack.num_rows, of_features, next(unique)[1]))
            batches.append([to_device(batch, self._on) for batch in padded])
        return SequenceInput(ids.features, batches, rooms, ids.num_samples, len(capacities))

    def limits(self, features: KeyedJaggedTensor, max_ids: Mapping[str, int]) -> list[Size]:
        """None: all sizes are shared."""
        return []

    def rehearse(self, batch: SequenceInput, levels: Iterator[Sequence[Size]]) -> None:
        """Nothing: a size is compiled when it is met."""

    def forward(self, batch: SequenceInput) -> dict[str, Tensor]:
        """By embedding name: `[room, dim]`, the ids' rows in their order, zeros behind them."""
        found: dict[int, Tensor] = {}
        for kernel, batches, stacks in zip(
            self._emb_modules, batch.batches, self._stack_features, strict=True
        ):
            for rows, stack in zip(kernel(batches), stacks, strict=True):
                parts = rows.split([batch.rooms[feature] for feature in stack.features])
                found.update(zip(stack.features.tolist(), parts, strict=True))
        return {name: found[key] for key, name in enumerate(self._names)}
