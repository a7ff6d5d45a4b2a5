"""Embedding kernels: pooled lookup, fused optimizer update, exchanges between chips."""

from recsys_tpu.kernels.api import (
    donating_update,
    fused_update,
    pooled_lookup,
    sequence_lookup,
    weight_gradient,
)
from recsys_tpu.kernels.batch import LookupBatch, Optimizer
from recsys_tpu.kernels.debug import IdRangeError, debugging
from recsys_tpu.kernels.optimizer import OptimizerSpec, hyper_tensor
from recsys_tpu.kernels.packing import packed, unpacked
from recsys_tpu.kernels.variants import Variant, force_variant

__all__ = [
    "IdRangeError",
    "LookupBatch",
    "Optimizer",
    "OptimizerSpec",
    "Variant",
    "debugging",
    "donating_update",
    "force_variant",
    "fused_update",
    "hyper_tensor",
    "packed",
    "pooled_lookup",
    "sequence_lookup",
    "unpacked",
    "weight_gradient",
]
