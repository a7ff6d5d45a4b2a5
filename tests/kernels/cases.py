"""Batches that kernels get wrong: drawn by hypothesis, the same for every implementation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from recsys_tpu.embeddings.preparation import prepare
from recsys_tpu.kernels.batch import LookupBatch, Optimizer
from recsys_tpu.kernels.optimizer import OptimizerSpec

SPECS = {
    "sgd": OptimizerSpec(Optimizer.SGD),
    "sgd_momentum_decay": OptimizerSpec(Optimizer.SGD, momentum=0.9, weight_decay=0.01),
    "adagrad": OptimizerSpec(Optimizer.ADAGRAD, eps=1e-6),
    "rowwise_adagrad": OptimizerSpec(Optimizer.ROWWISE_ADAGRAD, eps=1e-6),
    "rowwise_adagrad_clipped": OptimizerSpec(
        Optimizer.ROWWISE_ADAGRAD, eps=1e-6, max_norm=0.5, weight_decay=0.01, decoupled_weight_decay=True
    ),
    "adam": OptimizerSpec(Optimizer.ADAM, eps=1e-6),
    "adamw": OptimizerSpec(Optimizer.ADAM, eps=1e-6, weight_decay=0.01, decoupled_weight_decay=True),
    "ftrl": OptimizerSpec(Optimizer.FTRL, l1=0.01, l2=0.1),
}


@dataclass
class Case:
    num_rows: int
    num_bags: int
    rows: NDArray[np.int64]
    bags: NDArray[np.int64]
    weights: NDArray[np.float32] | None
    id_capacity: int
    unique_capacity: int

    def batch(self) -> LookupBatch:
        return prepare(
            self.rows,
            bags=self.bags,
            weights=self.weights,
            num_bags=self.num_bags,
            num_rows=self.num_rows,
            id_capacity=self.id_capacity,
            unique_capacity=self.unique_capacity,
        )


@st.composite
def cases(draw: st.DrawFn, *, max_ids: int = 40, num_rows: int = 32, num_bags: int = 8) -> Case:
    """Empty batches, empty bags, duplicates, one row for all ids, both ends, capacities exactly full."""
    count = draw(st.sampled_from([0, 1, max_ids // 2, max_ids]))
    shape = draw(st.sampled_from(["uniform", "one row", "ends", "one bag"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    rows = rng.integers(0, num_rows, count)
    if shape == "one row":
        rows[:] = rng.integers(0, num_rows)
    if shape == "ends":
        rows = np.where(rng.random(count) < 0.5, 0, num_rows - 1)
    bags = np.sort(rng.integers(0, num_bags, count))
    if shape == "one bag":
        bags[:] = rng.integers(0, num_bags)
    weights = rng.standard_normal(count).astype(np.float32) if draw(st.booleans()) else None
    full = draw(st.booleans())
    unique = len(np.unique(rows))
    return Case(
        num_rows,
        num_bags,
        rows,
        bags,
        weights,
        id_capacity=count if full and count else max_ids + 8,
        unique_capacity=unique if full and unique else max_ids + 8,
    )
