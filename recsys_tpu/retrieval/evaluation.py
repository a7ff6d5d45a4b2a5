"""Vectors of the whole catalogue, and the ranking of it for every held-out query, over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys_tpu.data.events import EventLog, Ids, Positions
from recsys_tpu.data.holdout import Holdout
from recsys_tpu.data.retrieval_features import RetrievalFeatures
from recsys_tpu.retrieval.loss import gather_rows
from recsys_tpu.retrieval.ranking import RankingSums, RetrievalMetrics, rank_catalogue
from recsys_tpu.runtime import Runtime


@dataclass(frozen=True)
class RankedBlock:
    """Some queries of this rank: their numbers ``[n]``, and `rank_catalogue`'s results as arrays."""

    queries: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    is_target: npt.NDArray[np.bool_]
    scores: npt.NDArray[np.float32]
    items: npt.NDArray[np.int64]


class CatalogueEvaluation:
    """Ranks the catalogue for the queries of a holdout, a block of rows at a time."""

    def __init__(
        self,
        log: EventLog,
        holdout: Holdout,
        features: RetrievalFeatures,
        runtime: Runtime,
        *,
        batch_size: int,
        cutoffs: Sequence[int],
        exclude_seen: bool,
    ) -> None:
        """
        Args:
            batch_size: queries (and items) embedded at a time over all ranks; rounded up to a multiple
                of their number.
        """
        self._log, self._holdout, self._features, self._runtime = log, holdout, features, runtime
        self._rows = -(-batch_size // runtime.world_size)
        self._cutoffs, self._exclude_seen = list(cutoffs), exclude_seen
        self._items = len(log.item_keys)
        self._best = min(max(cutoffs), self._items)
        known = holdout.stops - log.user_starts[holdout.users]
        self._seen_width = int(max(known.max(), 1)) if exclude_seen else 1
        self._target_width = int(np.diff(holdout.target_offsets).max())
        self._rank_catalogue = runtime.compile(rank_catalogue)

    def item_vectors(self, model: nn.Module) -> Tensor:
        """``[items, D]`` float32 on the device, of the whole catalogue; collective."""
        blocks = []
        for ids in self.own_slices(self._items):
            sparse = self._features.jagged(
                queries={}, items=self._features.items(ids.astype(np.int32)), rows=self._rows
            )
            with self._runtime.autocast():
                _, vectors = model(sparse)
            blocks.append(gather_rows(vectors.float(), self._runtime.process_group))
        return torch.cat(blocks)[: self._items]

    def query_vectors(self, model: nn.Module, users: Ids, stops: Positions) -> Tensor:
        """``[rows, D]`` of users with the events before `stops`, filled up to a block's rows; collective."""
        sparse = self._features.jagged(
            queries=self._features.queries(users, stops), items={}, rows=self._rows
        )
        with self._runtime.autocast():
            vectors, _ = model(sparse)
        return vectors.float()

    def ranked(self, model: nn.Module) -> Iterator[RankedBlock]:
        """The ranking for this rank's part of the queries; collective."""
        was_training = model.training
        model.eval()
        with torch.no_grad():
            items = self.item_vectors(model)
            for own in self.own_slices(self._holdout.queries):
                users, stops = self._holdout.users[own], self._holdout.stops[own]
                yield self._rank(own, self.query_vectors(model, users, stops), items)
        model.train(was_training)

    def metrics(self, model: nn.Module) -> RetrievalMetrics:
        """Metrics over all queries of all ranks; collective, the same result on all ranks."""
        sums = RankingSums(self._items, self._cutoffs)
        for block in self.ranked(model):
            sums.add(block.places, block.is_target, block.items)
        for values in (sums.values, sums.recommended):
            dist.all_reduce(torch.from_numpy(values))
        return sums.metrics()

    def metrics_of_vectors(
        self, queries: npt.NDArray[np.float32], items: npt.NDArray[np.float32]
    ) -> RetrievalMetrics:
        """Metrics of another model of inner products, ``[queries, D]`` and ``[items, D]``; not collective."""
        sums = RankingSums(self._items, self._cutoffs)
        on_device = torch.from_numpy(items).to(self._runtime.device)
        for first in range(0, self._holdout.queries, self._rows):
            own = np.arange(first, min(first + self._rows, self._holdout.queries))
            vectors = torch.zeros(self._rows, queries.shape[1])
            vectors[: len(own)] = torch.from_numpy(queries[own])
            block = self._rank(own, vectors.to(self._runtime.device), on_device)
            sums.add(block.places, block.is_target, block.items)
        return sums.metrics()

    def own_slices(self, count: int) -> Iterator[npt.NDArray[np.int64]]:
        """This rank's slice of every block of ``ranks * rows`` numbers; it may be empty."""
        block = self._rows * self._runtime.world_size
        for first in range(0, count, block):
            start = first + self._runtime.rank * self._rows
            yield np.arange(min(start, count), min(start + self._rows, count))

    def _rank(self, queries: npt.NDArray[np.int64], vectors: Tensor, items: Tensor) -> RankedBlock:
        device = self._runtime.device
        seen, targets = self._filled_up(queries)
        places, scores, best = self._rank_catalogue(
            vectors,
            items,
            torch.from_numpy(seen).to(device),
            torch.from_numpy(targets).to(device),
            self._best,
        )
        number = len(queries)
        return RankedBlock(
            queries=queries,
            places=places.cpu().numpy()[:number],
            is_target=targets[:number] < self._items,
            scores=scores.cpu().numpy()[:number],
            items=best.cpu().numpy()[:number],
        )

    def _filled_up(
        self, queries: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Seen items and targets of the queries as rectangles, filled up with the number of items."""
        seen = np.full((self._rows, self._seen_width), self._items, np.int64)
        targets = np.full((self._rows, self._target_width), self._items, np.int64)
        holdout = self._holdout
        for row, query in enumerate(queries):
            if self._exclude_seen:
                known = self.seen(query)
                seen[row, : len(known)] = known
            wanted = holdout.targets[holdout.target_offsets[query] : holdout.target_offsets[query + 1]]
            targets[row, : len(wanted)] = wanted
        return seen, targets

    def seen(self, query: int) -> Ids:
        """Items that the user of a query had events with."""
        user = self._holdout.users[query]
        return self._log.items[self._log.user_starts[user] : self._holdout.stops[query]]
