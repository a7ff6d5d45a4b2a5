"""The seam between the Trainer (loop, optimizer, checkpoints, logs) and what is trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from recsys_tpu.run_log import RunLog
from recsys_tpu.runtime import Runtime

Result = TypeVar("Result")


class Metrics(Protocol):
    """What an evaluation found; `str()` of it is the line that the run prints."""

    def as_dict(self) -> dict[str, float]: ...


BatchT = TypeVar("BatchT")
MetricsT = TypeVar("MetricsT", bound=Metrics)


class Task(ABC, Generic[BatchT, MetricsT]):
    """A model with its data, on one rank.

    Attributes:
        num_embeddings: rows of each table of the model, by feature.
        batches_per_epoch: steps in one pass over the training data; the same on every rank.
        train_samples, eval_samples: rows of the training and the evaluation split, over all ranks; None
            where an evaluation has no rows to speak of.
        max_ids_per_sample: ids of a sample at most, by feature, where the data says so.
    """

    num_embeddings: Mapping[str, int]
    batches_per_epoch: int
    train_samples: int | None = None
    eval_samples: int | None = None
    max_ids_per_sample: Mapping[str, int]

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model, its tables on the meta device.

        It has `sparse_arch.embedding_bag_collection` (every table) and `compile_towers(compiler)`.
        """

    @abstractmethod
    def batches(self, epoch: int, *, start: int) -> Iterator[BatchT]:
        """This rank's training batches ``start, start + 1, …`` of an epoch."""

    def prepare_steps(self, model: nn.Module, step: int) -> int | None:
        """Work between steps, before batch `step` is read; collective.

        Returns after how many steps at most it is to be called again (None: when an epoch ends).
        """
        return None

    @abstractmethod
    def loss(self, model: nn.Module, batch: BatchT) -> Tensor:
        """Scalar on the device: this rank's part of the global mean loss times the number of ranks.

        So its average over ranks is the global mean, and averaging gradients over ranks gives its gradient.
        """

    @abstractmethod
    def evaluate(self, model: nn.Module) -> MetricsT:
        """Metrics over the whole evaluation split; collective, the same result on all ranks."""

    @abstractmethod
    def report(self, metrics: MetricsT, log: RunLog, step: int) -> None:
        """Final table of a run, beside simple predictors where the config asks for them (rank 0 only)."""

    @abstractmethod
    def describe_data(self) -> str:
        """One line of the run's header."""

    def dataset(self) -> dict[str, Any]:
        """What identifies the data, as JSON values, for the run's log."""
        return {}

    def data_order(self) -> dict[str, Any]:
        """All that decides which samples a step sees, as JSON values; a checkpoint fits no other order."""
        return {"batches_per_epoch": self.batches_per_epoch}

    def state(self) -> dict[str, Tensor]:
        """Tensors that training changes beside model and optimizer; saved in and loaded from checkpoints."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned when a checkpoint was written."""
        assert not state, "a task with state overrides load_state"


def on_rank_zero_first(runtime: Runtime, prepare: Callable[[], Result]) -> Result:
    """`prepare()` on every rank, the others after rank 0, so that they find what it left on disk."""
    if runtime.rank == 0:
        result = prepare()
    dist.barrier()
    if runtime.rank != 0:
        result = prepare()
    return result
