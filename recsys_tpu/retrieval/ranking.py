"""Exact ranking of the whole catalogue for every query, and the metrics of it.  Nothing is sampled.

Tensor suffixes: E queries, M items of the catalogue, D embedding dim, S seen items, T targets, K cut-off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def rank_catalogue(
    query_ED: Tensor, items_MD: Tensor, seen_ES: Tensor, targets_ET: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Places of the targets among all items that the query has not seen, and the best `k` items.

    Args:
        seen_ES: items that are not ranked; filled up with M.
        targets_ET: items whose place is wanted; filled up with M.

    Returns:
        places ``[E, T]`` int64, 0 for the best item; equal scores are ordered by item id. Places of
        filling are meaningless.
        scores ``[E, k]`` and item ids ``[E, k]``, best first; -inf and -1 where fewer items are left.
        Which of equal scores comes first, and whether it is among the `k`, is the device's choice.
    """
    scores_EM = query_ED @ items_MD.T
    nowhere_E1 = scores_EM.new_full((len(scores_EM), 1), -torch.inf)
    scores = torch.cat([scores_EM, nowhere_E1], dim=1).scatter(1, seen_ES, -torch.inf)
    ids = torch.arange(scores.shape[1], device=scores.device)
    places = []
    for target_E1 in targets_ET.split(1, dim=1):
        own_E1 = scores.gather(1, target_E1)
        before = (scores > own_E1) | ((scores == own_E1) & (ids < target_E1))
        places.append(before.sum(1))
    best = scores[:, :-1].topk(k)
    items = best.indices.masked_fill(best.values == -torch.inf, -1)
    return torch.stack(places, dim=1), best.values, items


@dataclass(frozen=True)
class RetrievalMetrics:
    """Means over all queries.

    recall: by K, the part of a query's targets among the best K.
    ndcg: by K, sum of 1 / log2(place + 2) over those targets, over the same sum of an ideal order.
    mrr: 1 / (place + 1) of a query's first target, over the whole catalogue.
    coverage: the part of the catalogue that is among the best `coverage_at` of some query.
    """

    recall: dict[int, float]
    ndcg: dict[int, float]
    mrr: float
    coverage: float
    coverage_at: int
    queries: int
    targets: int

    def as_dict(self) -> dict[str, float]:
        return {
            **{f"recall@{k}": value for k, value in self.recall.items()},
            **{f"ndcg@{k}": value for k, value in self.ndcg.items()},
            "mrr": self.mrr,
            f"coverage@{self.coverage_at}": self.coverage,
            "queries": self.queries,
            "targets": self.targets,
        }

    def __str__(self) -> str:
        found = "  ".join(
            f"recall@{k} {self.recall[k]:.4f}  NDCG@{k} {self.ndcg[k]:.4f}" for k in self.recall
        )
        return f"{found}  MRR {self.mrr:.4f}"


class RankingSums:
    """Accumulates places block by block; sums of two accumulators (of two ranks) add up."""

    def __init__(self, items: int, cutoffs: Sequence[int]) -> None:
        self.cutoffs, self.coverage_at = list(cutoffs), min(cutoffs)
        self.values = np.zeros(2 * len(cutoffs) + 3)
        """recall sums, NDCG sums, sum of reciprocal ranks, queries, targets."""
        self.recommended = np.zeros(items, np.int64)
        """How many queries have the item among the best `coverage_at`."""

    def add(
        self, places: npt.NDArray[np.int64], is_target: npt.NDArray[np.bool_], best: npt.NDArray[np.int64]
    ) -> None:
        """Add queries with places ``[E, T]`` (valid where `is_target`) and best items ``[E, K]``."""
        if len(places) == 0:
            return
        targets = is_target.sum(1)
        gains = np.where(is_target, 1 / np.log2(places + 2.0), 0.0)
        ideal = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(targets.max()) + 2.0))])
        number = len(self.cutoffs)
        for i, k in enumerate(self.cutoffs):
            found = is_target & (places < k)
            self.values[i] += (found.sum(1) / targets).sum()
            self.values[number + i] += ((gains * found).sum(1) / ideal[np.minimum(targets, k)]).sum()
        first = np.where(is_target, places, np.iinfo(np.int64).max).min(1)
        self.values[-3:] += (1 / (first + 1.0)).sum(), len(places), targets.sum()
        shown = best[:, : self.coverage_at].ravel()
        np.add.at(self.recommended, shown[shown >= 0], 1)

    def metrics(self) -> RetrievalMetrics:
        """The means."""
        number, (mrr, queries, targets) = len(self.cutoffs), self.values[-3:]
        return RetrievalMetrics(
            recall={k: self.values[i] / queries for i, k in enumerate(self.cutoffs)},
            ndcg={k: self.values[number + i] / queries for i, k in enumerate(self.cutoffs)},
            mrr=mrr / queries,
            coverage=float((self.recommended > 0).mean()),
            coverage_at=self.coverage_at,
            queries=int(queries),
            targets=int(targets),
        )
