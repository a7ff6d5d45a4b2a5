"""TensorCore kernels (v5e, v4): one copy a row, many in flight."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from recsys_tpu.chips import Chip
from recsys_tpu.kernels import xla
from recsys_tpu.kernels.flat_rows import LINE
from recsys_tpu.kernels.tensorcore.lookup import pooled_lookup, sequence_lookup
from recsys_tpu.kernels.tensorcore.update import fused_update as update_lines


def kernels_for(chip: Chip) -> SimpleNamespace:
    """`pooled_lookup`, `sequence_lookup` and `fused_update`, with the signatures of `xla`."""
    del chip  # one kernel for all
    return SimpleNamespace(
        pooled_lookup=pooled_lookup, sequence_lookup=sequence_lookup, fused_update=fused_update
    )


def fused_update(
    flat: jax.Array, state: tuple[jax.Array, ...], grad_output: jax.Array, *rest: Any, **options: Any
) -> Any:
    """As `xla.fused_update`: the kernel for float32 rows of whole lines, else XLA's scatter of lines.

    Rows that share a line can't be written one by one; XLA merges them into their lines first.
    """
    if flat.dtype == jnp.float32 and grad_output.shape[1] % LINE == 0:
        return update_lines(flat, state, grad_output, *rest, **options)
    return functools.partial(xla.fused_update, by_line=True)(flat, state, grad_output, *rest, **options)
