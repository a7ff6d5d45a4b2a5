"""Sampled softmax against a loop over its definition, and over two ranks against one."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recsys_tpu.retrieval.frequency import FrequencyEstimator
from recsys_tpu.retrieval.loss import sampled_softmax

ROOT = Path(__file__).parents[2]


def problem(rows: int = 8, dim: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "query": torch.randn(rows, dim, generator=generator, dtype=torch.float64),
        "items": torch.randn(rows, dim, generator=generator, dtype=torch.float64),
        "ids": torch.tensor([4, 7, 4, 1, -1, 0, 7, 2])[:rows],
        "log_q": torch.rand(rows, generator=generator, dtype=torch.float64).log(),
    }


def loss_of(given: dict[str, Tensor], *, hard_negatives: int = 0) -> Tensor:
    return sampled_softmax(
        given["query"],
        given["items"],
        item_ids_B=given["ids"],
        candidate_ids_C=given["ids"],
        position_B=torch.arange(len(given["ids"])),
        log_q_C=given["log_q"],
        temperature=0.3,
        hard_negatives=hard_negatives,
    )


@pytest.mark.parametrize("hard_negatives", [0, 2, 100])
def test_the_loss_is_its_definition(hard_negatives: int) -> None:
    given = problem()
    found = loss_of(given, hard_negatives=hard_negatives)
    ids = given["ids"].tolist()
    for row, own in enumerate(ids):
        if own < 0:
            continue  # padding: its weight is 0
        logits = [
            float(given["query"][row] @ given["items"][j]) / 0.3 - float(given["log_q"][j])
            for j in range(len(ids))
        ]
        negatives = [logits[j] for j in range(len(ids)) if ids[j] not in (own, -1)]
        if hard_negatives:
            negatives = sorted(negatives)[-hard_negatives:]
        total = sum(math.exp(x) for x in [logits[row], *negatives])
        assert float(found[row]) == pytest.approx(math.log(total) - logits[row], rel=1e-9)


def test_log_q_makes_the_sampled_gradient_that_of_the_full_softmax() -> None:
    """Candidates drawn by q, corrected by log q, against the softmax over all items."""
    generator = torch.Generator().manual_seed(0)
    items, draws = 12, 20_000
    query = torch.randn(1, 4, generator=generator, dtype=torch.float64)
    vectors = torch.randn(items, 4, generator=generator, dtype=torch.float64)
    q = torch.arange(1.0, items + 1, dtype=torch.float64)
    q /= q.sum()
    drawn = torch.multinomial(q, draws, replacement=True, generator=generator)
    candidates = torch.cat([torch.tensor([0]), drawn[drawn != 0]])
    expected_count = (draws * q)[candidates]
    expected_count[0] = 1.0  # the query's own item stands there once
    loss = sampled_softmax(
        query,
        vectors[candidates],
        item_ids_B=torch.tensor([0]),
        candidate_ids_C=candidates,
        position_B=torch.tensor([0]),
        log_q_C=expected_count.log(),
        temperature=1.0,
        hard_negatives=0,
    )
    full = torch.nn.functional.cross_entropy(query @ vectors.T, torch.tensor([0]))
    assert float(loss) == pytest.approx(float(full), rel=0.02)


def test_two_ranks_find_the_losses_and_gradients_of_one(tmp_path: Path) -> None:
    given = problem()
    torch.save(given, tmp_path / "problem.pt")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }  # fmt: skip
    done = subprocess.run(
        [*launcher, "-m", "tests.retrieval.ranks", str(tmp_path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    given["query"].requires_grad_()
    given["items"].requires_grad_()
    losses = loss_of(given)
    losses.sum().backward()
    for name, expected in (
        ("losses", losses.detach()),
        ("query", given["query"].grad),
        ("items", given["items"].grad),
    ):
        assert expected is not None
        torch.testing.assert_close(
            torch.cat([rank[name] for rank in ranks]), expected, rtol=1e-12, atol=1e-12
        )


def test_frequencies_are_plain_ones_at_first() -> None:
    estimator = FrequencyEstimator(5, window=10**6)
    for batch in ([0, 0, 1, 2], [0, 3], [4, 4, 4]):
        estimator.update(torch.tensor(batch))
    expected = torch.tensor([3, 1, 1, 1, 3]) / 9
    torch.testing.assert_close(estimator.probability(torch.arange(5)).float(), expected, rtol=1e-5, atol=0)


def test_frequencies_follow_a_drifting_stream_and_survive_rescaling() -> None:
    estimator = FrequencyEstimator(2, window=20)
    for step in range(2000):  # the scale passes its limit many times over
        estimator.update(torch.tensor([0] * 10 if step < 1000 else [0] * 2 + [1] * 8))
    torch.testing.assert_close(
        estimator.probability(torch.arange(2)), torch.tensor([0.2, 0.8], dtype=torch.float64)
    )
    assert torch.isfinite(estimator.counts).all()
