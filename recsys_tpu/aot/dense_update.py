"""torch.optim's AdamW, Adagrad and SGD as pure functions, for a step that is compiled as one program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from recsys_tpu.config import DenseOptimizerConfig

_BETAS = (0.9, 0.999)  # torch.optim.AdamW's defaults

StateKind = Literal["moment1", "moment2", "sum", "momentum"]


def dense_state_kinds(config: DenseOptimizerConfig) -> tuple[StateKind, ...]:
    if config.kind == "adamw":
        return ("moment1", "moment2")
    if config.kind == "adagrad":
        return ("sum",)
    return ("momentum",) if config.momentum else ()


def dense_update(
    config: DenseOptimizerConfig,
) -> Callable[[Mapping[str, Tensor], Sequence[str], Sequence[Tensor]], dict[str, Tensor]]:
    """torch.optim's AdamW, Adagrad or SGD as a pure function: (arguments, names, gradients) -> new state."""
    rules: dict[str, Callable[..., dict[str, Tensor]]] = {"adamw": _adamw, "adagrad": _adagrad, "sgd": _sgd}
    rule = rules[config.kind]

    def update(given: Mapping[str, Tensor], names: Sequence[str], gradients: Sequence[Tensor]) -> Any:
        new: dict[str, Tensor] = {}
        for name, gradient in zip(names, gradients, strict=True):
            kinds = ("weight", *dense_state_kinds(config))
            old = {kind: given[f"{kind}.{name}"] for kind in kinds}
            updated = rule(config, old, gradient, given["step"])
            new.update({f"{kind}.{name}": value for kind, value in updated.items()})
        return new

    return update


def _adamw(
    config: DenseOptimizerConfig, old: Mapping[str, Tensor], gradient: Tensor, step: Tensor
) -> dict[str, Tensor]:
    beta1, beta2 = _BETAS
    moment1 = beta1 * old["moment1"] + (1 - beta1) * gradient
    moment2 = beta2 * old["moment2"] + (1 - beta2) * gradient.square()
    root = (moment2 / (1 - beta2**step)).sqrt() + config.eps
    kept = old["weight"] * (1 - config.learning_rate * config.weight_decay)
    weight = kept - config.learning_rate * (moment1 / (1 - beta1**step)) / root
    return {"weight": weight, "moment1": moment1, "moment2": moment2}


def _adagrad(
    config: DenseOptimizerConfig, old: Mapping[str, Tensor], gradient: Tensor, step: Tensor
) -> dict[str, Tensor]:
    gradient = gradient + config.weight_decay * old["weight"]
    total = old["sum"] + gradient.square()
    return {
        "weight": old["weight"] - config.learning_rate * gradient / (total.sqrt() + config.eps),
        "sum": total,
    }


def _sgd(
    config: DenseOptimizerConfig, old: Mapping[str, Tensor], gradient: Tensor, step: Tensor
) -> dict[str, Tensor]:
    gradient = gradient + config.weight_decay * old["weight"]
    if not config.momentum:
        return {"weight": old["weight"] - config.learning_rate * gradient}
    momentum = config.momentum * old["momentum"] + gradient
    return {"weight": old["weight"] - config.learning_rate * momentum, "momentum": momentum}
