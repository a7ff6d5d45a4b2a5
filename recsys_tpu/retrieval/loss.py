"""Sampled softmax over the candidates of all ranks.

Tensor suffixes: B queries of this rank, C candidates of all ranks, D embedding dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor


def sampled_softmax(
    query_BD: Tensor,
    candidates_CD: Tensor,
    *,
    item_ids_B: Tensor,
    candidate_ids_C: Tensor,
    position_B: Tensor,
    log_q_C: Tensor,
    temperature: float,
    hard_negatives: int,
) -> Tensor:
    """Cross-entropy ``[B]`` of each query's own candidate among all of them.

    The logit of a candidate is ``<query, candidate> / temperature - log q``, q being how often it is
    expected among the candidates (Yi et al., RecSys 2019: without it, frequent items are punished for
    being sampled often).  Left out: padding (id < 0), and other copies of the query's own item
    (accidental hits), which are no negatives.

    Args:
        position_B: where the own candidate of each query stands.
        hard_negatives: keep only this many of the highest logits as negatives; 0: all.
    """
    logits_BC = query_BD @ candidates_CD.T / temperature - log_q_C
    columns_C = torch.arange(len(candidates_CD), device=query_BD.device)
    own_BC = columns_C == position_B[:, None]
    copy_BC = candidate_ids_C == item_ids_B[:, None]
    left_out_BC = (copy_BC | (candidate_ids_C < 0)) & ~own_BC
    positive_B = logits_BC.gather(1, position_B[:, None]).squeeze(1)
    if hard_negatives:
        negatives_BC = logits_BC.masked_fill(left_out_BC | own_BC, -torch.inf)
        hardest = negatives_BC.topk(min(hard_negatives, len(candidates_CD))).values
        everything = torch.cat([positive_B[:, None], hardest], dim=1)
    else:
        everything = logits_BC.masked_fill(left_out_BC, -torch.inf)
    return everything.logsumexp(1) - positive_B


def gather_rows(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rows ``[n, D]`` of every rank one after the other, ``[ranks * n, D]``.

    The gradient of a rank's rows is the sum of what all ranks found for them.
    """
    if group.size() == 1:
        return local
    return _GatherRows.apply(local, group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        context.group = group
        # functional, so that a step can be traced with it
        return functional.wait_tensor(functional.all_gather_single(local.contiguous(), 0, group))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        total = functional.reduce_scatter_single(gradient.contiguous(), "sum", 0, context.group)
        return functional.wait_tensor(total), None
