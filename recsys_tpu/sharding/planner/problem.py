"""The planner's optimisation problem, free of tables and chips: options, ranks, limits.

Every table takes exactly one of its options:

EVERY   one item on every rank (row-wise, data-parallel);
GROUP   `count` equal items, each on all ranks of one group (table-row-wise, grid);
STRIPS  column shards: pieces of whole units (registers of columns) on ranks of their own, together all
        units of the table.  One piece is table-wise, several are column-wise; pieces may differ in width.
        An option says the width of its pieces; the balancing step may move units between them.

An item costs its rank `work` seconds of HBM and of ring collectives, `send` seconds of link time and
`memory` bytes.  The plan costs every rank `receive` seconds of link time and the slice `bisection`
seconds.  Links are full duplex, so a rank's time is

    time(r) = Σ work + max(Σ send, receive, bisection)

with work and send over what it holds.  Minimise the slowest rank within a memory limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

EVERY, GROUP, STRIPS = 0, 1, 2
NOWHERE: IntArray = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Options:
    """All options of all tables, as columns; sorted by table.

    `units` is the width of the pieces of a STRIPS option (0 for others) and `count` their number, which is a
    fraction where the last piece is narrower.  work, send and memory are of one item (full-width piece).
    """

    table: IntArray
    kind: IntArray
    units: IntArray
    count: FloatArray
    work: FloatArray
    send: FloatArray
    memory: FloatArray
    receive: FloatArray
    bisection: FloatArray

    def __len__(self) -> int:
        return len(self.table)


@dataclass(frozen=True, kw_only=True)
class Strips:
    """Costs of column shards, [tables, units + 1]: entry [t, u] is a piece of u units of table t.

    Attributes:
        units: units of each table.
        divisible: whether a table's columns may be split at all.
        whole: whether a table may lie on one rank as a whole.
        receive, bisection: seconds per piece, added to the option-wide part in `fixed_*`.
    """

    units: IntArray
    divisible: BoolArray
    whole: BoolArray
    work: FloatArray
    send: FloatArray
    memory: FloatArray
    receive: FloatArray
    bisection: FloatArray
    fixed_receive: FloatArray
    fixed_bisection: FloatArray


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Options of `tables` tables over `ranks` equal ranks in groups of `group`.

    Attributes:
        memory_limit: bytes that one rank can give to items.
        allowed: for a table, the ranks its items may lie on (absent: all).
        pinned: for a table, the exact places of its items (ranks, or groups for GROUP options).
    """

    options: Options
    strips: Strips
    tables: int
    ranks: int
    group: int
    memory_limit: float
    allowed: Mapping[int, BoolArray] = field(default_factory=dict)
    pinned: Mapping[int, IntArray] = field(default_factory=dict)
    first: IntArray = field(init=False)
    copies: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        first = np.searchsorted(self.options.table, np.arange(self.tables + 1))
        assert (np.diff(first) > 0).all(), "a table without options"
        object.__setattr__(self, "first", first.astype(np.int64))
        o = self.options
        copies = np.where(o.kind == EVERY, self.ranks, o.count * np.where(o.kind == GROUP, self.group, 1))
        object.__setattr__(self, "copies", copies)

    @property
    def groups(self) -> int:
        return self.ranks // self.group

    def of_table(self, table: int) -> slice:
        """Its options."""
        return slice(int(self.first[table]), int(self.first[table + 1]))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one table lies: nothing for EVERY, groups for GROUP, ranks and units of each piece for STRIPS."""

    places: IntArray = field(default_factory=lambda: NOWHERE)
    units: IntArray = field(default_factory=lambda: NOWHERE)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One option and one placement per table."""

    choice: IntArray
    placements: Sequence[Placement]


@dataclass(frozen=True, kw_only=True)
class Loads:
    """Seconds and bytes of every rank under an assignment."""

    work: FloatArray
    send: FloatArray
    memory: FloatArray
    floor: float

    @property
    def time(self) -> FloatArray:
        """Seconds of each rank."""
        return self.work + np.maximum(self.send, self.floor)


def item_ranks(problem: Problem, option: int, placement: Placement) -> IntArray:
    """Ranks that hold an item of an option."""
    kind = problem.options.kind[option]
    if kind == EVERY:
        return np.arange(problem.ranks)
    if kind == STRIPS:
        return placement.places
    return (placement.places[:, None] * problem.group + np.arange(problem.group)).ravel()


def item_costs(
    problem: Problem, option: int, placement: Placement
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """work, send and memory on each of `item_ranks`."""
    o, s = problem.options, problem.strips
    if o.kind[option] == STRIPS:
        at = (o.table[option], placement.units)
        return s.work[at], s.send[at], s.memory[at]
    return o.work[option : option + 1], o.send[option : option + 1], o.memory[option : option + 1]


def shared_seconds(
    problem: Problem, choice: IntArray, placements: Sequence[Placement | None]
) -> tuple[float, float]:
    """Receive and bisection seconds of a plan; a table not placed yet counts as its option says."""
    o, s = problem.options, problem.strips
    receive, bisection = o.receive[choice], o.bisection[choice]
    for table in np.flatnonzero(o.kind[choice] == STRIPS).tolist():
        placement = placements[table]
        if placement is not None:
            pieces = len(placement.places)
            receive[table] = s.fixed_receive[table] + pieces * s.receive[table]
            bisection[table] = s.fixed_bisection[table] + pieces * s.bisection[table]
    return float(receive.sum()), float(bisection.sum())


def loads(problem: Problem, assignment: Assignment) -> Loads:
    """Evaluate an assignment."""
    work, send, memory = (np.zeros(problem.ranks) for _ in range(3))
    for option, placement in zip(assignment.choice, assignment.placements, strict=True):
        ranks = item_ranks(problem, int(option), placement)
        for total, cost in zip(
            (work, send, memory), item_costs(problem, int(option), placement), strict=True
        ):
            np.add.at(total, ranks, cost)
    floor = max(shared_seconds(problem, assignment.choice, assignment.placements))
    return Loads(work=work, send=send, memory=memory, floor=floor)
