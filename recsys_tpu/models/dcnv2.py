"""DCN-V2 (arXiv:2008.13535): cross layers and an MLP over dense features and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torchrec.modules.crossnet import CrossNet, LowRankCrossNet
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP

from recsys_tpu.models.click_model import ClickModel, SparseArch


class FullRankCrossNet(CrossNet):
    """TorchRec's `CrossNet`, parameters and values, each layer one matrix product over the batch.

    TorchRec multiplies matrix by column vector, sample by sample.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``[B, N]`` to ``[B, N]``: ``x_{l+1} = x_0 * (W_l x_l + b_l) + x_l``."""
        crossed = input
        for weight, bias in zip(self.kernels, self.bias, strict=True):
            crossed = input * nn.functional.linear(crossed, weight, bias.squeeze(1)) + crossed
        return crossed


class DCNv2(ClickModel):
    """Deep & Cross Network V2.

    The input ``x_0`` is the dense features and all embeddings side by side. The logit is a linear layer
    over the cross layers' output and the MLP's (parallel), or over the MLP's, which then reads the cross
    layers' output (stacked); figure 1 of the paper.

    Args:
        tables: one dim for all; may be on the meta device.
        dense_in_features: number of dense features.
        mlp: hidden layers of the MLP, all with ReLU.
        cross_layers: number of cross layers.
        cross_rank: rank of each cross layer's matrix; None: full matrices.
        structure: see above.
    """

    def __init__(
        self,
        tables: EmbeddingBagCollection,
        *,
        dense_in_features: int,
        mlp: Sequence[int],
        cross_layers: int,
        cross_rank: int | None,
        structure: Literal["parallel", "stacked"],
    ) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(tables)
        width = dense_in_features + self.sparse_arch.F * self.sparse_arch.D
        self.crossnet: nn.Module = (
            FullRankCrossNet(width, cross_layers)
            if cross_rank is None
            else LowRankCrossNet(width, cross_layers, cross_rank)
        )
        self.mlp = MLP(width, list(mlp), bias=True, activation="relu")
        self._parallel = structure == "parallel"
        self.output = nn.Linear(mlp[-1] + (width if self._parallel else 0), 1)

    def towers(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """``[B, dense features]`` and ``[B, F, D]`` to logits ``[B]``."""
        start = torch.cat((dense, embedded.flatten(1)), dim=1)
        crossed = self.crossnet(start)
        last = torch.cat((crossed, self.mlp(start)), dim=1) if self._parallel else self.mlp(crossed)
        return self.output(last).squeeze(-1)
