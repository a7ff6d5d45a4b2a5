"""Local search: take a few tables off the slice, put them back in their best way, keep what helps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recsys_tpu.sharding.planner.packing import Packing, Target, choose, place, remove
from recsys_tpu.sharding.planner.problem import GROUP, NOWHERE, BoolArray, IntArray, Problem


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to search.

    Attributes:
        starts: packings that local search continues from.
        steps: steps of local search for each of them.
        gap: relative distance to the bound at which the search is content.
        time_slack: distance to the bound that is given away for less HBM on the fullest rank, and for ranks
            that are equally busy.
        seed: of the random numbers.
    """

    starts: int = 3
    steps: int = 150
    gap: float = 0.005
    time_slack: float = 0.048
    seed: int = 0


class LocalSearch:
    """Ruin and recreate on one packing; deterministic by seed (it counts steps, not seconds)."""

    def __init__(self, problem: Problem, usable: BoolArray, target: Target, *, seed: int) -> None:
        self._problem = problem
        self._target = target
        self._random = np.random.default_rng(seed)
        self._usable = [
            np.flatnonzero(usable[problem.of_table(table)]) + problem.first[table]
            for table in range(problem.tables)
        ]
        self._size = problem.options.work + problem.options.send

    def key(self, state: Packing) -> float:
        """What is minimised: the slowest rank, then (a little) how many ranks are nearly as slow."""
        score = state.score(self._target)
        top = float(score.max())
        if not np.isfinite(top):
            return top
        return top + 0.05 * top * float(np.mean((score / top) ** 12)) ** (1 / 12)

    def run(self, state: Packing, steps: int, enough: float) -> Packing:
        """Best packing found in `steps` steps, or the first whose every rank scores at most `enough`."""
        best, best_key = state.copy(), self.key(state)
        current, current_key = state, best_key
        for step in range(steps):
            if best.score(self._target).max() <= enough:
                break
            trial = current.copy()
            if not self._rebuild(trial):
                continue
            key = self.key(trial)
            # A late-acceptance slack that closes lets the search leave plateaus early on.
            slack = 1 + 0.02 * (1 - step / steps) ** 2
            if key < current_key * slack:
                current, current_key = trial, key
            if key < best_key * (1 - 1e-9):
                best, best_key = trial.copy(), key
        return best

    def _rebuild(self, state: Packing) -> bool:
        problem = self._problem
        victims = self._victims(state)
        for table in victims:
            remove(problem, state, int(table))
        order = sorted(victims, key=lambda table: -self._size[state.choice[table]])
        return all(self._reinsert(state, int(table)) for table in order)

    def _victims(self, state: Packing) -> IntArray:
        problem = self._problem
        worst = int(np.argmax(state.score(self._target)))
        on_worst = _tables_on(problem, state, worst)
        others = self._random.permutation(problem.tables)[: int(self._random.integers(0, 4))]
        first = self._random.choice(
            on_worst, size=min(len(on_worst), int(self._random.integers(1, 3))), replace=False
        )
        return np.unique(np.concatenate([first, others]))

    def _reinsert(self, state: Packing, table: int) -> bool:
        """Try every usable option of the table and keep the best."""
        best: tuple[float, int] | None = None
        for option in self._usable[table]:
            trial = state.copy()
            choose(self._problem, trial, table, int(option))
            if place(self._problem, trial, table, self._target):
                key = self.key(trial)
                if best is None or key < best[0]:
                    best = (key, int(option))
        if best is None:
            return False
        choose(self._problem, state, table, best[1])
        return place(self._problem, state, table, self._target)


def _tables_on(problem: Problem, state: Packing, rank: int) -> IntArray:
    """Tables that lie on a rank; the ones on every rank too, where no other does."""
    places = [NOWHERE if placement is None else placement.places for placement in state.placements]
    owner = np.repeat(np.arange(problem.tables), [len(one) for one in places])
    at = np.where(problem.options.kind[state.choice] == GROUP, rank // problem.group, rank)
    here = np.unique(owner[np.concatenate(places) == at[owner]])
    return here if len(here) else np.arange(problem.tables)
