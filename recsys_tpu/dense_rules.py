"""torch.optim's AdamW, Adagrad and SGD as pure functions, for a train step that is one program.

A program has no tensors to change, only arguments and results.  Learning rate and bias corrections are
arguments, so that a new rate compiles nothing.  State has the names that torch.optim gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from recsys_tpu.config import DenseOptimizerConfig

WEIGHT = "weight"
BETAS = (0.9, 0.999)  # torch.optim.AdamW's defaults

Values = Mapping[str, Tensor]


def state_kinds(config: DenseOptimizerConfig) -> tuple[str, ...]:
    """Names of the tensors, each of the weight's shape, that the optimizer keeps for a weight."""
    if config.kind == "adamw":
        return ("exp_avg", "exp_avg_sq")
    if config.kind == "adagrad":
        return ("sum",)
    return ("momentum_buffer",) if config.momentum else ()


def updated(
    config: DenseOptimizerConfig,
    old: Values,
    gradient: Tensor,
    *,
    learning_rate: Tensor | float,
    corrections: Sequence[Tensor],
) -> dict[str, Tensor]:
    """The weight and its state after a step.

    old: `WEIGHT` and each of `state_kinds`.  corrections: see `bias_corrections`.
    """
    rules: dict[str, Callable[..., dict[str, Tensor]]] = {"adamw": _adamw, "adagrad": _adagrad, "sgd": _sgd}
    return rules[config.kind](config, old, gradient, learning_rate, corrections)


def bias_corrections(step: int) -> tuple[float, float]:
    """AdamW's ``1 - beta ** step`` of both moments; `step` counts from 1.

    For the host, in float64: in float32 the second loses up to four digits in the first steps (1 - 0.999).
    """
    return 1 - BETAS[0] ** step, 1 - BETAS[1] ** step


def _adamw(
    config: DenseOptimizerConfig,
    old: Values,
    gradient: Tensor,
    rate: Tensor | float,
    corrections: Sequence[Tensor],
) -> dict[str, Tensor]:
    beta1, beta2 = BETAS
    average = beta1 * old["exp_avg"] + (1 - beta1) * gradient
    squares = beta2 * old["exp_avg_sq"] + (1 - beta2) * gradient.square()
    root = (squares / corrections[1]).sqrt() + config.eps
    kept = old[WEIGHT] * (1 - rate * config.weight_decay)
    weight = kept - rate * (average / corrections[0]) / root
    return {WEIGHT: weight, "exp_avg": average, "exp_avg_sq": squares}


def _adagrad(
    config: DenseOptimizerConfig,
    old: Values,
    gradient: Tensor,
    rate: Tensor | float,
    corrections: Sequence[Tensor],
) -> dict[str, Tensor]:
    gradient = gradient + config.weight_decay * old[WEIGHT]
    total = old["sum"] + gradient.square()
    return {WEIGHT: old[WEIGHT] - rate * gradient / (total.sqrt() + config.eps), "sum": total}


def _sgd(
    config: DenseOptimizerConfig,
    old: Values,
    gradient: Tensor,
    rate: Tensor | float,
    corrections: Sequence[Tensor],
) -> dict[str, Tensor]:
    gradient = gradient + config.weight_decay * old[WEIGHT]
    if not config.momentum:
        return {WEIGHT: old[WEIGHT] - rate * gradient}
    momentum = config.momentum * old["momentum_buffer"] + gradient
    return {WEIGHT: old[WEIGHT] - rate * momentum, "momentum_buffer": momentum}
