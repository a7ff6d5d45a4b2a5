"""Lookups behind the exchange of rows: what `PooledLookup` is to the exchange of pooled bags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.types import QuantizedCommCodecs, ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.embeddings.bags import to_device
from recsys_tpu.embeddings.capacity import SMALLEST, Size
from recsys_tpu.embeddings.dense_tables import dense_lookup
from recsys_tpu.kernels.batch import LookupBatch
from recsys_tpu.sharding.host import fold_mean
from recsys_tpu.sharding.kernels import FusedSequenceKernel
from recsys_tpu.sharding.lookups import PooledLookup
from recsys_tpu.sharding.row_exchange import (
    Moves,
    OwnedRows,
    RowFeatures,
    StackIds,
    exchanged,
    on_device,
    padded_batches,
    slots_of_pair,
)
from recsys_tpu.sharding.row_routing import Routed, RowRouting
from recsys_tpu.sharding.source_rows import Column, SequenceSource, in_slots, pooled_source, sequence_source

SMALLEST_BUFFER = 256  # slots of all ranks together, where the ladder of buffers begins


@dataclass(frozen=True)
class RowPlan:
    """A sharding whose rows travel, as one rank sees it.

    columns: the output: embedding after embedding, each one's column blocks in order.
    mean: for each key of the features, whether its bags are averaged.  codecs: what rows and gradients are
    turned into while they travel, those of TorchRec's exchange of unpooled embeddings.
    """

    routing: RowRouting
    rank: int
    columns: list[Column]
    mean: list[bool]
    output_dtype: torch.dtype
    codecs: QuantizedCommCodecs | None

    def of_width(self, width: int) -> list[Column]:
        return [column for column in self.columns if column.width == width]

    def assembled(self, parts: dict[int, list[Tensor]]) -> dict[str, Tensor]:
        """Embeddings `[n, dim]` by name from their columns, which `parts` holds by width, in order."""
        remaining = {width: iter(of_width) for width, of_width in parts.items()}
        found: dict[str, list[Tensor]] = {}
        for column in self.columns:
            found.setdefault(column.name, []).append(next(remaining[column.width]))
        return {
            name: (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)).to(self.output_dtype)
            for name, pieces in found.items()
        }


@dataclass(frozen=True)
class SortedRows:
    """A rank's part of one exchange, sorted, before its buffers have sizes.

    rooms: for unpooled embeddings, the ids of each key; otherwise empty.
    """

    features: KeyedJaggedTensor
    routed: Routed
    stacks: list[StackIds]
    sources: dict[int, Any]  # by width: SortedIds, or SequenceSource
    rooms: list[int]

    @property
    def num_samples(self) -> int:
        return 0 if self.features.variable_stride_per_key() else self.features.stride()

    @property
    def shared_sizes(self) -> list[tuple[int, int]]:
        pairs = [(self.routed.most_for_one_rank(width), 0) for width in self.sources]
        return pairs + [source.sizes for source in self.sources.values()] + [(room, 0) for room in self.rooms]

    @property
    def smallest_shared(self) -> list[int]:
        ranks = self.routed.ranks
        of_pair = max(SMALLEST_BUFFER // (1 << (ranks - 1).bit_length()), 4)
        others = len(self.shared_sizes) - len(self.sources)
        return [of_pair] * len(self.sources) + [SMALLEST] * others

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return [stack.ids.sizes for stack in self.stacks]


@dataclass(frozen=True)
class RowInput:
    """A batch on the device.  batches: by kernel and stack.  sources: what is made of the rows, by width.

    rooms: output rows of each key of unpooled embeddings.
    """

    features: KeyedJaggedTensor
    batches: list[list[LookupBatch]]
    moves: dict[int, Moves]
    sources: dict[int, LookupBatch]
    rooms: list[int]
    num_samples: int
    num_shared: int


class _RowLookup:
    """Mixed into a TorchRec lookup: sorts, pads and runs an exchange of rows, up to the source's rows."""

    def _set_up(self: Any, plan: RowPlan, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._plan, self._group, self._on = plan, group, device
        self._owned = OwnedRows(plan.routing, plan.rank, self._emb_modules)

    def _pad_exchange(
        self: Any, rows: SortedRows, capacities: Sequence[tuple[int, int]]
    ) -> tuple[list[list[LookupBatch]], dict[int, Moves], dict[int, int]]:
        """(batches of the kernels, moves by width, slots of a pair of ranks by width)."""
        widths, ranks = list(rows.sources), self._plan.routing.ranks
        slots = {
            width: slots_of_pair(capacity[0], ranks)
            for width, capacity in zip(widths, capacities[: len(widths)], strict=True)
        }
        own = capacities[len(rows.shared_sizes) :]
        flat = iter(padded_batches(rows.stacks, own, self._on))
        batches = [[next(flat) for _ in kernel.emb_module.stacks] for kernel in self._emb_modules]
        moves = self._owned.moves(rows.stacks, [ids for ids, _ in own], slots)
        return batches, {width: on_device(of_width, self._on) for width, of_width in moves.items()}, slots

    def limits(self: Any, features: Any, max_ids: Mapping[str, int]) -> list[Size]:
        """What a stack can be asked for at most: ids are distinct for each rank that asks."""
        ranks = self._plan.routing.ranks
        return [(ranks * stack.num_rows, stack.num_rows) for stack in self._owned.stacks]

    def rehearse(self: Any, batch: Any, levels: Iterator[Sequence[Size]]) -> None:
        """Leaves out this lookup's levels: its exchange is compiled for a size when that is met."""
        for _ in self._owned.stacks:
            next(levels)

    def _source_rows(self: Any, batch: RowInput) -> dict[int, Tensor]:
        """By width: one output row a bag of the source, `[bags, width]`."""
        looked_up = [
            (stack.dim, rows)
            for kernel, batches in zip(self._emb_modules, batch.batches, strict=True)
            for stack, rows in zip(kernel.emb_module.stacks, kernel.emb_module.sequence(batches), strict=True)
        ]
        arrived = exchanged(looked_up, batch.moves, self._dummy_embs_tensor, self._group, self._plan.codecs)
        return {
            width: dense_lookup(rows.reshape(-1), width, batch.sources[width])
            for width, rows in arrived.items()
        }


class DeduplicatedLookup(_RowLookup, PooledLookup):
    """Pooled embeddings of one sharding: an owner sends each distinct row once, bags are summed at home."""

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        *,
        plan: RowPlan,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        sharding_type: ShardingType,
        env: ShardingEnv | None,
    ) -> None:
        super().__init__(grouped_configs, pg=pg, device=device, sharding_type=sharding_type, env=env)
        self._set_up(plan, pg, device or torch.device("cpu"))

    def sort(self, rows: RowFeatures) -> SortedRows:  # type: ignore[override]
        """Sorts what this rank was asked for, and its own bags."""
        features = rows.features
        if any(self._plan.mean):
            features = fold_mean(features, np.array(self._plan.mean))
        sources = {
            width: pooled_source(features, rows.routed, self._plan.of_width(width))
            for width in self._plan.routing.widths
        }
        return SortedRows(features, rows.routed, self._owned.sort(rows.received), sources, [])

    def pad(self, rows: SortedRows, capacities: Sequence[tuple[int, int]]) -> RowInput:  # type: ignore[override]
        """Pads to agreed capacities and moves to the device."""
        batches, moves, slots = self._pad_exchange(rows, capacities)
        ranks = self._plan.routing.ranks
        sources = {}
        for (width, ids), capacity in zip(
            rows.sources.items(), capacities[len(slots) : 2 * len(slots)], strict=True
        ):
            placed = in_slots(ids, rows.routed.slots(width, slots[width]), ranks * slots[width])
            sources[width] = to_device(placed.pad(*capacity), self._on)
        return RowInput(rows.features, batches, moves, sources, [], rows.num_samples, len(rows.shared_sizes))

    def forward(self, batch: RowInput) -> Tensor:  # type: ignore[override]
        """`[samples, sum of dims]` of this rank's samples; with variable batch sizes flat, see TorchRec."""
        strides = batch.features.stride_per_key()
        variable = batch.features.variable_stride_per_key()
        parts = {}
        for width, bags in self._source_rows(batch).items():
            columns = self._plan.of_width(width)
            if variable:
                parts[width] = list(bags.split([strides[column.key] for column in columns]))
            else:
                samples = bags.view(batch.features.stride(), len(columns) * width)
                parts[width] = list(samples.split(width, dim=1))
        embeddings = list(self._plan.assembled(parts).values())
        if variable:
            return torch.cat([embedding.reshape(-1) for embedding in embeddings])
        return torch.cat(embeddings, dim=1)


