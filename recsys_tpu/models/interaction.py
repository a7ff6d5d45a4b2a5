"""Pairwise dot interaction of DLRM, with a backward of one batched product and no scatter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class DotInteraction(nn.Module):
    """``[B, D]`` dense and ``[B, F, D]`` sparse to ``[B, D + (F + 1) F / 2]``.

    The same values in the same order as `torchrec.models.dlrm.InteractionArch` (arXiv:1906.00091,
    section 2.1): the dense vector, then the upper triangle of the Gram matrix of all F + 1 vectors.
    """

    triangle: Tensor
    inverse: Tensor

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        vectors = num_sparse_features + 1
        rows, columns = torch.triu_indices(vectors, vectors, offset=1)
        pairs = len(rows)
        # where each entry of the symmetric [vectors, vectors] gradient comes from; the diagonal is no
        # output, so it reads the zero column that backward appends
        inverse = torch.full((vectors, vectors), pairs)
        inverse[rows, columns] = torch.arange(pairs)
        inverse[columns, rows] = torch.arange(pairs)
        self.register_buffer("triangle", rows * vectors + columns, persistent=False)
        self.register_buffer("inverse", inverse.flatten(), persistent=False)

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        combined = torch.cat((dense_features.unsqueeze(1), sparse_features), dim=1)
        pairs = _PairwiseDots.apply(combined, self.triangle, self.inverse)
        return torch.cat((dense_features, pairs), dim=1)


class _PairwiseDots(torch.autograd.Function):
    """``[B, V, D]`` to the upper triangle ``[B, V (V - 1) / 2]`` of its Gram matrices.

    With S the symmetric matrix of incoming gradients (zero diagonal), d/dX of sum_ij S_ij <x_i, x_j> over
    i < j is S X: one product, where autograd of bmm and indexing takes two and an index_put.
    """

    @staticmethod
    def forward(ctx: Any, combined: Tensor, triangle: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(combined, inverse)
        gram = torch.bmm(combined, combined.transpose(1, 2))
        return gram.flatten(1).index_select(1, triangle)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        combined, inverse = ctx.saved_tensors
        batch, vectors, _ = combined.shape
        padded = torch.nn.functional.pad(gradient, (0, 1))
        symmetric = padded.index_select(1, inverse).reshape(batch, vectors, vectors)
        return torch.bmm(symmetric.to(combined.dtype), combined), None, None
