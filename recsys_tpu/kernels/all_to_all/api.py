"""Exchanges between the chips of a mesh axis, for JAX programs: differentiable, any chunk shape.

Every function runs inside `jax.shard_map(..., check_vma=False)` and mirrors one of `reference`, with
`axis` naming the mesh axis and

    scale            factor applied to float32 payloads before they are rounded for the wire
    wire_dtype       dtype on the links, float32 or bfloat16; None is the payload's own
    grad_wire_dtype  the same for the gradient's way back
    collective_id    distinguishes kernels that may run at the same time
    interpret        False on a chip, `pltpu.InterpretParams` elsewhere

The backward pass of an exchange is the exchange in the other direction, with the same kernel and scale.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from recsys_tpu.kernels.all_to_all import coded, direct, gather, reference, torus
from recsys_tpu.kernels.all_to_all import reduce_scatter as ring_sums
from recsys_tpu.kernels.all_to_all.lines import LANES, Pieces, from_lines, tile_lines, to_lines
from recsys_tpu.kernels.all_to_all.parts import Interpret, Ring

# DMAs that one peer's chunk is cut into.  A ragged exchange moves whole pieces, so it needs finer ones.
EQUAL_PIECES = 4
RAGGED_PIECES = 32

DType = jnp.dtype | type | None


@dataclass(frozen=True, kw_only=True)
class _Options:
    ring: Ring
    scale: float
    wire_dtype: DType
    grad_wire_dtype: DType
    collective_id: int
    interpret: Interpret

    def backward(self) -> _Options:
        return replace(self, wire_dtype=self.grad_wire_dtype, grad_wire_dtype=self.wire_dtype)

    def converts(self, dtype: jnp.dtype) -> bool:
        return self.scale != 1.0 or (self.wire_dtype is not None and jnp.dtype(self.wire_dtype) != dtype)


def _options(
    op: str,
    chunks: jax.Array,
    axis: str,
    *,
    scale: float,
    wire_dtype: DType,
    grad_wire_dtype: DType,
    collective_id: int,
    interpret: Interpret,
) -> _Options:
    chips = lax.axis_size(axis)
    if chunks.ndim < 2 or chunks.shape[0] != chips or 0 in chunks.shape:
        raise ValueError(
            f"{op}(): expected chunks [{chips}, *chunk], one non-empty chunk for each chip of mesh axis "
            f"{axis!r}, got shape {list(chunks.shape)}"
        )
    options = _Options(
        ring=Ring(axis, chips),
        scale=float(scale),
        wire_dtype=wire_dtype,
        grad_wire_dtype=grad_wire_dtype,
        collective_id=collective_id,
        interpret=interpret,
    )
    for direction in (options, options.backward()):
        wire = direction.wire_dtype
        if wire is not None and jnp.dtype(wire) not in (jnp.float32, jnp.bfloat16):
            raise ValueError(
                f"{op}(): expected a wire dtype of float32 or bfloat16, got {jnp.dtype(wire).name}"
            )
        if direction.converts(chunks.dtype) and chunks.dtype != jnp.float32:
            raise ValueError(f"{op}(): scale and wire dtypes need float32 chunks, got {chunks.dtype.name}")
    return options


def all_to_all(
    chunks: jax.Array,
    *,
    axis: str,
    scale: float = 1.0,
    wire_dtype: DType = None,
    grad_wire_dtype: DType = None,
    collective_id: int = 0,
    interpret: Interpret = False,
) -> jax.Array:
    """``[chips, *chunk]``: chunk ``i`` goes to chip ``i``; chunk ``i`` of the result came from chip ``i``.

    Bit for bit `reference.all_to_all`.  Raises ValueError for shapes or dtypes that it does not take.
    """
    options = _options(
        "all_to_all",
        chunks,
        axis,
        scale=scale,
        wire_dtype=wire_dtype,
        grad_wire_dtype=grad_wire_dtype,
        collective_id=collective_id,
        interpret=interpret,
    )
    return _all_to_all(chunks, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _all_to_all(chunks: jax.Array, options: _Options) -> jax.Array:
    if options.ring.size == 1:
        return reference.all_to_all(
            chunks, axis=options.ring.axis, scale=options.scale, wire_dtype=options.wire_dtype
        )
    chunk_shape = chunks.shape[1:]
    elements = math.prod(chunk_shape)
    if not options.converts(chunks.dtype):
        pieces = Pieces.of(elements, tile=tile_lines(chunks.dtype), at_most=EQUAL_PIECES)
        received = direct.direct_all_to_all(
            to_lines(chunks, pieces.lines),
            ring=options.ring,
            pieces=pieces,
            collective_id=options.collective_id,
            interpret=options.interpret,
        )
        return from_lines(received, chunk_shape)
    wire_dtype = options.wire_dtype or chunks.dtype
    pieces = Pieces.of(
        elements,
        tile=tile_lines(chunks.dtype, wire_dtype),
        at_most=EQUAL_PIECES,
        max_lines_each=coded.MAX_PIECE_LINES,
    )
    received = coded.coded_all_to_all(
        to_lines(chunks, pieces.lines),
        ring=options.ring,
        pieces=pieces,
        scale=options.scale,
        wire_dtype=wire_dtype,
        collective_id=options.collective_id,
        interpret=options.interpret,
    )
    return from_lines(received, chunk_shape)


def _all_to_all_forward(chunks: jax.Array, options: _Options) -> tuple[jax.Array, None]:
    return _all_to_all(chunks, options), None


def _all_to_all_backward(options: _Options, residual: None, grad: jax.Array) -> tuple[jax.Array]:
    return (_all_to_all(grad, options.backward()),)


_all_to_all.defvjp(_all_to_all_forward, _all_to_all_backward)


def ragged_all_to_all(
    chunks: jax.Array,
    send_counts: jax.Array,
    *,
    axis: str,
    received_counts: jax.Array | None = None,
    scale: float = 1.0,
    wire_dtype: DType = None,
    grad_wire_dtype: DType = None,
    collective_id: int = 0,
    interpret: Interpret = False,
) -> tuple[jax.Array, jax.Array]:
    """Exchange the first ``send_counts[i]`` rows of every chunk ``i`` of ``[chips, capacity, dim]``.

    Returns the rows received, ``[chips, capacity, dim]`` with zeros behind the valid ones, and their
    counts, int32 ``[chips]``.  Counts are exchanged first, unless the caller knows them from a plan and
    passes `received_counts` (if they contradict the senders, the kernel hangs).

    Only pieces that hold valid rows travel (1/32 of the capacity each, at least one tile), and one piece
    where there are none.  A count above the capacity is not cut: it comes out as it is in the counts
    received, for `check_counts` to refuse on the host; rows beyond the capacity do not travel.
    """
    options = _options(
        "ragged_all_to_all",
        chunks,
        axis,
        scale=scale,
        wire_dtype=wire_dtype,
        grad_wire_dtype=grad_wire_dtype,
        collective_id=collective_id,
        interpret=interpret,
    )
    if chunks.ndim != 3:
        raise ValueError(
            f"ragged_all_to_all(): expected chunks [chips, capacity, dim], got shape {list(chunks.shape)}"
        )
    if send_counts.shape != (options.ring.size,) or send_counts.dtype != jnp.int32:
        raise ValueError(
            f"ragged_all_to_all(): expected int32 send_counts [{options.ring.size}], got "
            f"{send_counts.dtype.name} {list(send_counts.shape)}"
        )
    if received_counts is None:
        received_counts = lax.all_to_all(send_counts, axis, 0, 0, tiled=True)
    return _ragged_all_to_all(chunks, send_counts, received_counts, options), received_counts


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _ragged_all_to_all(
    chunks: jax.Array, send_counts: jax.Array, received_counts: jax.Array, options: _Options
) -> jax.Array:
    if options.ring.size == 1:
        received = reference.all_to_all(
            chunks, axis=options.ring.axis, scale=options.scale, wire_dtype=options.wire_dtype
        )
        return reference.valid_rows(received_counts, received)
    _, capacity, dim = chunks.shape
    wire = _on_the_wire(chunks, options)
    pieces = Pieces.of(capacity * dim, tile=tile_lines(wire.dtype), at_most=RAGGED_PIECES)

    def used_pieces(counts: jax.Array) -> jax.Array:
        return travelling_pieces(jnp.clip(counts, 0, capacity) * dim, pieces)

    received = direct.direct_ragged_all_to_all(
        to_lines(wire, pieces.lines),
        used_pieces(send_counts),
        used_pieces(received_counts),
        ring=options.ring,
        pieces=pieces,
        collective_id=options.collective_id,
        interpret=options.interpret,
    )
    return reference.valid_rows(received_counts, from_lines(received, (capacity, dim)).astype(chunks.dtype))


def _ragged_forward(
    chunks: jax.Array, send_counts: jax.Array, received_counts: jax.Array, options: _Options
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _ragged_all_to_all(chunks, send_counts, received_counts, options), (send_counts, received_counts)


def _ragged_backward(
    options: _Options, counts: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, None, None]:
    send_counts, received_counts = counts
    return _ragged_all_to_all(grad, received_counts, send_counts, options.backward()), None, None


_ragged_all_to_all.defvjp(_ragged_forward, _ragged_backward)


def planned_all_to_all(
    chunks: jax.Array,
    counts: np.ndarray,
    *,
    axis: str,
    scale: float = 1.0,
    wire_dtype: DType = None,
    collective_id: int = 0,
    interpret: Interpret = False,
) -> jax.Array:
    """A ragged exchange whose row counts every chip knows in advance: ``counts[i, j]`` from ``i`` to ``j``.

    ``[chips, capacity, dim]`` to the same; rows behind the valid ones are unset.  The program is the same on
    every chip and asks for no partition id outside the kernel, as an op of torch_tpu must not.  No gradient
    of its own: the way back is the same exchange with ``counts.T``.
    """
    options = _options(
        "planned_all_to_all",
        chunks,
        axis,
        scale=scale,
        wire_dtype=wire_dtype,
        grad_wire_dtype=None,
        collective_id=collective_id,
        interpret=interpret,
    )
    chips, capacity, dim = chunks.shape
    check_counts(counts, capacity=capacity)
    if chips == 1:
        return reference.all_to_all(chunks, axis=axis, scale=scale, wire_dtype=wire_dtype)
    wire = _on_the_wire(chunks, options)
    pieces = Pieces.of(capacity * dim, tile=tile_lines(wire.dtype), at_most=RAGGED_PIECES)
    plan = travelling_pieces(jnp.asarray(counts, jnp.int32) * dim, pieces)
    received = direct.direct_planned_all_to_all(
        to_lines(wire, pieces.lines),
        plan.reshape(-1),
        ring=options.ring,
        pieces=pieces,
        collective_id=collective_id,
        interpret=interpret,
    )
    return from_lines(received, (capacity, dim)).astype(chunks.dtype)


def travelling_pieces(elements: jax.Array, pieces: Pieces) -> jax.Array:
    """Pieces that a pair exchanges for int32 `elements`: those that hold any of them, and at least one.

    A chip that is done has then heard from every peer, so every peer has passed the entry barrier: signals of
    the next exchange, which uses the same barrier semaphore, can't be taken for signals of this one.
    """
    each = pieces.lines_each * LANES
    return jnp.maximum((elements + each - 1) // each, 1)


def _on_the_wire(chunks: jax.Array, options: _Options) -> jax.Array:
    if not options.converts(chunks.dtype):
        return chunks
    return (chunks * options.scale).astype(options.wire_dtype or chunks.dtype)


def torus_all_to_all(
    chunks: jax.Array, *, axes: tuple[str, str], collective_id: int = 0, interpret: Interpret = False
) -> jax.Array:
    """`all_to_all` over two mesh axes, ``[X * Y, *chunk]``, one hop along each.

    Bit for bit `reference.all_to_all(chunks, axis=axes)`.  Raises ValueError for other shapes.
    """
    rings = tuple(Ring(axis, lax.axis_size(axis)) for axis in axes)
    chips = math.prod(ring.size for ring in rings)
    if len(rings) != 2 or min(ring.size for ring in rings) < 2:
        raise ValueError(
            "torus_all_to_all(): expected two axes of two chips or more, got "
            f"{[(ring.axis, ring.size) for ring in rings]}; use all_to_all() on one axis"
        )
    if chunks.ndim < 2 or chunks.shape[0] != chips or 0 in chunks.shape:
        raise ValueError(
            f"torus_all_to_all(): expected chunks [{chips}, *chunk], one non-empty chunk for each chip of "
            f"mesh axes {axes}, got shape {list(chunks.shape)}"
        )
    return _torus_all_to_all(chunks, (rings[0], rings[1]), collective_id, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _torus_all_to_all(
    chunks: jax.Array, rings: tuple[Ring, Ring], collective_id: int, interpret: Interpret
) -> jax.Array:
    chunk_shape = chunks.shape[1:]
    tile = tile_lines(chunks.dtype)
    # two pieces, one for each order of the axes, even if the chunk would fit one
    elements = max(math.prod(chunk_shape), LANES * tile + 1)
    pieces = Pieces.of(elements, tile=tile, at_most=2)
    received = torus.torus_all_to_all(
        to_lines(chunks, pieces.lines),
        rings=rings,
        pieces=pieces,
        collective_id=collective_id,
        interpret=interpret,
    )
    return from_lines(received, chunk_shape)


def _torus_forward(
    chunks: jax.Array, rings: tuple[Ring, Ring], collective_id: int, interpret: Interpret
) -> tuple[jax.Array, None]:
    return _torus_all_to_all(chunks, rings, collective_id, interpret), None


def _torus_backward(
    rings: tuple[Ring, Ring], collective_id: int, interpret: Interpret, residual: None, grad: jax.Array
) -> tuple[jax.Array]:
    return (_torus_all_to_all(grad, rings, collective_id, interpret),)


_torus_all_to_all.defvjp(_torus_forward, _torus_backward)


def reduce_scatter(
    chunks: jax.Array, *, axis: str, collective_id: int = 0, interpret: Interpret = False
) -> jax.Array:
    """float32 ``[chips, *chunk]`` partial sums to ``[*chunk]``: the sum of the chunk that this chip owns.

    `reference.reduce_scatter` up to the order of the sums; its gradient is an all-gather.  Raises
    ValueError for shapes or dtypes that it does not take.
    """
    chips = lax.axis_size(axis)
    if chunks.ndim < 2 or chunks.shape[0] != chips or 0 in chunks.shape or chunks.dtype != jnp.float32:
        raise ValueError(
            f"reduce_scatter(): expected float32 chunks [{chips}, *chunk], one non-empty chunk for each chip "
            f"of mesh axis {axis!r}, got {chunks.dtype.name} {list(chunks.shape)}"
        )
    return _reduce_scatter(chunks, Ring(axis, chips), collective_id, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _reduce_scatter(chunks: jax.Array, ring: Ring, collective_id: int, interpret: Interpret) -> jax.Array:
    if ring.size == 1:
        return chunks[0]
    chunk_shape = chunks.shape[1:]
    bands = ring_sums.Bands.of(math.prod(chunk_shape), tile=tile_lines(chunks.dtype))
    total = ring_sums.ring_reduce_scatter(
        to_lines(chunks, bands.lines),
        ring=ring,
        bands=bands,
        collective_id=collective_id,
        interpret=interpret,
    )
    return from_lines(total[None], chunk_shape)[0]


def _reduce_scatter_forward(
    chunks: jax.Array, ring: Ring, collective_id: int, interpret: Interpret
) -> tuple[jax.Array, None]:
    return _reduce_scatter(chunks, ring, collective_id, interpret), None


def _reduce_scatter_backward(
    ring: Ring, collective_id: int, interpret: Interpret, residual: None, grad: jax.Array
) -> tuple[jax.Array]:
    return (_all_gather(grad, ring, collective_id, interpret),)


def all_gather(
    chunk: jax.Array, *, axis: str, collective_id: int = 0, interpret: Interpret = False
) -> jax.Array:
    """``[*chunk]`` to ``[chips, *chunk]``: every chip's chunk; bit for bit `reference.all_gather`.

    The way back of `reduce_scatter`; it has no gradient of its own.  Raises ValueError for an empty chunk.
    """
    if chunk.ndim < 1 or 0 in chunk.shape:
        raise ValueError(f"all_gather(): expected a non-empty chunk, got shape {list(chunk.shape)}")
    return _all_gather(chunk, Ring(axis, lax.axis_size(axis)), collective_id, interpret)


def _all_gather(chunk: jax.Array, ring: Ring, collective_id: int, interpret: Interpret) -> jax.Array:
    if ring.size == 1:
        return chunk[None]
    pieces = Pieces.of(chunk.size, tile=tile_lines(chunk.dtype), at_most=EQUAL_PIECES)
    gathered = gather.direct_all_gather(
        to_lines(chunk[None], pieces.lines)[0],
        ring=ring,
        pieces=pieces,
        collective_id=collective_id,
        interpret=interpret,
    )
    return from_lines(gathered, chunk.shape)


_reduce_scatter.defvjp(_reduce_scatter_forward, _reduce_scatter_backward)


def check_counts(counts: np.ndarray, *, capacity: int) -> None:
    """Raise ValueError if an exchange was asked for more rows than its buffers hold.

    `counts` are rows sent or received, of any shape; the last axis is the peer chip.
    """
    counts = np.asarray(counts)
    bad = np.argwhere((counts < 0) | (counts > capacity))
    if len(bad):
        where = tuple(int(i) for i in bad[0])
        raise ValueError(
            f"ragged_all_to_all(): expected counts of 0 to {capacity} rows (the capacity), got "
            f"{int(counts[where])} for chip {where[-1]}; raise the capacity to at least {int(counts.max())}"
        )
