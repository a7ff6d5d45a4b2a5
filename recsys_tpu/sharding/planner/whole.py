"""How even a plan can be at all: a program of `bounds` whose tables may no longer mix sharding types.

Added to its rows are whole choices (a table is replicated, row-split, grid-split that way, or in column
shards of any mix of widths) and, for each table, that its pieces leave room for what all ranks share:

    Σ work of EVERY options + receive (or bisection) + mean work of the table's pieces ≤ T
    Σ (work + send) of EVERY options + mean (work + send) of the table's pieces ≤ T

Each piece obeys these, so their mean does.  HiGHS solves the program by branch and bound; where it stops at
its limit of nodes, its dual bound still holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csc_matrix, diags, hstack, vstack

from recsys_tpu.sharding.planner.bounds import Relaxed
from recsys_tpu.sharding.planner.problem import EVERY, STRIPS, FloatArray, Problem

_NODES = 300
_EPS = 1e-9


def evenness_bound(
    problems: Sequence[Problem], relaxed: Sequence[Relaxed], low: float, high: float, *, steps: int = 4
) -> float:
    """A ratio of slowest to mean rank that no plan whose slowest rank is within [low, high] seconds can beat.

    A plan whose slowest rank lies in a part [a, b] of the interval has a ratio of at least a over the largest
    mean of plans within b.
    """
    wholes = [
        Whole(problem, one)
        for problem, one in zip(problems, relaxed, strict=True)
        if one.possible(high, problem.memory_limit)
    ]
    edges = np.linspace(low, high, steps + 1)
    ratios = [1e9]
    for a, b in itertools.pairwise(edges.tolist()):
        most = max(one.most_mean(b) for one in wholes)
        ratios.append(a / most if most else 1e9)
        if ratios[-1] <= 1:
            break
    return max(min(ratios), 1.0)


class Whole:
    """The program of a problem, asked at any target."""

    def __init__(self, problem: Problem, relaxed: Relaxed) -> None:
        self._problem, self._relaxed = problem, relaxed
        o, tables = problem.options, problem.tables
        options = len(o)
        every, strip = o.kind == EVERY, o.kind == STRIPS
        by_table = csc_matrix((np.ones(options), (o.table, np.arange(options))), shape=(tables, options))
        work, both = np.where(every, o.work, 0.0), np.where(every, o.work + o.send, 0.0)
        own_work, own_both = np.where(every, 0.0, o.work), np.where(every, 0.0, o.work + o.send)
        # Columns: options, whether a table is in column shards, the three loads that every rank has.
        self._columns = options + tables + 3
        common = csc_matrix(np.array([work + o.receive, work + o.bisection, both]))
        in_strips = by_table @ diags(strip.astype(float))
        self._choice = vstack(
            [
                hstack([by_table, csc_matrix((tables, tables + 3))]),
                hstack([in_strips, -diags(np.ones(tables)), csc_matrix((tables, 3))]),
            ]
        )
        self._shared = hstack([common, csc_matrix((3, tables)), csc_matrix((3, 3))])
        self._loads = hstack([csc_matrix((3, options + tables)), -diags(np.ones(3))])
        ones = csc_matrix(np.ones((tables, 1)))
        self._room = [
            (
                hstack([by_table @ diags(own), csc_matrix((tables, tables + 3))]),
                hstack([csc_matrix((tables, options + tables + at)), ones, csc_matrix((tables, 2 - at))]),
            )
            for at, own in enumerate((own_work, own_work, own_both))
        ]
        self._integer = np.concatenate([~strip, np.ones(tables), np.zeros(3)])

    def most_mean(self, time: float) -> float:
        """Seconds that the mean rank of a plan within `time` cannot exceed; 0: there is no such plan.

        A rank's time is work + max(send, F) with F = max(receive, bisection); for send ≤ T it is at most
        work + F + send·(1 − F/T), and the least possible F keeps that valid.
        """
        o, limit = self._problem.options, self._problem.memory_limit
        share = self._problem.copies / self._problem.ranks
        most = 0.0
        floors = (o.receive, o.bisection)
        least = [self._least(time, limit, self._cost(floor)) for floor in floors]
        if least[0] is None or least[1] is None:
            return 0.0
        excess = 1 - min(max(least[0], least[1]) / time, 1.0)
        for floor in floors:
            mean = self._least(time, limit, -self._cost(share * (o.work + excess * o.send) + floor))
            most = max(most, time if mean is None else -mean)
        return min(most, time)

    def _cost(self, options: FloatArray) -> FloatArray:
        return np.concatenate([options, np.zeros(self._columns - len(options))])

    def _least(self, time: float, memory: float, cost: FloatArray) -> float | None:
        """A lower bound of `cost` over all plans within the target; None: there are none."""
        limits = self._relaxed.limits(time, memory)
        if limits is None:
            return None
        rows, usable = limits
        tables = self._problem.tables
        dense = np.zeros((len(rows), self._columns))
        dense[:, : len(usable)] = np.where(usable, np.array(rows), 0.0)
        room = [own / time + common for own, common in self._room]
        shared = self._shared / time + self._loads
        matrix = vstack([csc_matrix(dense), self._choice, shared, *room], format="csc")
        fixed = np.concatenate([np.ones(tables), np.zeros(tables + 3)])
        upper = np.concatenate([np.full(len(rows), 1 + _EPS), fixed, np.full(3 * tables, 1 + _EPS)])
        lower = np.concatenate([np.full(len(rows), -np.inf), fixed, np.full(3 * tables, -np.inf)])
        most = np.concatenate([usable.astype(float), np.ones(tables + 3)])
        scale = float(np.abs(cost).max()) or 1.0
        result = milp(
            cost / scale,
            constraints=LinearConstraint(matrix, lower, upper),
            integrality=self._integer,
            bounds=Bounds(0.0, most),
            options={"node_limit": _NODES, "mip_rel_gap": 1e-3},
        )
        if result.status == 2:
            return None
        return (-np.inf if result.mip_dual_bound is None else float(result.mip_dual_bound)) * scale
