"""The solver against full enumeration, and the properties that every plan has."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from recsys_tpu.sharding.planner import (
    InfeasibleError,
    Plan,
    ShardingType,
    TableSpec,
    Workload,
    estimate,
    make_plan,
)
from recsys_tpu.sharding.planner.bounds import Relaxed
from recsys_tpu.sharding.planner.costs import CostModel
from recsys_tpu.sharding.planner.options import enumerate_options
from recsys_tpu.sharding.planner.problem import EVERY, GROUP, Assignment, Placement, Problem, loads
from recsys_tpu.sharding.planner.search import Effort
from recsys_tpu.sharding.planner.solver import solve
from tests.sharding.planner.strategies import small_topology, tables, workload

# Shrinking re-runs the solver for minutes; the first failing case is small enough to read.
PHASES = (Phase.explicit, Phase.generate)


def _placements(problem: Problem, option: int) -> list[Placement]:
    """Every placement of an option; a STRIPS option stands for all compositions of its table's columns."""
    o, s = problem.options, problem.strips
    kind, table = o.kind[option], int(o.table[option])
    if kind == EVERY:
        return [Placement()]
    if kind == GROUP:
        count = int(o.count[option])
        return [Placement(places=np.array(p)) for p in itertools.combinations(range(problem.groups), count)]
    if o.units[option] != s.units[table]:
        return []
    splits = [
        widths
        for widths in itertools.product(range(int(s.units[table]) + 1), repeat=problem.ranks)
        if sum(widths) == s.units[table]
    ]
    return [
        Placement(
            places=np.array([r for r, w in enumerate(widths) if w]), units=np.array([w for w in widths if w])
        )
        for widths in splits
    ]


def _optimum(problems: list[Problem]) -> float | None:
    """Least slowest-rank time over every plan, by trying all of them."""
    best: float | None = None
    for problem in problems:
        ways = []
        for table in range(problem.tables):
            options = range(*problem.of_table(table).indices(len(problem.options)))
            ways.append([(option, place) for option in options for place in _placements(problem, option)])
        for plan in itertools.product(*ways):
            assignment = Assignment(
                choice=np.array([option for option, _ in plan]), placements=[p for _, p in plan]
            )
            load = loads(problem, assignment)
            if load.memory.max() <= problem.memory_limit * (1 + 1e-9):
                time = float(load.time.max())
                best = time if best is None else min(best, time)
    return best


def _problems(work: Workload, ranks: int, hosts: int, hbm_bytes: int | None) -> list[Problem]:
    topology = small_topology(ranks, hosts=hosts, hbm_bytes=hbm_bytes)
    return [
        enumerate_options(CostModel(work, topology, group)).problem for group in topology.likely_row_groups
    ]


@settings(max_examples=25, deadline=None, derandomize=True, phases=PHASES)
@given(
    specs=tables(most=3, dims=(8, 16)),
    shape=st.sampled_from(((2, 1), (2, 2), (3, 1), (4, 2))),
    tight=st.booleans(),
)
def test_small_instances_are_solved_to_the_optimum(specs, shape, tight):
    ranks, hosts = shape
    work = workload(specs)
    total = sum(table.total_bytes for table in specs)
    problems = _problems(work, ranks, hosts, int(total / ranks * 1.5) + 20_000_000 if tight else None)
    optimum = _optimum(problems)
    solution = solve(problems, Effort(time_slack=0.0, gap=0.0, steps=20))
    if optimum is None:
        assert solution is None
        return
    assert solution is not None, "a plan exists"
    assert solution.time_bound <= optimum * (1 + 1e-6), "the bound is no bound"
    assert solution.time == pytest.approx(optimum, rel=1e-6)
    problem = problems[solution.problem]
    assert loads(problem, solution.assignment).time.max() == pytest.approx(solution.time, rel=1e-9)


@settings(max_examples=30, deadline=None, derandomize=True, phases=PHASES)
@given(specs=tables(most=3, dims=(8, 16)), stretch=st.floats(0.3, 3.0))
def test_the_relaxation_never_rejects_a_target_that_some_plan_meets(specs, stretch):
    [problem] = _problems(workload(specs), 2, 1, None)
    optimum = _optimum([problem])
    assert optimum is not None
    relaxed = Relaxed(problem)
    if not relaxed.possible(optimum * stretch, problem.memory_limit):
        assert stretch < 1 + 1e-9


