"""The exchanges written with XLA's own collectives: what every kernel is tested against, and the fallback.

All run inside `jax.shard_map`, over one or several mesh axes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

Axes = str | tuple[str, ...]


def all_to_all(
    chunks: jax.Array, *, axis: Axes, scale: float = 1.0, wire_dtype: jnp.dtype | type | None = None
) -> jax.Array:
    """``[chips, *chunk]``: chunk ``i`` goes to chip ``i``; chunk ``i`` of the result came from chip ``i``."""
    wire = (chunks * jnp.asarray(scale, chunks.dtype)).astype(wire_dtype or chunks.dtype)
    return lax.all_to_all(wire, axis, 0, 0, tiled=True).astype(chunks.dtype)


def valid_rows(counts: jax.Array, chunks: jax.Array) -> jax.Array:
    """`chunks` ``[chips, capacity, dim]`` with zeros in the rows of chunk ``i`` from ``counts[i]`` on."""
    keep = jnp.arange(chunks.shape[1])[None, :] < counts[:, None]
    return jnp.where(keep[:, :, None], chunks, jnp.zeros((), chunks.dtype))


def ragged_all_to_all(
    chunks: jax.Array,
    send_counts: jax.Array,
    *,
    axis: Axes,
    scale: float = 1.0,
    wire_dtype: jnp.dtype | type | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Like `all_to_all` for the first ``send_counts[i]`` rows of chunk ``i``; returns the counts received."""
    received_counts = lax.all_to_all(send_counts, axis, 0, 0, tiled=True)
    received = all_to_all(chunks, axis=axis, scale=scale, wire_dtype=wire_dtype)
    return valid_rows(received_counts, received), received_counts


def reduce_scatter(chunks: jax.Array, *, axis: Axes) -> jax.Array:
    """``[chips, *chunk]`` partial sums to ``[*chunk]``: the chips' sum of the chunk that this one owns."""
    return lax.psum_scatter(chunks, axis, scatter_dimension=0, tiled=False)


def all_gather(chunk: jax.Array, *, axis: Axes) -> jax.Array:
    """``[*chunk]`` to ``[chips, *chunk]``: every chip's chunk on every chip."""
    return lax.all_gather(chunk, axis)
