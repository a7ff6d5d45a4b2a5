"""The search: bound by relaxation, options by rounding it, places by packing, the rest by local search.

Deterministic: it counts steps, never seconds, and its random numbers come from one seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recsys_tpu.sharding.planner.balance import Balancer
from recsys_tpu.sharding.planner.bounds import Relaxed, rounded
from recsys_tpu.sharding.planner.exact import solve_exactly
from recsys_tpu.sharding.planner.packing import Target, pack, packing_of
from recsys_tpu.sharding.planner.problem import Assignment, Problem
from recsys_tpu.sharding.planner.relieve import EVEN, memory_bound, more_even, with_less_memory
from recsys_tpu.sharding.planner.rounding import Found, aims, balance_steps, packed, small
from recsys_tpu.sharding.planner.search import Effort, LocalSearch
from recsys_tpu.sharding.planner.whole import evenness_bound

_STRETCH = (1.0, 1.01, 1.03, 1.06, 1.1, 1.16, 1.25, 1.4, 1.7, 2.2, 3.0, 5.0, 10.0)


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A plan, and what no plan can beat.

    Attributes:
        problem: index of the problem (row group size) that was chosen.
        assignment: its plan.
        time, memory: slowest rank's seconds, fullest rank's bytes.
        time_bound: no plan of any of the problems is faster.
        memory_bound: no plan of any of the problems within the time found (plus the slack) has a less full
            fullest rank.
        even_bound: no such plan has a lower ratio of slowest to mean rank; 1 where nothing was proven.
    """

    problem: int
    assignment: Assignment
    time: float
    memory: float
    time_bound: float
    memory_bound: float
    even_bound: float


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
        Found(packing.slowest(), index, packing)
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
    least = memory_bound(relaxed, allowed, float(best.packing.memory.max()))
    if effort.time_slack:
        best = with_less_memory(problems, relaxed, best, allowed, least, effort)
        evened = more_even(problems[best.problem], best.packing, allowed)
        best = Found(evened.slowest(), best.problem, evened)
    seconds = best.packing.time()
    even_bound = 1.0
    if seconds.max() > EVEN * seconds.mean() and small(problems[0]):
        even_bound = evenness_bound(problems, relaxed, bound, allowed)
    return Solution(
        even_bound=even_bound,
        problem=best.problem,
        assignment=best.packing.assignment(),
        time=best.time,
        memory=float(best.packing.memory.max()),
        time_bound=bound,
        memory_bound=least,
    )


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


def _starts(problems: Sequence[Problem], relaxed: Sequence[Relaxed], bound: float) -> list[Found]:
    """Packings of rounded relaxations at growing targets, best first."""
    found: list[Found] = []
    limit = problems[0].memory_limit
    for stretch in _STRETCH:
        time = bound * stretch
        if found and min(one.time for one in found) <= time:
            break
        for index, (problem, one) in enumerate(zip(problems, relaxed, strict=True)):
            for aim in aims(problem):
                relaxation = one.solve(time * aim, limit)
                if relaxation is None:
                    break
                packing = packed(problem, relaxation, time, limit)
                if packing is not None:
                    found.append(Found(packing.slowest(), index, packing))
    return sorted(found, key=lambda one: one.time)


def _searched(
    problems: Sequence[Problem],
    relaxed: Sequence[Relaxed],
    start: Found,
    bound: float,
    effort: Effort,
    seed: int,
) -> Found:
    problem = problems[start.problem]
    relaxation = relaxed[start.problem].solve(start.time, problem.memory_limit)
    assert relaxation is not None, "a plan exists at this time"
    target = Target(time=bound, memory_limit=problem.memory_limit)
    search = LocalSearch(problem, relaxation.usable, target, seed=seed)
    packing = search.run(start.packing, effort.steps, 1 + effort.gap)
    Balancer(problem, packing, target).run(balance_steps(problem))
    return Found(packing.slowest(), start.problem, packing)