def _assert_every_row_once(plan: Plan) -> None:
    """Each cell of each table lies in exactly one shard (data-parallel: in one per rank)."""
    for table in plan.tables:
        shards = list(table.shards(plan.topology.ranks, plan.row_group))
        assert all(0 <= shard.rank < plan.topology.ranks for shard in shards)
        if table.kind is ShardingType.DATA_PARALLEL:
            assert Counter(shard.rank for shard in shards) == Counter(range(plan.topology.ranks))
            assert all((s.rows, s.columns) == (table.rows, table.dim) for s in shards)
            continue
        assert len({(s.rank) for s in shards}) == len(shards), "two shards of a table on one rank"
        edges_r = sorted({s.first_row for s in shards} | {s.first_row + s.rows for s in shards})
        edges_c = sorted({s.first_column for s in shards} | {s.first_column + s.columns for s in shards})
        assert (edges_r[0], edges_r[-1], edges_c[0], edges_c[-1]) == (0, table.rows, 0, table.dim)
        for row, column in itertools.product(edges_r[:-1], edges_c[:-1]):
            owners = [
                s
                for s in shards
                if s.first_row <= row < s.first_row + s.rows
                and s.first_column <= column < s.first_column + s.columns
            ]
            assert len(owners) == 1, (table, row, column, owners)


@settings(max_examples=25, deadline=None, derandomize=True, phases=PHASES)
@given(
    specs=tables(most=12, dims=(4, 8, 10, 32, 64)),
    shape=st.sampled_from(((1, 1), (2, 1), (4, 2), (8, 2), (16, 4))),
    room=st.floats(0.9, 4.0),
)
def test_every_row_is_placed_once_and_memory_is_never_exceeded(specs, shape, room):
    ranks, hosts = shape
    work = workload(specs)
    total = sum(table.total_bytes for table in specs)
    topology = small_topology(ranks, hosts=hosts, hbm_bytes=int(total / ranks * room) + 10_000_000)
    try:
        plan = make_plan(work, topology, effort=Effort(steps=20))
    except InfeasibleError as error:
        assert "no plan fits" in str(error)
        return
    assert [table.name for table in plan.tables] == [table.name for table in specs]
    _assert_every_row_once(plan)
    numbers = estimate(plan, work)
    assert numbers.memory.max() <= topology.hbm_bytes * (1 + 1e-9)
    assert plan.summary["gap"] >= -1e-6


@settings(max_examples=6, deadline=None, derandomize=True, phases=PHASES)
@given(specs=tables(most=8), order=st.randoms(use_true_random=False))
def test_permuting_tables_changes_nothing(specs, order):
    topology = small_topology(4, hosts=2)
    plan = make_plan(workload(specs), topology, effort=Effort(steps=20))
    shuffled = list(specs)
    order.shuffle(shuffled)
    again = make_plan(workload(tuple(shuffled)), topology, effort=Effort(steps=20))
    assert {table.name: table for table in again.tables} == {table.name: table for table in plan.tables}


@settings(max_examples=5, deadline=None, derandomize=True, phases=PHASES)
@given(specs=tables(most=6))
def test_renaming_tables_changes_only_names(specs):
    topology = small_topology(4, hosts=2)
    plan = make_plan(workload(specs), topology, effort=Effort(steps=20))
    renamed = tuple(replace(table, name=f"z{i:03d}") for i, table in enumerate(specs))
    again = make_plan(workload(renamed), topology, effort=Effort(steps=20))
    assert [replace(table, name="") for table in again.tables] == [
        replace(table, name="") for table in plan.tables
    ]


def test_the_same_seed_gives_the_same_plan_and_bound():
    specs = tuple(
        TableSpec(name=f"t{i}", rows=7**i + 50, dim=32, pooling_factors=(1.0 + i,)) for i in range(8)
    )
    topology = small_topology(8, hosts=2)
    assert make_plan(workload(specs), topology, effort=Effort(steps=30)) == make_plan(
        workload(specs), topology, effort=Effort(steps=30)
    )


def _naive_times(work: Workload, plan: Plan) -> dict[str, float]:
    """Slowest rank of round-robin table-wise and of all-row-wise."""
    ranks = plan.topology.ranks
    round_robin = tuple(
        replace(table, kind=ShardingType.TABLE_WISE, column_shards=((i % ranks, table.dim),))
        for i, table in enumerate(plan.tables)
    )
    row_wise = tuple(
        replace(table, kind=ShardingType.ROW_WISE, column_shards=((0, table.dim),)) for table in plan.tables
    )
    return {
        name: float(estimate(replace(plan, tables=chosen), work).time.max())
        for name, chosen in (("round robin", round_robin), ("row-wise", row_wise))
    }


@settings(max_examples=12, deadline=None, derandomize=True, phases=PHASES)
@given(specs=tables(most=15, dims=(8, 32, 128)), ranks=st.sampled_from((2, 4, 8)))
def test_never_worse_than_round_robin_or_all_row_wise(specs, ranks):
    work = workload(specs)
    plan = make_plan(work, small_topology(ranks), effort=Effort(time_slack=0.0, steps=60))
    mine = float(estimate(plan, work).time.max())
    for name, time in _naive_times(work, plan).items():
        assert mine <= time * (1 + 1e-9), name
