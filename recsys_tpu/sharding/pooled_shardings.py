"""TorchRec's pooled shardings with the input exchange on the host and our lookup on the device.

Routing of ids, and the exchange of pooled rows, are TorchRec's own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_sharding import (
    EmbeddingSharding,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
)
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist, RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.sharding.twcw_sharding import TwCwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from torchrec.distributed.types import Awaitable, NoWait, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import PoolingType

from recsys_tpu.sharding.host import MeanFoldingInputDist, on_host
from recsys_tpu.sharding.lookups import ROW_SHARDED, PooledLookup


class _OnHost:
    """Mixed into a TorchRec sharding: its input dist exchanges CPU tensors over a host group."""

    sharding_type: ShardingType
    host_pg: dist.ProcessGroup | None = None

    def create_input_dist(self: Any, device: torch.device | None = None) -> nn.Module:
        with on_host(self):
            input_dist = super().create_input_dist(device=torch.device("cpu"))  # type: ignore[misc]
        mean = [
            table.pooling is PoolingType.MEAN
            for group in self._grouped_embedding_configs_per_rank_in_feature_order()
            for table in group.embedding_tables
            for _ in range(table.num_features())
        ]
        if self.sharding_type in ROW_SHARDED and any(mean):
            return MeanFoldingInputDist(input_dist, mean)
        return input_dist

    def _grouped_embedding_configs_per_rank_in_feature_order(self: Any) -> list[Any]:
        """The groups whose features, one after the other, are `feature_names()`."""
        if self.sharding_type in (ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL):
            return self._grouped_embedding_configs
        per_rank = self._grouped_embedding_configs_per_rank
        if self.sharding_type in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD):
            per_rank = per_rank[:: self._local_size]  # every rank of a host has the same groups
        return [group for groups in per_rank for group in groups]

    def create_lookup(
        self: Any,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> PooledLookup:
        return PooledLookup(
            self._grouped_embedding_configs_per_rank[self._rank],
            pg=self._env.process_group,
            device=device if device is not None else self._device,
            sharding_type=self.sharding_type,
            env=self._env,
        )


class _InTableOrder:
    """Mixed into a column sharding: puts the shards of a table side by side with operators of any device."""

    def create_output_dist(self: Any, device: torch.device | None = None) -> nn.Module:
        output_dist = super().create_output_dist(device)  # type: ignore[misc]
        if output_dist._callbacks:
            output_dist._callbacks = [
                partial(_in_order, widths=self._embedding_dims, order=self._embedding_order)
            ]
        return output_dist


def _in_order(embeddings: Tensor, *, widths: list[int], order: list[int]) -> Tensor:
    """Columns `[samples, sum of widths]`, in pieces of `widths`, in another order of the pieces."""
    pieces = embeddings.split(widths, dim=1)
    return torch.cat([pieces[piece] for piece in order], dim=1)


class TableWise(_OnHost, TwPooledEmbeddingSharding):
    sharding_type = ShardingType.TABLE_WISE


class RowWise(_OnHost, RwPooledEmbeddingSharding):
    sharding_type = ShardingType.ROW_WISE

    def create_output_dist(self, device: torch.device | None = None) -> RowWiseOutputDist:
        assert self._pg is not None
        return RowWiseOutputDist(self._pg, self.embedding_dims(), self.qcomm_codecs_registry)


class RowWiseOutputDist(RwPooledEmbeddingDist):
    """TorchRec's, with batch sizes of their own for each feature on every backend.

    TorchRec reduces and scatters uneven parts, which needs NCCL; here they are exchanged, then summed.
    """

    def forward(
        self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        if sharding_ctx is None or not sharding_ctx.variable_batch_per_feature:
            return super().forward(local_embs, sharding_ctx)
        return SummedParts(self._pg)(
            local_embs, sharding_ctx.batch_size_per_rank_per_feature, self._embedding_dims
        )


class SummedParts(nn.Module):
    """Reduces and scatters uneven parts on every backend, in the place of TorchRec's
    `VariableBatchPooledEmbeddingsReduceScatter`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def forward(
        self,
        local_embs: Tensor,
        batch_size_per_rank_per_feature: list[list[int]],
        embedding_dims: list[int],
    ) -> Awaitable[Tensor]:
        """A flat tensor, part r of it for rank r of the group: this rank's part, summed over the ranks."""
        sizes = [
            sum(samples * dim for samples, dim in zip(of_rank, embedding_dims, strict=True))
            for of_rank in batch_size_per_rank_per_feature
        ]
        return NoWait(_SummedParts.apply(local_embs, sizes or [0] * self._group.size(), self._group))


