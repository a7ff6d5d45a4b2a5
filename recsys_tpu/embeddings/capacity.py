"""Static buffer sizes for a step's ids: few distinct sizes, so that programs are few and re-used.

A batch that needs more than the current capacity moves it up the ladder; nothing is dropped.  A capacity
never moves down: a smaller buffer would be one more program to compile for the sake of some padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SMALLEST = 256
STEPS_PER_DOUBLING = 4
HEADROOM = 1.125  # of the first batch, so that the second one seldom moves up

MaxOverRanks = Callable[[NDArray[np.int64]], NDArray[np.int64]]


def rung(needed: int) -> int:
    """The smallest size on the ladder that holds `needed`: 256, 320, 384, 448, 512, 640, ...

    Four sizes a doubling: at most 25% of a buffer is padding, and a million ids is the 49th size.
    """
    if needed <= SMALLEST:
        return SMALLEST
    base = 1 << (needed - 1).bit_length() - 1  # the power of two below `needed`
    step = base // STEPS_PER_DOUBLING
    return base + -(-(needed - base) // step) * step


@dataclass
class CapacityCounters:
    """What static shapes cost so far: sizes are in ids (or distinct rows), summed over steps and stacks."""

    steps: int = 0
    ids: int = 0
    id_slots: int = 0
    unique_rows: int = 0
    unique_slots: int = 0
    moves: int = 0
    shapes: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def padding_waste(self) -> float:
        """Share of the id slots that held padding, 0 to 1."""
        return 1 - self.ids / self.id_slots if self.id_slots else 0.0


class Capacities:
    """The current (id, unique-row) capacity of each stack of one rank, agreed with the other ranks.

    `max_over_ranks` takes int64 `[n]` and returns its elementwise maximum over ranks; None for a single
    rank.  Stack `i` of one rank has the capacity of stack `i` of every other, so that ranks that hold the
    same tables (row-wise plans) run the same programs, and none compiles while the others wait for it.
    """

    def __init__(self, max_over_ranks: MaxOverRanks | None = None) -> None:
        self._max_over_ranks = max_over_ranks
        self._current: NDArray[np.int64] | None = None
        self._stacks_of_any_rank: int | None = None
        self.counters = CapacityCounters()

    def hold(self, needed: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Capacities that hold `needed`, (ids, distinct rows) per stack.  A collective call on every rank."""
        wanted = self._agree(needed)
        if self._current is None:
            self._current = self._rungs(wanted * HEADROOM)
        elif (wanted > self._current).any():
            self.counters.moves += int((wanted > self._current).sum())
            self._current = np.maximum(self._current, self._rungs(wanted))
        capacities = [(int(ids), int(unique)) for ids, unique in self._current[: len(needed)]]
        self._count(needed, capacities)
        return capacities

    def _agree(self, needed: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
        local = np.asarray(needed, np.int64).reshape(-1, 2)
        if self._max_over_ranks is None:
            return local
        if self._stacks_of_any_rank is None:
            self._stacks_of_any_rank = int(self._max_over_ranks(np.array([len(local)]))[0])
        padded = np.zeros((self._stacks_of_any_rank, 2), np.int64)
        padded[: len(local)] = local
        return self._max_over_ranks(padded.reshape(-1)).reshape(-1, 2)

    @staticmethod
    def _rungs(needed: NDArray[np.integer] | NDArray[np.floating]) -> NDArray[np.int64]:
        sizes = [[rung(int(np.ceil(size))) for size in stack] for stack in needed]
        return np.asarray(sizes, np.int64).reshape(-1, 2)

    def _count(self, needed: Sequence[tuple[int, int]], capacities: list[tuple[int, int]]) -> None:
        counters = self.counters
        counters.steps += 1
        for (ids, unique), (id_slots, unique_slots) in zip(needed, capacities, strict=True):
            counters.ids += ids
            counters.id_slots += id_slots
            counters.unique_rows += unique
            counters.unique_slots += unique_slots
        counters.shapes.add(tuple(size for stack in capacities for size in stack))
