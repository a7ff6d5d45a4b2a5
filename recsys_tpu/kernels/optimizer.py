"""The fused optimizers: what each keeps, and its formula, written once for every implementation.

The formulas work on anything with array arithmetic (torch, jax, or the lanes of a SparseCore
register): `math` is what holds its `sqrt` and `where`.  They come in two halves, because a kernel sees a
row in pieces:
`row_terms` needs one number of the whole row (the sum of squares of its gradient), `update_elements`
is elementwise.

Sources: Adagrad: Duchi et al. 2011.  Row-wise Adagrad: Mudigere et al. 2022, as in FBGEMM
(`exact_rowwise_adagrad`).  Adam: Kingma and Ba 2015, decoupled decay: Loshchilov and Hutter 2019.
FTRL-Proximal: McMahan et al. 2013, algorithm 1, with a global learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recsys_tpu.kernels.batch import Optimizer

HYPER_SIZE = 16  # one SparseCore register on the widest chip
LEARNING_RATE, STEP, MOMENT1_CORRECTION, MOMENT2_CORRECTION, INVERSE_LEARNING_RATE = range(5)


@dataclass(frozen=True)
class OptimizerSpec:
    """Everything about an optimizer that a program is compiled for.  Rates and steps are run-time.

    optimizer: which one.
    eps: added to the root of the second moment (SGD, FTRL: unused).
    beta1, beta2: Adam's decay rates.
    bias_correction: Adam's, by the global step; False leaves the moments as they are.
    weight_decay: L2 (added to the gradient), or decoupled: `w -= lr * weight_decay * w`.  Rows that a
        step doesn't touch don't decay.
    momentum: SGD's heavy ball; it keeps one value per element when not zero.
    max_norm: a row's summed gradient is scaled down to this L2 norm.  None: no clipping.
    l1, l2, beta: FTRL's regularisers and its per-coordinate beta.
    stochastic_rounding: round new weights of a bfloat16 table up or down at random, without bias, from
        a counter (step, element): the same run gives the same bits.
    """

    optimizer: Optimizer
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    bias_correction: bool = True
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    momentum: float = 0.0
    max_norm: float | None = None
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1.0
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        if self.momentum and self.optimizer is not Optimizer.SGD:
            raise ValueError(f"OptimizerSpec: momentum is SGD's; {self.optimizer.value} got {self.momentum}")
        if self.weight_decay and self.optimizer is Optimizer.FTRL:
            raise ValueError("OptimizerSpec: FTRL regularises with l1 and l2, not weight_decay")
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"OptimizerSpec: max_norm must be positive or None, got {self.max_norm}")

    @property
    def element_states(self) -> int:
        """State buffers with one float32 per table element."""
        if self.optimizer is Optimizer.SGD:
            return 1 if self.momentum else 0
        return {Optimizer.ADAGRAD: 1, Optimizer.ADAM: 2, Optimizer.FTRL: 2}.get(self.optimizer, 0)

    @property
    def has_row_state(self) -> bool:
        """Whether there is a (single) state buffer with one float32 per row."""
        return self.optimizer is Optimizer.ROWWISE_ADAGRAD

    def state_sizes(self, num_rows: int, dim: int) -> tuple[int, ...]:
        """Elements of each flat float32 state buffer of a stack of `num_rows` rows."""
        return (num_rows,) if self.has_row_state else (num_rows * dim,) * self.element_states

    @property
    def needs_square_sum(self) -> bool:
        """Whether the update needs the sum of squares of a row's whole gradient."""
        return self.has_row_state or self.max_norm is not None


