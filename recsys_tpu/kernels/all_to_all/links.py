"""Bytes that an all-to-all puts on the links of a slice, and the least that any schedule must.

A slice is a grid of chips with a link in each direction between neighbours; an axis may close to a ring.
An equal all-to-all sends `pair_bytes` from every chip to every other.  Messages take a shortest way, one
axis after the other; half of those with two shortest ways (opposite chips of an even ring) go each way.

The bound is the bisection argument for each axis: cut it in two halves and count what must cross.  On a
ring of length k, shortest ways put ``pair_bytes * (chips / k) * floor(k^2 / 4) / 2`` on every link of the
axis; on an open line the middle link carries ``pair_bytes * (chips / k) * floor(k/2) * ceil(k/2)``.
Both are met by the routing above, so an all-to-all of direct writes can reach the bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Slices of these chips are boxes of a plane, whose axes close only at the pod's full length
# (docs.cloud.google.com/tpu/docs/v5e, .../v6e); the others are 3-D and close from a 4x4x4 cube on
# (docs.cloud.google.com/tpu/docs/v5p: "4x4x4 and larger slices have full 3D torus").
_PLANE = ("v5e", "v6e")
_POD_SIDE, _CUBE_SIDE = 16, 4
# Two devices share a chip, and its links.
_DEVICES_PER_CHIP = {"tpu7x": 2}


@dataclass(frozen=True)
class Grid:
    """Chips along each axis, whether the axis closes to a ring, and devices in a chip."""

    shape: tuple[int, ...]
    closed: tuple[bool, ...]
    devices_per_chip: int = 1

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        return self.chips * self.devices_per_chip


def grid_of(topology: str) -> Grid:
    """The grid of a topology such as ``v6e:2x4``.  Raises ValueError for what is none."""
    name, _, sides = topology.partition(":")
    try:
        shape = tuple(int(side) for side in sides.split("x"))
    except ValueError:
        raise ValueError(f"expected a topology like v6e:2x4 or v5p:2x2x2, got {topology!r}") from None
    if name in _PLANE:
        closed = tuple(side == _POD_SIDE for side in shape)
    else:
        cube = all(side % _CUBE_SIDE == 0 for side in shape)
        closed = (cube,) * len(shape)
    return Grid(shape, closed, _DEVICES_PER_CHIP.get(name, 1))


def axis_link_bytes(grid: Grid, axis: int, *, device_pair_bytes: int, split_ties: bool = True) -> float:
    """Bytes on the busiest link along `axis`, in one direction, with the routing above.

    Without `split_ties` all messages between opposite chips of a ring go the same way round.
    """
    length = grid.shape[axis]
    pair_bytes = device_pair_bytes * grid.devices_per_chip**2
    lines = grid.chips // length
    crossing = float(length**2 // 4)
    if grid.closed[axis] and length > 2:
        crossing /= 2
        if not split_ties and length % 2 == 0:
            crossing += length / 4
    return pair_bytes * lines * crossing


def link_bytes(grid: Grid, *, device_pair_bytes: int, split_ties: bool = True) -> float:
    """Bytes on the busiest link of the slice: with ties split, the lower bound of any schedule."""
    return max(
        axis_link_bytes(grid, axis, device_pair_bytes=device_pair_bytes, split_ties=split_ties)
        for axis in range(len(grid.shape))
    )


def sent_bytes(grid: Grid, *, device_pair_bytes: int) -> int:
    """Bytes that leave one device for others, on the same chip or not."""
    return device_pair_bytes * (grid.devices - 1)
