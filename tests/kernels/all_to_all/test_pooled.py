"""`exchange_pooled` against TorchRec's exchange: outputs, gradients and a sharded training, on real ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.all_to_all import pooled_ranks
from tests.sharding.ranks import on_ranks
from tests.sharding.training import Case, Table

CASES = [
    ([128, 128], 4),
    ([40, 96], 3),
    ([24, 0], 5),  # a rank without tables
    ([7, 1], 1),
]


def function(name: str) -> str:
    return f"{pooled_ranks.__name__}:{name}"


REFUSED = (
    "expected 2 dims, one for each rank, got [8]",
    "expected pooled [2 * B, 8] on rank 0, got [5, 8]",
    "expected pooled [2 * B, 8] on rank 0, got [4, 7]",
    "expected float32 pooled rows, got torch.float64",
    "expected a wire dtype of bfloat16 or None, got torch.float16",
    "transport 'kernel' takes tpu tensors",
    "needs the same batch size on every rank and for every feature, got [3, 4]",
)


def test_equals_torchrec_and_refuses_wrong_arguments() -> None:
    ranks = on_ranks(function("on_two_ranks"), 2, "cpu", CASES)
    for rank in ranks:
        check(rank["cases"])
    said = ranks[0]["refused"]
    assert len(said) == len(REFUSED)
    for message, expected in zip(said, REFUSED, strict=True):
        assert expected in message


@pytest.mark.slow
@pytest.mark.usefixtures("tpu")
def test_equals_torchrec_on_the_emulated_device() -> None:
    for rank in on_ranks(function("on_two_ranks"), 2, "tpu-emulated", CASES):
        check(rank["cases"])


def check(cases: list[dict[str, list[torch.Tensor]]]) -> None:
    for case in cases:
        for ours, theirs, bf16 in zip(case["ours"], case["torchrec"], case["bf16"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
            torch.testing.assert_close(bf16, theirs, rtol=2**-8, atol=0)


def test_one_rank() -> None:
    (rank,) = on_ranks(function("both_exchanges"), 1, "cpu", [([12], 3), ([0], 3)])
    for case in rank:
        for ours, theirs in zip(case["ours"], case["torchrec"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "tpu-emulated"])
def test_sharded_training_is_the_same_as_with_the_collective(
    device: str, request: pytest.FixtureRequest
) -> None:
    if device != "cpu":
        request.getfixturevalue("tpu")
    tables = tuple(
        Table(rows, dim, (f"f{index}",), "table_wise", ranks=(rank,))
        for index, (rows, dim, rank) in enumerate([(50, 8, 0), (30, 16, 1), (40, 8, 2), (20, 24, 2)])
    )
    for rank in on_ranks(function("train_with_both"), 4, device, Case(tables, steps=5)):
        np.testing.assert_array_equal(rank["collective"]["losses"], rank["torchrec"]["losses"])
        for name, pieces in rank["torchrec"]["tables"].items():
            for (_, theirs), (_, ours) in zip(pieces, rank["collective"]["tables"][name], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