def hyper_tensor(
    spec: OptimizerSpec, *, learning_rate: float, step: int, device: torch.device | str = "cpu"
) -> Tensor:
    """The run-time part of an optimizer, float32 `[16]`.  `step` counts from 1.

    Raises ValueError for a step below 1, or a learning rate of 0 with FTRL (which divides by it).
    """
    if step < 1:
        raise ValueError(f"hyper_tensor: step counts from 1, got {step}")
    if spec.optimizer is Optimizer.FTRL and not learning_rate > 0:
        raise ValueError(f"hyper_tensor: FTRL needs a positive learning rate, got {learning_rate}")
    corrected = spec.optimizer is Optimizer.ADAM and spec.bias_correction
    values = [0.0] * HYPER_SIZE
    values[LEARNING_RATE] = learning_rate
    values[STEP] = float(step)
    values[MOMENT1_CORRECTION] = 1 / (1 - spec.beta1**step) if corrected else 1.0
    values[MOMENT2_CORRECTION] = 1 / (1 - spec.beta2**step) if corrected else 1.0
    values[INVERSE_LEARNING_RATE] = 1 / learning_rate if learning_rate else 0.0
    return torch.tensor(values, dtype=torch.float32, device=device)


def regularised(spec: OptimizerSpec, weight: Any, gradient: Any) -> Any:
    """The gradient with L2 weight decay added; elementwise."""
    if spec.weight_decay and not spec.decoupled_weight_decay:
        return gradient + spec.weight_decay * weight
    return gradient


def row_terms(
    math: Any, spec: OptimizerSpec, dim: int, square_sum: Any, row_state: Any
) -> tuple[Any, Any, Any]:
    """Per row: (scale of its gradient or None, divisor of its step or None, new row state or None).

    square_sum: sum of squares of the row's (regularised) gradient; row_state: row-wise accumulator.
    """
    scale = None
    if spec.max_norm is not None:
        norm = math.sqrt(square_sum)
        # A NaN norm compares false: the gradient stays as it is, and its NaN is seen.
        scale = math.where(norm > spec.max_norm, spec.max_norm / norm, norm * 0 + 1)
        square_sum = square_sum * scale * scale
    if not spec.has_row_state:
        return scale, None, None
    accumulated = row_state + square_sum * (1.0 / dim)
    return scale, math.sqrt(accumulated) + spec.eps, accumulated


def update_elements(
    math: Any,
    spec: OptimizerSpec,
    hyper: Any,
    weight: Any,
    gradient: Any,
    states: tuple[Any, ...],
    row_divisor: Any,
) -> tuple[Any, tuple[Any, ...]]:
    """New weight and element states, elementwise, in float32; `hyper` is indexed by the constants above."""
    rate = hyper[LEARNING_RATE]
    kept = weight
    if spec.decoupled_weight_decay and spec.weight_decay:
        kept = weight - rate * spec.weight_decay * weight
    match spec.optimizer:
        case Optimizer.SGD:
            if not spec.momentum:
                return kept - rate * gradient, ()
            velocity = spec.momentum * states[0] + gradient
            return kept - rate * velocity, (velocity,)
        case Optimizer.ROWWISE_ADAGRAD:
            return kept - rate * gradient / row_divisor, ()
        case Optimizer.ADAGRAD:
            squares = states[0] + gradient * gradient
            return kept - rate * gradient / (math.sqrt(squares) + spec.eps), (squares,)
        case Optimizer.ADAM:
            first = spec.beta1 * states[0] + (1 - spec.beta1) * gradient
            second = spec.beta2 * states[1] + (1 - spec.beta2) * gradient * gradient
            root = math.sqrt(second * hyper[MOMENT2_CORRECTION]) + spec.eps
            return kept - rate * (first * hyper[MOMENT1_CORRECTION]) / root, (first, second)
        case Optimizer.FTRL:
            z, squares = states
            total = squares + gradient * gradient
            root = math.sqrt(total)
            inverse_rate = hyper[INVERSE_LEARNING_RATE]
            z = z + gradient - (root - math.sqrt(squares)) * inverse_rate * weight
            shrunk = z - math.where(z > 0, z * 0 + spec.l1, z * 0 - spec.l1)
            inside = (z <= spec.l1) & (z >= -spec.l1)
            moved = -shrunk / ((spec.beta + root) * inverse_rate + spec.l2)
            return math.where(inside, z * 0, moved), (z, total)
