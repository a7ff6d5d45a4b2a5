"""DeepFM (arXiv:1703.04247): a factorization machine and an MLP on the same field vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.deepfm import DeepFM as DeepComponent
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP

from recsys_tpu.models.click_model import ClickModel, SparseArch


class NumericFields(nn.Module):
    """A learned vector for each dense feature, times its value: ``[B, N]`` to ``[B, N, D]``."""

    def __init__(self, fields: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.xavier_normal_(torch.empty(fields, dim)))

    def forward(self, values: Tensor) -> Tensor:
        return values.unsqueeze(-1) * self.weight


def second_order(fields: Tensor) -> Tensor:
    """Sum of the inner products of all pairs of fields: ``[B, F, D]`` to ``[B]``.

    Equation 2 of the paper in linear time: half of (square of the sum - sum of the squares), over D.
    (`torchrec.modules.deepfm.FactorizationMachine` flattens fields and dims into one list, so for D > 1 it
    adds products of different dims, of one field too; on one dim at a time it is this sum.)
    """
    return 0.5 * (fields.sum(1).square() - fields.square().sum(1)).sum(-1)


class DeepFM(ClickModel):
    """logit = first order + second order + MLP, all of one vector for each dense and sparse field.

    The first-order weight of an id is a learned projection of its embedding. The paper keeps a scalar of
    its own for each id, which would be a second table, and a second lookup, for each feature.

    Args:
        tables: one dim for all; may be on the meta device.
        dense_in_features: number of dense features.
        mlp: hidden layers of the deep part; a last layer of one logit is added.
    """

    def __init__(self, tables: EmbeddingBagCollection, *, dense_in_features: int, mlp: Sequence[int]) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(tables)
        width = (dense_in_features + self.sparse_arch.F) * self.sparse_arch.D
        self.numeric_fields = NumericFields(dense_in_features, self.sparse_arch.D)
        self.first_order = nn.Linear(width, 1)
        self.deep = DeepComponent(
            nn.Sequential(MLP(width, list(mlp), bias=True, activation="relu"), nn.Linear(mlp[-1], 1))
        )

    def towers(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """``[B, dense features]`` and ``[B, F, D]`` to logits ``[B]``."""
        fields = torch.cat((self.numeric_fields(dense), embedded), dim=1)
        logits = self.first_order(fields.flatten(1)) + self.deep([fields])
        return logits.squeeze(-1) + second_order(fields)
