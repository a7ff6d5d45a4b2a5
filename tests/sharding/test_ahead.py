"""Host work ahead of the steps: in order, once a batch, errors where they belong, and no hang at the end."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from recsys_tpu.sharding.ahead import Ahead
from recsys_tpu.sharding.pipeline import TpuTrainPipeline, host_times, prepared_ahead
from tests.sharding.ranks import on_ranks


class Module(nn.Module):
    """Stands in for a sharded module: its host work notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[int] = []
        self.ahead: Ahead[list[int], int] = Ahead(self._work)
        self.weight = nn.Parameter(torch.zeros(()))

    def _work(self, value: list[int]) -> int:
        if value[0] < 0:
            raise ValueError(f"bad batch {value[0]}")
        self.done.append(value[0])
        return value[0] * 10

    def forward(self, value: list[int]) -> tuple[torch.Tensor, int]:
        return self.weight.reshape(1) * 2, self.ahead.take(value)


def test_results_belong_to_their_batches_and_work_is_done_in_order() -> None:
    module = Module()
    results = [
        module(batch)[1] for batch in prepared_ahead(module, ([n] for n in range(9)), features_of=lambda b: b)
    ]
    assert results == [10 * n for n in range(9)]
    assert module.done == list(range(9))


def test_the_work_runs_ahead_of_the_batch_that_is_out() -> None:
    module = Module()
    batches = prepared_ahead(module, ([n] for n in range(9)), depth=2, features_of=lambda b: b)
    first = next(batches)
    module.ahead.take(first)
    third = module.ahead._started
    assert len(third) == 2
    batches.close()  # type: ignore[attr-defined]
    assert module.done == [0, 1, 2]
    assert module([7])[1] == 70  # without the thread


def test_an_unannounced_batch_waits_its_turn() -> None:
    module = Module()
    announced = [1]
    module.ahead.start(announced)
    assert module.ahead.take([2]) == 20
    assert module.ahead.take(announced) == 10
    assert module.done == [1, 2]
    module.ahead.close()


def test_an_error_is_raised_by_the_step_of_its_batch() -> None:
    module = Module()
    batches = prepared_ahead(module, ([n] for n in (1, 2, -3, 4)), depth=2, features_of=lambda b: b)
    assert [module(next(batches))[1], module(next(batches))[1]] == [10, 20]
    with pytest.raises(ValueError, match="bad batch -3"):
        module(next(batches))


def test_closing_gives_up_on_work_that_does_not_end() -> None:
    release = threading.Event()
    ahead: Ahead[list[int], bool] = Ahead(lambda _: release.wait())
    ahead.start([1])
    with pytest.raises(TimeoutError, match="did every rank start the same batches"):
        ahead.close(0.05)
    release.set()


def test_a_batch_is_announced_once() -> None:
    module, batch = Module(), [1]
    module.ahead.start(batch)
    with pytest.raises(ValueError, match="announce each batch once"):
        module.ahead.start(batch)
    module.ahead.close()


def test_the_train_pipeline_steps_through_all_batches_and_restarts() -> None:
    module = Module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    pipeline = TpuTrainPipeline(module, optimizer, torch.device("cpu"), features_of=lambda b: b)
    for run in range(2):
        batches = iter([[n] for n in range(5)])
        assert [pipeline.progress(batches) for _ in range(5)] == [10 * n for n in range(5)]
        with pytest.raises(StopIteration):
            pipeline.progress(batches)
        assert module.weight.item() == -5.0 * (run + 1)
    pipeline.progress(iter([[n] for n in range(5)]))
    pipeline.close()
    assert host_times(module).prepared_s > 0


def test_ranks_stop_early_without_a_hang() -> None:
    results: list[Any] = on_ranks("tests.sharding.early_stop:run", 2, "cpu")
    assert results == [3, 3]
