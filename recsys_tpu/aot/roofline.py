"""The least time that a program could take on a chip, from its FLOPs and HBM bytes."""

from __future__ import annotations

from dataclasses import dataclass

from recsys_tpu.chips import Chip

MATMUL_PASSES = {"medium": 1, "high": 3, "highest": 6}
"""bfloat16 passes through the matrix unit for one float32 product, by torch's matmul precision."""


@dataclass(frozen=True)
class Roofline:
    """Roofline model (Williams et al., CACM 2009): the slower of computing and moving the bytes.

    Args:
        chip: figures of the device.
        flops: floating-point operations of one execution.
        hbm_bytes: bytes that it reads from and writes to HBM.
        passes: bfloat16 passes per product (`MATMUL_PASSES`); 1 for bfloat16 inputs.
    """

    chip: Chip
    flops: float
    hbm_bytes: float
    passes: int = 1

    @property
    def arithmetic_intensity(self) -> float:
        """FLOP per HBM byte."""
        return self.flops / self.hbm_bytes if self.hbm_bytes else float("inf")

    @property
    def compute_seconds(self) -> float:
        return self.flops * self.passes / self.chip.bf16_flops

    @property
    def memory_seconds(self) -> float:
        return self.hbm_bytes / self.chip.hbm_bytes_per_second

    @property
    def seconds(self) -> float:
        """Lower bound of the execution time: no overlap of the two can beat it."""
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def bound_by(self) -> str:
        return "compute" if self.compute_seconds >= self.memory_seconds else "HBM"

    @property
    def mfu_bound(self) -> float:
        """Upper bound of the model FLOP/s utilisation, as a fraction of peak bfloat16 FLOP/s."""
        return self.flops / (self.seconds * self.chip.bf16_flops) if self.seconds else 0.0
