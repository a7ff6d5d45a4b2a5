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


class BagLayout:
    """Where the bags of a batch with variable batch sizes are.

    strides: samples by [feature][rank].  Bags come feature after feature, each rank after rank; a stack's
    bags are put in the order rank, feature, sample.
    """

    def __init__(self, strides: Sequence[Sequence[int]]) -> None:
        self._strides = np.asarray(strides, np.int64).reshape(len(strides), -1)
        ends = np.cumsum(self._strides.reshape(-1))
        self._starts = (ends - self._strides.reshape(-1)).reshape(self._strides.shape)

    @property
    def num_ranks(self) -> int:
        return self._strides.shape[1]

    def bag_order(self, features: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions, among all bags, of the bags of `features` in the order of a stack."""
        return concatenated_ranges(
            self._starts[features].T.reshape(-1), self._strides[features].T.reshape(-1)
        )

    def bounds(self, features: NDArray[np.int64]) -> list[list[tuple[int, int]]]:
        """(first, last) bag of the stack, by [rank][feature of the stack]."""
        lengths = self._strides[features].T
        ends = np.cumsum(lengths.reshape(-1)).reshape(lengths.shape)
        return [
            list(zip((ends - lengths)[rank].tolist(), ends[rank].tolist(), strict=True))
            for rank in range(self.num_ranks)
        ]


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
