"""From a relaxed plan to a packing: one option a table, items placed, columns balanced."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recsys_tpu.sharding.planner.balance import Balancer
from recsys_tpu.sharding.planner.bounds import Relaxation, rounded
from recsys_tpu.sharding.planner.packing import Packing, Target, pack
from recsys_tpu.sharding.planner.problem import Problem

_SMALL = 2000
"""Options of a problem up to which every way is tried."""


def small(problem: Problem) -> bool:
    """Whether programs of this problem take milliseconds."""
    return len(problem.options) <= _SMALL


def aims(problem: Problem) -> tuple[float, ...]:
    """Shares of a target to aim relaxed plans at: below 1, the packing has room for what does not divide."""
    return (1.0, 0.97, 0.94) if small(problem) else (1.0, 0.97)


@dataclass(frozen=True)
class Found:
    """A packing of the problem of that index, and its slowest rank's seconds."""

    time: float
    problem: int
    packing: Packing


def packed(problem: Problem, relaxation: Relaxation, time: float, memory_limit: float) -> Packing | None:
    """Rounded, packed by time alone (where that ends in full ranks: by the scarcer of time and memory)."""
    choice = rounded(problem, relaxation.weights)
    for memory in (np.inf, memory_limit):
        target = Target(time=time, memory=memory, memory_limit=memory_limit)
        packing = pack(problem, choice, target)
        if packing is not None:
            Balancer(problem, packing, target).run(balance_steps(problem))
            return packing
    return None


def balance_steps(problem: Problem) -> int:
    return 4 * problem.ranks + 200
