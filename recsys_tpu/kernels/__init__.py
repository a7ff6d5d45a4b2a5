"""Embedding kernels: pooled lookup, fused optimizer update, exchanges between chips."""

from recsys_tpu.kernels.api import fused_update, pooled_lookup, sequence_lookup, weight_gradient
from recsys_tpu.kernels.batch import LookupBatch, Optimizer
from recsys_tpu.kernels.optimizer import OptimizerSpec, hyper_tensor

__all__ = [
    "LookupBatch",
    "Optimizer",
    "OptimizerSpec",
    "fused_update",
    "hyper_tensor",
    "pooled_lookup",
    "sequence_lookup",
    "weight_gradient",
]