class SequenceLookup(_RowLookup, GroupedEmbeddingsLookup):
    """Unpooled embeddings of one sharding, by name: one row an occurrence, padding behind them."""

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        *,
        plan: RowPlan,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        env: ShardingEnv | None,
    ) -> None:
        super().__init__(grouped_configs, pg, device, env)
        self._set_up(plan, pg, device or torch.device("cpu"))

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

    def sort(self, rows: RowFeatures) -> SortedRows:
        """Sorts what this rank was asked for, and its own occurrences."""
        sources = {
            width: sequence_source(rows.routed, self._plan.of_width(width))
            for width in self._plan.routing.widths
        }
        stacks = self._owned.sort(rows.received)
        return SortedRows(rows.features, rows.routed, stacks, sources, rows.features.length_per_key())

    def pad(self, rows: SortedRows, capacities: Sequence[tuple[int, int]]) -> RowInput:
        """Pads to agreed capacities and moves to the device."""
        batches, moves, slots = self._pad_exchange(rows, capacities)
        ranks, shared = self._plan.routing.ranks, len(rows.shared_sizes)
        rooms = [room for room, _ in capacities[2 * len(slots) : shared]]
        sources = {}
        for (width, source), (_, unique) in zip(
            rows.sources.items(), capacities[len(slots) : 2 * len(slots)], strict=True
        ):
            assert isinstance(source, SequenceSource)
            of_columns = [rooms[column.key] for column in self._plan.of_width(width)]
            placed = rows.routed.slots(width, slots[width])
            padded = source.pad(placed, ranks * slots[width], of_columns, unique)
            sources[width] = to_device(padded, self._on)
        return RowInput(rows.features, batches, moves, sources, rooms, rows.num_samples, shared)

    def forward(self, batch: RowInput) -> dict[str, Tensor]:
        """By embedding name: `[room, dim]`, the ids' rows in their order, zeros behind them."""
        parts = {
            width: list(bags.split([batch.rooms[column.key] for column in self._plan.of_width(width)]))
            for width, bags in self._source_rows(batch).items()
        }
        return self._plan.assembled(parts)
