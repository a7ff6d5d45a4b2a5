"""The output dist of table-wise shards on our exchange instead of TorchRec's collective."""

from __future__ import annotations

import enum
from typing import get_args

import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist, EmbeddingShardingContext
from torchrec.distributed.types import Awaitable, NoWait

from recsys_tpu.kernels.all_to_all.pooled import Transport, exchange_pooled


class Exchange(enum.Enum):
    """Who moves the pooled rows of table-wise shards between ranks."""

    TORCHREC = "torchrec"  # TorchRec's all-to-all by torch.distributed
    COLLECTIVE = "collective"  # our packing, by torch.distributed: any device
    KERNEL = "kernel"  # our packing and the remote-DMA kernel: TPU chips


assert {exchange.value for exchange in Exchange} == {"torchrec", *get_args(Transport)}


class PooledExchange(BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]):
    """``[ranks * B, dims[rank]]`` pooled rows of this rank's tables to ``[B, sum(dims)]`` of its samples.

    Raises ValueError, when called, for batches that are not equal on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, dims: list[int], transport: Transport) -> None:
        super().__init__()
        self._group, self._dims, self._transport = group, dims, transport

    def forward(
        self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        if sharding_ctx is not None:
            batches = sharding_ctx.batch_size_per_rank
            if sharding_ctx.variable_batch_per_feature or len(set(batches)) > 1:
                raise ValueError(
                    f"exchange '{self._transport}' needs the same batch size on every rank and for every "
                    f"feature, got {batches}: drop the last, smaller batch, or use exchange 'torchrec'"
                )
        ranks = len(self._dims)
        return NoWait(
            exchange_pooled(
                local_embs,
                self._group,
                dims=self._dims,
                transport=self._transport,
                grad_scale=1 / ranks if get_gradient_division() else 1.0,
            )
        )
