"""What is held out of a log of events, and what a query may know: only events before its moment.

Both splits cut every user's events, in time order, into a known beginning and a held-out end, so the
training events of a user are always a prefix and no feature can look past it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from recsys_tpu.data.events import EventLog, Ids, Positions
from recsys_tpu.data.metadata import DatasetError

MIN_EVENTS = 3
"""Users with fewer events only train: leave-one-out takes a test and a validation event and leaves one."""


@dataclass(frozen=True)
class Holdout:
    """A split of an `EventLog`.

    train: positions of the training events.
    users: ``[queries]`` users who are asked for; the events before position ``stops[q]`` are known.
    targets: items to find, one query after the other, ``target_offsets`` ``[queries + 1]`` between them.
    unreachable: held-out events left out because the user had the item before (and it is not ranked).
    """

    train: Positions
    users: Ids
    stops: Positions
    targets: Ids
    target_offsets: Positions
    unreachable: int

    @property
    def queries(self) -> int:
        return len(self.users)


def hold_out(
    log: EventLog,
    *,
    split: Literal["leave_one_out", "temporal"],
    evaluate_on: Literal["test", "validation"],
    temporal_fraction: float,
    exclude_seen: bool,
) -> Holdout:
    """Split `log`.

    leave_one_out: the target is a user's last event (test) or the one before it (validation, where the
    last is in neither part); users with fewer than `MIN_EVENTS` events only train.

    temporal: the targets are all events at or after one moment, chosen so that `temporal_fraction` of all
    events follow; validation takes the span of the same number of events before it and drops the later.

    Raises:
        DatasetError: nothing is left to train on or to find.
    """
    starts, ends = log.user_starts[:-1], log.user_starts[1:]
    if split == "leave_one_out":
        enough = ends - starts >= MIN_EVENTS
        stops = np.where(enough, ends - (1 if evaluate_on == "test" else 2), ends)
        limits = np.where(enough, stops + 1, ends)
    else:
        later = np.quantile(log.timestamps, 1 - temporal_fraction, method="higher")
        earlier = np.quantile(log.timestamps, 1 - 2 * temporal_fraction, method="higher")
        moment, end = (later, None) if evaluate_on == "test" else (earlier, later)
        stops = starts + _count_by_user(log, log.timestamps < moment)
        limits = ends if end is None else starts + _count_by_user(log, log.timestamps < end)
    is_train = np.arange(len(log.users)) < stops[log.users]
    targets, target_users, unreachable = _targets(log, is_train, limits, exclude_seen=exclude_seen)
    users = np.unique(target_users)
    if not is_train.any() or len(users) == 0:
        raise DatasetError(
            f"split {split}, {evaluate_on}: {int(is_train.sum())} training events and {len(users)} users "
            f"with something to find, of {len(log.users)} events; take more data or another split"
        )
    return Holdout(
        train=np.flatnonzero(is_train),
        users=users,
        stops=stops[users],
        targets=targets,
        target_offsets=np.searchsorted(target_users, np.append(users, users[-1] + 1)),
        unreachable=unreachable,
    )


def _count_by_user(log: EventLog, chosen: npt.NDArray[np.bool_]) -> Positions:
    return np.bincount(log.users[chosen], minlength=len(log.user_keys))


def _targets(
    log: EventLog, is_train: npt.NDArray[np.bool_], limits: Positions, *, exclude_seen: bool
) -> tuple[Ids, Ids, int]:
    """(items, users) held out, each pair once, by user; and how many events were unreachable."""
    held = np.flatnonzero(~is_train & (np.arange(len(log.users)) < limits[log.users]))
    pairs = log.users[held].astype(np.int64) * len(log.item_keys) + log.items[held]
    unreachable = np.zeros(len(held), bool)
    if exclude_seen:
        known = log.users[is_train].astype(np.int64) * len(log.item_keys) + log.items[is_train]
        unreachable = np.isin(pairs, known)
    users, items = np.divmod(np.unique(pairs[~unreachable]), len(log.item_keys))
    return items.astype(np.int32), users.astype(np.int32), int(unreachable.sum())
