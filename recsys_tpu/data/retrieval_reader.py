"""Batches of (query, item) pairs and negatives: the same global batches at every world size.

Epoch ``e`` is the permutation of the training events by (seed, e), cut into global batches; rank ``r``
takes the ``r``-th equal slice of each.  The last batch is filled up with padding.  So a position is
(epoch, batch index), and every rank knows the items of the whole batch without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.data.events import EventLog, Ids, Positions
from recsys_tpu.data.metadata import DatasetError
from recsys_tpu.data.retrieval_features import RetrievalFeatures

NO_ITEM = -1
Mine = Callable[[Ids, np.random.Generator], Ids]


@dataclass(frozen=True)
class RetrievalBatch:
    """A rank's part of a step: ``B`` pairs, then ``N`` items that are negatives for every query.

    sparse          query and item features, stride ``B + N``; padding and the queries of negatives are empty
    item_ids        ``[B]`` int64: the item of each pair, `NO_ITEM` in padding
    candidate_ids   ``[ranks * (B + N)]`` int64: items of the pairs and negatives of all ranks, rank by rank
    weights         ``[B]`` float32: 1 for a pair, 0 for padding
    positives       items of the pairs of all ranks, int64
    """

    sparse: KeyedJaggedTensor
    item_ids: Tensor
    candidate_ids: Tensor
    weights: Tensor
    positives: Tensor


class RetrievalReader:
    """Training batches for one rank.

    Attributes:
        batches_per_epoch: the same on every rank.
        order: what decides the samples of every step, for the checkpoint.
    """

    def __init__(
        self,
        log: EventLog,
        train: Positions,
        features: RetrievalFeatures,
        *,
        batch_size: int,
        uniform_negatives: int,
        rank: int,
        world_size: int,
        seed: int,
        mined_negatives: int = 0,
        mine: Mine | None = None,
    ) -> None:
        """
        Args:
            batch_size, uniform_negatives, mined_negatives: over all ranks.
            mine: draws the mined negatives for the users of a global batch.

        Raises:
            DatasetError: the number of ranks does not divide them.
        """
        for name, size in (
            ("train.batch_size", batch_size),
            ("model.uniform_negatives", uniform_negatives),
            ("model.mined_negatives.count", mined_negatives),
        ):
            if size % world_size:
                raise DatasetError(f"{name}={size} must be a multiple of the number of ranks, {world_size}")
        self._log, self._train, self._features = log, train, features
        self._batch_size, self._uniform_negatives = batch_size, uniform_negatives
        self._mine = mine
        self._rank, self._world_size, self._seed = rank, world_size, seed
        self.batches_per_epoch = -(-len(train) // batch_size)
        self.order = {
            "train_events": len(train),
            "batch_size": batch_size,
            "uniform_negatives": uniform_negatives,
            "seed": seed,
        }

    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[RetrievalBatch]:
        """Batches ``start, start + 1, …`` of epoch number `epoch`."""
        order = np.random.default_rng([self._seed, epoch]).permutation(self._train)
        for index in range(start, self.batches_per_epoch):
            chosen = order[index * self._batch_size : (index + 1) * self._batch_size]
            generator = np.random.default_rng([self._seed, epoch, index])
            uniform = generator.integers(len(self._log.item_keys), size=self._uniform_negatives)
            negatives: Ids = uniform.astype(np.int32)
            if self._mine is not None:
                mined = self._mine(self._log.users[chosen], generator)
                negatives = np.concatenate([negatives, mined])
            yield self._batch(chosen, negatives)

    def _batch(self, chosen: Positions, negatives: Ids) -> RetrievalBatch:
        pairs = np.full(self._batch_size, NO_ITEM, np.int64)
        pairs[: len(chosen)] = self._log.items[chosen]
        by_rank = np.concatenate(
            [pairs.reshape(self._world_size, -1), negatives.reshape(self._world_size, -1)], axis=1
        )
        rows = self._batch_size // self._world_size
        own = chosen[self._rank * rows : (self._rank + 1) * rows]
        return RetrievalBatch(
            sparse=self._sparse(own, negatives.reshape(self._world_size, -1)[self._rank], rows),
            item_ids=torch.from_numpy(by_rank[self._rank, :rows].copy()),
            candidate_ids=torch.from_numpy(by_rank.reshape(-1)),
            weights=torch.from_numpy((np.arange(rows) < len(own)).astype(np.float32)),
            positives=torch.from_numpy(pairs[: len(chosen)]),
        )

    def _sparse(self, own: Positions, negatives: Ids, rows: int) -> KeyedJaggedTensor:
        pairs = self._features.items(self._log.items[own])
        padding = np.zeros(rows - len(own), np.int32)
        items = {
            name: (np.concatenate([ids, more]), np.concatenate([counts, padding, more_counts]))
            for (name, (ids, counts)), (more, more_counts) in zip(
                pairs.items(), self._features.items(negatives).values(), strict=True
            )
        }
        return self._features.jagged(
            queries=self._features.queries(self._log.users[own], own), items=items, rows=rows + len(negatives)
        )
