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


@pytest.mark.parametrize("tables", [TABLES, TABLES[::-1]])
def test_a_shared_feature_must_fit_its_smallest_table(tables: list[EmbeddingBagConfig]) -> None:
    with pytest.raises(
        InvalidFeatureError, match=r"feature friend: id 7 at position 1 .*table few, which has 5"
    ):
        check_features(batch([0, 0], [0, 7, 0]), FeatureLimits.of_tables(tables), Validation.FULL)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_raises(bad: float) -> None:
    with pytest.raises(InvalidFeatureError, match=r"friend: weight \w+ at position 2 \(sample 1.*table few"):
        check(batch([0, 0], [0, 0, 0], [1, 1, 1, 1, 1, bad]))


@pytest.mark.parametrize("position", [99, 35, 64, 0])
def test_off_checks_nothing_and_sample_finds_a_bad_id_once_in_its_period(position: int) -> None:
    ids = [0] * 100
    ids[position] = 10
    bad = batch(ids, [0, 0])
    check(bad, Validation.OFF)
    limits = FeatureLimits.of_tables(TABLES)
    found = []
    for step in range(1, 2 * SAMPLED + 1):
        try:
            check_features(bad, limits, Validation.SAMPLE)
        except InvalidFeatureError as error:
            assert f"id 10 at position {position} (" in str(error)
            found.append(step)
    first = position % SAMPLED or SAMPLED
    assert found == [first, first + SAMPLED]


def test_sample_finds_a_bad_weight_and_its_place() -> None:
    weights = [1.0] * 103
    weights[99] = float("nan")
    limits = FeatureLimits.of_tables(TABLES)
    with pytest.raises(
        InvalidFeatureError, match=r"user: weight nan at position 99 \(sample 1.*table users is not"
    ):
        for _ in range(SAMPLED):
            check_features(batch([0] * 100, [0, 0], weights), limits, Validation.SAMPLE)
