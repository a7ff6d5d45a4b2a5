"""Bad batches of ids by name: every case ends in an error that names the place, or in a documented result.

Public bug reports that a case stands for are in its name.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.embeddings.preparation import CapacityError, prepare
from recsys_tpu.sharding.validation import FeatureLimits, InvalidFeatureError, Validation, check_features


def _features(ids: list[int], weights: list[float] | None = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["C1"],
        values=torch.tensor(ids),
        lengths=torch.tensor([1] * len(ids)),
        weights=None if weights is None else torch.tensor(weights),
    )


LIMITS = [EmbeddingBagConfig(name="t_C1", num_embeddings=10, embedding_dim=4, feature_names=["C1"])]
BAD_FEATURES = {
    "torchrec 2957: id of the table's size": (
        [0, 10],
        None,
        "feature C1: id 10 at position 1 .*t_C1, which has 10",
    ),
    "torchrec 575: id negative": ([-1], None, "feature C1: id -1 at position 0"),
    "id over 32 bits": ([1, 2**40], None, "id 1099511627776 at position 1"),
    "weight NaN": ([1, 2], [1.0, float("nan")], "weight nan at position 1"),
    "weight infinite": ([1, 2], [float("-inf"), 1.0], "weight -inf at position 0"),
}


@pytest.mark.parametrize("case", BAD_FEATURES)
def test_bad_features(case):
    ids, weights, message = BAD_FEATURES[case]
    with pytest.raises(InvalidFeatureError, match=message):
        check_features(_features(ids, weights), FeatureLimits.of_tables(LIMITS), Validation.FULL)


ROWS = np.array([1, 2, 3])
BAD_PREPARATIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "row of the table's size": ({"rows": np.array([1, 8, 3])}, ValueError, "row 8 at position 1 is not in"),
    "row negative": ({"rows": np.array([1, -8, 3])}, ValueError, "row -8 at position 1"),
    "lengths too short": (
        {"lengths": np.array([1, 1])},
        ValueError,
        "lengths sum to 2, but there are 3 rows",
    ),
    "length negative": ({"lengths": np.array([4, -1])}, ValueError, "length -1 is negative"),
    "too few lengths": ({"lengths": np.array([3])}, ValueError, "1 lengths for 2 bags"),
    "too many ids": ({"id_capacity": 2}, CapacityError, "ids: 3 needed, but id_capacity is 2"),
    "too many rows": (
        {"unique_capacity": 2},
        CapacityError,
        "distinct rows: 3 needed, but unique_capacity is 2",
    ),
    "weights too few": ({"weights": np.array([1.0])}, ValueError, "3 rows but 1 weights"),
    "no bags": ({"lengths": None}, ValueError, "either lengths or bags"),
}


@pytest.mark.parametrize("case", BAD_PREPARATIONS)
def test_bad_preparation(case):
    changes, kind, message = BAD_PREPARATIONS[case]
    arguments: dict[str, Any] = {
        "num_bags": 2,
        "num_rows": 8,
        "id_capacity": 8,
        "unique_capacity": 8,
        "lengths": np.array([1, 2]),
        "rows": ROWS,
    }
    arguments |= changes
    with pytest.raises(kind, match=message):
        prepare(arguments.pop("rows"), **arguments)
