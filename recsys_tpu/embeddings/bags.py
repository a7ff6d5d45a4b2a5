"""From a jagged batch of features to the sorted ids of each stack, vectorised on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from recsys_tpu.embeddings.preparation import SortedIds, sort_ids
from recsys_tpu.kernels.batch import LookupBatch


@dataclass(frozen=True)
class JaggedFeatures:
    """A batch of several features, feature after feature, each feature sample after sample.

    values `[n]` ids; weights `[n]` or None; lengths `[bags]`; strides: samples of each feature, which sum
    to `bags`.
    """

    values: NDArray[np.integer]
    weights: NDArray[np.floating] | None
    lengths: NDArray[np.integer]
    strides: Sequence[int]


@dataclass(frozen=True)
class StackFeatures:
    """Which features read a stack: where they are in the batch, and where their tables start in the stack."""

    features: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    num_rows: int


def sort_for_stack(
    batch: JaggedFeatures, stack: StackFeatures, *, bag_order: NDArray[np.int64] | None = None, mean: bool
) -> SortedIds:
    """The ids of `stack`'s features, as bags in sample-major order: bag = sample * features + feature.

    bag_order: positions in `batch.lengths` of the stack's bags, for another order (variable batch sizes).
    mean: each id weighs 1 / (length of its bag), on top of its own weight.
    """
    if bag_order is None:
        bag_order = sample_major(stack.features, batch.strides)
    feature_of_bag = np.repeat(np.arange(len(batch.strides)), batch.strides)
    first_row_of_feature = np.zeros(len(batch.strides), np.int64)
    first_row_of_feature[stack.features] = stack.first_rows
    ends = np.cumsum(batch.lengths, dtype=np.int64)
    lengths = batch.lengths[bag_order].astype(np.int64)
    starts = ends[bag_order] - lengths
    source = concatenated_ranges(starts, lengths)
    rows = batch.values[source].astype(np.int64)
    rows += np.repeat(first_row_of_feature[feature_of_bag[bag_order]], lengths)
    weights = None if batch.weights is None else batch.weights[source]
    if mean:
        share = np.repeat((1.0 / np.maximum(lengths, 1)).astype(np.float32), lengths)
        weights = share if weights is None else weights * share
    return sort_ids(rows, num_bags=len(bag_order), num_rows=stack.num_rows, lengths=lengths, weights=weights)


def sample_major(features: NDArray[np.int64], strides: Sequence[int]) -> NDArray[np.int64]:
    """Positions, among all bags of a batch of equal strides, of the bags of `features`, sample by sample."""
    samples = strides[0] if len(strides) else 0
    assert all(stride == samples for stride in strides)
    return (features[None, :] * samples + np.arange(samples)[:, None]).reshape(-1)


def concatenated_ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """`[start, start + length)` of each pair, one after the other."""
    total = int(lengths.sum())
    destinations = np.cumsum(lengths) - lengths
    positions = np.repeat(starts - destinations, lengths)
    positions += np.arange(total)
    return positions


def to_device(batch: LookupBatch, device: torch.device) -> LookupBatch:
    """The batch with its tensors on `device`."""
    if device.type == "cpu":
        return batch
    moved = {name: value.to(device) for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    return LookupBatch(**{**vars(batch), **moved})
