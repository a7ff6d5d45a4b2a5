"""The TPU generations: what kernels, the compiler and the roofline need to know of each.

Figures are of one device as torch and XLA see it, which is what one rank drives: a whole chip on v4, v5e,
v5p (whose two cores act as one) and v6e, half a chip on tpu7x.  Peak bfloat16 FLOP/s and HBM bytes are those
of torch_tpu's `hardware.py` (which cites Google's Cloud TPU pages); HBM bandwidth, VMEM, cores and
SparseCores are those of JAX's `pltpu.get_tpu_info_for_chip`.  Tests compare both.

Imports neither torch nor JAX: the device is chosen before either of them is loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recsys_tpu.errors import UserError

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh

SOURCE = "torch_tpu hardware.py (FLOP/s, HBM size), JAX pltpu.get_tpu_info_for_chip (HBM bandwidth)"


class TopologyError(UserError, ValueError):
    """A topology that names no known chip, or no extents."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One TPU generation, figures per device."""

    name: str
    device_kinds: tuple[str, ...]
    """What PJRT and JAX call a device of it."""
    smallest_topology: str
    """The smallest slice that libtpu compiles for."""
    bf16_flops: float
    """Peak dense bfloat16 FLOP/s."""
    hbm_bytes: int
    hbm_bytes_per_second: float
    vmem_bytes: int
    """Vector memory of a TensorCore."""
    devices: int = 1
    """Devices a chip."""
    cores: int = 1
    """TensorCores a device."""
    sparsecores: int = 0
    subcores: int = 0
    """Vector subcores of a SparseCore."""
    lanes: int = 0
    """float32 lanes of a vector subcore."""

    @property
    def workers(self) -> int:
        """Vector subcores of all SparseCores of a device."""
        return self.sparsecores * self.subcores

    def abstract_mesh(self) -> AbstractMesh:
        """The context in which a SparseCore kernel for this chip is traced, on any machine."""
        from jax.sharding import AbstractDevice, AbstractMesh

        device = AbstractDevice(device_kind=self.device_kinds[0], num_cores=self.cores, platform="tpu")
        return AbstractMesh((1,), ("chip",), abstract_device=device)


_GIB = 1024**3
_MIB = 1024**2

CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            device_kinds=("TPU v4",),
            smallest_topology="v4:2x2x1",
            bf16_flops=275e12,
            hbm_bytes=32 * _GIB,
            hbm_bytes_per_second=1230e9,
            vmem_bytes=16 * _MIB,
            cores=2,
        ),
        Chip(
            name="v5e",
            device_kinds=("TPU v5 lite", "TPU v5e"),
            smallest_topology="v5e:2x2",
            bf16_flops=197e12,
            hbm_bytes=16 * _GIB,
            hbm_bytes_per_second=820e9,
            vmem_bytes=128 * _MIB,
        ),
        Chip(
            name="v5p",
            device_kinds=("TPU v5", "TPU v5p"),
            smallest_topology="v5p:2x2x1",
            bf16_flops=459e12,
            hbm_bytes=95 * _GIB,
            hbm_bytes_per_second=2460e9,
            vmem_bytes=64 * _MIB,
            cores=2,
            sparsecores=4,
            subcores=16,
            lanes=8,
        ),
        Chip(
            name="v6e",
            device_kinds=("TPU v6 lite", "TPU v6e"),
            smallest_topology="v6e:2x2",
            bf16_flops=918e12,
            hbm_bytes=32 * _GIB,
            hbm_bytes_per_second=1640e9,
            vmem_bytes=128 * _MIB,
            sparsecores=2,
            subcores=16,
            lanes=8,
        ),
        Chip(
            name="tpu7x",
            device_kinds=("TPU7x",),
            smallest_topology="tpu7x:2x2x1",
            bf16_flops=1153.5e12,
            hbm_bytes=96 * _GIB,
            hbm_bytes_per_second=3700e9,
            vmem_bytes=64 * _MIB,
            devices=2,
            sparsecores=2,
            subcores=16,
            lanes=16,
        ),
    )
}


def devices_of(topology: str) -> int:
    """Devices, so ranks, of a topology: ``v6e:2x4`` has 8, ``tpu7x:2x2x1`` too.

    Raises:
        TopologyError: it is not of the form ``chip:AxB`` or ``chip:AxBxC``.
    """
    chip, extents = chip_of(topology), topology.partition(":")[2].split("x")
    if not all(extent.isdigit() and int(extent) for extent in extents):
        raise TopologyError(f"topology {topology!r}: expected the chip and its extents, such as v6e:2x4")
    return math.prod(map(int, extents)) * chip.devices


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as ``v6e:2x4``.

    Raises:
        TopologyError: it names no known chip.
    """
    name = topology.partition(":")[0]
    if name not in CHIPS:
        raise TopologyError(f"topology {topology!r}: unknown chip {name!r}; known are {', '.join(CHIPS)}")
    return CHIPS[name]