class _SummedParts(torch.autograd.Function):
    """Part r of every rank's flat input, `sizes[r]` long, summed on rank r."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        mine = [sizes[group.rank()]] * group.size()
        arrived = flat.new_empty(sum(mine))
        dist.all_to_all_single(arrived, flat.contiguous(), mine, sizes, group=group)
        return arrived.view(group.size(), -1).sum(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ranks = ctx.group.size()
        gradient = grads[0] / ranks if get_gradient_division() else grads[0]
        arrived = gradient.new_empty(sum(ctx.sizes))
        sent = [len(gradient)] * ranks
        dist.all_to_all_single(arrived, gradient.repeat(ranks), ctx.sizes, sent, group=ctx.group)
        return arrived, None, None


class ColumnWise(_OnHost, _InTableOrder, CwPooledEmbeddingSharding):
    sharding_type = ShardingType.COLUMN_WISE


class TableColumnWise(_OnHost, _InTableOrder, TwCwPooledEmbeddingSharding):
    sharding_type = ShardingType.TABLE_COLUMN_WISE


class _SummedOverHost:
    """Mixed into a sharding over the ranks of a host: batch sizes of their own for each feature, as above."""

    def create_output_dist(self: Any, device: torch.device | None = None) -> nn.Module:
        output_dist: Any = super().create_output_dist(device)  # type: ignore[misc]
        # TorchRec makes its parts for what the first batch is, and then has none for the other kind.
        output_dist._create_output_dist_modules(EmbeddingShardingContext(variable_batch_per_feature=True))
        output_dist._variable_intra_dist = SummedParts(self._intra_pg)
        return output_dist


class TableRowWise(_OnHost, _SummedOverHost, TwRwPooledEmbeddingSharding):
    sharding_type = ShardingType.TABLE_ROW_WISE


class Grid(_OnHost, _SummedOverHost, _InTableOrder, GridPooledEmbeddingSharding):
    sharding_type = ShardingType.GRID_SHARD


class DataParallel(_OnHost, DpPooledEmbeddingSharding):
    sharding_type = ShardingType.DATA_PARALLEL


_SHARDINGS: dict[str, type[Any]] = {
    sharding.sharding_type.value: sharding
    for sharding in (TableWise, RowWise, ColumnWise, TableColumnWise, TableRowWise, Grid, DataParallel)
}


def pooled_sharding(
    infos: list[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None,
    permute_embeddings: bool,
    qcomm_codecs_registry: Any,
) -> EmbeddingSharding[Any, Any, Any, Any]:
    """The sharding of `infos`, which all have one type.  Raises ValueError for a type that we don't have."""
    name = infos[0].param_sharding.sharding_type
    if name not in _SHARDINGS:
        raise ValueError(f"sharding type {name} not supported; use one of {sorted(_SHARDINGS)}")
    if name == ShardingType.DATA_PARALLEL.value:
        return DataParallel(infos, env, device)
    options: dict[str, Any] = {"qcomm_codecs_registry": qcomm_codecs_registry}
    if name in (ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value):
        options["permute_embeddings"] = permute_embeddings
    return _SHARDINGS[name](infos, env, device, **options)
