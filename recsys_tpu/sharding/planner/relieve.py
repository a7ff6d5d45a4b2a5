"""Among plans that are fast enough: one whose fullest rank is emptier, and whose ranks are equally busy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recsys_tpu.sharding.planner.balance import Balancer
from recsys_tpu.sharding.planner.bounds import Relaxed, rounded
from recsys_tpu.sharding.planner.packing import Packing, Target, choose, pack, place, remove
from recsys_tpu.sharding.planner.problem import EVERY, Problem
from recsys_tpu.sharding.planner.rounding import Found, aims, balance_steps, small
from recsys_tpu.sharding.planner.search import Effort, LocalSearch

EVEN = 1.10
"""Slowest over mean time at which a plan counts as even."""
_MOST_TRIALS = 6000


def memory_bound(relaxed: Sequence[Relaxed], time: float, upper: float, *, steps: int = 9) -> float:
    """A fullest rank's memory that no plan of any problem within `time` can beat; some plan has `upper`."""
    low, high = 0.0, upper
    active, impossible = list(relaxed), []
    for _ in range(steps):
        if high - low <= 2e-3 * high:
            break
        middle = (low + high) / 2
        # A problem impossible with that much memory is so with less, so it is never asked again.
        while active and not active[0].possible(time, middle):
            impossible.append(active.pop(0))
        if active:
            high, impossible = middle, []
        else:
            low, active, impossible = middle, impossible, []
    return low


def with_less_memory(
    problems: Sequence[Problem],
    relaxed: Sequence[Relaxed],
    best: Found,
    time: float,
    least: float,
    effort: Effort,
) -> Found:
    """Plan for growing memory until a plan within `time` is found, then relieve its fullest rank.

    Args:
        best: a plan within `time`.
        least: bytes of a fullest rank that no such plan can beat.
    """
    fullest = float(best.packing.memory.max())
    if fullest <= 1.03 * least:
        return best
    indices = range(len(problems)) if small(problems[0]) else [best.problem]
    rungs = 14 if small(problems[0]) else 5
    for memory in np.geomspace(max(1.05 * least, 1e-3 * fullest), fullest, rungs, endpoint=False):
        found = _within(problems, relaxed, indices, time, float(memory), effort)
        if found is not None and found.packing.memory.max() < fullest:
            best = found
            break
    problem = problems[best.problem]
    target = Target(time=time, memory=max(least, 1.0), time_limit=time, memory_limit=problem.memory_limit)
    usable = relaxed[best.problem].usable_at(time, problem.memory_limit)
    search = LocalSearch(problem, usable, target, seed=effort.seed)
    packing = best.packing
    for _ in range(2):
        emptier = search.run(packing.copy(), effort.steps // 2, 1.0)
        Balancer(problem, emptier, target).run(balance_steps(problem))
        if emptier.slowest() <= time * (1 + 1e-9) and emptier.memory.max() < packing.memory.max():
            packing = emptier
    return Found(packing.slowest(), best.problem, packing)


def _within(
    problems: Sequence[Problem],
    relaxed: Sequence[Relaxed],
    indices: Sequence[int],
    time: float,
    memory: float,
    effort: Effort,
) -> Found | None:
    """A plan whose every rank is within `time` seconds, and about within `memory` bytes; None: not found."""
    nearest: tuple[float, int, Packing] | None = None
    for index in indices:
        problem, one = problems[index], relaxed[index]
        target = Target(time=time, memory=memory, memory_limit=problem.memory_limit)
        for aim in aims(problem):
            relaxation = one.solve(time * aim, memory)
            if relaxation is None:
                break
            packing = pack(problem, rounded(problem, relaxation.weights), target)
            if packing is None:
                continue
            Balancer(problem, packing, target).run(balance_steps(problem))
            score = float(packing.score(target).max())
            if nearest is None or score < nearest[0]:
                nearest = (score, index, packing)
    if nearest is None or nearest[0] > 1.08:
        return None
    score, index, packing = nearest
    problem = problems[index]
    if score > 1:
        target = Target(time=time, memory=memory, memory_limit=problem.memory_limit)
        search = LocalSearch(problem, relaxed[index].usable_at(time, memory), target, seed=effort.seed)
        packing = search.run(packing, effort.steps // 2, 1.0)
        Balancer(problem, packing, target).run(balance_steps(problem))
    slowest = packing.slowest()
    return Found(slowest, index, packing) if slowest <= time * (1 + 1e-9) else None


def more_even(problem: Problem, packing: Packing, time: float) -> Packing:
    """While ranks are uneven, spread one more table over more of them, if no rank exceeds `time` by that.

    Finer column shards, row splits or replicas give work to ranks that wait, so the mean rises to the
    slowest: as fast a step, whose ranks are equally busy.
    """
    memory = min(problem.memory_limit, float(packing.memory.max()))
    target = Target(time=time, time_limit=time, memory_limit=memory)
    for _ in range(problem.tables):
        seconds = packing.time()
        ratio = float(seconds.max() / seconds.mean())
        if ratio <= EVEN:
            break
        spread = _spread(problem, packing, target, ratio)
        if spread is None:
            break
        packing = spread
    return packing


def _spread(problem: Problem, packing: Packing, target: Target, ratio: float) -> Packing | None:
    """The most even packing that differs in one table's option; None: none is more even than `ratio`."""
    o = problem.options
    best: Packing | None = None
    used = 0
    for table in np.argsort(-problem.copies[packing.choice], kind="stable")[::-1].tolist():
        if table in problem.pinned or o.kind[packing.choice[table]] == EVERY:
            continue
        mine = problem.of_table(table)
        used += mine.stop - mine.start
        if used > _MOST_TRIALS:
            break
        bare = packing.copy()
        remove(problem, bare, table)
        for option in range(mine.start, mine.stop):
            trial = bare.copy()
            choose(problem, trial, table, option)
            if not place(problem, trial, table, target):
                continue
            seconds = trial.time()
            new = float(seconds.max() / seconds.mean())
            if seconds.max() <= target.time * (1 + 1e-9) and new < ratio * (1 - 1e-4):
                best, ratio = trial, new
    return best
