"""Watches over a run's numbers: the first tensor that is not finite, loss spikes, the gradient's norm."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

_WINDOW = 100
_LEAST = 20
_DEVIATIONS = 8.0


def first_bad_tensor(model: nn.Module) -> str | None:
    """What holds the first NaN or infinity: a weight, or else a gradient, of this rank; in the model's order.

    None where all are finite: then the number arose in the forward (overflow of an activation).
    """
    for kind, name, tensor in _tensors(model):
        bad = ~torch.isfinite(tensor)
        if bad.any():
            where = tuple(torch.nonzero(bad)[0].tolist())
            value = tensor[where].item()
            return (
                f"{kind} {name} at {list(where)} is {value} ({int(bad.sum()):,} of {tensor.numel():,} values)"
            )
    return None


def _tensors(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                yield "table", f"{name} from row {shard.metadata.shard_offsets[0]}", shard.tensor
        elif value.is_floating_point():
            yield "weight", name, value
    for name, parameter in model.named_parameters():
        if isinstance(parameter.grad, Tensor):
            yield "gradient of", name, parameter.grad


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor | None:
    """Euclidean norm of all gradients together, on their device; None if there are none.

    Table gradients are applied inside the backward and never exist as tensors, so they are not in it.
    """
    gradients = [p.grad for p in parameters if isinstance(p.grad, Tensor) and p.grad.numel()]
    return torch.nn.utils.get_total_norm(gradients) if gradients else None


class SpikeWatch:
    """Finds losses far above the recent ones.

    A spike is a loss more than 8 robust standard deviations (1.4826 x median absolute deviation) above the
    median of the 100 losses before it; the first 20 are never one.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_WINDOW)

    def is_spike(self, loss: float) -> bool:
        """Whether `loss`, the next one in order, is a spike."""
        spike = False
        if len(self._recent) >= _LEAST and math.isfinite(loss):
            median = statistics.median(self._recent)
            deviation = 1.4826 * statistics.median(abs(value - median) for value in self._recent)
            spike = loss - median > _DEVIATIONS * max(deviation, 1e-3 * abs(median))
        self._recent.append(loss)
        return spike
