"""What each TPU generation can do, per device as torch sees it.

A device is what one rank drives: a whole chip on v5e, v5p (whose two cores act as one) and v6e, half a
chip on tpu7x.  Peak bf16 FLOP/s and HBM bytes are those of torch_tpu's `hardware.py` (which cites Google's
Cloud TPU pages); HBM bandwidth is that of JAX's `pltpu.get_tpu_info_for_chip`.  Tests compare both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SOURCE = "torch_tpu hardware.py (FLOP/s, HBM size), JAX pltpu.get_tpu_info_for_chip (HBM bandwidth)"


@dataclass(frozen=True)
class Chip:
    """One TPU generation, figures per device."""

    name: str
    bf16_flops: float
    """Peak dense bfloat16 FLOP/s."""
    hbm_bytes: int
    hbm_bytes_per_second: float
    smallest_topology: str
    """The smallest slice that libtpu compiles for."""
    devices: int = 1
    """Devices a chip."""


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", 197e12, 16 * 1024**3, 820e9, "v5e:2x2"),
        Chip("v5p", 459e12, 95 * 1024**3, 2460e9, "v5p:2x2x1"),
        Chip("v6e", 918e12, 32 * 1024**3, 1640e9, "v6e:2x2"),
        Chip("tpu7x", 1153.5e12, 96 * 1024**3, 3700e9, "tpu7x:2x2x1", 2),
    )
}


def devices_of(topology: str) -> int:
    """Devices, so ranks, of a topology: ``v6e:2x4`` has 8, ``tpu7x:2x2x1`` too.

    Raises:
        ValueError: it is not of the form ``chip:AxB`` or ``chip:AxBxC``.
    """
    chip, extents = chip_of(topology), topology.partition(":")[2].split("x")
    if not all(extent.isdigit() and int(extent) for extent in extents):
        raise ValueError(f"topology {topology!r}: expected the chip and its extents, such as v6e:2x4")
    return math.prod(map(int, extents)) * chip.devices


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as ``v6e:2x4``.

    Raises:
        ValueError: it names no known chip.
    """
    name = topology.partition(":")[0]
    if name not in CHIPS:
        raise ValueError(f"topology {topology!r}: unknown chip {name!r}; known are {', '.join(CHIPS)}")
    return CHIPS[name]
