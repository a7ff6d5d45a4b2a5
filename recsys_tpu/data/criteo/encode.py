"""From parsed values to what a model reads: dense features and ids.

Shape legend: ``B`` rows, ``I`` = 13 dense features, ``C`` = 26 sparse features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MISSING_ID = 0  # of a vocabulary
UNSEEN_ID = 1  # of a vocabulary: a hash that is rare or absent in the training split
FIRST_HASH_ID = 2


def transform_dense(counts: NDArray[np.int64]) -> NDArray[np.float32]:
    """``log(1 + max(x, 0))`` of ``[I, B]`` counts, the transform of facebookresearch/dlrm.

    A missing count (0 here) and every negative one become 0.  The result depends on the value alone,
    never on the other rows of a file, and is always finite.
    """
    return np.log1p(np.maximum(counts, 0)).astype(np.float32)


class Encoder(Protocol):
    """Turns hashes into ids.  Encoders are sent to worker processes, so they pickle."""

    def encode(self, hashes: NDArray[np.uint32], missing: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Ids ``[C, B]`` of hashes ``[C, B]``, which are 0 where `missing`."""
        ...


@dataclass(frozen=True)
class HashedEncoder:
    """``hash mod num_embeddings`` per feature, on the unsigned 32-bit hash; a missing value counts as hash 0.

    Id 0 is thus shared by missing values and the hashes divisible by the table size, as in
    facebookresearch/dlrm and TorchRec.
    """

    num_embeddings: tuple[int, ...]

    def encode(self, hashes: NDArray[np.uint32], missing: NDArray[np.bool_]) -> NDArray[np.int32]:
        ids = np.empty(hashes.shape, np.int32)
        for feature, rows in enumerate(self.num_embeddings):
            ids[feature] = hashes[feature] % np.uint32(rows)
        return ids


class VocabularyEncoder:
    """Contiguous ids from a fitted vocabulary: 0 missing, 1 rare or unseen, then the kept hashes ascending.

    Args:
        hash_files: per feature, the kept hashes as raw ascending little-endian uint32.  They are mapped
            into memory, so worker processes share them.
        num_embeddings: per feature, the table size that ids are taken modulo of; None: ids as they are.
    """

    def __init__(self, hash_files: Sequence[Path], num_embeddings: Sequence[int] | None = None) -> None:
        self._files = list(hash_files)
        self._num_embeddings = num_embeddings
        self._hashes: list[NDArray[np.uint32]] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_hashes": None}

    def encode(self, hashes: NDArray[np.uint32], missing: NDArray[np.bool_]) -> NDArray[np.int32]:
        if self._hashes is None:
            self._hashes = [map_hashes(path) for path in self._files]
        ids = np.empty(hashes.shape, np.int32)
        for feature, known in enumerate(self._hashes):
            if len(known) == 0:
                ids[feature] = UNSEEN_ID
                continue
            position = np.searchsorted(known, hashes[feature])
            found = known[np.minimum(position, len(known) - 1)] == hashes[feature]
            ids[feature] = np.where(found, position + FIRST_HASH_ID, UNSEEN_ID)
        ids[missing] = MISSING_ID
        if self._num_embeddings is not None:
            ids %= np.array(self._num_embeddings, np.int32)[:, None]
        return ids


def map_hashes(path: Path) -> NDArray[np.uint32]:
    """Map a file of raw uint32 into memory (an empty file can't be mapped)."""
    if path.stat().st_size == 0:
        return np.empty(0, np.uint32)
    return np.memmap(path, "<u4", mode="r")
