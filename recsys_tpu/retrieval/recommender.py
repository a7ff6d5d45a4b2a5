"""The best items for users and histories, from a bundle and one of its indexes.  No TorchRec here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recsys_tpu.errors import UserError
from recsys_tpu.retrieval.bundle import load_bundle
from recsys_tpu.retrieval.index import IndexKind, load_index
from recsys_tpu.retrieval.query_tower import fill_rows


class UnknownKeyError(UserError, LookupError):
    """A query names a user or an item that the bundle does not have."""


@dataclass(frozen=True)
class Query:
    """Who asks: a known user, a history of item keys (oldest first), or both.

    With both, the history is what happened after the events that the bundle knows.
    """

    user: Any = None
    history: Sequence[Any] = ()


@dataclass(frozen=True)
class Recommendation:
    """An item and its score, the inner product of the two vectors."""

    item: Any
    score: float


class Recommender:
    """Answers queries in batches."""

    def __init__(self, directory: Path, kind: IndexKind = "flat") -> None:
        """
        Raises:
            DatasetError: the folder is no bundle or has no such index.
        """
        self.bundle = load_bundle(directory)
        self._index = load_index(directory, kind)

    def recommend(self, queries: Sequence[Query], k: int) -> list[list[Recommendation]]:
        """The best `k` items of each query, best first; fewer where the catalogue has no more.

        Items that a query's user or history has are left out if the model was evaluated so.

        Raises:
            UnknownKeyError: naming the user or item that is not known.
        """
        users, events = self._resolve(queries)
        vectors = self.query_vectors(users, events)
        info = self.bundle.info
        seen = [set(known) for known in events] if info.exclude_seen else [set() for _ in events]
        depth = min(k + max(map(len, seen)), info.items)
        scores, items = self._index.search(vectors, depth)
        return [
            [
                Recommendation(self.bundle.item_keys[item], float(score))
                for item, score in zip(row, values, strict=True)
                if item >= 0 and item not in known
            ][:k]
            for row, values, known in zip(items.tolist(), scores.tolist(), seen, strict=True)
        ]

    def check(self, query: Query) -> None:
        """
        Raises:
            UnknownKeyError: the query names a user or an item that the bundle does not have.
        """
        if query.user is not None and query.user not in self.bundle.users:
            raise UnknownKeyError(f"user {query.user!r} is not known; ask with a history alone")
        for key in query.history:
            if key not in self.bundle.item_ids:
                raise UnknownKeyError(f"item {key!r} of the history is not in the catalogue")

    def user_key(self, text: str) -> Any:
        """The user key that `text` (of a command line or URL) stands for; keys may be integers."""
        return _key(text, self.bundle.users)

    def item_key(self, text: str) -> Any:
        """The item key that `text` stands for."""
        return _key(text, self.bundle.item_ids)

    def query_vectors(
        self, users: Sequence[int | None], events: Sequence[Sequence[int]]
    ) -> npt.NDArray[np.float32]:
        """``[queries, D]`` of users by number (None: unknown) with their events."""
        info, rows = self.bundle.info, {}
        for name, width in info.user_widths.items():
            values = self.bundle.user_ids[name]
            rows[name] = fill_rows([[] if user is None else values[user] for user in users], width)
        for name, length in info.history_lengths.items():
            rows[name] = fill_rows([known[-length:] for known in events], length)
        with torch.inference_mode():
            return self.bundle.query_tower(
                {name: torch.from_numpy(ids) for name, ids in rows.items()}
            ).numpy()

    def _resolve(self, queries: Sequence[Query]) -> tuple[list[int | None], list[list[int]]]:
        users: list[int | None] = []
        events = []
        for query in queries:
            self.check(query)
            user = self.bundle.users[query.user] if query.user is not None else None
            known = self.bundle.events[user] if user is not None else []
            users.append(user)
            events.append([*known, *(self.bundle.item_ids[key] for key in query.history)])
        return users, events


def _key(text: str, known: dict[Any, int]) -> Any:
    is_number = text.removeprefix("-").isdecimal()
    return int(text) if text not in known and is_number else text
