"""Rows of flat buffers, read and written by XLA's gathers and scatters.

On a TPU a buffer reshaped to `[rows, words]` is copied whole, unless a row is one line of 128 words.  There,
`by_line`, it is seen as `[lines, 128]`, which is the flat buffer itself, and rows are taken from and put
into their lines; rows that neither fill nor divide lines, and bfloat16 that isn't packed, are read and
written element by element.  On a CPU the reshape costs nothing, and lines only would.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

LINE = 128


def read_rows(flat: jax.Array, rows: jax.Array, words: int, *, by_line: bool = False) -> jax.Array:
    """`[n, words]`; rows beyond the buffer read some row of it."""
    if not by_line:
        return flat.reshape(-1, words).at[rows].get(mode="clip")
    if not _by_whole_lines(flat, words):
        return flat.at[_elements(rows, words)].get(mode="clip")
    if words % LINE == 0:
        lines = rows[:, None] * (words // LINE) + jnp.arange(words // LINE, dtype=jnp.int32)
        return flat.reshape(-1, LINE).at[lines].get(mode="clip").reshape(-1, words)
    share = LINE // words
    lines = flat.reshape(-1, LINE).at[rows // share].get(mode="clip").reshape(-1, share, words)
    return jnp.take_along_axis(lines, (rows % share)[:, None, None], axis=1)[:, 0]


def write_rows(
    flat: jax.Array, rows: jax.Array, values: jax.Array, words: int, *, by_line: bool = False
) -> jax.Array:
    """The buffer with `values` `[n, words]` at `rows`: distinct, ascending; those beyond it are dropped."""
    exact: Any = {"mode": "drop", "unique_indices": True, "indices_are_sorted": True}
    if not by_line:
        return flat.reshape(-1, words).at[rows].set(values, **exact).reshape(-1)
    if not _by_whole_lines(flat, words):
        return flat.at[_elements(rows, words).reshape(-1)].set(values.reshape(-1), **exact)
    if words % LINE == 0:
        count = words // LINE
        lines = rows[:, None] * count + jnp.arange(count, dtype=jnp.int32)
        table = flat.reshape(-1, LINE).at[lines.reshape(-1)].set(values.reshape(-1, LINE), **exact)
        return table.reshape(-1)
    share, table = LINE // words, flat.reshape(-1, LINE)
    line = rows // share
    first = jnp.append(True, line[1:] != line[:-1])
    index = jnp.cumsum(first, dtype=jnp.int32) - 1
    beyond = table.shape[0] + jnp.arange(rows.shape[0], dtype=jnp.int32)
    lines = beyond.at[index].set(line)
    merged = table.at[lines].get(mode="clip").reshape(-1, share, words).at[index, rows % share].set(values)
    # Lines beyond the table may repeat (padding rows share them): keep them distinct for the scatter.
    lines = jnp.where(lines < table.shape[0], lines, beyond)
    return table.at[lines].set(merged.reshape(-1, LINE), **exact).reshape(-1)


def stored_words(flat: jax.Array, dim: int, multiple: int = 1) -> int:
    """Words of a row in a buffer that a TPU kernel reads.

    Raises ValueError for a bfloat16 buffer that isn't packed, or words that aren't a multiple of `multiple`.
    """
    if flat.dtype not in (jnp.float32, jnp.int32):
        raise ValueError(f"a TPU kernel reads float32 or packed tables, got {flat.dtype}: use kernels.packed")
    words = dim // 2 if flat.dtype == jnp.int32 else dim
    if words % multiple or (dim % 2 and flat.dtype == jnp.int32):
        raise ValueError(
            f"rows of {words} words: this chip needs a multiple of {multiple}; pad the table's dim"
        )
    return words


def _by_whole_lines(flat: jax.Array, words: int) -> bool:
    """Whether rows fill or divide lines of 32-bit words (single words are quicker by themselves)."""
    return flat.dtype != jnp.bfloat16 and words > 1 and (words % LINE == 0 or LINE % words == 0)


def _elements(rows: jax.Array, words: int) -> jax.Array:
    """`[n, words]` positions; beyond the buffer for rows beyond it (a stack has less than 2^31 elements)."""
    return rows[:, None] * words + jnp.arange(words, dtype=jnp.int32)
