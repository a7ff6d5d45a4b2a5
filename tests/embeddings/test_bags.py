"""Sorting a jagged batch into the bags of a stack, against a loop over samples and features."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from recsys_tpu.embeddings.bags import JaggedFeatures, StackFeatures, sort_for_stack


@st.composite
def batches(draw: st.DrawFn) -> tuple[JaggedFeatures, StackFeatures, bool]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    features, samples = draw(st.integers(1, 5)), draw(st.integers(0, 6))
    lengths = rng.integers(0, draw(st.integers(1, 4)), features * samples)
    rows = 11
    values = rng.integers(0, rows, lengths.sum())
    weights = rng.normal(size=len(values)).astype(np.float32) if draw(st.booleans()) else None
    chosen = np.flatnonzero(rng.random(features) < 0.7)
    starts = rng.integers(0, 3, len(chosen)) * rows
    batch = JaggedFeatures(values, weights, lengths, [samples] * features)
    return batch, StackFeatures(chosen, starts, 3 * rows), draw(st.booleans())


@settings(deadline=None)
@given(batches())
def test_sorted_bags_equal_a_loop(drawn: tuple[JaggedFeatures, StackFeatures, bool]) -> None:
    batch, stack, mean = drawn
    ids = sort_for_stack(batch, stack, mean=mean)
    rows, bags, weights = _loop(batch, stack, mean)
    np.testing.assert_array_equal(ids.rows, rows)
    np.testing.assert_array_equal(ids.bags, bags)
    if ids.weights is None:
        np.testing.assert_array_equal(weights, 1)
    else:
        np.testing.assert_allclose(ids.weights, weights, rtol=1e-6)


def _loop(
    batch: JaggedFeatures, stack: StackFeatures, mean: bool
) -> tuple[list[int], list[int], NDArray[np.float64]]:
    samples = batch.strides[0]
    ends = np.cumsum(batch.lengths)
    rows, bags, weights = [], [], []
    for sample in range(samples):
        for position, (feature, start) in enumerate(zip(stack.features, stack.first_rows, strict=True)):
            bag = feature * samples + sample
            for index in range(ends[bag] - batch.lengths[bag], ends[bag]):
                rows.append(int(batch.values[index] + start))
                bags.append(sample * len(stack.features) + position)
                weight = 1.0 if batch.weights is None else float(batch.weights[index])
                weights.append(weight / batch.lengths[bag] if mean else weight)
    return rows, bags, np.array(weights)
