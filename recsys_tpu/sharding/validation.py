"""Checks of a batch on the host before anything of it is sent: a bad id names feature, table and place."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

SAMPLED = 64  # of how many ids one is checked


class Validation(enum.Enum):
    """How much of a batch is checked."""

    FULL = "full"  # every id and weight
    SAMPLE = "sample"  # one id in SAMPLED, another one each step
    OFF = "off"  # nothing here; an id that reaches its owner out of range still raises there


class InvalidFeatureError(ValueError):
    """An id that its table doesn't have, or a weight that is not a number."""


@dataclass
class FeatureLimits:
    """Rows of the smallest table that each feature reads, and that table's name."""

    rows: dict[str, tuple[int, str]]
    steps: int = field(default=0)

    @staticmethod
    def of_tables(configs: Iterable[BaseEmbeddingConfig]) -> FeatureLimits:
        rows: dict[str, tuple[int, str]] = {}
        for config in configs:
            for feature in config.feature_names:
                limit = (config.num_embeddings, config.name)
                rows[feature] = min(rows.get(feature, limit), limit)
        return FeatureLimits(rows)


def check_features(features: KeyedJaggedTensor, limits: FeatureLimits, validation: Validation) -> None:
    """Raises InvalidFeatureError for the first id or weight that is out of range.

    features: on CPU.  Features that no table reads are not checked.
    """
    if validation is Validation.OFF:
        return
    limits.steps += 1
    step = 1 if validation is Validation.FULL else SAMPLED
    first = 0 if validation is Validation.FULL else limits.steps % SAMPLED
    values = features.values().numpy()
    weights = features.weights_or_none()
    ends = features.offset_per_key()
    for position, feature in enumerate(features.keys()):
        if feature not in limits.rows:
            continue
        rows, table = limits.rows[feature]
        chosen = slice(ends[position] + first, ends[position + 1], step)
        ids = values[chosen]
        if len(ids) and (ids.min() < 0 or ids.max() >= rows):
            at = int(np.flatnonzero((ids < 0) | (ids >= rows))[0]) * step + first
            bad = int(values[ends[position] + at])
            raise InvalidFeatureError(
                f"feature {feature}: id {bad} at position {at} ({_sample(features, position, at)}) is not a "
                f"row of table {table}, which has {rows}; fix the data or hash it into range"
            )
        if weights is not None:
            _check_weights(features, position, weights.numpy()[chosen], first, step, table)


def _check_weights(
    features: KeyedJaggedTensor,
    position: int,
    weights: NDArray[np.floating],
    first: int,
    step: int,
    table: str,
) -> None:
    if np.isfinite(weights).all():
        return
    at = int(np.flatnonzero(~np.isfinite(weights))[0])
    place = at * step + first
    raise InvalidFeatureError(
        f"feature {features.keys()[position]}: weight {weights[at]} at position {place} "
        f"({_sample(features, position, place)}) of table {table} is not a finite number"
    )


def _sample(features: KeyedJaggedTensor, position: int, at: int) -> str:
    """Which sample of the batch, for a position among the ids of a feature."""
    first_bag = sum(features.stride_per_key()[:position])
    lengths = features.lengths().reshape(-1)[first_bag : first_bag + features.stride_per_key()[position]]
    sample = int(np.searchsorted(np.cumsum(lengths.numpy()), at, side="right"))
    return f"sample {sample} of this rank's batch"
