"""What one TPU chip can do, each number with its source beside it.

Sources:
    [jax]    JAX 0.10.2, `jax._src.pallas.mosaic.tpu_info` (per TensorCore there; per chip here).
    [torch]  torch_tpu 0.2.0, `torch_tpu._internal.utils.hardware`.
    [cloud]  docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e}: the table of key specifications.
    [paper]  TPU v4, arXiv:2304.01433.
    [compiled]  peak HBM of `python -m recsys_tpu.aot --config configs/dlrm.yaml`, see docs/planner.md.
    [public spec]  published by Google, quoted from memory: check before relying on it.
    [assumed]  no source; a value of a sibling chip.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Facts about one chip.  A chip is `devices` ranks; per-rank figures are per chip over `devices`.

    Attributes:
        devices: devices (ranks) that a chip shows to the runtime.
        hbm_bytes: HBM of the chip.
        hbm_bytes_per_s: peak HBM bandwidth of the chip.
        flops: peak bf16 FLOP/s of the chip.
        sparse_cores: SparseCores of the chip; 0: lookups run on the TensorCore.
        lanes: f32 lanes of a vector register on the core that does lookups; column shards are
            multiples of it.
        row_granule_bytes: smallest HBM access that a row lookup costs.
        mesh_axes: dimensions of the ICI network.
        link_bytes_per_s: one ICI link, one direction.
        dcn_bytes_per_s: data-centre network, per chip, one direction.
        host_chips: chips of one host (VM) in a slice of several hosts.
        max_chips: largest single slice.
        working_set: activations and temporaries of a compiled step over those on v5p.
    """

    name: str
    devices: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    flops: float
    sparse_cores: int
    lanes: int
    row_granule_bytes: int
    mesh_axes: int
    link_bytes_per_s: float
    dcn_bytes_per_s: float
    host_chips: int
    max_chips: int
    working_set: float = 1.0


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            devices=1,  # [torch] two TensorCores fused
            hbm_bytes=32 * GIB,  # [torch]
            hbm_bytes_per_s=1.23e12,  # [jax]
            flops=275e12,  # [torch]
            sparse_cores=4,  # [paper]
            lanes=8,  # [assumed] as v5p
            row_granule_bytes=32,  # [assumed] as v5p
            mesh_axes=3,
            link_bytes_per_s=50 * GB,  # [paper] six links of 50 GB/s
            dcn_bytes_per_s=6.25 * GB,  # [public spec]
            host_chips=4,
            max_chips=4096,
        ),
        Chip(
            name="v5e",
            devices=1,
            hbm_bytes=16 * GIB,  # [torch]
            hbm_bytes_per_s=8.2e11,  # [jax]
            flops=197e12,  # [torch]
            sparse_cores=0,  # [jax]
            lanes=128,  # [jax] TensorCore lanes
            row_granule_bytes=512,  # one line of 128 f32 lanes
            mesh_axes=2,
            link_bytes_per_s=50 * GB,  # [cloud] 400 GB/s both directions, four ports
            dcn_bytes_per_s=3.125 * GB,  # [cloud] 6.4 Tbit/s a pod of 256
            host_chips=4,
            max_chips=256,
            working_set=3.9,  # [compiled] TensorCore kernels and XLA's scatters
        ),
        Chip(
            name="v5p",
            devices=1,  # [torch] two TensorCores fused
            hbm_bytes=95 * GIB,  # [torch]
            hbm_bytes_per_s=2.46e12,  # [jax]; [cloud] says 2.765e12
            flops=459e12,  # [torch]
            sparse_cores=4,  # [jax]
            lanes=8,  # [jax]
            row_granule_bytes=32,  # [jax] dma_granule_size_bytes
            mesh_axes=3,
            link_bytes_per_s=100 * GB,  # [cloud] 1200 GB/s both directions, six links
            dcn_bytes_per_s=6.25 * GB,  # [cloud] 50 Gbit/s a chip
            host_chips=4,
            max_chips=6144,  # [cloud] 16x16x24
        ),
        Chip(
            name="v6e",
            devices=1,
            hbm_bytes=32 * GIB,  # [torch]
            hbm_bytes_per_s=1.64e12,  # [jax]
            flops=918e12,  # [torch]
            sparse_cores=2,  # [jax]
            lanes=8,  # [jax]
            row_granule_bytes=32,  # [jax]
            mesh_axes=2,
            link_bytes_per_s=100 * GB,  # [cloud] 800 GB/s both directions, four ports
            dcn_bytes_per_s=12.5 * GB,  # [public spec]
            host_chips=4,
            max_chips=256,
            working_set=1.2,  # [compiled]
        ),
        Chip(
            name="tpu7x",
            devices=2,  # [torch]
            hbm_bytes=192 * GIB,  # [torch]
            hbm_bytes_per_s=7.4e12,  # [jax] 3.7e12 a device
            flops=2307e12,  # [torch]
            sparse_cores=4,  # [jax] two a device
            lanes=16,  # [jax]
            row_granule_bytes=32,  # [jax]
            mesh_axes=3,
            link_bytes_per_s=100 * GB,  # [public spec] 1200 GB/s both directions, six links
            dcn_bytes_per_s=12.5 * GB,  # [public spec]
            host_chips=4,
            max_chips=9216,  # [cloud] pod size
            working_set=0.88,  # [compiled]
        ),
    )
}
