"""Events of users with items, from Parquet files to encoded arrays in memory.

A folder of events holds

    events.parquet  columns user, item, timestamp (integer seconds, or a timestamp type); one row an event
    items.parquet   optional: column item and features of items; its rows are the catalogue
    users.parquet   optional: column user and features of users

A feature is a column of strings or integers, or of lists of them; a null has no ids.  Without
items.parquet the catalogue is every item that has an event.  Keys are encoded as ids in the order of
their values, so ids do not depend on the order of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys_tpu.data.metadata import DatasetError

Ids = npt.NDArray[np.int32]
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Bags:
    """Ids of one feature, a bag for each user or item: bag ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""

    values: Ids
    offsets: Positions
    vocabulary: list[Any]
    """The raw value of each id."""

    def select(self, rows: Ids | Positions) -> tuple[Ids, Ids]:
        """(ids one after the other, lengths) of the bags `rows`."""
        return take_ranges(self.values, self.offsets[rows], self.offsets[rows + 1])


@dataclass(frozen=True)
class EventLog:
    """Events sorted by user, then time, then their order in the file.

    users, items: ``[events]`` int32 ids; timestamps ``[events]`` int64.
    user_keys, item_keys: the raw key of each id.
    user_features, item_features: a bag for each user and each item of the catalogue.
    """

    users: Ids
    items: Ids
    timestamps: Positions
    user_keys: list[Any]
    item_keys: list[Any]
    user_features: dict[str, Bags]
    item_features: dict[str, Bags]

    @property
    def user_starts(self) -> Positions:
        """``[users + 1]``: the events of user ``u`` are ``user_starts[u]`` to ``user_starts[u + 1]``."""
        return np.searchsorted(self.users, np.arange(len(self.user_keys) + 1))


def load_events(directory: Path) -> EventLog:
    """Read and check a folder of events.

    Raises:
        DatasetError: a file or column is missing, a key or time is null, an event names an item or user
            that items.parquet or users.parquet lacks, or a feature has a type that has no ids.
    """
    path = directory / "events.parquet"
    table = _read(path, required=("user", "item", "timestamp"))
    if len(table) == 0:
        raise DatasetError(f"{path}: no events")
    users, user_keys, user_features = _entities(directory / "users.parquet", "user", table, path)
    items, item_keys, item_features = _entities(directory / "items.parquet", "item", table, path)
    timestamps = _timestamps(table["timestamp"], path)
    order = np.lexsort((timestamps, users))  # stable: events of one instant stay in the file's order
    return EventLog(
        users=users[order],
        items=items[order],
        timestamps=timestamps[order],
        user_keys=user_keys,
        item_keys=item_keys,
        user_features=user_features,
        item_features=item_features,
    )


def take_ranges(values: Ids, starts: Positions, stops: Positions) -> tuple[Ids, Ids]:
    """``values[starts[i]:stops[i]]`` for every i one after the other, and their lengths."""
    lengths = stops - starts
    ends = np.cumsum(lengths)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    return values[np.repeat(starts, lengths) + within], lengths.astype(np.int32)


def _read(path: Path, required: tuple[str, ...]) -> pa.Table:
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise DatasetError(
            f"{path}: no such file; docs/retrieval.md says what a folder of events holds"
        ) from None
    except (pa.ArrowInvalid, OSError) as error:
        raise DatasetError(f"{path}: cannot be read ({error})") from None
    for name in required:
        if name not in table.column_names:
            raise DatasetError(f"{path}: has no column {name!r}; it has {', '.join(table.column_names)}")
        nulls = table[name].null_count
        if nulls:
            row = int(np.argmax(table[name].is_null().to_numpy()))
            raise DatasetError(f"{path}: column {name!r} is null in {nulls} rows, the first is row {row}")
    return table


def _timestamps(column: pa.ChunkedArray, path: Path) -> Positions:
    if not (pa.types.is_timestamp(column.type) or pa.types.is_integer(column.type)):
        raise DatasetError(
            f"{path}: column 'timestamp' is {column.type}; expected integers (seconds) or a timestamp type"
        )
    return np.asarray(column.cast(pa.int64()).to_numpy())


def _entities(
    path: Path, key: str, events: pa.Table, events_path: Path
) -> tuple[Ids, list[Any], dict[str, Bags]]:
    """(id of each event, raw keys by id, features) of the users or items."""
    column = events[key].combine_chunks()
    if not path.is_file():
        keys = _sorted_unique(column)
        return _encode(column, keys), keys.to_pylist(), {}
    table = _read(path, required=(key,))
    keys = _sorted_unique(table[key].combine_chunks())
    if len(keys) != len(table):
        raise DatasetError(f"{path}: a {key} occurs twice; every {key} has one row")
    if keys.type != column.type and not (_is_text(keys.type) and _is_text(column.type)):
        raise DatasetError(
            f"{path}: column {key!r} is {keys.type} but {events_path.name} has {column.type}; use one type"
        )
    ids = pc.index_in(column.cast(keys.type), keys)
    if ids.null_count:
        row = int(np.argmax(ids.is_null().to_numpy(zero_copy_only=False)))
        raise DatasetError(f"{events_path}, row {row}: {key} {column[row]} is not in {path.name}")
    table = table.sort_by(key)
    features = {name: _bags(table[name], path, name) for name in table.column_names if name != key}
    return ids.to_numpy().astype(np.int32), keys.to_pylist(), features


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _sorted_unique(column: pa.Array) -> pa.Array:
    unique = column.unique()
    return unique.take(pc.sort_indices(unique))


def _encode(column: pa.Array, keys: pa.Array) -> Ids:
    return pc.index_in(column, keys).to_numpy().astype(np.int32)


def _bags(column: pa.ChunkedArray, path: Path, name: str) -> Bags:
    array = column.combine_chunks()
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy().astype(np.int64)
        values = array.flatten()
    else:
        lengths = array.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
        values = array.drop_null()
    if not (pa.types.is_integer(values.type) or _is_text(values.type)):
        raise DatasetError(
            f"{path}: feature {name!r} is {column.type}; features are strings, integers or lists of them "
            "(put numbers into ranges first)"
        )
    if values.null_count:
        raise DatasetError(f"{path}: feature {name!r} has nulls inside of lists")
    vocabulary = _sorted_unique(values)
    return Bags(
        values=_encode(values, vocabulary),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        vocabulary=vocabulary.to_pylist(),
    )
