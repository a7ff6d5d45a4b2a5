"""The formulas of `links` against every message of an all-to-all walked link by link."""

from __future__ import annotations

import collections
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys_tpu.kernels.all_to_all.links import Grid, axis_link_bytes, grid_of, link_bytes, sent_bytes

GRIDS = st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=3).filter(
    lambda axes: 1 < math.prod(length for length, _ in axes) <= 64
)


def ways(start: int, end: int, length: int, closed: bool, split_ties: bool) -> list[list[tuple[int, int]]]:
    """The shortest ways between two positions of an axis, each a list of hops."""
    up = [((start + i) % length, (start + i + 1) % length) for i in range((end - start) % length)]
    down = [((start - i) % length, (start - i - 1) % length) for i in range((start - end) % length)]
    if not closed or length == 2:
        return [up if end >= start else down]
    shortest = min(len(up), len(down))
    found = [way for way in (up, down) if len(way) == shortest]
    return found if split_ties else found[:1]


def walked(grid: Grid, split_ties: bool) -> dict[int, float]:
    """Axis -> messages over its busiest directed link, by walking every pair of chips."""
    load: dict[tuple[object, ...], float] = collections.Counter()
    chips = list(itertools.product(*(range(side) for side in grid.shape)))
    for source, target in itertools.permutations(chips, 2):
        for axis, (length, closed) in enumerate(zip(grid.shape, grid.closed, strict=True)):
            # earlier axes are walked already, later ones not yet
            elsewhere = (*target[:axis], None, *source[axis + 1 :])
            found = ways(source[axis], target[axis], length, closed, split_ties)
            for way in found:
                for hop in way:
                    load[axis, elsewhere, hop] += 1 / len(found)
    return {
        axis: max((n for (where, *_), n in load.items() if where == axis), default=0.0)
        for axis in range(len(grid.shape))
    }


@given(GRIDS, st.booleans())
@settings(deadline=None, max_examples=40)
def test_formula_equals_the_walk(axes: list[tuple[int, bool]], split_ties: bool) -> None:
    grid = Grid(tuple(length for length, _ in axes), tuple(closed for _, closed in axes))
    busiest = walked(grid, split_ties)
    for axis in range(len(axes)):
        formula = axis_link_bytes(grid, axis, device_pair_bytes=24, split_ties=split_ties)
        assert formula == pytest.approx(24 * busiest[axis])
    assert link_bytes(grid, device_pair_bytes=24, split_ties=split_ties) == pytest.approx(
        24 * max(busiest.values())
    )


def test_topologies() -> None:
    assert grid_of("v6e:2x4") == Grid((2, 4), (False, False))
    assert grid_of("v6e:16x16") == Grid((16, 16), (True, True))
    assert grid_of("v5p:2x2x4") == Grid((2, 2, 4), (False,) * 3)
    assert grid_of("v5p:4x4x8") == Grid((4, 4, 8), (True,) * 3)
    assert grid_of("tpu7x:2x2x1").devices == 8
    with pytest.raises(ValueError, match="expected a topology like"):
        grid_of("v6e")


def test_devices_of_one_chip_share_its_links() -> None:
    # 2 chips of 2 devices: 2 x 2 pairs cross the one link; each device sends to 3 others
    grid = Grid((2,), (False,), devices_per_chip=2)
    assert link_bytes(grid, device_pair_bytes=10) == 40
    assert sent_bytes(grid, device_pair_bytes=10) == 30
