"""Unpooled embeddings equal unsharded ones; variable batch sizes equal the written-out batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.sharding import training
from tests.sharding.ranks import on_ranks
from tests.sharding.training import SHARDED, Case, Table

MODULE = "tests.sharding.sequence_and_vbe"


def sequence_case(sharding: str) -> Case:
    ranks = (0, 1) if sharding == "column_wise" else (0,)
    tables = (
        Table(30, 8, ("a", "b"), sharding, ranks=ranks),
        Table(5, 8, ("c", "b"), sharding, ranks=ranks[::-1]),
        Table(1, 8, ("d",), sharding, ranks=(1,)),  # a column shard of another width; more ranks than rows
    )
    return Case(tables, steps=6)


SEQUENCES = ("table_wise", "row_wise", "column_wise", "data_parallel")


def mixed_sequences() -> Case:
    return Case(tuple(Table(20 + i, 8, (f"f{i}", "all"), kind, (i,)) for i, kind in enumerate(SEQUENCES)))


def check_sequences(case: Case, ranks: list[dict[str, Any]], rtol: float = 1e-5) -> None:
    from tests.sharding.sequence_and_vbe import train_sequences_unsharded

    expected = train_sequences_unsharded(case)
    losses = np.mean([rank["losses"] for rank in ranks], axis=0)
    np.testing.assert_allclose(losses, expected["losses"], rtol=rtol)
    for name, value in expected["tables"].items():
        pieces = [rank["tables"][name] for rank in ranks]
        if case.tables[int(name.split(".")[1][1:])].sharding == "data_parallel":
            pieces = pieces[:1]
        found = training.assembled(pieces, value.shape)
        torch.testing.assert_close(found, value, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("world", [1, 2])
def test_sequences_equal_unsharded_training(world: int) -> None:
    cases = [*map(sequence_case, SEQUENCES), mixed_sequences()]
    results = on_ranks(f"{MODULE}:train_sequences", world, "cpu", cases)
    for index, case in enumerate(cases):
        check_sequences(case, [rank[index] for rank in results])


def variable_cases() -> list[Case]:
    return [
        Case(
            (
                Table(30, 8, ("a", "b"), kind),
                Table(9, 4, ("c",), kind, ranks=(1,)),
                Table(7, 8, ("d",), kind, ranks=(1, 0), mean=True),
            ),
            deduplicate=deduplicate,
        )
        for kind in SHARDED
        for deduplicate in (False, True)
    ]


def check_variable(outcome: dict[str, Any]) -> None:
    short, whole = outcome["short"], outcome["whole"]
    torch.testing.assert_close(short["output"], whole["output"], rtol=1e-5, atol=1e-6)
    for name, shards in whole["tables"].items():
        for (_, found), (_, expected) in zip(short["tables"][name], shards, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_variable_batch_sizes_equal_the_written_out_batch(world: int) -> None:
    for rank in on_ranks(f"{MODULE}:variable_batches", world, "cpu", variable_cases()):
        for outcome in rank:
            check_variable(outcome)
