"""Which implementation runs where, asked in one place."""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Iterator

import torch

from recsys_tpu.chips import CHIPS, Chip


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
    chip = target_chip()
    if chip is None:
        return Variant.XLA
    return Variant.SPARSECORE if chip.sparsecores else Variant.TENSORCORE


def target_chip() -> Chip | None:
    """The chip that kernels are traced for: that of a surrounding abstract mesh (ahead-of-time lowering), or
    this process' device.  None when that is emulated."""
    import jax

    device = jax.sharding.get_abstract_mesh().abstract_device
    return _chip_of_kind(device.device_kind) if device is not None else _device_chip()


@functools.cache
def _device_chip() -> Chip | None:
    from torch_tpu._internal.device import _device_ops_backend

    kind = _device_ops_backend._get_local_device_attributes()["device_kind"]
    return None if kind == "cpu" else _chip_of_kind(kind)


def _chip_of_kind(kind: str) -> Chip:
    for chip in CHIPS.values():
        if kind in chip.device_kinds:
            return chip
    known = ", ".join(chip.device_kinds[0] for chip in CHIPS.values())
    raise ValueError(f"no embedding kernels for device kind {kind!r}; known are {known}")
