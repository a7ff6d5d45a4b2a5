"""Streaming estimate of how often each item is a positive, for the logQ correction."""

from __future__ import annotations

import torch
from torch import Tensor

_RESCALE_ABOVE = 1e12


class FrequencyEstimator:
    """Exponentially weighted relative frequency of every item over the steps so far.

    After step ``t`` the estimate of item ``y`` is ``sum_s g^(t-s) count_s(y) / sum_s g^(t-s) rows_s`` with
    ``g = 1 - 1 / window``: the plain frequency at first, one that follows a drifting stream later.  Old
    counts are not decayed one by one; new ones weigh more instead, so a step costs the items of its batch.

    (Yi et al., RecSys 2019, estimate the gap between occurrences in place of the count, which saturates
    when an item occurs in every batch.)
    """

    def __init__(self, items: int, *, window: int) -> None:
        self.counts = torch.zeros(items, dtype=torch.float64)
        self.scale = torch.tensor([1.0, 0.0], dtype=torch.float64)  # weight of the next step, total weight
        self._growth = 1.0 / (1.0 - 1.0 / window) if window > 1 else _RESCALE_ABOVE

    def update(self, positives: Tensor) -> None:
        """Count the positives ``[rows]`` (int64) of one step over all ranks."""
        weight = self.scale[0].item()
        self.counts.index_add_(0, positives, torch.full((len(positives),), weight, dtype=torch.float64))
        self.scale[1] += weight * len(positives)
        self.scale[0] *= self._growth
        if self.scale[0] > _RESCALE_ABOVE:
            self.counts /= self.scale[0]
            self.scale /= self.scale[0].clone()

    def probability(self, items: Tensor) -> Tensor:
        """Estimated probability that a positive is ``items[i]``; float64."""
        return self.counts[items] / self.scale[1]
