"""Hard negatives mined from an index of the current item vectors.

Every so many steps all users' queries are run against a FAISS index of the catalogue; the best items that a
user has had no training event with are the user's pool.  A batch draws its mined negatives from the pools
of its own users.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys_tpu.config import MinedNegativesConfig
from recsys_tpu.data.events import EventLog, Ids, Positions
from recsys_tpu.data.metadata import DatasetError
from recsys_tpu.data.retrieval_reader import NO_ITEM
from recsys_tpu.errors import ConfigError
from recsys_tpu.retrieval.evaluation import CatalogueEvaluation
from recsys_tpu.runtime import Runtime


class MinedNegatives:
    """The pools of all users.

    Attributes:
        pool: ``[users, config.pool]`` int32, ascending; `NO_ITEM` fills up a row.  Part of a checkpoint:
            batches between two refreshes draw from it.
        expected: ``[items]`` float64, how often a step's draws are expected to hit each item.
    """

    def __init__(
        self,
        log: EventLog,
        stops: Positions,
        evaluation: CatalogueEvaluation,
        runtime: Runtime,
        config: MinedNegativesConfig,
        *,
        seed: int,
    ) -> None:
        """
        Args:
            stops: the position in the log where the training events of each user end.

        Raises:
            ConfigError: FAISS is not installed.
        """
        try:
            import faiss  # noqa: F401 (said here, before a run begins, and not in its first step)
        except ImportError as error:
            raise ConfigError(
                "model.mined_negatives needs FAISS: pip install 'recsys-tpu[retrieval]'"
            ) from error
        self._log, self._stops, self._evaluation, self._runtime = log, stops, evaluation, runtime
        self._config, self._seed = config, seed
        self._items = len(log.item_keys)
        self.pool = torch.full(
            (len(log.user_keys), min(config.pool, self._items)), NO_ITEM, dtype=torch.int32
        )
        self.expected: npt.NDArray[np.float64] = np.zeros(self._items)

    def refresh(self, model: nn.Module) -> None:
        """Mine every user's pool with the model as it is; collective, the same result on all ranks."""
        from recsys_tpu.retrieval.index import build_index

        was_training = model.training
        model.eval()
        parts = []
        with torch.no_grad():
            items = self._evaluation.item_vectors(model).cpu().numpy()
            index = build_index(self._config.index, items, seed=self._seed)
            for users in self._evaluation.own_slices(len(self.pool)):
                vectors = self._evaluation.query_vectors(model, users.astype(np.int32), self._stops[users])
                parts.append(self._mine(index, users, vectors.cpu().numpy()))
        model.train(was_training)
        self.load_pool(self._gathered(parts))

    def _mine(self, index: object, users: Positions, vectors: npt.NDArray[np.float32]) -> Ids:
        """Pools of `users`, filled up to the rows of `vectors`."""
        result = np.full((len(vectors), self.pool.shape[1]), NO_ITEM, np.int32)
        if len(users) == 0:
            return result
        starts = self._log.user_starts[users]
        known = [self._log.items[start:stop] for start, stop in zip(starts, self._stops[users], strict=True)]
        depth = min(self.pool.shape[1] + max(map(len, known)), self._items)
        _, found = index.search(vectors[: len(users)], depth)  # type: ignore[attr-defined]
        for row, best, had in zip(result, found, known, strict=False):
            fresh = best[(best >= 0) & ~np.isin(best, had)][: len(row)]
            row[: len(fresh)] = np.sort(fresh)
        return result

    def _gathered(self, parts: list[Ids]) -> Tensor:
        """Pools of all users from each rank's slices of the blocks."""
        local = torch.from_numpy(np.stack(parts))
        pieces = [torch.empty_like(local) for _ in range(self._runtime.world_size)]
        dist.all_gather(pieces, local)
        return torch.stack(pieces, dim=1).reshape(-1, self.pool.shape[1])[: len(self.pool)]

    def load_pool(self, found: Tensor) -> None:
        """Take over pools, and work out how often each item is expected among the draws of a step."""
        self.pool.copy_(found)
        pool = self.pool.numpy()
        sizes = (pool != NO_ITEM).sum(1)
        events = (self._stops - self._log.user_starts[:-1]) * (sizes > 0)
        chance = events / max(events.sum(), 1) / np.maximum(sizes, 1)
        owners, columns = np.nonzero(pool != NO_ITEM)
        hits = np.bincount(pool[owners, columns], weights=chance[owners], minlength=self._items)
        self.expected = (self._config.count * hits).astype(np.float64)

    def draw(self, users: Ids, generator: np.random.Generator) -> Ids:
        """``[config.count]`` items from the pools of a global batch's `users`.

        Raises:
            DatasetError: no user of the batch has had fewer than all items.
        """
        sizes = (self.pool.numpy()[users] != NO_ITEM).sum(1)
        usable, sizes = users[sizes > 0], sizes[sizes > 0]
        if len(usable) == 0:
            raise DatasetError(
                "model.mined_negatives: every user of a batch has had every item, nothing is left to mine"
            )
        chosen = generator.integers(len(usable), size=self._config.count)
        places = generator.integers(sizes[chosen])
        return np.asarray(self.pool.numpy()[usable[chosen], places])
