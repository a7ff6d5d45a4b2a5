"""Capacities hold every batch, move only up, take few sizes, and are the same on every rank."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from recsys_tpu.embeddings.capacity import SMALLEST, Capacities, rung

SIZES = st.integers(0, 10_000_000)


@given(SIZES)
def test_a_rung_holds_what_is_needed_with_at_most_a_quarter_of_padding(needed: int) -> None:
    size = rung(needed)
    assert size >= needed
    assert size == SMALLEST or size < needed * 1.25 + 1
    assert rung(size) == size


def test_the_ladder_has_four_sizes_a_doubling() -> None:
    assert [rung(n) for n in (0, 256, 257, 321, 385, 449, 513)] == [256, 256, 320, 384, 448, 512, 640]
    assert len({rung(n) for n in range(1 << 16)}) == 1 + 4 * 8


@given(st.lists(st.lists(st.tuples(SIZES, SIZES), min_size=2, max_size=2), min_size=1, max_size=8))
def test_capacities_hold_every_step_and_never_shrink(steps: list[list[tuple[int, int]]]) -> None:
    capacities = Capacities()
    before = [(0, 0), (0, 0)]
    for needed in steps:
        held = capacities.hold(needed)
        for size, old, need in zip(held, before, needed, strict=True):
            assert size[0] >= max(old[0], need[0]) and size[1] >= max(old[1], need[1])
        before = held
    counters = capacities.counters
    assert counters.steps == len(steps)
    assert counters.ids == sum(ids for step in steps for ids, _ in step)
    assert 0 <= counters.padding_waste <= 1


def test_small_changes_do_not_move_capacities() -> None:
    capacities = Capacities()
    first = capacities.hold([(10_000, 8_000)])
    for ids in (10_300, 9_000, 10_500):
        assert capacities.hold([(ids, 8_100)]) == first
    assert capacities.counters.moves == 0
    assert len(capacities.counters.shapes) == 1
    capacities.hold([(50_000, 8_000)])
    assert capacities.counters.moves == 1


def test_ranks_agree_on_the_largest_need_and_fewer_stacks_take_part() -> None:
    other = np.array([[900, 100], [5_000, 4_000]])

    def max_with_other(values: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.maximum(values, [2] if len(values) == 1 else other.reshape(-1))

    held = Capacities(max_with_other).hold([(300, 300)])
    assert held == [(rung(int(np.ceil(900 * 1.125))), rung(int(np.ceil(300 * 1.125))))]
