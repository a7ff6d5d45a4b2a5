"""Static buffer sizes for a step's ids: few sizes, all known from the first batch on.

Every size of a buffer is one more program to compile, and a program that is compiled in the middle of a
run stops every rank.  So the first batch of a stack decides all sizes that it will ever need: its own need
with some headroom, and doublings of that up to what no batch can exceed.  The programs of all of them are
compiled in the first step; each batch then takes the smallest that holds it.  Nothing is dropped: a batch
that needs more than the largest size (possible only where the limit is not known) adds one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SMALLEST = 256
STEPS_PER_DOUBLING = 4
HEADROOM = 1.125  # of the first batch, so that the second one seldom takes the next size
DOUBLINGS = 3  # of the first batch, where nothing says how many ids a batch can have
UNKNOWN = np.iinfo(np.int64).max

MaxOverRanks = Callable[[NDArray[np.int64]], NDArray[np.int64]]
Size = tuple[int, int]
"""(ids, distinct rows) that a buffer holds."""


def rung(needed: int, smallest: int = SMALLEST) -> int:
    """The smallest size on the ladder that holds `needed`: 256, 320, 384, 448, 512, 640, ...

    Four sizes a doubling: at most 25% of a buffer is padding, and a million ids is the 49th size.
    smallest: where the ladder begins, a power of two of at least 4.
    """
    if needed <= smallest:
        return smallest
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
    late: int = 0
    """Sizes that were not known from the first batch on: each was compiled when it came."""
    shapes: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def padding_waste(self) -> float:
        """Share of the id slots that held padding, 0 to 1."""
        return 1 - self.ids / self.id_slots if self.id_slots else 0.0


class Capacities:
    """The sizes of the buffers of each stack of one rank, agreed with the other ranks.

    `max_over_ranks` takes int64 `[n]` and returns its elementwise maximum over ranks; None for a single
    rank.  Stack `i` of one rank has the sizes of stack `i` of every other, so that ranks that hold the
    same tables (row-wise plans) run the same programs, and none compiles while the others wait for it.
    """

    def __init__(self, max_over_ranks: MaxOverRanks | None = None) -> None:
        self._max_over_ranks = max_over_ranks
        self._ladders: dict[Hashable, list[list[Size]]] = {}
        self._stacks_of_any_rank: int | None = None
        self.counters = CapacityCounters()

    def hold(
        self,
        needed: Sequence[Size],
        *,
        limits: Sequence[Size] | None = None,
        batch: Hashable = None,
        smallest: Sequence[int] = (),
    ) -> list[Size]:
        """Sizes that hold `needed`, one per stack.  A collective call on every rank.

        limits: what a batch can need at most, `UNKNOWN` where nothing is known.
        batch: what tells batches of different sizes apart (training and evaluation): they share no sizes.
        smallest: where the ladders of the first entries begin, the same on every rank; `SMALLEST` for others.
        """
        wanted = self._agree(needed)
        if batch not in self._ladders:
            most = self._agree(limits or [(UNKNOWN, UNKNOWN)] * len(needed))
            least = [*smallest, *(SMALLEST for _ in range(len(wanted) - len(smallest)))]
            self._ladders[batch] = [
                ladder(need, limit, first)
                for need, limit, first in zip(_sizes(wanted), _sizes(most), least, strict=True)
            ]
        held = [
            self._smallest(of_stack, need)
            for of_stack, need in zip(self._ladders[batch], _sizes(wanted), strict=True)
        ][: len(needed)]
        self._count(needed, held)
        return held

    def levels(self, batch: Hashable = None) -> list[list[Size]]:
        """All sizes of each stack for batches of this kind, smallest first."""
        return self._ladders[batch]

    def _smallest(self, of_stack: list[Size], need: Size) -> Size:
        for size in of_stack:
            if _holds(size, need):
                return size
        self.counters.late += 1
        largest = of_stack[-1]
        of_stack.append((rung(max(largest[0], need[0])), rung(max(largest[1], need[1]))))
        return of_stack[-1]

    def _agree(self, values: Sequence[Size]) -> NDArray[np.int64]:
        local = np.asarray(values, np.int64).reshape(-1, 2)
        if self._max_over_ranks is None:
            return local
        if self._stacks_of_any_rank is None:
            self._stacks_of_any_rank = int(self._max_over_ranks(np.array([len(local)]))[0])
        padded = np.zeros((self._stacks_of_any_rank, 2), np.int64)
        padded[: len(local)] = local
        return self._max_over_ranks(padded.reshape(-1)).reshape(-1, 2)

    def _count(self, needed: Sequence[Size], held: list[Size]) -> None:
        counters = self.counters
        counters.steps += 1
        for (ids, unique), (id_slots, unique_slots) in zip(needed, held, strict=True):
            counters.ids += ids
            counters.id_slots += id_slots
            counters.unique_rows += unique
            counters.unique_slots += unique_slots
        counters.shapes.add(tuple(size for of_stack in held for size in of_stack))


def ladder(first: Size, limit: Size, smallest: int = SMALLEST) -> list[Size]:
    """The sizes of a stack whose first batch needs `first` and whose batches never need more than `limit`.

    Distinct rows are never more than the ids, or than the rows of the stack (the second limit).
    """
    sizes: list[Size] = []
    doublings = DOUBLINGS if limit[0] == UNKNOWN else 64  # a known limit ends the ladder by itself
    for doubling in range(doublings + 1):
        ids, unique = (
            rung(max(int(np.ceil(need * HEADROOM)), smallest) << doubling, smallest) for need in first
        )
        ids = min(ids, _rung_of_limit(limit[0]))
        unique = min(unique, ids, _rung_of_limit(limit[1]))
        size = (max(ids, rung(first[0], smallest)), max(unique, rung(first[1], smallest)))
        if sizes and size == sizes[-1]:
            break
        sizes.append(size)
    return sizes


def _rung_of_limit(limit: int) -> int:
    return UNKNOWN if limit == UNKNOWN else rung(limit)


def _holds(size: Size, need: Size) -> bool:
    return size[0] >= need[0] and size[1] >= need[1]


def _sizes(values: NDArray[np.int64]) -> list[Size]:
    return [(int(ids), int(unique)) for ids, unique in values]
