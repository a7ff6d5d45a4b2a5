"""Events: reading and checking, splits without leakage, batches that every world size agrees on."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_tpu.config import HistoryConfig
from recsys_tpu.data.events import EventLog, load_events
from recsys_tpu.data.holdout import MIN_EVENTS, hold_out
from recsys_tpu.data.metadata import DatasetError
from recsys_tpu.data.retrieval_features import ITEM_ID, USER_ID, RetrievalFeatures
from recsys_tpu.data.retrieval_reader import NO_ITEM, RetrievalBatch, RetrievalReader

HISTORIES = [
    HistoryConfig(name="last", length=1),
    HistoryConfig(name="past", length=5, share_item_table=False),
]


def write(folder: Path, name: str, **columns: Any) -> None:
    pq.write_table(pa.table(columns), folder / f"{name}.parquet")


@st.composite
def logs(draw: st.DrawFn) -> EventLog:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    users, items, count = int(rng.integers(1, 8)), int(rng.integers(2, 12)), int(rng.integers(6, 60))
    user = rng.integers(users, size=count)
    time = rng.integers(0, 30, size=count)  # many events at one time
    order = np.lexsort((time, user))
    return EventLog(
        users=user[order].astype(np.int32),
        items=rng.integers(items, size=count).astype(np.int32),
        timestamps=time[order].astype(np.int64),
        user_keys=list(range(users)),
        item_keys=list(range(items)),
        user_features={},
        item_features={},
    )


def test_keys_and_features_become_ids(tmp_path: Path) -> None:
    write(tmp_path, "events", user=["b", "a", "b", "b"], item=[30, 10, 10, 20], timestamp=[5, 1, 2, 2])
    write(
        tmp_path, "items", item=[30, 10, 20, 40], genres=[["x", "z"], [], ["z"], None], year=[1, 2, None, 1]
    )
    log = load_events(tmp_path)
    assert (log.user_keys, log.item_keys) == (["a", "b"], [10, 20, 30, 40])
    assert log.users.tolist() == [0, 1, 1, 1]
    assert log.items.tolist() == [0, 0, 1, 2]  # by time; those of one time in the file's order
    genres, year = log.item_features["genres"], log.item_features["year"]
    assert (genres.vocabulary, genres.offsets.tolist()) == (["x", "z"], [0, 0, 1, 3, 3])
    values, lengths = genres.select(np.array([2, 0, 1]))
    assert (values.tolist(), lengths.tolist()) == ([0, 1, 1], [2, 0, 1])
    values, lengths = year.select(np.array([0, 1, 2, 3]))
    assert (values.tolist(), lengths.tolist()) == ([1, 0, 0], [1, 0, 1, 1])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"events\.parquet: no such file"),
        ({"events": {"user": [1], "item": [1]}}, "has no column 'timestamp'"),
        (
            {"events": {"user": [1, None], "item": [1, 1], "timestamp": [1, 1]}},
            "'user' is null in 1 rows.* row 1",
        ),
        ({"events": {"user": [1], "item": [1], "timestamp": [1.5]}}, "'timestamp' is double"),
        (
            {"events": {"user": [1, 1], "item": [1, 7], "timestamp": [1, 2]}, "items": {"item": [1]}},
            "row 1: item 7 is not in items",
        ),
        (
            {"events": {"user": [1], "item": [1], "timestamp": [1]}, "items": {"item": [1, 1]}},
            "a item occurs twice|occurs twice",
        ),
        (
            {"events": {"user": [1], "item": [1], "timestamp": [1]}, "items": {"item": [1], "price": [1.5]}},
            "'price' is double; features are strings, integers",
        ),
    ],
)
def test_bad_files_are_named(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    for name, columns in files.items():
        write(tmp_path, name, **columns)
    with pytest.raises(DatasetError, match=message):
        load_events(tmp_path)


@settings(max_examples=60, deadline=None)
@given(logs(), st.sampled_from(["leave_one_out", "temporal"]), st.sampled_from(["test", "validation"]))
def test_no_split_leaks(log: EventLog, split: Any, evaluate_on: Any) -> None:
    try:
        found = hold_out(log, split=split, evaluate_on=evaluate_on, temporal_fraction=0.2, exclude_seen=True)
    except DatasetError:
        return  # nothing to train on or to find in this log
    is_train = np.isin(np.arange(len(log.users)), found.train)
    starts = log.user_starts
    for user in range(len(log.user_keys)):  # training events are the beginning of every user's
        own = is_train[starts[user] : starts[user + 1]]
        assert (np.diff(own.astype(int)) <= 0).all()
    for query, user in enumerate(found.users):
        stop = found.stops[query]
        assert is_train[starts[user] : stop].all() and not is_train[stop : starts[user + 1]].any()
        wanted = found.targets[found.target_offsets[query] : found.target_offsets[query + 1]]
        assert len(wanted) >= 1
        assert not np.isin(wanted, log.items[starts[user] : stop]).any()
        assert np.isin(wanted, log.items[stop : starts[user + 1]]).all()
        if split == "leave_one_out":
            assert starts[user + 1] - stop == (1 if evaluate_on == "test" else 2)
            assert starts[user + 1] - starts[user] >= MIN_EVENTS
    if split == "temporal":
        held = log.timestamps[~is_train]
        assert log.timestamps[is_train].max() < held.min()


def test_validation_and_test_do_not_share_targets() -> None:
    log = EventLog(
        users=np.repeat(np.arange(2, dtype=np.int32), 5),
        items=np.arange(10, dtype=np.int32),
        timestamps=np.arange(10, dtype=np.int64),
        user_keys=[0, 1], item_keys=list(range(10)), user_features={}, item_features={},
    )  # fmt: skip
    for split, expected in (("leave_one_out", ([3, 8], [4, 9])), ("temporal", ([6, 7], [8, 9]))):
        for evaluate_on, targets in zip(("validation", "test"), expected, strict=True):
            found = hold_out(
                log,
                split=split,  # type: ignore[arg-type]
                evaluate_on=evaluate_on,  # type: ignore[arg-type]
                temporal_fraction=0.2,
                exclude_seen=True,
            )
            assert found.targets.tolist() == targets
            assert not np.isin(found.targets, log.items[found.train]).any()


@settings(max_examples=30, deadline=None)
@given(logs(), st.integers(1, 3))
def test_a_rows_features_are_what_the_user_did_before(log: EventLog, epoch: int) -> None:
    train = np.arange(len(log.users))
    features = RetrievalFeatures(log, train, histories=HISTORIES, user_id=True)
    reader = RetrievalReader(
        log, train, features, batch_size=8, uniform_negatives=4, rank=0, world_size=1, seed=3
    )
    seen: list[tuple[int, int]] = []
    starts = log.user_starts
    for batch in reader.epoch(epoch):
        bags = {name: bag.to_dense() for name, bag in batch.sparse.to_dict().items()}
        assert batch.sparse.stride() == 12
        for row in range(8):
            if batch.weights[row] == 0:
                assert batch.item_ids[row] == NO_ITEM
                assert all(len(bag[row]) == 0 for bag in bags.values())
                continue
            user, item = int(bags[USER_ID][row]), int(bags[ITEM_ID][row])
            assert item == batch.item_ids[row] == batch.candidate_ids[row]
            own = log.items[starts[user] : starts[user + 1]]
            histories = [own[max(0, p - 5) : p].tolist() for p in range(len(own)) if own[p] == item]
            assert bags["past"][row].int().tolist() in histories
            assert bags["last"][row].tolist() == bags["past"][row].tolist()[-1:]
            seen.append((user, item))
        assert [int(bags[ITEM_ID][row]) for row in range(8, 12)] == batch.candidate_ids[8:].tolist()
        assert all(len(bags[name][row]) == 0 for name in features.query_features for row in range(8, 12))
    assert sorted(seen) == sorted(zip(log.users.tolist(), log.items.tolist(), strict=True))


@settings(max_examples=20, deadline=None)
@given(logs(), st.sampled_from([2, 4]), st.integers(0, 3))
def test_every_world_size_reads_the_same_batches(log: EventLog, world_size: int, start: int) -> None:
    train = np.arange(len(log.users))
    features = RetrievalFeatures(log, train, histories=HISTORIES, user_id=True)

    def read(rank: int, ranks: int, first: int = 0) -> list[RetrievalBatch]:
        reader = RetrievalReader(
            log, train, features, batch_size=8, uniform_negatives=4, rank=rank, world_size=ranks, seed=3
        )
        return list(reader.epoch(1, start=first))

    alone, ranks = read(0, 1), [read(rank, world_size) for rank in range(world_size)]
    for number, batch in enumerate(alone):
        parts = [batches[number] for batches in ranks]
        assert torch.equal(torch.cat([part.item_ids for part in parts]), batch.item_ids)
        assert torch.equal(torch.cat([part.weights for part in parts]), batch.weights)
        for part in parts:
            assert torch.equal(part.positives, batch.positives)
            assert torch.equal(part.candidate_ids, parts[0].candidate_ids)
            assert sorted(part.candidate_ids.tolist()) == sorted(batch.candidate_ids.tolist())
        rows = 8 // world_size
        for name in features.query_features:
            expected = batch.sparse[name].to_dense()[:8]
            found = [row for part in parts for row in part.sparse[name].to_dense()[:rows]]
            assert [row.tolist() for row in found] == [row.tolist() for row in expected]
    for whole, resumed in zip(alone[start:], read(0, 1, start), strict=True):
        assert torch.equal(whole.sparse.values(), resumed.sparse.values())


def test_a_user_without_training_events_has_no_user_id() -> None:
    log = EventLog(
        users=np.array([0, 0, 1], np.int32), items=np.array([0, 1, 1], np.int32),
        timestamps=np.arange(3), user_keys=["a", "b"], item_keys=["x", "y"], user_features={},
        item_features={},
    )  # fmt: skip
    features = RetrievalFeatures(log, np.array([0, 1]), histories=HISTORIES, user_id=True)
    found = features.queries(np.array([0, 1], np.int32), np.array([2, 2]))
    assert [found[USER_ID][0].tolist(), found[USER_ID][1].tolist()] == [[0], [1, 0]]
    assert [found["last"][0].tolist(), found["last"][1].tolist()] == [[1], [1, 0]]


def test_a_world_size_that_does_not_divide_is_refused() -> None:
    log = EventLog(
        users=np.zeros(4, np.int32), items=np.arange(4, dtype=np.int32), timestamps=np.arange(4),
        user_keys=[0], item_keys=list(range(4)), user_features={}, item_features={},
    )  # fmt: skip
    features = RetrievalFeatures(log, np.arange(4), histories=[], user_id=True)
    for size, negatives, name in ((9, 0, "train.batch_size"), (8, 3, "model.uniform_negatives")):
        with pytest.raises(DatasetError, match=f"{name}={size if size == 9 else 3} must be a multiple"):
            RetrievalReader(
                log, np.arange(4), features,
                batch_size=size, uniform_negatives=negatives, rank=0, world_size=2, seed=1,
            )  # fmt: skip
