"""Small instances solved to the optimum as one mixed-integer program (HiGHS branch and bound)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import coo_matrix

from recsys_tpu.sharding.planner.highs import INFINITY, minimise
from recsys_tpu.sharding.planner.problem import EVERY, GROUP, STRIPS, Assignment, Placement, Problem

_MOST_VARIABLES = 320
_NODES = 4000


@dataclass
class _Model:
    """Rows and binary columns of a program that is built up piece by piece; column 0 is the time."""

    ranks: int
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    columns: int = 1
    rows: int = 0
    limits: list[tuple[float, float]] = field(default_factory=list)

    def row(self, low: float, high: float) -> int:
        self.limits.append((low, high))
        self.rows += 1
        return self.rows - 1

    def column(self) -> int:
        self.columns += 1
        return self.columns - 1

    def add(self, row: int, column: int, value: float) -> None:
        if value:
            self.entries.append((row, column, value))


def solve_exactly(problem: Problem, time_scale: float) -> Assignment | None:
    """The optimal assignment; None where the instance is too large, has pins, or none fits memory.

    Args:
        time_scale: seconds of about the optimum, for the solver's tolerances.
    """
    variables = int(problem.ranks * problem.strips.units.sum()) + len(problem.options) * problem.groups
    if variables > _MOST_VARIABLES or problem.pinned:
        return None
    o, s = problem.options, problem.strips
    model = _Model(problem.ranks)
    # Per rank: work + send, work + receive, work + bisection within the time; memory within the limit.
    timed = [[model.row(-INFINITY, 0.0) for _ in range(problem.ranks)] for _ in range(3)]
    memory = [model.row(-INFINITY, 1.0) for _ in range(problem.ranks)]
    for rows in timed:
        for row in rows:
            model.add(row, 0, -1.0)

    def load(column: int, rank: int, work: float, send: float, size: float) -> None:
        model.add(timed[0][rank], column, (work + send) / time_scale)
        model.add(timed[1][rank], column, work / time_scale)
        model.add(timed[2][rank], column, work / time_scale)
        model.add(memory[rank], column, size / problem.memory_limit)

    def wait(column: int, receive: float, bisection: float) -> None:
        for rank in range(problem.ranks):
            model.add(timed[1][rank], column, receive / time_scale)
            model.add(timed[2][rank], column, bisection / time_scale)

    meaning: list[tuple[int, int, int, int]] = []  # column, table, option or -units, place
    for table in range(problem.tables):
        one = model.row(1.0, 1.0)
        mine = range(*problem.of_table(table).indices(len(o)))
        for option in mine:
            if o.kind[option] == STRIPS:
                continue
            chosen = model.column()
            model.add(one, chosen, 1.0)
            wait(chosen, float(o.receive[option]), float(o.bisection[option]))
            if o.kind[option] == EVERY:
                meaning.append((chosen, table, option, 0))
                for rank in range(problem.ranks):
                    load(chosen, rank, float(o.work[option]), float(o.send[option]), float(o.memory[option]))
                continue
            count = model.row(0.0, 0.0)
            model.add(count, chosen, -float(o.count[option]))
            for group in range(problem.groups):
                ranks = range(group * problem.group, (group + 1) * problem.group)
                if table in problem.allowed and not problem.allowed[table][list(ranks)].all():
                    continue
                item = model.column()
                meaning.append((item, table, option, group))
                model.add(count, item, 1.0)
                for rank in ranks:
                    load(item, rank, float(o.work[option]), float(o.send[option]), float(o.memory[option]))
        if not any(o.kind[option] == STRIPS for option in mine):
            continue
        chosen = model.column()
        model.add(one, chosen, 1.0)
        wait(chosen, float(s.fixed_receive[table]), float(s.fixed_bisection[table]))
        cover = model.row(0.0, 0.0)
        model.add(cover, chosen, -float(s.units[table]))
        for rank in range(problem.ranks):
            if table in problem.allowed and not problem.allowed[table][rank]:
                continue
            once = model.row(-INFINITY, 1.0)
            for units in _piece_widths(problem, table):
                piece = model.column()
                meaning.append((piece, table, -units, rank))
                model.add(cover, piece, float(units))
                model.add(once, piece, 1.0)
                load(
                    piece,
                    rank,
                    float(s.work[table, units]),
                    float(s.send[table, units]),
                    float(s.memory[table, units]),
                )
                wait(piece, float(s.receive[table]), float(s.bisection[table]))
    values = _run(model)
    return None if values is None else _assignment(problem, meaning, values)


def _piece_widths(problem: Problem, table: int) -> list[int]:
    units, s = int(problem.strips.units[table]), problem.strips
    narrow = list(range(1, units)) if s.divisible[table] else []
    return narrow + ([units] if s.whole[table] else [])


def _run(model: _Model) -> np.ndarray | None:
    rows, columns, values = (np.array(part) for part in zip(*model.entries, strict=True))
    matrix = coo_matrix((values, (rows, columns)), shape=(model.rows, model.columns)).tocsc()
    binary = np.ones(model.columns - 1)
    return minimise(
        np.append(1.0, 0 * binary),
        matrix,
        np.array([low for low, _ in model.limits]),
        np.array([high for _, high in model.limits]),
        np.append(INFINITY, binary),
        integer=[False] + [True] * len(binary),
        nodes=_NODES,
    )


def _assignment(problem: Problem, meaning: list[tuple[int, int, int, int]], values: np.ndarray) -> Assignment:
    o = problem.options
    places: list[list[tuple[int, int]]] = [[] for _ in range(problem.tables)]
    choice = np.full(problem.tables, -1)
    for column, table, what, place in meaning:
        if values[column] > 0.5:
            places[table].append((place, max(-what, 0)))
            choice[table] = what if what >= 0 else _strip_option(problem, table, -what)
    placements = []
    for table, items in enumerate(places):
        where = np.array([place for place, _ in items])
        units = np.array([width for _, width in items])
        kind = o.kind[choice[table]]
        if kind == EVERY:
            placements.append(Placement())
        else:
            placements.append(
                Placement(places=where, units=units) if kind != GROUP else Placement(places=where)
            )
    return Assignment(choice=choice, placements=placements)


def _strip_option(problem: Problem, table: int, units: int) -> int:
    """An option that stands for pieces of that width (any STRIPS option: the placement says the rest)."""
    mine = problem.of_table(table)
    strips = [option for option in range(mine.start, mine.stop) if problem.options.kind[option] == STRIPS]
    return next((option for option in strips if problem.options.units[option] == units), strips[0])
