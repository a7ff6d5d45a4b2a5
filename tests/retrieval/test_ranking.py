"""Full ranking and its metrics against sorting in Python, and torchmetrics."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_tpu.retrieval.ranking import RankingSums, rank_catalogue


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_places_are_those_of_a_sorted_list(seed: int) -> None:
    rng = np.random.default_rng(seed)
    queries, items = int(rng.integers(1, 5)), int(rng.integers(2, 30))
    scores = rng.integers(-3, 4, (queries, items)).astype(np.float32)  # many ties
    seen = [rng.permutation(items)[: rng.integers(0, items)] for _ in range(queries)]
    left = [np.setdiff1d(np.arange(items), row) for row in seen]
    targets = [row[: rng.integers(1, 4)] for row in left]
    k = int(rng.integers(1, items + 1))
    places, best_scores, best = rank_catalogue(
        torch.from_numpy(scores),
        torch.eye(items),
        torch.from_numpy(_filled(seen, items)),
        torch.from_numpy(_filled(targets, items)),
        k,
    )
    for query in range(queries):
        order = sorted(left[query], key=lambda item: (-scores[query, item], item))
        for column, target in enumerate(targets[query]):
            assert places[query, column] == order.index(target)
        number = min(k, len(order))
        found = best[query].tolist()
        assert found[number:] == [-1] * (k - number)
        assert sorted(scores[query, found[:number]]) == sorted(scores[query, order[:number]])
        assert len(set(found[:number])) == number
        assert best_scores[query, :number].tolist() == scores[query, found[:number]].tolist()


def _filled(rows: list[np.ndarray], fill: int) -> np.ndarray:
    width = max(1, *(len(row) for row in rows))
    return np.stack([np.pad(row, (0, width - len(row)), constant_values=fill) for row in rows]).astype(
        np.int64
    )


def test_metrics_by_hand() -> None:
    sums = RankingSums(items=10, cutoffs=[2, 4])
    places = np.array([[0, 9], [3, 1], [5, 0]])
    is_target = np.array([[True, False], [True, True], [True, False]])
    best = np.array([[1, 2, 3, 4], [1, 2, 3, 4], [5, -1, -1, -1]])
    sums.add(places[:2], is_target[:2], best[:2])
    sums.add(places[2:], is_target[2:], best[2:])
    found = sums.metrics()
    assert found.recall == pytest.approx({2: (1 + 0.5 + 0) / 3, 4: (1 + 1 + 0) / 3})
    ideal = 1 + 1 / math.log2(3)
    second = {2: (1 / math.log2(3)) / ideal, 4: (1 / math.log2(5) + 1 / math.log2(3)) / ideal}
    assert found.ndcg == pytest.approx({k: (1 + second[k]) / 3 for k in (2, 4)})
    assert found.mrr == pytest.approx((1 + 1 / 2 + 1 / 6) / 3)
    assert found.coverage == 3 / 10  # items 1, 2 and 5 are among someone's best two
    assert (found.queries, found.targets) == (3, 4)


def test_metrics_agree_with_torchmetrics() -> None:
    from torchmetrics.functional.retrieval import (
        retrieval_normalized_dcg,
        retrieval_recall,
        retrieval_reciprocal_rank,
    )

    rng = np.random.default_rng(0)
    queries, items = 20, 40
    scores = rng.permuted(np.tile(np.arange(items), (queries, 1)), axis=1).astype(np.float32)
    targets = [rng.permutation(items)[: rng.integers(1, 8)] for _ in range(queries)]
    filled = _filled(targets, items)
    places, _, best = rank_catalogue(
        torch.from_numpy(scores),
        torch.eye(items),
        torch.full((queries, 1), items),
        torch.from_numpy(filled),
        10,
    )
    sums = RankingSums(items, [10])
    sums.add(places.numpy(), filled < items, best.numpy())
    expected: dict[str, list[float]] = {"recall": [], "ndcg": [], "mrr": []}
    for row, wanted in zip(scores, targets, strict=True):
        relevant = torch.zeros(items, dtype=torch.long)
        relevant[wanted] = 1
        preds = torch.from_numpy(row)
        expected["recall"].append(float(retrieval_recall(preds, relevant, top_k=10)))
        expected["ndcg"].append(float(retrieval_normalized_dcg(preds, relevant, top_k=10)))
        expected["mrr"].append(float(retrieval_reciprocal_rank(preds, relevant)))
    found = sums.metrics()
    assert found.recall[10] == pytest.approx(np.mean(expected["recall"]), abs=1e-6)
    assert found.ndcg[10] == pytest.approx(np.mean(expected["ndcg"]), abs=1e-6)
    assert found.mrr == pytest.approx(np.mean(expected["mrr"]), abs=1e-6)
