"""Sharded training against unsharded training: every sharding type, 1, 2 and 4 ranks, CPU and emulated chips.

    python benchmarks/sharding_matrix.py --device cpu --ranks 1 2 4 --draws 4
    python benchmarks/sharding_matrix.py --device tpu-emulated --ranks 1 2 4 --draws 1
    python benchmarks/sharding_matrix.py --device tpu-emulated --ranks 2 --types variable_batch unpooled

Tables are drawn by hypothesis (1 to 100,000 rows, widths 4 to 256, SUM and MEAN, features that share a table,
bags of 0 to 4 ids, all ids equal, more ranks than rows; 4 ranks are 2 hosts of 2).  Each case trains 20
steps, sharded and in one process with optimizers in plain torch (`tests/sharding/training.py`).  It is
equal when losses agree to 1e-5 of their value, and outputs, tables and optimizer state to 1e-5 of the value
plus 1e-5.  Beside the sharding types there are `variable_batch` (a step with a batch size of its own for each
feature against the written-out batch) and `unpooled` (an EmbeddingCollection), each over the types that
TorchRec has them for.
"""

from __future__ import annotations

import os

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # ranks activate their own device

import argparse
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.sharding import training
from tests.sharding.ranks import on_ranks
from tests.sharding.test_sequence_and_vbe import (
    SEQUENCES,
    check_sequences,
    check_variable,
    sequence_case,
    variable_cases,
)
from tests.sharding.test_training import check_equal
from tests.sharding.training import SHARDED, Case, Table

TYPES = (*SHARDED, "data_parallel")
VARIABLE, UNPOOLED = "variable_batch", "unpooled"
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "tpu-emulated"), default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--types", nargs="+", choices=(*TYPES, VARIABLE, UNPOOLED), default=TYPES)
    parser.add_argument("--draws", type=int, default=4, help="cases of each type")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores; {vars(arguments)}")
    failures = 0
    for world in arguments.ranks:
        began = time.perf_counter()
        for kind, found in outcomes(arguments, world):
            equal = found.count("equal")
            failures += len(found) - equal
            line = f"{arguments.device:>12} {world} ranks {kind:>17}: {equal} of {len(found)} equal"
            print(line, flush=True)
        print(f"{arguments.device:>12} {world} ranks: {time.perf_counter() - began:.0f} s", flush=True)
    raise SystemExit(bool(failures))


def outcomes(arguments: argparse.Namespace, world: int) -> Iterator[tuple[str, list[str]]]:
    """(type, "equal" or what differs of each of its cases)."""

    def run(function: str, cases: list[Case]) -> list[list[dict]]:
        """By case, what every rank returns."""
        found = on_ranks(
            f"tests.sharding.{function}",
            world,
            arguments.device,
            cases,
            host_size=ranks_of_a_host(world),
            timeout_s=24 * 3600,
        )
        return [list(ranks) for ranks in zip(*found, strict=True)]

    kinds = [kind for kind in arguments.types if kind in TYPES]
    by_type = {kind: drawn(kind, world, arguments.draws, arguments.steps, arguments.seed) for kind in kinds}
    trained = iter(
        run("sharded:train_all", [case for cases in by_type.values() for case in cases]) if kinds else []
    )
    for kind, cases in by_type.items():
        yield kind, [outcome(case, compare, case, next(trained)) for case in cases]
    if VARIABLE in arguments.types:
        cases = variable_cases()
        both = run("sequence_and_vbe:variable_batches", cases)
        for kind in sharding_types(cases):
            yield (
                f"{kind}, variable",
                [
                    outcome(case, check_variable, rank)
                    for case, ranks in zip(cases, both, strict=True)
                    if case.tables[0].sharding == kind
                    for rank in ranks
                ],
            )
    if UNPOOLED in arguments.types:
        cases = [replace(sequence_case(kind), steps=arguments.steps) for kind in SEQUENCES]
        for case, ranks in zip(cases, run("sequence_and_vbe:train_sequences", cases), strict=True):
            yield f"{case.tables[0].sharding}, unpooled", [outcome(case, check_sequences, case, ranks)]


def sharding_types(cases: list[Case]) -> list[str]:
    return list(dict.fromkeys(case.tables[0].sharding for case in cases))


def ranks_of_a_host(world: int) -> int:
    """Four ranks are two hosts of two."""
    return world if world < 4 else world // 2


def compare(case: Case, ranks: list[dict]) -> None:
    check_equal(case, ranks, training.train_unsharded(case))


def outcome(case: Case, check: Callable[..., None], *arguments: Any) -> str:
    """What `check` finds different, which is printed; or "equal"."""
    try:
        check(*arguments)
    except AssertionError as error:
        different = " ".join(str(error).split())[:300]
        print(f"FAILED {case}: {different}", flush=True)
        return different
    return "equal"


def drawn(kind: str, world: int, count: int, steps: int, seed: int) -> list[Case]:
    """`count` cases of one sharding type, the same for every seed."""
    found: list[Case] = []

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(kind, world, steps))
    def collect(case: Case) -> None:
        found.append(case)

    seeded(seed)(collect)()
    # Hypothesis begins with the smallest case; every type also gets the largest tables
    # (with weighted ids), and one id only.
    ranks = (0,) if kind == "grid_shard" else tuple(range(min(world, 2)))
    largest = Table(100_000, 16, ("x", "y"), kind, ranks)
    tiny = Table(1, 4, ("z",), kind, (world - 1,))
    split = ("column_wise", "table_column_wise", "grid_shard")
    edge = Case((largest, tiny), optimizer="adagrad", steps=steps, rate=0.02, batch=16, split_columns=split)
    weighted = replace(edge, weighted=True)
    return [*found[:count], weighted, replace(edge, same_id=True, optimizer="sgd", rate=1e-3)]


@st.composite
def cases(draw: st.DrawFn, kind: str, world: int, steps: int) -> Case:
    tables = []
    for index in range(draw(st.integers(1, 4))):
        rows = draw(st.one_of(st.integers(1, 8), st.integers(1, 5000)))
        dim = 4 * 2 ** draw(st.integers(0, 6))
        split = min(world, 2) if dim >= 8 else 1
        ranks = tuple(draw(st.permutations(range(world)))[:split])
        if kind == "table_column_wise":  # columns stay on one host
            ranks = tuple(range(ranks_of_a_host(world)))[-split:]
        if kind == "grid_shard":  # TorchRec's grid makes column blocks of 128, one a host
            hosts = world // ranks_of_a_host(world)
            dim = min(dim, 128 * hosts)
            ranks = tuple(range(hosts)) if dim == 256 else (draw(st.integers(0, hosts - 1)),)
        shared = ("shared",) if draw(st.booleans()) else ()
        tables.append(Table(rows, dim, (f"f{index}", *shared), kind, ranks, draw(st.booleans())))
    optimizers = OPTIMIZERS if kind != "data_parallel" else ("sgd", "adagrad")
    optimizer = draw(st.sampled_from(optimizers))
    return Case(
        tuple(tables),
        optimizer=optimizer,
        rate=2e-4 if optimizer == "sgd" else 0.02,  # wide rows have large gradients: no chaos
        steps=steps,
        batch=16,
        longest_bag=draw(st.integers(1, 4)),
        same_id=draw(st.booleans()) and draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        split_columns=("column_wise", "table_column_wise", "grid_shard"),
        ahead=draw(st.integers(0, 2)),
        deduplicate=kind != "data_parallel" and draw(st.booleans()),
        max_norm=draw(st.sampled_from([None, None, 0.5])),
        decaying=draw(st.booleans()),
    )


if __name__ == "__main__":
    main()
