"""Proven lower bounds: what no plan can beat.

For a target (seconds T, bytes M) we relax the problem to a linear program: tables may mix options, column
shards may have any mix of widths, ranks only obey the load averaged over them.  What makes it tight:

* average rows: mean work + mean send ≤ T, mean work + receive ≤ T, mean work + bisection ≤ T, mean
  memory ≤ M (a maximum is never below a mean, and max(a, b) is never below a or b);
* common load: every rank waits for receive or bisection and does the work of EVERY options.  The least
  such C that the program allows leaves T − C for the work of other items, and the least time E of EVERY
  options alone leaves T − E for their work and sending; an option whose single item needs more is
  out.  C, E and the options that remain are computed in turns;
* dual feasible functions u_k (Fekete and Schepers, 2001): if items fit a rank then Σ u_k(size/limit) ≤ 1,
  so the mean of that sum is ≤ 1.  They see that two items just over half a rank never share one.

Where the program has no solution, no plan has; the largest such T found is the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csc_matrix, vstack

from recsys_tpu.sharding.planner.highs import INFINITY, Bases, minimise
from recsys_tpu.sharding.planner.problem import EVERY, BoolArray, FloatArray, IntArray, Problem

_DUAL_FUNCTIONS = (1, 2, 3, 4, 6)
_TURNS = 4
_EPS = 1e-9


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """Answer of the linear program at one target.

    Attributes:
        value: least mean rank time.
        common: least load that all ranks share.
        usable: options that a plan within the target may contain.
        weights: share of each option in the relaxed plan.
    """

    value: float
    common: float
    usable: BoolArray
    weights: FloatArray


class Relaxed:
    """The linear program of a problem, solved at any target."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._program = _Program(problem)
        o = problem.options
        self._share = problem.copies / problem.ranks
        every = o.kind == EVERY
        self._every_work = np.where(every, o.work, 0.0)
        self._every_time = np.where(every, o.work + o.send, 0.0)
        self._own_work = np.where(every, 0.0, o.work)
        self._own_time = np.where(every, 0.0, o.work + o.send)
        self._proven: list[tuple[float, float, float, float]] = []

    def solve(self, time: float, memory: float) -> Relaxation | None:
        """The relaxed plan of least mean time within the target (seconds, bytes); None: there is no plan."""
        tightened = self._tighten(time, memory)
        if tightened is None:
            return None
        rows, common, usable = tightened
        mean = self._program.minimise(rows, self._mean_rows(time), usable)
        if mean is None:
            return None
        return Relaxation(value=mean[0] * time, common=common, usable=usable, weights=mean[1])

    def usable_at(self, time: float, memory: float) -> BoolArray:
        """Options that some plan within a target may contain; all, where the target is impossible."""
        tightened = self._tighten(time, memory)
        return tightened[2] if tightened else np.ones(len(self._problem.options), dtype=bool)

    def limits(self, time: float, memory: float) -> tuple[list[FloatArray], BoolArray] | None:
        """Rows over the options that every plan within a target keeps at most 1, and the options that it may
        contain; None: there is no plan."""
        tightened = self._tighten(time, memory)
        return None if tightened is None else ([*tightened[0], *self._mean_rows(time)], tightened[2])

    def possible(self, time: float, memory: float) -> bool:
        """False proves that no plan has every rank within the target."""
        return self._tighten(time, memory) is not None

    def _tighten(self, time: float, memory: float) -> tuple[list[FloatArray], float, BoolArray] | None:
        """Raise the common load and drop options in turns; None once the program has no solution."""
        o = self._problem.options
        # A tighter target leaves less choice, so what was proven for a wider one still holds.
        wider = [(common, shared) for t, m, common, shared in self._proven if t >= time and m >= memory]
        common = max((one for one, _ in wider), default=0.0)
        every = max((one for _, one in wider), default=0.0)
        waits = [(self._every_work + o.receive) / time, (self._every_work + o.bisection) / time]
        for turn in range(_TURNS):
            usable = (
                (self._own_time + every <= time * (1 + _EPS))
                & (self._own_work + common <= time * (1 + _EPS))
                & (o.memory <= memory * (1 + _EPS))
            )
            if not np.logical_or.reduceat(usable, self._problem.first[:-1]).all():
                return None
            rows = self._rows(time, memory, common, every)
            limits = [*rows, *self._mean_rows(time)]
            least = self._program.minimise(limits, waits, usable)
            if least is None:
                return None
            if turn == _TURNS - 1 or least[0] * time <= common * 1.003 + 1e-12:
                break
            # Rounded down: the solver's tolerance must not make the bound too sharp.
            common = max(common, least[0] * time * (1 - 1e-6))
            if turn == 0:
                always = self._program.minimise(limits, [self._every_time / time], usable)
                if always is None:
                    return None
                every = max(every, always[0] * time * (1 - 1e-6))
        self._proven.append((time, memory, common, every))
        return rows, common, usable

    def _mean_rows(self, time: float) -> list[FloatArray]:
        o = self._problem.options
        work = self._share * o.work
        return [(work + self._share * o.send) / time, (work + o.receive) / time, (work + o.bisection) / time]

    def _rows(self, time: float, memory: float, common: float, every: float) -> list[FloatArray]:
        o = self._problem.options
        sizes = [o.memory / memory]
        if every < time:
            sizes.append(self._own_time / (time - every))
        if common < time:
            sizes.append(self._own_work / (time - common))
        rows = [self._share * size for size in sizes]
        for size in sizes:
            rows += [self._share * _dual(k, size) for k in _DUAL_FUNCTIONS]
        return rows


