"""Capacities hold every batch, take few sizes known from the first batch on, and agree between ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from recsys_tpu.embeddings.capacity import SMALLEST, UNKNOWN, Capacities, ladder, rung

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
def test_capacities_hold_every_step_in_a_size_that_the_ladder_has(steps: list[list[tuple[int, int]]]) -> None:
    capacities = Capacities()
    for needed in steps:
        held = capacities.hold(needed)
        for size, need, levels in zip(held, needed, capacities.levels(), strict=True):
            assert size[0] >= need[0] and size[1] >= need[1]
            assert size == next(s for s in levels if s[0] >= need[0] and s[1] >= need[1])
    counters = capacities.counters
    assert counters.steps == len(steps)
    assert counters.ids == sum(ids for step in steps for ids, _ in step)
    assert 0 <= counters.padding_waste <= 1


@given(st.integers(1, 50), st.integers(1, 1 << 16), st.integers(1, 1 << 18), st.data())
def test_with_known_limits_no_size_comes_late(
    max_ids: int, samples: int, rows: int, data: st.DataObject
) -> None:
    limit = (max_ids * samples, rows)
    capacities = Capacities()
    for _ in range(4):
        ids = data.draw(st.integers(0, limit[0]))
        unique = data.draw(st.integers(0, min(ids, rows)))
        capacities.hold([(ids, unique)], limits=[limit])
    assert capacities.counters.late == 0
    (levels,) = capacities.levels()
    assert len(levels) == len(set(levels)) <= 40
    assert levels[-1] == (rung(limit[0]), min(rung(limit[0]), rung(rows)))


def test_without_limits_eight_times_the_first_batch_is_foreseen_and_more_comes_late() -> None:
    capacities = Capacities()
    first = capacities.hold([(10_000, 8_000)])
    for ids in (10_300, 9_000, 10_500):
        assert capacities.hold([(ids, 8_100)]) == first
    capacities.hold([(80_000, 8_000)])
    assert capacities.counters.late == 0
    assert capacities.hold([(10_000, 8_000)]) == first  # back in the small buffers
    assert capacities.hold([(500_000, 8_000)])[0][0] >= 500_000
    assert capacities.counters.late == 1


def test_one_id_a_sample_is_one_size_of_ids_and_few_of_distinct_rows() -> None:
    assert ladder((512, 300), (512, 100_000)) == [(512, 384), (512, 512)]
    assert ladder((0, 0), (UNKNOWN, 50))[0] == (SMALLEST, SMALLEST)


def test_training_and_evaluation_share_no_sizes() -> None:
    capacities = Capacities()
    small = capacities.hold([(1_000, 900)], batch=(8,))
    assert capacities.hold([(4_000, 3_000)], batch=(32,)) != small
    assert capacities.hold([(1_000, 900)], batch=(8,)) == small
    assert capacities.counters.late == 0


def test_ranks_agree_on_the_largest_need_and_fewer_stacks_take_part() -> None:
    other = np.array([[900, 100], [5_000, 4_000]])

    def max_with_other(values: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.maximum(values, [2] if len(values) == 1 else other.reshape(-1))

    held = Capacities(max_with_other).hold([(300, 300)])
    assert held == [(rung(int(np.ceil(900 * 1.125))), rung(int(np.ceil(300 * 1.125))))]
