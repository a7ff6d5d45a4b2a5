"""The output dist of pooled shards on our exchange instead of TorchRec's collectives, for every type.

Table-, column- and table-column-wise shards are exchanged all to all.  Row-wise partial sums are reduced and
scattered.  Table-row-wise and grid shards do the one among the ranks of a row group (TorchRec: node), then
the other among the ranks with the same place in their groups.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist, EmbeddingShardingContext
from torchrec.distributed.types import Awaitable, NoWait

from recsys_tpu.kernels.all_to_all.pooled import MeshAxis, Transport, exchange_pooled, sum_pooled
from recsys_tpu.kernels.variants import target_chip
from recsys_tpu.sharding.pooled_shardings import (
    ColumnWise,
    Grid,
    RowWise,
    TableColumnWise,
    TableRowWise,
    TableWise,
)


class Exchange(enum.Enum):
    """Who moves pooled rows and their gradients between ranks."""

    COLLECTIVE = "collective"  # TorchRec's output dists, by torch.distributed: any device
    PALLAS = "pallas"  # remote-DMA kernels on TPU chips; elsewhere the same lines by torch.distributed


Stage = Callable[[Tensor], Tensor]

Wire = Literal["fp32", "bf16"]
# None: as they are
WIRE_DTYPES: Mapping[Wire, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


class PooledExchange(BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]):
    """Pooled rows ``[ranks * B, columns]`` of this rank's shards to ``[B, all columns]`` of its samples.

    Raises ValueError, when called, for batches that are not equal on all ranks.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__()
        self._stages = list(stages)

    def forward(
        self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        if sharding_ctx is not None:
            batches = sharding_ctx.batch_size_per_rank
            if sharding_ctx.variable_batch_per_feature or len(set(batches)) > 1:
                raise ValueError(
                    "exchange 'pallas' needs the same batch size on every rank and for every feature, got "
                    f"{batches}: drop the last, smaller batch, or use exchange 'collective'"
                )
        for stage in self._stages:
            local_embs = stage(local_embs)
        return NoWait(local_embs)


def transport_on(device: torch.device) -> Transport:
    """The kernel where there is a TPU (or one is compiled for), torch.distributed elsewhere."""
    return "kernel" if device.type == "tpu" and target_chip() is not None else "collective"


def pooled_exchange(
    sharding: Any, output_dist: Any, device: torch.device, *, wire_dtype: torch.dtype | None = None
) -> PooledExchange | None:
    """Ours in the place of a TorchRec sharding's output dist; None for data-parallel tables.

    wire_dtype: of `all_to_all`.  Partial sums travel as they are: a kernel would round them at every hop.
    """
    transport, world = transport_on(device), sharding._pg
    in_table_order: list[Stage] = list(getattr(output_dist, "_callbacks", None) or [])
    if isinstance(sharding, TableWise | ColumnWise | TableColumnWise):
        stages = [all_to_all(world, sharding._dim_sum_per_rank(), transport, wire_dtype=wire_dtype)]
    elif isinstance(sharding, RowWise):
        stages = [reduce_scatter(world, transport)]
    elif isinstance(sharding, TableRowWise | Grid):
        groups = (sharding._cross_pg.size(), sharding._intra_pg.size())
        stages = [
            reduce_scatter(sharding._intra_pg, transport, MeshAxis(world, groups, 1)),
            all_to_all(
                sharding._cross_pg,
                sharding._dim_sum_per_node(),
                transport,
                MeshAxis(world, groups, 0),
                wire_dtype=wire_dtype,
            ),
        ]
    else:
        return None
    return PooledExchange([*stages, *in_table_order])


def all_to_all(
    group: dist.ProcessGroup,
    dims: Sequence[int],
    transport: Transport,
    axis: MeshAxis | None = None,
    *,
    wire_dtype: torch.dtype | None = None,
) -> Stage:
    """`exchange_pooled` with TorchRec's division of gradients; both ways are rounded to `wire_dtype`."""

    def stage(pooled: Tensor) -> Tensor:
        return exchange_pooled(
            pooled,
            group,
            dims=dims,
            transport=transport,
            wire_dtype=wire_dtype,
            grad_wire_dtype=wire_dtype,
            grad_scale=_gradient_scale(group),
            axis=axis,
        )

    return stage


def reduce_scatter(group: dist.ProcessGroup, transport: Transport, axis: MeshAxis | None = None) -> Stage:
    """`sum_pooled` with TorchRec's division of gradients."""

    def stage(partial: Tensor) -> Tensor:
        return sum_pooled(partial, group, transport=transport, grad_scale=_gradient_scale(group), axis=axis)

    return stage


def _gradient_scale(group: dist.ProcessGroup) -> float:
    return 1 / dist.get_world_size(group) if get_gradient_division() else 1.0
