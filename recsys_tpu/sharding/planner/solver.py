"""The search: bound by relaxation, options by rounding it, places by packing, the rest by local search.

Deterministic: it counts steps, never seconds, and its random numbers come from one seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recsys_tpu.sharding.planner.balance import Balancer
from recsys_tpu.sharding.planner.bounds import Relaxation, Relaxed, rounded
from recsys_tpu.sharding.planner.exact import solve_exactly
from recsys_tpu.sharding.planner.packing import Packing, Target, pack, packing_of
from recsys_tpu.sharding.planner.problem import Assignment, Problem
from recsys_tpu.sharding.planner.search import LocalSearch

_STRETCH = (1.0, 1.01, 1.03, 1.06, 1.1, 1.16, 1.25, 1.4, 1.7, 2.2, 3.0, 5.0, 10.0)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to search.

    Attributes:
        starts: packings that local search continues from.
        steps: steps of local search for each of them.
        gap: relative distance to the bound at which the search is content.
        time_slack: slowdown of the slowest rank allowed while the fullest rank is relieved.
        seed: of the random numbers.
    """

    starts: int = 3
    steps: int = 150
    gap: float = 0.005
    time_slack: float = 0.045
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A plan, and what no plan can beat.

    Attributes:
        problem: index of the problem (row group size) that was chosen.
        assignment: its plan.
        time, memory: slowest rank's seconds, fullest rank's bytes.
        time_bound: no plan of any of the problems is faster.
        memory_bound: no plan within the time found (plus the slack) has a less full fullest rank.
    """

    problem: int
    assignment: Assignment
    time: float
    memory: float
    time_bound: float
    memory_bound: float


@dataclass(frozen=True)
class _Found:
    time: float
    problem: int
    packing: Packing


def solve(problems: Sequence[Problem], effort: Effort | None = None) -> Solution | None:
    """The fastest plan found over all problems (they differ in the row group); None if none fits memory.

    Args:
        problems: at least one, over the same ranks and tables.
    """
    effort = effort or Effort()
    relaxed = [Relaxed(problem) for problem in problems]
    bound = _time_bound(problems, relaxed)
    if bound is None:
        return None
    exact = [solve_exactly(problem, max(bound, 1e-12)) for problem in problems]
    found = [
        _Found(packing.slowest(), index, packing)
        for index, (problem, one) in enumerate(zip(problems, exact, strict=True))
        if one is not None and (packing := packing_of(problem, one))
    ]
    if all(one is not None for one in exact):
        bound = max(bound, min(one.time for one in found))
    found = sorted(found + _starts(problems, relaxed, bound), key=lambda one: one.time)
    if not found:
        return None
    for rank, start in enumerate(found[: effort.starts]):
        if min(found, key=lambda one: one.time).time <= bound * (1 + effort.gap):
            break
        found.append(_searched(problems, relaxed, start, bound, effort, seed=effort.seed + rank))
    best = min(found, key=lambda one: one.time)
    allowed = max(best.time, min(best.time, bound) * (1 + effort.time_slack))
    return _with_less_memory(problems[best.problem], relaxed[best.problem], best, allowed, bound, effort)


def _time_bound(problems: Sequence[Problem], relaxed: Sequence[Relaxed], steps: int = 14) -> float | None:
    """Largest time proven impossible for all problems; None if no time is possible."""
    limit = problems[0].memory_limit
    if limit <= 0:
        return None
    high = max(_any_time(problem) for problem in problems)
    first = [(one.solve(high, limit), problem, one) for problem, one in zip(problems, relaxed, strict=True)]
    open_ones = [(relaxation, problem, one) for relaxation, problem, one in first if relaxation is not None]
    if not open_ones:
        return None
    low = min(relaxation.value for relaxation, _, _ in open_ones)
    for relaxation, problem, _ in open_ones:
        packing = pack(problem, rounded(problem, relaxation.weights), Target(time=low, memory_limit=limit))
        if packing is not None:
            high = min(high, packing.slowest())
    active = [one for _, _, one in open_ones]
    impossible: list[Relaxed] = []
    for _ in range(steps):
        if high - low <= 3e-3 * high:
            break
        # While the interval is wide, halve the ratio rather than the difference.
        middle = float(np.sqrt(low * high))
        # A problem impossible at `middle` is impossible at every smaller time, so it is never asked again.
        while active and not active[0].possible(middle, limit):
            impossible.append(active.pop(0))
        if active:
            high, impossible = middle, []
        else:
            low, active, impossible = middle, impossible, []
    return low


def _any_time(problem: Problem) -> float:
    """A time that is surely enough: every table on one rank, each in its slowest option."""
    o = problem.options
    alone = o.work + np.maximum(o.send, np.maximum(o.receive, o.bisection))
    return float(np.maximum.reduceat(alone, problem.first[:-1]).sum())


def _starts(problems: Sequence[Problem], relaxed: Sequence[Relaxed], bound: float) -> list[_Found]:
    """Packings of rounded relaxations at growing targets, best first."""
    found: list[_Found] = []
    limit = problems[0].memory_limit
    for stretch in _STRETCH:
        time = bound * stretch
        if found and min(one.time for one in found) <= time:
            break
        for index, (problem, one) in enumerate(zip(problems, relaxed, strict=True)):
            relaxation = one.solve(time, limit)
            if relaxation is None:
                continue
            packing = _packed(problem, relaxation, time, limit)
            if packing is not None:
                found.append(_Found(packing.slowest(), index, packing))
    return sorted(found, key=lambda one: one.time)


def _packed(problem: Problem, relaxation: Relaxation, time: float, memory_limit: float) -> Packing | None:
    """Rounded, packed by time alone (where that ends in full ranks: by the scarcer of time and memory)."""
    choice = rounded(problem, relaxation.weights)
    for memory in (np.inf, memory_limit):
        target = Target(time=time, memory=memory, memory_limit=memory_limit)
        packing = pack(problem, choice, target)
        if packing is not None:
            Balancer(problem, packing, target).run(_balance_steps(problem))
            return packing
    return None


def _balance_steps(problem: Problem) -> int:
    return 4 * problem.ranks + 200


def _searched(
    problems: Sequence[Problem],
    relaxed: Sequence[Relaxed],
    start: _Found,
    bound: float,
    effort: Effort,
    seed: int,
) -> _Found:
    problem = problems[start.problem]
    relaxation = relaxed[start.problem].solve(start.time, problem.memory_limit)
    assert relaxation is not None, "a plan exists at this time"
    target = Target(time=bound, memory_limit=problem.memory_limit)
    search = LocalSearch(problem, relaxation.usable, target, seed=seed)
    packing = search.run(start.packing, effort.steps, 1 + effort.gap)
    Balancer(problem, packing, target).run(_balance_steps(problem))
    return _Found(packing.slowest(), start.problem, packing)


def _with_less_memory(
    problem: Problem, relaxed: Relaxed, best: _Found, allowed: float, bound: float, effort: Effort
) -> Solution:
    """Among plans within `allowed` seconds, one whose fullest rank is as empty as the search gets it."""
    packing = best.packing
    fullest = float(packing.memory.max())
    proven = relaxed.memory_bound(allowed, fullest)
    if fullest > 1.02 * proven:
        packing = _emptier(problem, relaxed, packing, allowed, proven, effort)
    return Solution(
        problem=best.problem,
        assignment=packing.assignment(),
        time=packing.slowest(),
        memory=float(packing.memory.max()),
        time_bound=bound,
        memory_bound=proven,
    )


def _within(problem: Problem, relaxed: Relaxed, time: float, memory: float, effort: Effort) -> Packing | None:
    """A packing whose every rank is within `time` seconds and `memory` bytes, if the search finds one."""
    relaxation = relaxed.solve(time, memory)
    if relaxation is None:
        return None
    target = Target(time=time, memory=memory, memory_limit=problem.memory_limit)
    packing = pack(problem, rounded(problem, relaxation.weights), target)
    if packing is None:
        return None
    Balancer(problem, packing, target).run(_balance_steps(problem))
    search = LocalSearch(problem, relaxation.usable, target, seed=effort.seed)
    packing = search.run(packing, effort.steps, 1.0)
    Balancer(problem, packing, target).run(_balance_steps(problem))
    return packing if packing.slowest() <= time * (1 + 1e-9) else None


def _emptier(
    problem: Problem, relaxed: Relaxed, packing: Packing, allowed: float, proven: float, effort: Effort
) -> Packing:
    """Plan for less memory from scratch where that works out, then relieve the fullest rank step by step."""
    fullest = float(packing.memory.max())
    for share in (0.08, 0.25, 0.5):
        memory = proven + share * (fullest - proven)
        relieved = _within(problem, relaxed, allowed, memory, effort)
        if relieved is not None:
            packing = relieved
            break
    target = Target(
        time=allowed, memory=max(proven, 1.0), time_limit=allowed, memory_limit=problem.memory_limit
    )
    search = LocalSearch(problem, relaxed.usable_at(allowed, problem.memory_limit), target, seed=effort.seed)
    for _ in range(2):
        emptier = search.run(packing.copy(), effort.steps // 2, 1.0)
        Balancer(problem, emptier, target).run(_balance_steps(problem))
        if emptier.slowest() <= allowed * (1 + 1e-9) and emptier.memory.max() < packing.memory.max():
            packing = emptier
    return packing
