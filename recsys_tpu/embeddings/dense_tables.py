"""Small tables that every rank holds: their gradient is an ordinary one, averaged over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recsys_tpu import kernels
from recsys_tpu.embeddings.fused_tables import PooledInput
from recsys_tpu.embeddings.stacks import LocalTable, in_feature_order, make_stacks
from recsys_tpu.kernels.batch import LookupBatch, Optimizer
from recsys_tpu.kernels.optimizer import OptimizerSpec


class DenseTables(nn.Module):
    """Tables as one parameter a stack.  Their gradient is dense: for tables small enough to replicate."""

    def __init__(
        self,
        tables: Sequence[LocalTable],
        feature_tables: Sequence[int],
        *,
        dtype: torch.dtype,
        output_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.tables = list(tables)
        self.feature_tables = list(feature_tables)
        self._output_dtype = output_dtype
        self.stacks = make_stacks(tables, dtype=dtype, spec=OptimizerSpec(Optimizer.SGD), device=device)
        self.weights = nn.ParameterList([nn.Parameter(stack.weights) for stack in self.stacks])
        self._to_rehearse: list[list[LookupBatch]] = [[] for _ in self.stacks]
        self._where = {
            index: position for position, stack in enumerate(self.stacks) for index in stack.tables
        }

    def forward(self, batch: PooledInput) -> Tensor:
        """Pooled embeddings `[num_samples, sum of the features' dims]`."""
        samples = [output.view(batch.num_samples, -1) for output in self.pool(batch.batches)]
        return in_feature_order(samples, self.stacks, self.feature_tables)

    def pool(self, batches: Sequence[LookupBatch]) -> list[Tensor]:
        """Each stack's pooled embeddings `[bags, dim]`."""
        return [
            DenseLookup.apply(weights, stack.dim, lookup, rehearsals).to(self._output_dtype)
            for weights, stack, lookup, rehearsals in zip(
                self.weights, self.stacks, batches, self._to_rehearse, strict=True
            )
        ]

    def rehearse(self, position: int, batch: LookupBatch) -> None:
        """Runs lookup and gradient of a stack on a batch without ids, so that their programs are there.

        The gradient comes behind the next one, from the same gradient of the output, which may be a view.
        """
        kernels.pooled_lookup(self.weights[position].detach(), batch, self.stacks[position].dim)
        self._to_rehearse[position].append(batch)

    def slice_of(self, index: int) -> tuple[Tensor, int, int]:
        """(flat parameter, first element, last element) of a table."""
        stack = self.stacks[self._where[index]]
        start = stack.first_rows[index] * stack.dim
        return self.weights[self._where[index]], start, start + self.tables[index].rows * stack.dim

    def split_embedding_weights(self) -> list[Tensor]:
        """Each table's weights, `[rows, dim]`."""
        return [
            parameter.detach()[start:end].view(-1, table.dim)
            for table, (parameter, start, end) in zip(
                self.tables, map(self.slice_of, range(len(self.tables))), strict=True
            )
        ]


def dense_lookup(rows: Tensor, dim: int, batch: LookupBatch) -> Tensor:
    """Pooled lookup `[bags, dim]` in flat `rows`, which get an ordinary gradient, as large as they are."""
    return DenseLookup.apply(rows, dim, batch)


class DenseLookup(torch.autograd.Function):
    """Lookup of a replicated stack whose backward is a gradient of the stack's size."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, dim: int, batch: LookupBatch, rehearsals: list[LookupBatch] | None = None
    ) -> Tensor:
        ctx.batch, ctx.shape, ctx.dtype = batch, (weights.numel() // dim, dim), weights.dtype
        ctx.rehearsals = rehearsals
        return kernels.pooled_lookup(weights.detach(), batch, dim)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = DenseLookup._gradient(ctx, ctx.batch, grad_output)
        while ctx.rehearsals:
            DenseLookup._gradient(ctx, ctx.rehearsals.pop(), grad_output)
        return gradient, None, None, None

    @staticmethod
    def _gradient(ctx: Any, batch: LookupBatch, grad_output: Tensor) -> Tensor:
        rows, dim = ctx.shape
        bags = batch.bags.clamp(max=batch.num_bags - 1)
        each = grad_output.float().index_select(0, bags)
        if batch.weights is not None:
            each = each * batch.weights[:, None]
        each = torch.where((batch.bags < batch.num_bags)[:, None], each, 0.0)  # padding adds 0 to row 0
        gradient = torch.zeros(rows, dim, device=grad_output.device).index_add(0, batch.rows, each)
        return gradient.view(-1).to(ctx.dtype)
