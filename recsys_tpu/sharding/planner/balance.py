"""Relieve the slowest rank: hand columns, or whole pieces, of what it holds to faster ranks.

Column shards may have unequal widths, so a table's units flow from slow ranks to fast ones until the
slowest cannot be relieved any more.  A step must lower the sum of exp(β·fullness) over ranks: with several
ranks equally slow, relieving one is progress although the maximum stays, and a new piece of a table may
make every rank wait a little longer for its ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recsys_tpu.sharding.planner.packing import Packing, Target
from recsys_tpu.sharding.planner.problem import STRIPS, FloatArray, IntArray, Placement, Problem

_SHARPNESS = 200.0


@dataclass(frozen=True)
class _Move:
    score: float
    table: int
    target: int
    units: int


class Balancer:
    """Moves units between the pieces of a packing, in place."""

    def __init__(self, problem: Problem, state: Packing, target: Target) -> None:
        self._problem = problem
        self._state = state
        self._target = target
        # Units of each table on each rank, and the same by rank: which tables a rank holds in pieces.
        self._pieces: dict[int, dict[int, int]] = {}
        self._on_rank: dict[int, set[int]] = {}
        for table, option in enumerate(state.choice):
            placement = state.placements[table]
            assert placement is not None
            if problem.options.kind[option] == STRIPS and table not in problem.pinned:
                self._pieces[table] = dict(
                    zip(placement.places.tolist(), placement.units.tolist(), strict=True)
                )
                for rank in placement.places.tolist():
                    self._on_rank.setdefault(rank, set()).add(table)

    def run(self, steps: int) -> None:
        """At most `steps` moves; ends at the first slowest rank that nothing relieves."""
        pressure = self._pressure()
        for _ in range(steps):
            scores = np.maximum(
                self._state.time() / self._target.time, self._state.memory / self._target.memory
            )
            worst = int(np.argmax(scores))
            moves = [
                move
                for table in sorted(self._on_rank.get(worst, ()))
                if (move := self._best_move(table, worst, float(scores[worst]))) is not None
            ]
            for move in sorted(moves, key=lambda move: move.score):
                self._apply(move, worst, move.target)
                relieved = self._pressure()
                if relieved < pressure - 1e-9:
                    pressure = relieved
                    break
                self._apply(move, move.target, worst)
            else:
                break
        self._store()

    def _pressure(self) -> float:
        """log Σ exp(β·fullness)."""
        state, goal = self._state, self._target
        exponent = _SHARPNESS * np.maximum(state.time() / goal.time, state.memory / goal.memory)
        top = float(exponent.max())
        return top + float(np.log(np.exp(exponent - top).sum()))

    def _best_move(self, table: int, worst: int, limit: float) -> _Move | None:
        """Best way to hand units of `table` from `worst` to another rank; None if none beats `limit`."""
        s, state, goal = self._problem.strips, self._state, self._target
        pieces = self._pieces[table]
        width = pieces[worst]
        moved = np.arange(1, width + 1) if s.divisible[table] else np.array([width])
        held = np.zeros(self._problem.ranks, dtype=np.int64)
        held[list(pieces)] = list(pieces.values())
        columns = np.minimum(held[None, :] + moved[:, None], s.units[table])
        another = (held[None, :] == 0) & (moved[:, None] < width)
        raised = max(state.receive + s.receive[table], state.bisection + s.bisection[table])
        floor = np.where(another, max(raised, state.floor), state.floor)
        gained = [cost[table, columns] - cost[table, held][None, :] for cost in (s.work, s.send, s.memory)]
        time = state.work[None, :] + gained[0] + np.maximum(state.send[None, :] + gained[1], floor)
        result = np.maximum(
            goal.score(time, state.memory[None, :] + gained[2]),
            self._left_score(table, worst, width, moved, floor),
        )
        result[:, worst] = np.inf
        if table in self._problem.allowed:
            result[:, ~self._problem.allowed[table]] = np.inf
        if not s.whole[table]:
            result[columns == s.units[table]] = np.inf
        at, target = divmod(int(np.argmin(result)), self._problem.ranks)
        if result[at, target] >= limit * (1 - 1e-9):
            return None
        return _Move(float(result[at, target]), table, target, int(moved[at]))

    def _left_score(
        self, table: int, rank: int, width: int, moved: IntArray, floor: FloatArray
    ) -> FloatArray:
        """Score of `rank` when its piece of `width` units loses `moved`, [moved, ranks] as `floor`."""
        s, state, goal = self._problem.strips, self._state, self._target
        after = width - moved
        work = state.work[rank] - s.work[table, width] + s.work[table, after]
        send = state.send[rank] - s.send[table, width] + s.send[table, after]
        memory = state.memory[rank] - s.memory[table, width] + s.memory[table, after]
        time = work[:, None] + np.maximum(send[:, None], floor)
        # The rank only gets emptier, so limits it still exceeds do not forbid the move.
        return np.maximum(time / goal.time, memory[:, None] / goal.memory)

    def _apply(self, move: _Move, source: int, target: int) -> None:
        pieces = self._pieces[move.table]
        before = len(pieces)
        self._resize(move.table, source, pieces[source] - move.units)
        self._resize(move.table, target, pieces.get(target, 0) + move.units)
        more = len(pieces) - before
        self._state.receive += more * float(self._problem.strips.receive[move.table])
        self._state.bisection += more * float(self._problem.strips.bisection[move.table])

    def _resize(self, table: int, rank: int, units: int) -> None:
        s, state = self._problem.strips, self._state
        old = self._pieces[table].get(rank, 0)
        state.work[rank] += s.work[table, units] - s.work[table, old]
        state.send[rank] += s.send[table, units] - s.send[table, old]
        state.memory[rank] += s.memory[table, units] - s.memory[table, old]
        if units:
            self._pieces[table][rank] = units
            self._on_rank.setdefault(rank, set()).add(table)
        else:
            del self._pieces[table][rank]
            self._on_rank[rank].discard(table)

    def _store(self) -> None:
        for table, pieces in self._pieces.items():
            ranks = np.array(sorted(pieces), dtype=np.int64)
            units = np.array([pieces[int(rank)] for rank in ranks], dtype=np.int64)
            self._state.placements[table] = Placement(places=ranks, units=units)
