"""Click metrics of predictions that arrive in batches on many ranks, exact and in little memory.

A rank keeps 4 bytes a row. For the AUC the ranks cut the range of the predictions into one part for each of
them (a sample sort), exchange what lies in each other's parts, and count pairs in integers: the result does
not depend on the number of ranks or the order of the rows, and is the true ratio rounded once.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from recsys_tpu.errors import TrainingDivergedError
from recsys_tpu.metrics import ClickMetrics, metrics_from_sums

Keys = NDArray[np.uint32]

_SAMPLES = 1024  # of each rank, from which the parts are chosen
_LARGEST_PAIRS = 2**62  # pairs of a positive and a negative, each counted twice, must fit int64


class StreamingClickMetrics:
    """Add the rows of one rank, then `result` on every rank."""

    def __init__(self) -> None:
        self._positives: list[Keys] = []
        self._negatives: list[Keys] = []
        self._loss = self._predictions = 0.0

    def add(self, labels: NDArray[np.float32], logits: NDArray[np.float32]) -> None:
        """Count rows: 0/1 labels and float32 logits ``[N]``.

        Raises:
            TrainingDivergedError: a logit is NaN.
        """
        if np.isnan(logits).any():
            raise TrainingDivergedError(
                "a prediction of the evaluation set is NaN: the model's weights or the data are not finite; "
                "lower the learning rates and start again from an earlier checkpoint"
            )
        x, y = logits.astype(np.float64), labels.astype(np.float64)
        self._loss += float((np.logaddexp(0.0, x) - y * x).sum())
        self._predictions += float((0.5 * (1 + np.tanh(0.5 * x))).sum())
        keys = order_keys(logits)
        self._positives.append(keys[labels == 1])
        self._negatives.append(keys[labels == 0])

    def result(self) -> ClickMetrics:
        """Metrics of the rows of all ranks; collective, the same result on every rank.

        Raises:
            DatasetError: all labels are the same.
        """
        positives, negatives = _joined(self._positives), _joined(self._negatives)
        counts = _summed(torch.tensor([len(positives), len(negatives)])).tolist()
        sums = _summed(torch.tensor([self._loss, self._predictions], dtype=torch.float64)).tolist()
        auc = None
        if all(counts):
            assert 2 * counts[0] * counts[1] < _LARGEST_PAIRS, "more rows than int64 can count pairs of"
            auc = _pairs_won_twice(positives, negatives) / (2 * counts[0] * counts[1])
        return metrics_from_sums(
            auc=auc, loss=sums[0], predictions=sums[1], rows=sum(counts), positives=counts[0]
        )


def order_keys(values: NDArray[np.float32]) -> Keys:
    """Unsigned integers in the order of the floats; equal floats (0 and -0 too) have equal keys."""
    bits = (values.astype(np.float32) + np.float32(0)).view(np.uint32)
    return np.where(bits >> 31 == 1, ~bits, bits | np.uint32(1 << 31))


def _pairs_won_twice(positives: Keys, negatives: Keys) -> int:
    """2 x (pairs in which the positive is above the negative) + ties, over all ranks; collective."""
    positives.sort()
    negatives.sort()
    bounds = _bounds(positives, negatives)
    positives, negatives = _exchange(positives, bounds), _exchange(negatives, bounds)
    positives.sort()
    negatives.sort()
    sizes = _gathered(torch.tensor([len(negatives)])).flatten()
    below = int(sizes[: dist.get_rank()].sum())  # negatives of the lower parts
    won = (
        np.searchsorted(negatives, positives, "left").sum(dtype=np.int64)
        + np.searchsorted(negatives, positives, "right").sum(dtype=np.int64)
        + 2 * below * len(positives)
    )
    return int(_summed(torch.tensor([int(won)])).item())


def _bounds(positives: Keys, negatives: Keys) -> Keys:
    """``[ranks - 1]`` ascending keys at which the parts begin, from equally many samples of each rank."""
    own = np.concatenate([_spread(positives), _spread(negatives)])
    sample = np.sort(_gathered(torch.from_numpy(own.astype(np.int64))).flatten().numpy())
    ranks = dist.get_world_size()
    return sample[[len(sample) * rank // ranks for rank in range(1, ranks)]].astype(np.uint32)


def _spread(keys: Keys) -> Keys:
    """`_SAMPLES` of sorted keys, evenly spaced; zeros where there are none."""
    if not len(keys):
        return np.zeros(_SAMPLES, np.uint32)
    return keys[np.linspace(0, len(keys) - 1, _SAMPLES).astype(np.int64)]


def _exchange(keys: Keys, bounds: Keys) -> Keys:
    """Send sorted keys to the ranks of their parts; returns those of this rank's part, unsorted."""
    cuts = [0, *np.searchsorted(keys, bounds, "left").tolist(), len(keys)]
    sent = np.diff(cuts).tolist()
    received = torch.empty(len(sent), dtype=torch.int64)
    dist.all_to_all_single(received, torch.tensor(sent))
    output = torch.empty(int(received.sum()), dtype=torch.int32)
    dist.all_to_all_single(output, torch.from_numpy(keys.view(np.int32)), received.tolist(), sent)
    return output.numpy().view(np.uint32)


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """``[ranks, ...]``"""
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, tensor)
    return torch.stack(pieces)


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor


def _joined(keys: list[Keys]) -> Keys:
    return np.concatenate([np.empty(0, np.uint32), *keys])
