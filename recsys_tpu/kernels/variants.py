"""Which implementation runs where, asked in one place."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator

import torch


class Variant(enum.Enum):
    """The implementations of every operation."""

    REFERENCE = "reference"  # plain torch: CPU
    XLA = "xla"  # plain JAX: the emulated device
    SPARSECORE = "sparsecore"  # v5p, v6e, tpu7x
    TENSORCORE = "tensorcore"  # v5e, v4


_forced: Variant | None = None


@contextlib.contextmanager
def force_variant(variant: Variant) -> Iterator[None]:
    """Every operation inside uses this implementation, whatever the device."""
    global _forced
    before, _forced = _forced, variant
    try:
        yield
    finally:
        _forced = before


def variant_for(device: torch.device) -> Variant:
    """The implementation for tensors on `device`.  Raises ValueError for a device that has none."""
    if _forced is not None:
        return _forced
    if device.type == "cpu":
        return Variant.REFERENCE
    if device.type != "tpu":
        raise ValueError(f"embedding kernels run on cpu and tpu tensors, not on {device}")
    return Variant.XLA
