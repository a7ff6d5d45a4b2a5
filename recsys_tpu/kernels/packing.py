"""Bfloat16 tables on a TPU: flat int32 buffers of pairs, element ``2 i`` in the low half of word ``i``.

The chip's compilers copy a flat bfloat16 buffer whole before a kernel may read rows of it (its layout
interleaves rows); 32-bit words stay where they are.  On the host both are the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed(flat: Tensor) -> Tensor:
    """A flat bfloat16 CPU tensor as int32 words; no copy.  Raises ValueError for another type or odd size."""
    if flat.dtype is not torch.bfloat16 or flat.dim() != 1 or flat.numel() % 2:
        raise ValueError(
            f"packed: expected a flat bfloat16 tensor of even size, got {flat.dtype} {tuple(flat.shape)}"
        )
    return flat.view(torch.int32)


def unpacked(words: Tensor) -> Tensor:
    """Flat int32 words as bfloat16 values; no copy.  The inverse of `packed`."""
    if words.dtype is not torch.int32 or words.dim() != 1:
        raise ValueError(f"unpacked: expected flat int32 words, got {words.dtype} {tuple(words.shape)}")
    return words.view(torch.bfloat16)


def words_per_row(flat: Tensor, dim: int) -> int:
    """Elements of the buffer that a row of `dim` values takes."""
    return dim // 2 if flat.dtype is torch.int32 else dim
