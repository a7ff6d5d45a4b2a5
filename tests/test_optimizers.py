import pytest
import torch
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from recsys_tpu.config import ScheduleConfig
from recsys_tpu.optimizers import LearningRateSchedule


def schedule(**settings: float) -> tuple[CombinedOptimizer, LearningRateSchedule]:
    parts = []
    for name, rate in (("sparse", 0.5), ("dense", 0.1)):
        parameter = torch.nn.Parameter(torch.zeros(1))
        parts.append(
            (name, KeyedOptimizerWrapper({name: parameter}, lambda p, rate=rate: torch.optim.SGD(p, lr=rate)))
        )
    optimizer = CombinedOptimizer(parts)
    return optimizer, LearningRateSchedule(optimizer, ScheduleConfig(**settings), total_steps=100)


def test_constant_by_default() -> None:
    _, rule = schedule()
    assert {rule.factor(step) for step in range(200)} == {1.0}


def test_warm_up_then_constant_then_quadratic_decay() -> None:
    _, rule = schedule(warmup_steps=4, decay_start_step=10, decay_steps=20, decay_power=2.0)
    assert [rule.factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rule.factor(10) == 1.0
    # MLPerf DLRM: ((N - k) / N) ** 2, floored
    for k in range(20):
        assert rule.factor(10 + k) == pytest.approx(((20 - k) / 20) ** 2)
    assert rule.factor(30) == rule.factor(1000) == 1e-7


def test_decay_without_a_length_ends_with_training() -> None:
    _, rule = schedule(decay_start_step=20, decay_power=1.0, min_factor=0.0)
    assert rule.factor(60) == pytest.approx(0.5)
    assert rule.factor(100) == 0.0


def test_every_learning_rate_is_multiplied_from_its_own_base() -> None:
    optimizer, rule = schedule(warmup_steps=2)
    for _ in range(3):  # applying again does not compound
        assert rule.apply(0) == 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.05]
