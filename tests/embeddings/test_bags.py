"""Sorting a jagged batch into the bags of a stack, against a loop over samples and features."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from recsys_tpu.embeddings.bags import BagLayout, JaggedFeatures, StackFeatures, sort_for_stack, to_device
from recsys_tpu.embeddings.preparation import prepare


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


@settings(deadline=None)
@given(st.data())
def test_bags_of_variable_batch_sizes_are_rank_feature_sample(data: st.DataObject) -> None:
    """Against a loop: bags come feature by feature, rank by rank; a stack wants rank, feature, sample."""
    features, ranks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    strides = [[data.draw(st.integers(0, 3)) for _ in range(ranks)] for _ in range(features)]
    chosen = data.draw(st.lists(st.sampled_from(range(features)), unique=True, max_size=features))
    position, number = {}, 0
    for feature in range(features):
        for rank in range(ranks):
            for sample in range(strides[feature][rank]):
                position[feature, rank, sample] = number
                number += 1
    order, bounds = [], []
    for rank in range(ranks):
        bounds.append([])
        for feature in chosen:
            first = len(order)
            order += [position[feature, rank, sample] for sample in range(strides[feature][rank])]
            bounds[-1].append((first, len(order)))
    layout = BagLayout(strides)
    assert layout.num_ranks == ranks
    assert layout.bag_order(np.array(chosen, np.int64)).tolist() == order
    assert layout.bounds(np.array(chosen, np.int64)) == bounds


def test_moving_a_batch_moves_its_tensors_only() -> None:
    batch = prepare(
        np.array([3, 1]), num_bags=2, num_rows=5, id_capacity=4, unique_capacity=4, lengths=np.array([1, 1])
    )
    assert to_device(batch, torch.device("cpu")) is batch
    moved = to_device(batch, torch.device("meta"))
    assert moved.rows.device.type == "meta" and moved.counts.shape == (2,)
    assert moved.num_bags == 2 and moved.weights is None
