"""The chips that kernels are written for, and what a kernel needs to know of each.

Sizes are of one device as XLA sees it (v4 and v5p fuse two cores into a device, a tpu7x chip is two
devices); from `jax.experimental.pallas.tpu.get_tpu_info_for_chip`.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import AbstractDevice, AbstractMesh


@dataclass(frozen=True)
class Chip:
    """name, the device kinds that PJRT and JAX call it, a small topology for ahead-of-time compilation, cores
    a device, its SparseCores with their vector subcores and float32 lanes (0: none), HBM bandwidth [GB/s]."""

    name: str
    device_kinds: tuple[str, ...]
    topology: str
    cores: int
    sparsecores: int
    subcores: int
    lanes: int
    hbm_gb_per_second: float

    @property
    def workers(self) -> int:
        """Vector subcores of all SparseCores of a device."""
        return self.sparsecores * self.subcores

    def abstract_mesh(self) -> AbstractMesh:
        """The context in which a SparseCore kernel for this chip is traced, on any machine."""
        device = AbstractDevice(device_kind=self.device_kinds[0], num_cores=self.cores, platform="tpu")
        return AbstractMesh((1,), ("chip",), abstract_device=device)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", ("TPU v4",), "v4:2x2x1", 1, 0, 0, 0, 1230.0),
        Chip("v5e", ("TPU v5 lite", "TPU v5e"), "v5e:2x2", 1, 0, 0, 0, 820.0),
        Chip("v5p", ("TPU v5", "TPU v5p"), "v5p:2x2x1", 2, 4, 16, 8, 2460.0),
        Chip("v6e", ("TPU v6 lite", "TPU v6e"), "v6e:2x2", 1, 2, 16, 8, 1640.0),
        Chip("tpu7x", ("TPU7x",), "tpu7x:2x2x1", 1, 2, 16, 16, 3700.0),
    )
}
