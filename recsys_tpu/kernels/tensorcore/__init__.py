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


def kernels_for(chip: Chip, *, debug: bool = False) -> SimpleNamespace:
    """`pooled_lookup`, `sequence_lookup` and `fused_update`, with the signatures of `xla`.

    debug: with the compiler's bounds checks, which cost about ten bundles an id.
    """
    return SimpleNamespace(
        pooled_lookup=functools.partial(pooled_lookup, debug=debug),
        sequence_lookup=functools.partial(sequence_lookup, debug=debug),
        fused_update=functools.partial(fused_update, debug=debug, resident_bytes=resident_bytes(chip)),
    )


def resident_bytes(chip: Chip) -> int:
    """VMEM that an update may fill with gradients: half of it."""
    return chip.vmem_bytes // 2


def fused_update(
    flat: jax.Array,
    state: tuple[jax.Array, ...],
    grad_output: jax.Array,
    *rest: Any,
    debug: bool = False,
    resident_bytes: int = 0,
    **options: Any,
) -> Any:
    """As `xla.fused_update`: the kernel for float32 rows of whole lines, else XLA's scatter of lines.

    Rows that share a line can't be written one by one; XLA merges them into their lines first.
    """
    if flat.dtype == jnp.float32 and grad_output.shape[1] % LINE == 0:
        options |= {"debug": debug, "resident_bytes": resident_bytes}
        return update_lines(flat, state, grad_output, *rest, **options)
    return xla.fused_update(flat, state, grad_output, *rest, by_line=True, **options)
