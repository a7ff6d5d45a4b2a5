"""Put the items of chosen options on ranks: largest first, each where it hurts least.

Everything is vectorised over ranks: one table costs a few passes over `ranks` numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recsys_tpu.sharding.planner.problem import (
    EVERY,
    GROUP,
    STRIPS,
    Assignment,
    FloatArray,
    IntArray,
    Placement,
    Problem,
    item_costs,
    item_ranks,
    loads,
    shared_seconds,
)

_EPS = 1e-9


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a packing aims at: a rank's score is max(time / `time`, memory / `memory`).

    Attributes:
        time, memory: seconds and bytes that count as full; memory=inf compares ranks by time alone.
        time_limit, memory_limit: seconds and bytes that no rank may exceed.
    """

    time: float
    memory: float = np.inf
    time_limit: float = np.inf
    memory_limit: float

    def score(self, time: FloatArray, memory: FloatArray) -> FloatArray:
        """Fullness; inf beyond a limit."""
        score = time / self.time
        if np.isfinite(self.memory):
            score = np.maximum(score, memory / self.memory)
        score[(memory > self.memory_limit * (1 + _EPS)) | (time > self.time_limit * (1 + _EPS))] = np.inf
        return score


@dataclass(kw_only=True)
class Packing:
    """Loads while items are placed; `placements[t]` is None until table t is placed."""

    choice: IntArray
    placements: list[Placement | None]
    work: FloatArray
    send: FloatArray
    memory: FloatArray
    receive: float
    bisection: float

    @property
    def floor(self) -> float:
        return max(self.receive, self.bisection)

    def time(self) -> FloatArray:
        """Seconds of each rank."""
        return self.work + np.maximum(self.send, self.floor)

    def slowest(self) -> float:
        return float(self.time().max())

    def score(self, target: Target) -> FloatArray:
        """Fullness of each rank against the target."""
        return target.score(self.time(), self.memory)

    def assignment(self) -> Assignment:
        assert all(placement is not None for placement in self.placements)
        return Assignment(choice=self.choice.copy(), placements=[p for p in self.placements if p is not None])

    def copy(self) -> Packing:
        return Packing(
            choice=self.choice.copy(),
            placements=list(self.placements),
            work=self.work.copy(),
            send=self.send.copy(),
            memory=self.memory.copy(),
            receive=self.receive,
            bisection=self.bisection,
        )


def packing_of(problem: Problem, assignment: Assignment) -> Packing:
    """The packing that an assignment describes."""
    load = loads(problem, assignment)
    receive, bisection = shared_seconds(problem, assignment.choice, assignment.placements)
    return Packing(
        choice=assignment.choice.copy(),
        placements=list(assignment.placements),
        work=load.work,
        send=load.send,
        memory=load.memory,
        receive=receive,
        bisection=bisection,
    )


def pack(problem: Problem, choice: IntArray, target: Target) -> Packing | None:
    """Place all tables' items under the options chosen; None where some item fits no rank."""
    o = problem.options
    zeros = [np.zeros(problem.ranks) for _ in range(3)]
    receive, bisection = shared_seconds(problem, choice, [None] * problem.tables)
    state = Packing(
        choice=choice.copy(),
        placements=[None] * problem.tables,
        work=zeros[0],
        send=zeros[1],
        memory=zeros[2],
        receive=receive,
        bisection=bisection,
    )
    time = o.work[choice] + o.send[choice]
    size = np.maximum(time / target.time, o.memory[choice] / target.memory)
    # What lies everywhere or was pinned first; then the largest, groups before single ranks among equals.
    fixed = np.array([table in problem.pinned for table in range(problem.tables)]) | (o.kind[choice] == EVERY)
    order = np.lexsort((np.arange(problem.tables), -o.memory[choice], o.kind[choice], -size, ~fixed))
    for table in order:
        if not place(problem, state, int(table), target):
            return None
    return state


def place(problem: Problem, state: Packing, table: int, target: Target) -> bool:
    """Put one table's items where they hurt least; False (and nothing done) where they do not fit.

    The table's option is `state.choice[table]`; its shared seconds must already be in `state`.
    """
    option = int(state.choice[table])
    placement = _placement(problem, state, table, option, target)
    if placement is None:
        return False
    ranks = item_ranks(problem, option, placement)
    work, send, memory = item_costs(problem, option, placement)
    if (state.memory[ranks] + memory).max() > target.memory_limit * (1 + _EPS):
        return False
    # A table holds a rank at most once, so plain indexing adds every item.
    state.work[ranks] += work
    state.send[ranks] += send
    state.memory[ranks] += memory
    _count_pieces(problem, state, table, len(placement.places) - float(problem.options.count[option]))
    state.placements[table] = placement
    return True


def remove(problem: Problem, state: Packing, table: int) -> None:
    """Take a placed table's items off their ranks; its shared seconds return to the option's own."""
    option = int(state.choice[table])
    placement = state.placements[table]
    assert placement is not None
    ranks = item_ranks(problem, option, placement)
    work, send, memory = item_costs(problem, option, placement)
    state.work[ranks] -= work
    state.send[ranks] -= send
    state.memory[ranks] -= memory
    _count_pieces(problem, state, table, float(problem.options.count[option]) - len(placement.places))
    state.placements[table] = None


def choose(problem: Problem, state: Packing, table: int, option: int) -> None:
    """Change the option of a table that is not placed."""
    o, old = problem.options, state.choice[table]
    state.receive += float(o.receive[option] - o.receive[old])
    state.bisection += float(o.bisection[option] - o.bisection[old])
    state.choice[table] = option


def _count_pieces(problem: Problem, state: Packing, table: int, more: float) -> None:
    if problem.options.kind[state.choice[table]] == STRIPS:
        state.receive += more * float(problem.strips.receive[table])
        state.bisection += more * float(problem.strips.bisection[table])


def _placement(problem: Problem, state: Packing, table: int, option: int, target: Target) -> Placement | None:
    o = problem.options
    if o.kind[option] == EVERY:
        return Placement()
    units = _piece_units(problem, table, option)
    if table in problem.pinned:
        return Placement(places=problem.pinned[table], units=units)
    work = state.work + o.work[option]
    send = state.send + o.send[option]
    memory = state.memory + o.memory[option]
    score = target.score(work + np.maximum(send, state.floor), memory)
    # Equal scores are told apart by memory, then by rank.
    score += 1e-6 * memory / target.memory_limit
    if table in problem.allowed:
        score[~problem.allowed[table]] = np.inf
    if o.kind[option] == GROUP:
        score = score.reshape(problem.groups, problem.group).max(axis=1)
        count = int(o.count[option])
    else:
        count = len(units)
    if count > len(score):
        return None
    best = np.array([int(np.argmin(score))]) if count == 1 else np.argsort(score, kind="stable")[:count]
    return Placement(places=best, units=units) if np.isfinite(score[best]).all() else None


def _piece_units(problem: Problem, table: int, option: int) -> IntArray:
    """Widths of the pieces of a STRIPS option: full ones, then the rest."""
    width = int(problem.options.units[option])
    if width == 0:
        return Placement().units
    full, rest = divmod(int(problem.strips.units[table]), width)
    return np.array([width] * full + [rest] * (rest > 0), dtype=np.int64)
