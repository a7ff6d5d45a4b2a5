"""`exchange_pooled` against TorchRec's exchange: outputs, gradients and a sharded training, on real ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchrec.distributed.types import QuantizedCommCodecs

from recsys_tpu.sharding.embedding_bag_collection import TpuEmbeddingBagCollectionSharder
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
        for ours, theirs in zip(rank["sums"]["ours"], rank["sums"]["torchrec"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exchange": "pallas", "qcomm_codecs_registry": {"x": QuantizedCommCodecs()}}, "give wire='bf16'"),
        ({"wire": "bf16"}, "needs exchange 'pallas'"),
        ({"exchange": "pallas", "wire": "fp16"}, "expected one of fp32, bf16"),
    ],
)
def test_a_wire_that_would_be_ignored_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TpuEmbeddingBagCollectionSharder(**options)


TYPES = ("table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard")


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("tpu-emulated", marks=pytest.mark.long)],
)
def test_training_of_every_type_is_the_same_as_with_the_collective(
    device: str, request: pytest.FixtureRequest
) -> None:
    if device != "cpu":
        request.getfixturevalue("tpu")
    cases = [Case(tables_of(sharding), steps=3, optimizer="adagrad") for sharding in TYPES]
    for rank in on_ranks(function("train_with_both"), 4, device, cases, host_size=2):
        for runs in rank:
            ours, theirs = runs["pallas"], runs["collective"]
            if "bf16" in runs:  # rounded, but the same training
                assert runs["bf16"]["losses"] != theirs["losses"]
                np.testing.assert_allclose(runs["bf16"]["losses"], theirs["losses"], rtol=2**-7)
            np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=1e-6)
            for name, pieces in theirs["tables"].items():
                for (_, expected), (_, trained) in zip(pieces, ours["tables"][name], strict=True):
                    torch.testing.assert_close(trained, expected, rtol=1e-6, atol=1e-7)


def tables_of(sharding: str) -> tuple[Table, ...]:
    """Over both hosts of two ranks; for whole tables and columns one rank has none."""
    owners = {"table_wise": [(0,), (1,), (3,), (3,)], "column_wise": [(0, 1), (1, 3), (3,), (0, 3)]}
    owners["grid_shard"] = [(0,), (0, 1), (1,), (1,)]  # hosts
    ranks = owners.get(sharding, [(0,), (1,), (1,), (0,)])
    dims = (8, 256 if sharding == "grid_shard" else 16, 8, 24)  # TorchRec cuts grids into 128 columns
    return tuple(
        Table(rows, dim, (f"f{index}",), sharding, ranks=of_table, mean=index == 2)
        for index, (rows, dim, of_table) in enumerate(zip((50, 30, 40, 20), dims, ranks, strict=True))
    )
