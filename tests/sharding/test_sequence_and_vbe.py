"""Unpooled embeddings equal unsharded ones; variable batch sizes equal the written-out batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.sharding import training
from tests.sharding.ranks import on_ranks
from tests.sharding.training import Case, Table

MODULE = "tests.sharding.sequence_and_vbe"


def sequence_case(sharding: str) -> Case:
    ranks = (0, 1) if sharding == "column_wise" else (0,)  # TorchRec wants equal column shards
    tables = (
        Table(30, 8, ("a", "b"), sharding, ranks=ranks),
        Table(5, 8, ("c",), sharding, ranks=ranks[::-1]),
    )
    return Case(tables, steps=6)


@pytest.mark.parametrize("world", [1, 2])
def test_sequences_equal_unsharded_training(world: int) -> None:
    from tests.sharding.sequence_and_vbe import train_sequences_unsharded

    cases = [sequence_case(kind) for kind in ("table_wise", "row_wise", "column_wise")]
    results = on_ranks(f"{MODULE}:train_sequences", world, "cpu", cases)
    for index, case in enumerate(cases):
        expected = train_sequences_unsharded(case)
        ranks = [rank[index] for rank in results]
        losses = np.mean([rank["losses"] for rank in ranks], axis=0)
        np.testing.assert_allclose(losses, expected["losses"], rtol=1e-5)
        for name, value in expected["tables"].items():
            found = training.assembled([rank["tables"][name] for rank in ranks], value.shape)
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_variable_batch_sizes_equal_the_written_out_batch(world: int) -> None:
    # TorchRec's uneven reduce-scatter has no backward on gloo, so row-wise only on one rank.
    kinds = ("table_wise", "column_wise") if world > 1 else ("table_wise", "column_wise", "row_wise")
    cases = [
        Case(
            (
                Table(30, 8, ("a", "b"), kind),
                Table(9, 4, ("c",), kind, ranks=(1, 0)),
                Table(7, 8, ("d",), kind),
            )
        )
        for kind in kinds
    ]
    for rank in on_ranks(f"{MODULE}:variable_batches", world, "cpu", cases):
        for outcome in rank:
            short, whole = outcome["short"], outcome["whole"]
            torch.testing.assert_close(short["output"], whole["output"], rtol=1e-5, atol=1e-6)
            for name, shards in whole["tables"].items():
                for (_, found), (_, expected) in zip(short["tables"][name], shards, strict=True):
                    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
