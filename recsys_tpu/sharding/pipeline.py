"""Training with the host ahead: the ids of steps N+1 and N+2 are exchanged and sorted during step N."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.sharding.ahead import HostTimes, modules_that_prepare

Batch = TypeVar("Batch")
FeaturesOf = Callable[[Any], KeyedJaggedTensor]

DEPTH = 2
CLOSE_TIMEOUT_S = 60.0


def sparse_features(batch: Any) -> KeyedJaggedTensor:
    """The features of a TorchRec batch."""
    features: KeyedJaggedTensor = batch.sparse_features
    return features


def prepared_ahead(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    depth: int = DEPTH,
    features_of: FeaturesOf = sparse_features,
) -> Generator[Batch, None, None]:
    """Yields `batches`, with the host's part of the next `depth` of them begun on a thread.

    The model must pass the very object that `features_of` returns to its embedding collections; a
    collection that gets another one prepares it when it comes (right, but not ahead).  Every rank must
    run the same number of batches.  Closing the generator waits for what was begun.
    """
    modules = modules_that_prepare(model)
    ahead: deque[Batch] = deque()
    try:
        for batch in batches:
            features = features_of(batch)
            for module in modules:
                module.ahead.start(features)
            ahead.append(batch)
            if len(ahead) > depth:
                yield ahead.popleft()
        while ahead:
            yield ahead.popleft()
    except GeneratorExit:
        for module in modules:
            module.ahead.close(CLOSE_TIMEOUT_S)
        raise


def host_times(model: nn.Module) -> HostTimes:
    """Preparation and waiting of all sharded modules of a model so far."""
    total = HostTimes()
    for module in modules_that_prepare(model):
        total.prepared_s += module.ahead.times.prepared_s
        total.waited_s += module.ahead.times.waited_s
    return total


def buffer_metrics(model: nn.Module) -> dict[str, float]:
    """What static shapes have cost all sharded modules of a model so far: padding, late sizes, shapes."""
    counters = [module.capacity_counters for module in modules_that_prepare(model)]
    slots = sum(counter.id_slots for counter in counters)
    return {
        "padding_waste": 1 - sum(counter.ids for counter in counters) / slots if slots else 0.0,
        "late_buffer_sizes": float(sum(counter.late for counter in counters)),
        "buffer_shapes": float(sum(len(counter.shapes) for counter in counters)),
    }


class TpuTrainPipeline(TrainPipelineBase[Any, Any]):
    """TorchRec's train pipeline with the host `depth` batches ahead.

    `model(batch)` returns (losses, output), as for every TorchRec pipeline.  The batch's features stay on
    the host; `to_device(batch)`, if given, moves what else the model needs.  `progress` raises
    StopIteration after the last batch; `close` may be called at any time.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        depth: int = DEPTH,
        features_of: FeaturesOf = sparse_features,
        to_device: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(model, optimizer, device)
        self._depth, self._features_of, self._to_device = depth, features_of, to_device
        self._batches: Iterator[Any] | None = None
        self._source: Iterator[Any] | None = None

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        if self._batches is None or dataloader_iter is not self._source:
            self.close()
            self._source = dataloader_iter
            self._batches = prepared_ahead(
                self._model, dataloader_iter, depth=self._depth, features_of=self._features_of
            )
        batch = next(self._batches)
        if self._to_device is not None:
            batch = self._to_device(batch)
        if self._model.training:
            self._optimizer.zero_grad()
        losses, output = self._model(batch)
        if self._model.training:
            self._backward(losses)
            self._optimizer.step()
        return output

    def close(self) -> None:
        """Waits for the preparations that were begun, and forgets them."""
        if self._batches is not None:
            self._batches.close()  # type: ignore[attr-defined]
        self._batches = self._source = None

    def reset(self) -> None:
        self.close()
        super().reset()
