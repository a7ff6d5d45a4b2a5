"""Float64 numpy lookups and updates, written from the definitions: loops over ids, no sorting."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recsys_tpu.kernels.batch import Optimizer
from recsys_tpu.kernels.optimizer import OptimizerSpec

Array = NDArray[np.float64]


def pooled(table: Array, rows: Array, bags: Array, weights: Array | None, num_bags: int) -> Array:
    out = np.zeros((num_bags, table.shape[1]))
    for i, (row, bag) in enumerate(zip(rows, bags, strict=True)):
        out[bag] += table[row] * (1.0 if weights is None else weights[i])
    return out


def row_gradients(
    num_rows: int, grad: Array, rows: Array, bags: Array, weights: Array | None
) -> tuple[Array, NDArray[np.bool_]]:
    """Dense gradient of the table, and which rows were touched."""
    out, touched = np.zeros((num_rows, grad.shape[1])), np.zeros(num_rows, bool)
    for i, (row, bag) in enumerate(zip(rows, bags, strict=True)):
        out[row] += grad[bag] * (1.0 if weights is None else weights[i])
        touched[row] = True
    return out, touched


def step(
    spec: OptimizerSpec,
    table: Array,
    state: tuple[Array, ...],
    gradient: Array,
    touched: NDArray[np.bool_],
    learning_rate: float,
    count: int,
) -> None:
    """One optimizer step on the touched rows, in place.  State arrays: `[R]` or `[R, dim]`."""
    w, g = table[touched], gradient[touched]
    s = [buffer[touched] for buffer in state]
    if spec.weight_decay and not spec.decoupled_weight_decay:
        g = g + spec.weight_decay * w
    if spec.max_norm is not None:
        norm = np.sqrt((g * g).sum(1, keepdims=True))
        g = np.where(norm > spec.max_norm, g * spec.max_norm / np.where(norm > 0, norm, 1), g)
    kept = w * (1 - learning_rate * spec.weight_decay) if spec.decoupled_weight_decay else w
    match spec.optimizer:
        case Optimizer.SGD:
            if spec.momentum:
                s[0] = spec.momentum * s[0] + g
                g = s[0]
            new = kept - learning_rate * g
        case Optimizer.ADAGRAD:
            s[0] = s[0] + g * g
            new = kept - learning_rate * g / (np.sqrt(s[0]) + spec.eps)
        case Optimizer.ROWWISE_ADAGRAD:
            s[0] = s[0] + (g * g).mean(1)
            new = kept - learning_rate * g / (np.sqrt(s[0]) + spec.eps)[:, None]
        case Optimizer.ADAM:
            s[0] = spec.beta1 * s[0] + (1 - spec.beta1) * g
            s[1] = spec.beta2 * s[1] + (1 - spec.beta2) * g * g
            first, second = s
            if spec.bias_correction:
                first, second = first / (1 - spec.beta1**count), second / (1 - spec.beta2**count)
            new = kept - learning_rate * first / (np.sqrt(second) + spec.eps)
        case Optimizer.FTRL:
            z, n = s
            total = n + g * g
            z = z + g - (np.sqrt(total) - np.sqrt(n)) / learning_rate * w
            denominator = (spec.beta + np.sqrt(total)) / learning_rate + spec.l2
            new = np.where(np.abs(z) <= spec.l1, 0.0, -(z - np.sign(z) * spec.l1) / denominator)
            s = [z, total]
    table[touched] = new
    for buffer, values in zip(state, s, strict=True):
        buffer[touched] = values