class _Program:
    """Linear programs over the options: every table takes usable ones with weights that sum to 1.

    All programs of a problem have the same columns (those not usable are held at 0), so each starts from the
    basis at which the last of its kind ended.
    """

    def __init__(self, problem: Problem) -> None:
        o = problem.options
        self._one_each = csc_matrix(
            (np.ones(len(o)), (o.table, np.arange(len(o)))), shape=(problem.tables, len(o) + 1)
        )
        self._bases: Bases = {}

    def minimise(
        self, rows: list[FloatArray], objective: list[FloatArray], usable: BoolArray
    ) -> tuple[float, FloatArray] | None:
        """Least possible maximum of the `objective` rows, with every one of `rows` at most 1."""
        matrix = np.zeros((len(rows) + len(objective), len(usable) + 1))
        matrix[:, :-1] = np.where(usable, np.array([*rows, *objective]), 0.0)
        matrix[len(rows) :, -1] = -1.0
        whole = vstack([csc_matrix(matrix), self._one_each], format="csc")
        slack = np.concatenate([np.full(len(rows), 1 + _EPS), np.zeros(len(objective))])
        one = np.ones(self._one_each.shape[0])
        values = minimise(
            np.append(np.zeros(len(usable)), 1.0),
            whole,
            np.concatenate([np.full(len(slack), -INFINITY), one]),
            np.concatenate([slack, one]),
            np.append(np.where(usable, INFINITY, 0.0), INFINITY),
            bases=self._bases,
        )
        return None if values is None else (float(values[-1]), values[:-1])


def _dual(k: int, size: FloatArray) -> FloatArray:
    """u_k of Fekete and Schepers; near a breakpoint the smaller of its two values, which keeps it valid."""
    scaled = (k + 1) * size
    steps = np.floor(scaled) / k
    near = np.abs(scaled - np.round(scaled)) < 1e-6
    return np.where(near, np.minimum(size, steps), steps)


def rounded(problem: Problem, weights: FloatArray) -> IntArray:
    """The heaviest option of each table."""
    o = problem.options
    order = np.lexsort((-np.arange(len(o)), weights, o.table))
    return order[problem.first[1:] - 1]
