"""A bad id or weight raises before anything is sent, and names feature, table, position and value."""

from __future__ import annotations

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.sharding.validation import (
    SAMPLED,
    FeatureLimits,
    InvalidFeatureError,
    Validation,
    check_features,
)

TABLES = [
    EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="users", feature_names=["user", "friend"]),
    EmbeddingBagConfig(num_embeddings=5, embedding_dim=4, name="few", feature_names=["friend"]),
]


def batch(user: list[int], friend: list[int], weights: list[float] | None = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["user", "unread", "friend"],
        values=torch.tensor([*user, 99, *friend]),
        lengths=torch.tensor([1, len(user) - 1, 1, 0, 2, len(friend) - 2]),
        weights=None if weights is None else torch.tensor(weights),
    )


def check(features: KeyedJaggedTensor, validation: Validation = Validation.FULL) -> None:
    check_features(features, FeatureLimits.of_tables(TABLES), validation)


def test_good_batches_pass_and_features_of_no_table_are_not_looked_at() -> None:
    check(batch([0, 9], [0, 4, 3]))


@pytest.mark.parametrize("bad", [10, -1, 2**40])
def test_an_id_out_of_range_names_everything(bad: int) -> None:
    with pytest.raises(
        InvalidFeatureError,
        match=rf"feature user: id {bad} at position 2 \(sample 1 .*table users, which has 10",
    ):
        check(batch([0, 9, bad], [0, 0, 0]))


def test_a_shared_feature_must_fit_its_smallest_table() -> None:
    with pytest.raises(
        InvalidFeatureError, match=r"feature friend: id 7 at position 1 .*table few, which has 5"
    ):
        check(batch([0, 0], [0, 7, 0]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_raises(bad: float) -> None:
    with pytest.raises(InvalidFeatureError, match=r"feature friend: weight \w+ at position 2 \(sample 1"):
        check(batch([0, 0], [0, 0, 0], [1, 1, 1, 1, 1, bad]))


def test_off_checks_nothing_and_sample_finds_a_bad_id_within_its_period() -> None:
    bad = batch([0] * 99 + [10], [0, 0])
    check(bad, Validation.OFF)
    limits = FeatureLimits.of_tables(TABLES)
    with pytest.raises(InvalidFeatureError, match="id 10 at position 99"):
        for _ in range(SAMPLED):
            check_features(bad, limits, Validation.SAMPLE)
