"""The exact AUC of many ranks, against a count of all pairs and scikit-learn."""

import socket
from collections.abc import Iterator
from fractions import Fraction
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from recsys_tpu.data.metadata import DatasetError
from recsys_tpu.errors import TrainingDivergedError
from recsys_tpu.metrics import ClickMetrics, click_metrics
from recsys_tpu.streaming_metrics import StreamingClickMetrics, order_keys

LABELS = NDArray[np.float32]


@pytest.fixture(scope="module", autouse=True)
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stream(labels: LABELS, logits: NDArray[np.float32], batch: int = 7) -> ClickMetrics:
    found = StreamingClickMetrics()
    for start in range(0, len(labels), batch):
        found.add(labels[start : start + batch], logits[start : start + batch])
    return found.result()


def case(seed: int, rows: int, decimals: int) -> tuple[LABELS, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, rows).astype(np.float32)
    labels[:2] = 0, 1
    return labels, np.round(rng.normal(0, 2, rows), decimals).astype(np.float32)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 150), st.integers(0, 3))
def test_auc_is_the_ratio_of_pairs_rounded_once(seed: int, rows: int, decimals: int) -> None:
    labels, logits = case(seed, rows, decimals)
    won = sum(
        2 * int(p > n) + int(p == n) for p in logits[labels == 1] for n in logits[labels == 0]
    )  # fmt: skip
    pairs = int((labels == 1).sum() * (labels == 0).sum())
    assert stream(labels, logits).auc == float(Fraction(won, 2 * pairs))


def test_equal_to_scikit_learn_and_the_metrics_of_whole_arrays() -> None:
    labels, logits = case(5, 200_000, 4)
    found, expected = stream(labels, logits, batch=1000), click_metrics(labels, logits)
    assert found.auc == pytest.approx(roc_auc_score(labels, logits.astype(np.float64)), abs=2e-16, rel=0)
    for name, value in expected.as_dict().items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-12), name


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=50))
def test_keys_order_as_floats_do(values: list[float]) -> None:
    floats = np.array(values, np.float32)
    keys = order_keys(floats).astype(np.int64)
    assert (np.less.outer(keys, keys) == np.less.outer(floats, floats)).all()


def test_one_class_and_nan_are_errors() -> None:
    with pytest.raises(DatasetError, match="no positives"):
        stream(np.zeros(3, np.float32), np.zeros(3, np.float32))
    with pytest.raises(TrainingDivergedError, match="is NaN"):
        stream(np.ones(1, np.float32), np.array([np.nan], np.float32))


def _owner(seed: int, labels: LABELS, world: int) -> NDArray[np.int64]:
    """The rank of each row: dealt round, or every positive on rank 0 and no row on the last rank."""
    rows = np.arange(len(labels))
    return rows % world if seed % 2 == 0 else np.where(labels == 1, 0, rows % (world - 1))


def _rank(rank: int, world: int, port: int, queue: Any) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    found = []
    for seed in (0, 1):
        labels, logits = case(seed, 5000, 2)
        mine = _owner(seed, labels, world) == rank
        found.append(stream(labels[mine], logits[mine], batch=97).as_dict())
    queue.put(found)
    dist.destroy_process_group()


def test_three_ranks_give_the_auc_of_one_to_the_bit(world_of_one: None) -> None:
    dist.destroy_process_group()  # forked ranks start without it
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("fork")
    queue = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, 3, port, queue)) for rank in range(3)]
    for process in ranks:
        process.start()
    results = [queue.get(timeout=120) for _ in ranks]
    for process in ranks:
        process.join()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert results[1] == results[0] == results[2]
    for seed, found in enumerate(results[0]):
        expected = stream(*case(seed, 5000, 2))
        assert found["auc"] == expected.auc
        assert found["log_loss"] == pytest.approx(expected.log_loss, rel=1e-13)
        assert (found["rows"], found["positives"]) == (5000, expected.positives)
