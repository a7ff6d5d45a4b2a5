"""Clipping by the global norm of all gradients, those of the fused tables included.

A fused update leaves no gradient behind, so it is done in two phases: the backward keeps the gradients of
each lookup's output (which are small: bags, not tables); when it is over, row gradients are summed once for
their norm, ranks add up theirs, and the updates run with their gradients scaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recsys_tpu.embeddings.fused_tables import FusedTables
from recsys_tpu.sharding.prepared_module import PreparedModule

_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


def _fused_tables(model: nn.Module) -> Iterator[FusedTables]:
    """A sharded collection keeps its lookups in a list, where `model.modules()` doesn't see them."""
    for collection in model.modules():
        if isinstance(collection, PreparedModule):
            lookups: Any = collection._lookups
            for lookup in lookups:
                yield from (module for module in lookup.modules() if isinstance(module, FusedTables))


class GlobalNormClipping:
    """Scales all gradients of a sharded model so that their Euclidean norm together is at most `max_norm`.

    Call `apply` after each backward and before the optimizer's step.  From its making on the fused tables
    are trained by `apply` only: a backward without it changes no table.  The norm is that of the unsharded
    model: a row's gradient is summed over the batch of all ranks, a dense gradient is averaged by its
    data-parallel wrapper.
    """

    def __init__(
        self, model: nn.Module, max_norm: float, process_group: dist.ProcessGroup | None = None
    ) -> None:
        """Raises ValueError for a norm that is not positive."""
        if not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}")
        self._max_norm, self._group = max_norm, process_group
        self._tables = list(_fused_tables(model))
        self._dense = [parameter for _, parameter in in_backward_optimizer_filter(model.named_parameters())]
        for tables in self._tables:
            tables.hold_updates()

    def apply(self) -> Tensor:
        """Clips, updates the tables, and returns the norm before clipping, a scalar; a collective call.

        A norm that is NaN or infinite scales by NaN or 0, as torch's does: look at the loss.
        """
        gradients = [p.grad for p in self._dense if isinstance(p.grad, Tensor) and p.grad.numel()]
        squares = [tables.held_square_sum() for tables in self._tables if tables.stacks]
        device = (squares or gradients or [torch.zeros(())])[0].device
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
        if dist.get_world_size(self._group) > 1:
            dist.all_reduce(total, group=self._group)
        if gradients:
            total = total + torch.nn.utils.get_total_norm(gradients).to(device).square()
        norm = total.sqrt()
        scale = (self._max_norm / (norm + _EPS)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.device))
        for tables in self._tables:
            tables.apply_held(scale)
        return norm
