"""How a payload travels: chunks cut into lines of 128 lanes, moved in pieces of whole tiles.

A remote DMA moves what lies in HBM, padding included: a ``[rows, 64]`` float32 array is stored in tiles of
(8, 128), so half of the bytes it would put on a link are padding.  Every exchange therefore works on
``[chips, lines, 128]``, in which nothing but the end of a chunk is padding, whatever the embedding dim.
A flat buffer takes that shape without a copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

LANES = 128


def tile_lines(*dtypes: jnp.dtype | type) -> int:
    """Lines of one (sublane, lane) tile: 8 for 4-byte elements, 16 for 2-byte ones; the largest wins."""
    for dtype in dtypes:
        if jnp.dtype(dtype).itemsize not in (2, 4):
            raise ValueError(f"an exchange moves 2- or 4-byte elements, not {jnp.dtype(dtype).name}")
    return max(32 // jnp.dtype(dtype).itemsize for dtype in dtypes)


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """One chunk of `lines` lines, moved as `count` DMAs of `lines_each` lines.

    Several DMAs to one peer are in flight together, so that a link does not idle between two of them.
    """

    count: int
    lines_each: int

    @property
    def lines(self) -> int:
        return self.count * self.lines_each

    @staticmethod
    def of(elements: int, *, tile: int, at_most: int, max_lines_each: int | None = None) -> Pieces:
        """Cut a chunk of `elements` into up to `at_most` pieces of whole tiles, rounding the chunk up.

        `max_lines_each` bounds a piece that has to fit a VMEM buffer; it wins over `at_most`.
        """
        if elements < 1:
            raise ValueError(f"a chunk needs at least one element, got {elements}")
        tiles = math.ceil(elements / (LANES * tile))
        count = min(at_most, tiles)
        if max_lines_each is not None:
            count = max(count, math.ceil(tiles * tile / max_lines_each))
        tiles_each = math.ceil(tiles / count)
        return Pieces(count=math.ceil(tiles / tiles_each), lines_each=tiles_each * tile)


def to_lines(chunks: jax.Array, lines: int) -> jax.Array:
    """``[chips, *chunk]`` to ``[chips, lines, 128]``, zeros behind the end of each chunk."""
    flat = chunks.reshape(chunks.shape[0], -1)
    spare = lines * LANES - flat.shape[1]
    assert spare >= 0, (chunks.shape, lines)
    if spare:
        flat = jnp.pad(flat, ((0, 0), (0, spare)))
    return flat.reshape(chunks.shape[0], lines, LANES)


def from_lines(lines: jax.Array, chunk_shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `to_lines`: drop the padding and restore ``[chips, *chunk_shape]``."""
    flat = lines.reshape(lines.shape[0], -1)[:, : math.prod(chunk_shape)]
    return flat.reshape(lines.shape[0], *chunk_shape)
