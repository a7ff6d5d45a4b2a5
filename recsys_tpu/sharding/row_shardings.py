"""TorchRec shardings whose rows travel: who holds which shard is TorchRec's, the exchange is `row_exchange`.

Features and embeddings come table after table, in the order in which the shards of rank 0, 1, ... show them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.distributed.sharding.cw_sequence_sharding import CwSequenceEmbeddingSharding
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.types import CommOp, NoWait, ShardingEnv, ShardingType, ShardMetadata
from torchrec.modules.embedding_configs import PoolingType

from recsys_tpu.embeddings.fused_params import parse_fused_params
from recsys_tpu.sharding.pooled_shardings import (
    ColumnWise,
    Grid,
    RowWise,
    TableColumnWise,
    TableRowWise,
    TableWise,
)
from recsys_tpu.sharding.replicated_sequences import ReplicatedSequenceLookup
from recsys_tpu.sharding.row_exchange import RowInputDist
from recsys_tpu.sharding.row_lookups import DeduplicatedLookup, RowPlan, SequenceLookup
from recsys_tpu.sharding.row_routing import RowRouting, TableShard
from recsys_tpu.sharding.source_rows import Column


class LocalOutput(nn.Module):
    """An output dist that has nothing to do: the lookup's output is that of this rank's samples."""

    def forward(self, embeddings: Any, sharding_ctx: Any = None) -> Any:
        return NoWait(embeddings)


class RowsTravel:
    """Mixed into a TorchRec sharding, for which it takes the part of input dist, lookup and output dist."""

    sharding_type: ShardingType
    host_pg: dist.ProcessGroup | None = None

    def create_input_dist(self: Any, device: torch.device | None = None) -> RowInputDist:
        tables = [table.name for table in self._tables() for _ in table.feature_names]
        return RowInputDist(self._routing(), tables, self.host_pg, self._env.rank)

    def create_output_dist(self, device: torch.device | None = None) -> Any:
        return LocalOutput()

    def feature_names(self: Any) -> list[str]:
        return [feature for table in self._tables() for feature in table.feature_names]

    def embedding_names(self: Any) -> list[str]:
        return [name for table in self._tables() for name in table.embedding_names]

    def embedding_dims(self: Any) -> list[int]:
        return [table.embedding_dim for table in self._tables() for _ in table.embedding_names]

    def uncombined_embedding_names(self) -> list[str]:
        return self.embedding_names()

    def uncombined_embedding_dims(self) -> list[int]:
        return self.embedding_dims()

    def embedding_shard_metadata(self: Any) -> list[ShardMetadata | None]:
        return [table.local_metadata for table in self._tables() for _ in table.embedding_names]

    def _groups(self: Any) -> list[list[GroupedEmbeddingConfig]]:
        per_rank: list[list[GroupedEmbeddingConfig]] = self._grouped_embedding_configs_per_rank
        return per_rank

    def _tables(self) -> list[ShardedEmbeddingTable]:
        """Each table once."""
        found: dict[str, ShardedEmbeddingTable] = {}
        for groups in self._groups():
            for group in groups:
                for table in group.embedding_tables:
                    found.setdefault(table.name, table)
        return list(found.values())

    def _routing(self) -> RowRouting:
        return RowRouting(
            [
                [_shard(table) for group in groups for table in group.embedding_tables]
                for groups in self._groups()
            ]
        )

    def _plan(self: Any) -> RowPlan:
        routing, tables = self._routing(), self._tables()
        features = [(table, name) for table in tables for name in table.embedding_names]
        columns = [
            Column(name, key, block, routing.columns[block])
            for key, (table, name) in enumerate(features)
            for block in routing.blocks_of(table.name)
        ]
        mean = [table.pooling is PoolingType.MEAN for table, _ in features]
        (output_dtype,) = {
            parse_fused_params(group.fused_params).output_dtype
            for groups in self._groups()
            for group in groups
        }
        codecs = (self.qcomm_codecs_registry or {}).get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name)
        return RowPlan(routing, self._env.rank, columns, mean, output_dtype, codecs)


def _shard(table: ShardedEmbeddingTable) -> TableShard:
    assert table.local_metadata is not None
    first_row, first_column = (int(offset) for offset in table.local_metadata.shard_offsets)
    return TableShard(table.name, first_row, table.local_rows, first_column, table.local_cols)


class _Deduplicated(RowsTravel):
    def create_lookup(
        self: Any,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> DeduplicatedLookup:
        return DeduplicatedLookup(
            self._grouped_embedding_configs_per_rank[self._env.rank],
            plan=self._plan(),
            pg=self._env.process_group,
            device=device if device is not None else self._device,
            sharding_type=self.sharding_type,
            env=self._env,
        )


class _Sequence(RowsTravel):
    def create_lookup(
        self: Any,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> SequenceLookup:
        return SequenceLookup(
            self._grouped_embedding_configs_per_rank[self._env.rank],
            plan=self._plan(),
            pg=self._env.process_group,
            device=device if device is not None else self._device,
            env=self._env,
        )


class DeduplicatedTableWise(_Deduplicated, TableWise):
    pass


class DeduplicatedRowWise(_Deduplicated, RowWise):
    pass


class DeduplicatedColumnWise(_Deduplicated, ColumnWise):
    pass


class DeduplicatedTableColumnWise(_Deduplicated, TableColumnWise):
    pass


class DeduplicatedTableRowWise(_Deduplicated, TableRowWise):
    pass


class DeduplicatedGrid(_Deduplicated, Grid):
    pass


class SequenceTableWise(_Sequence, TwSequenceEmbeddingSharding):
    sharding_type = ShardingType.TABLE_WISE


class SequenceRowWise(_Sequence, RwSequenceEmbeddingSharding):
    sharding_type = ShardingType.ROW_WISE


class SequenceColumnWise(_Sequence, CwSequenceEmbeddingSharding):
    sharding_type = ShardingType.COLUMN_WISE


class SequenceDataParallel(DpSequenceEmbeddingSharding):
    sharding_type = ShardingType.DATA_PARALLEL
    host_pg: dist.ProcessGroup | None = None  # unused: every rank has every row

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> ReplicatedSequenceLookup:
        return ReplicatedSequenceLookup(
            self._grouped_embedding_configs,
            pg=self._env.process_group,
            device=device if device is not None else self._device,
            env=self._env,
        )


_DEDUPLICATED: dict[str, type[Any]] = {
    sharding.sharding_type.value: sharding
    for sharding in (
        DeduplicatedTableWise,
        DeduplicatedRowWise,
        DeduplicatedColumnWise,
        DeduplicatedTableColumnWise,
        DeduplicatedTableRowWise,
        DeduplicatedGrid,
    )
}
SEQUENCES: dict[str, type[Any]] = {
    sharding.sharding_type.value: sharding
    for sharding in (SequenceDataParallel, SequenceTableWise, SequenceColumnWise, SequenceRowWise)
}


def deduplicated_sharding(
    infos: list[EmbeddingShardingInfo], env: ShardingEnv, device: torch.device | None, qcomm: Any
) -> EmbeddingSharding[Any, Any, Any, Any]:
    """The sharding of pooled tables, all of one type."""
    kind = _DEDUPLICATED[infos[0].param_sharding.sharding_type]
    return kind(infos, env, device, qcomm_codecs_registry=qcomm)


def sequence_sharding(
    name: str, infos: list[EmbeddingShardingInfo], env: ShardingEnv, device: torch.device | None, qcomm: Any
) -> EmbeddingSharding[Any, Any, Any, Any]:
    """The sharding of unpooled tables.  Raises ValueError for a type that is not supported."""
    if name not in SEQUENCES:
        raise ValueError(
            f"sharding type {name} not supported for unpooled embeddings; use one of {sorted(SEQUENCES)}"
        )
    if name == ShardingType.DATA_PARALLEL.value:
        return SequenceDataParallel(infos, env, device)
    return SEQUENCES[name](infos, env, device, qcomm_codecs_registry=qcomm)
