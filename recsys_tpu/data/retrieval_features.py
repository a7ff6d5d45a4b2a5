"""The features of queries and items, and which table each of them reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.config import HistoryConfig
from recsys_tpu.data.events import EventLog, Ids, Positions, take_ranges
from recsys_tpu.data.metadata import DatasetError

ITEM_ID = "item_id"
USER_ID = "user_id"

FeatureBags = tuple[Ids, Ids]
"""(ids one row after the other, number of ids of each row)"""


@dataclass(frozen=True)
class TableSpec:
    """A table and the features that read it."""

    name: str
    rows: int
    features: tuple[str, ...]


class RetrievalFeatures:
    """Builds the sparse input of a two-tower model from an event log.

    Query features: ``user_id``, ``user_<feature>``, and the histories.  Item features: ``item_id`` and
    ``item_<feature>``.  A user without training events has no ``user_id`` (the row would be untrained).
    """

    def __init__(
        self, log: EventLog, train: Positions, *, histories: Sequence[HistoryConfig], user_id: bool
    ) -> None:
        """
        Raises:
            DatasetError: a history has the name of a feature.
        """
        self._log = log
        self._starts = log.user_starts
        self._histories = list(histories)
        self._user_id = user_id
        self._trained = np.bincount(log.users[train], minlength=len(log.user_keys)) > 0
        self.item_features = [ITEM_ID, *(f"item_{name}" for name in log.item_features)]
        own = [USER_ID] if user_id else []
        own += [f"user_{name}" for name in log.user_features]
        self.query_features = [*own, *(history.name for history in histories)]
        names = [*self.query_features, *self.item_features]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise DatasetError(
                f"feature named twice: {', '.join(repeated)}; rename the history (model.histories) or column"
            )

    @property
    def history_lengths(self) -> dict[str, int]:
        """How many events each history holds at most."""
        return {history.name: history.length for history in self._histories}

    @property
    def max_ids_per_sample(self) -> dict[str, int]:
        """Ids that each feature has at most."""
        of_log = {f"user_{name}": bags for name, bags in self._log.user_features.items()}
        of_log |= {f"item_{name}": bags for name, bags in self._log.item_features.items()}
        longest = {name: int(np.diff(bags.offsets).max(initial=0)) for name, bags in of_log.items()}
        return {USER_ID: 1, ITEM_ID: 1, **longest, **self.history_lengths}

    @property
    def tables(self) -> list[TableSpec]:
        """One table a feature, but for the histories that share the items'."""
        log, items = self._log, len(self._log.item_keys)
        shared = [history.name for history in self._histories if history.share_item_table]
        specs = [TableSpec(ITEM_ID, items, (ITEM_ID, *shared))]
        specs += [
            TableSpec(history.name, items, (history.name,))
            for history in self._histories
            if not history.share_item_table
        ]
        if self._user_id:
            specs.append(TableSpec(USER_ID, len(log.user_keys), (USER_ID,)))
        for side, features in (("user", log.user_features), ("item", log.item_features)):
            for name, bags in features.items():
                specs.append(TableSpec(f"{side}_{name}", max(len(bags.vocabulary), 1), (f"{side}_{name}",)))
        return specs

    def queries(self, users: Ids, stops: Positions) -> dict[str, FeatureBags]:
        """Features of `users`, each of whom has had the events before position ``stops[i]``."""
        result: dict[str, FeatureBags] = {}
        if self._user_id:
            known = self._trained[users]
            result[USER_ID] = users[known].astype(np.int32), known.astype(np.int32)
        for name, bags in self._log.user_features.items():
            result[f"user_{name}"] = bags.select(users)
        for history in self._histories:
            first = np.maximum(self._starts[users], stops - history.length)
            result[history.name] = take_ranges(self._log.items, first, stops)
        return result

    def items(self, ids: Ids) -> dict[str, FeatureBags]:
        """Features of catalogue items."""
        result: dict[str, FeatureBags] = {ITEM_ID: (ids.astype(np.int32), np.ones(len(ids), np.int32))}
        for name, bags in self._log.item_features.items():
            result[f"item_{name}"] = bags.select(ids)
        return result

    def jagged(
        self, *, queries: Mapping[str, FeatureBags], items: Mapping[str, FeatureBags], rows: int
    ) -> KeyedJaggedTensor:
        """Both sides as one input of `rows` rows; each side starts at row 0 and the rest of it is empty."""
        keys = [*self.query_features, *self.item_features]
        empty = np.empty(0, np.int32)
        values, lengths = [], []
        for key in keys:
            ids, counts = queries.get(key) or items.get(key) or (empty, empty)
            values.append(ids)
            lengths.append(np.pad(counts, (0, rows - len(counts))))
        return KeyedJaggedTensor(
            keys=keys,
            values=torch.from_numpy(np.concatenate(values)),
            lengths=torch.from_numpy(np.concatenate(lengths)),
            stride=rows,
        )
