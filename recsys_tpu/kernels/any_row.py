"""Every dim and type on every chip: a chip's kernels for the rows they take, XLA for the others.

Kernels need rows of whole registers (SparseCore) or lines (TensorCore) of 32-bit words.  Other rows, of
dim 12 or 100 or of bfloat16 that isn't packed, are gathered and scattered by XLA, word by word: in
place and at the cost of the rows touched, but slower than a kernel.  Padding or packing a table is what
makes it fast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from recsys_tpu.chips import Chip
from recsys_tpu.kernels import sparsecore, tensorcore, xla
from recsys_tpu.kernels.flat_rows import LINE


def kernels_for(chip: Chip, *, on_sparsecore: bool, debug: bool = False) -> SimpleNamespace:
    """`pooled_lookup`, `sequence_lookup` and `fused_update` on `chip`, with the signatures of `xla`.

    Raises ValueError for the SparseCores of a chip that has none.
    """
    kernels = sparsecore.kernels_for(chip) if on_sparsecore else tensorcore.kernels_for(chip, debug=debug)
    pick = functools.partial(_pick, chip.lanes if on_sparsecore else None)
    return SimpleNamespace(
        pooled_lookup=pick(kernels.pooled_lookup, xla.pooled_lookup, lambda _, options: options["dim"]),
        sequence_lookup=pick(kernels.sequence_lookup, xla.sequence_lookup, lambda _, options: options["dim"]),
        fused_update=pick(kernels.fused_update, xla.fused_update, lambda args, _: args[2].shape[1]),
    )


def takes_rows(lanes: int | None, dtype: Any, dim: int) -> bool:
    """Whether a kernel reads rows of `dim` values.  lanes: of a SparseCore; None: a TensorCore's kernel."""
    if dtype not in (jnp.float32, jnp.int32) or (dtype == jnp.int32 and dim % 2):
        return False
    words = dim // 2 if dtype == jnp.int32 else dim
    if lanes is not None:
        return words % lanes == 0
    # A lookup keeps a sum for each row that a line has room for: more than 16 are too many for VMEM.
    return words % LINE == 0 or (LINE % words == 0 and LINE // words <= 16)


def _pick(
    lanes: int | None,
    kernel: Callable[..., Any],
    plain: Callable[..., Any],
    dim_of: Callable[[Any, Any], int],
) -> Callable[..., Any]:
    def picked(flat: jax.Array, *arguments: Any, **options: Any) -> Any:
        if takes_rows(lanes, flat.dtype, dim_of((flat, *arguments), options)):
            return kernel(flat, *arguments, **options)
        return plain(flat, *arguments, **options, by_line=True)

    return picked
