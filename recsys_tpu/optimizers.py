"""Dense optimizer, fused table optimizer, and the learning-rate schedule over both."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recsys_tpu.config import DenseOptimizerConfig, ScheduleConfig, SparseOptimizerConfig


def fuse_table_optimizer(tables: nn.Module, config: SparseOptimizerConfig) -> None:
    """Mark the tables so that the sharder fuses the optimizer's update into their backward."""
    classes: dict[str, type[torch.optim.Optimizer]] = {
        "rowwise_adagrad": RowWiseAdagrad,
        "adagrad": torch.optim.Adagrad,
        "sgd": torch.optim.SGD,
    }
    arguments: dict[str, Any] = {"lr": config.learning_rate}
    if config.kind != "sgd":
        arguments["eps"] = config.eps
    apply_optimizer_in_backward(classes[config.kind], tables.parameters(), arguments)


def build_optimizer(model: DistributedModelParallel, config: DenseOptimizerConfig) -> CombinedOptimizer:
    """One optimizer over the fused one of the tables and that of the dense parameters."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if config.kind == "adamw":
            return torch.optim.AdamW(
                parameters, lr=config.learning_rate, weight_decay=config.weight_decay, eps=config.eps
            )
        if config.kind == "adagrad":
            return torch.optim.Adagrad(
                parameters, lr=config.learning_rate, weight_decay=config.weight_decay, eps=config.eps
            )
        return torch.optim.SGD(
            parameters,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
        )

    dense = KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(model.named_parameters())), make)
    return CombinedOptimizer([("sparse", model.fused_optimizer), ("dense", dense)])


class LearningRateSchedule:
    """Multiplies every learning rate by a factor of the step number: warm-up, constant, decay.

    factor(k) = (k + 1) / warmup while k < warmup;
    ((end - k) / (end - start)) ** power from decay_start on, at least min_factor
    (power 2 is MLPerf DLRM's schedule: ((N - k) / N) ** 2, floored).
    """

    def __init__(self, optimizer: CombinedOptimizer, config: ScheduleConfig, total_steps: int) -> None:
        self._optimizer, self._config = optimizer, config
        self._base = [group["lr"] for group in optimizer.param_groups]
        self._decay_steps = config.decay_steps
        if config.decay_start_step is not None and self._decay_steps is None:
            self._decay_steps = max(total_steps - config.decay_start_step, 1)

    def factor(self, step: int) -> float:
        """The factor of step number `step` (the first is 0)."""
        config = self._config
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        if config.decay_start_step is None or self._decay_steps is None or step < config.decay_start_step:
            return 1.0
        left = max(config.decay_start_step + self._decay_steps - step, 0) / self._decay_steps
        return float(max(left**config.decay_power, config.min_factor))

    def apply(self, step: int) -> float:
        """Set the learning rates for step number `step`; returns the factor.

        Call it before `zero_grad`, which is what hands the rate to the fused optimizer.
        """
        factor = self.factor(step)
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            group["lr"] = base * factor
        return factor
