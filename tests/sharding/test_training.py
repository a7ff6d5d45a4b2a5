"""Sharded training equals unsharded training: losses, outputs, tables and optimizer state after 20 steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.sharding import training
from tests.sharding.ranks import on_ranks
from tests.sharding.training import Case, Table

SHARDED = ("table_wise", "row_wise", "column_wise", "table_row_wise", "grid_shard")
TRAIN = "tests.sharding.sharded:train_all"
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam")


def tables(sharding: str) -> tuple[Table, ...]:
    """Shared features, several widths, one row (more ranks than rows), both poolings."""
    return (
        Table(50, 8, ("a", "b"), sharding),
        Table(1, 4, ("c",), sharding, ranks=(1,)),
        Table(300, 16, ("d", "a"), sharding, ranks=(1, 0), mean=True),
        Table(7, 8, ("e",), sharding, ranks=(1,)),
    )


def cases() -> list[Case]:
    found = [Case(tables(kind), optimizer=optimizer) for kind in SHARDED for optimizer in OPTIMIZERS]
    found += [Case(tables("data_parallel"), optimizer=optimizer) for optimizer in ("sgd", "adagrad")]
    sums = {kind: tuple(replace(table, mean=False) for table in tables(kind)) for kind in SHARDED}
    found += [Case(sums[kind], weighted=True) for kind in ("table_wise", "row_wise")]
    found += [Case(tables(kind), same_id=True) for kind in ("table_wise", "row_wise")]
    found += [Case(tables(kind), longest_bag=0, steps=2) for kind in ("table_wise", "row_wise")]
    found += [Case(tables(kind), ahead=depth) for kind, depth in (("table_wise", 1), ("row_wise", 3))]
    found += [Case(tables(kind), deduplicate=True) for kind in SHARDED]
    found += [Case(sums["row_wise"], weighted=True, deduplicate=True)]
    found += [Case(tables("row_wise"), deduplicate=True, longest_bag=0, steps=2)]
    found += [Case(tables("table_column_wise"), optimizer="adagrad")]
    found += [Case(tables(kind), optimizer="adagrad", bf16=True) for kind in ("table_wise", "row_wise")]
    found += [Case(tables(kind), optimizer="ftrl") for kind in ("table_wise", "row_wise")]
    found += [Case(tables(kind), decaying=True) for kind in ("row_wise", "data_parallel")]
    found[-1] = replace(found[-1], optimizer="adagrad")
    mixed = tuple(
        Table(40 + 10 * index, 8, (f"f{index}",), kind, ranks=(index,))
        for index, kind in enumerate((*SHARDED, "data_parallel"))
    )
    plain = Case(mixed, optimizer="adagrad")
    changed = [{"deduplicate": True}, {"max_norm": 0.3}, {"max_norm": 0.3, "deduplicate": True}]
    return [*found, plain, *(replace(plain, **change) for change in changed)]


@pytest.fixture(scope="module", params=[1, 2], ids=["1rank", "2ranks"])
def runs(request: pytest.FixtureRequest) -> tuple[int, list[list[dict[str, Any]]]]:
    return request.param, on_ranks(TRAIN, request.param, "cpu", cases())


@pytest.mark.parametrize("index", range(len(cases())))
def test_sharded_equals_unsharded(runs: tuple[int, list[list[dict[str, Any]]]], index: int) -> None:
    _, results = runs
    case = cases()[index]
    rtol = 1e-2 if case.bf16 else 1e-5  # a sum in another order may round a weight the other way
    check_equal(case, [result[index] for result in results], training.train_unsharded(case), rtol)


def check_equal(
    case: Case, ranks: list[dict[str, Any]], expected: dict[str, Any], rtol: float = 1e-5
) -> None:
    losses = np.mean([rank["losses"] for rank in ranks], axis=0)
    np.testing.assert_allclose(losses, expected["losses"], rtol=rtol)
    for key, value in expected["first"].items():
        output = torch.cat([rank["first"][key] for rank in ranks])
        torch.testing.assert_close(output, value, rtol=rtol, atol=rtol)
    start = training.initial_tables(case)
    for name, value in expected["tables"].items():
        pieces = [rank["tables"][name] for rank in ranks]
        if case.tables[int(name.split(".")[1][1:])].sharding == "data_parallel":
            for rank in pieces:
                torch.testing.assert_close(rank[0][1], value, rtol=rtol, atol=rtol)
            continue
        trained = training.assembled(pieces, value.shape)
        torch.testing.assert_close(trained, value, rtol=rtol, atol=rtol)
        if case.longest_bag:
            assert not torch.equal(trained, start[name]), f"{name} was not trained"
        for kind, state in expected["states"][name].items():
            pieces = [rank["states"][name][kind] for rank in ranks if name in rank["states"]]
            state = state.flatten() if case.optimizer == "rowwise_adagrad" else state
            got = training.assembled(pieces, state.shape).double()
            torch.testing.assert_close(got, state, rtol=rtol, atol=rtol)


def drawn_case(seed: int, optimizer: str) -> Case:
    """Tables of 1 to 100,000 rows and widths of 4 to 256, types and owners at random, for four ranks."""
    rng = np.random.default_rng(seed)
    drawn = []
    for index in range(int(rng.integers(2, 6))):
        sharding = str(rng.choice(SHARDED))
        rows = int(rng.choice([1, 2, 3, 5, 17, 1000, 100_000], p=[0.2, 0.1, 0.1, 0.2, 0.2, 0.15, 0.05]))
        dim = int(4 * 2 ** rng.integers(0, 7))
        owners = rng.permutation(4)[: 2 if dim >= 8 else 1]
        # Two hosts of two ranks.  TorchRec's grid makes column blocks of 128: 256 columns take both.
        if sharding == "grid_shard":
            owners = np.array([0, 1]) if dim == 256 else owners[:1]
        features = (f"f{index}",) if rng.random() < 0.5 else (f"f{index}", "shared")
        drawn.append(
            Table(rows, dim, features, sharding, ranks=tuple(owners.tolist()), mean=bool(rng.random() < 0.3))
        )
    return Case(
        tuple(drawn),
        optimizer=optimizer,
        rate=2e-4 if optimizer == "sgd" else 0.02,  # wide rows have large gradients: no chaos
        batch=16,
        steps=6,
        seed=seed,
        same_id=bool(rng.random() < 0.2),
        split_columns=("column_wise", "grid_shard"),
        ahead=int(rng.integers(0, 3)),
        deduplicate=seed % 2 == 1,
    )


@pytest.mark.slow
def test_drawn_tables_on_four_ranks_of_two_hosts() -> None:
    cases = [drawn_case(seed, OPTIMIZERS[seed % 4]) for seed in range(16)]
    results = on_ranks(TRAIN, 4, "cpu", cases, host_size=2)
    for index, case in enumerate(cases):
        check_equal(case, [rank[index] for rank in results], training.train_unsharded(case))
