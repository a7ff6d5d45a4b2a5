"""TorchRec's `fused_params` (and `apply_optimizer_in_backward` arguments) to our optimizer specs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

from recsys_tpu.kernels.batch import Optimizer
from recsys_tpu.kernels.optimizer import OptimizerSpec

logger = logging.getLogger(__name__)

_OPTIMIZERS = {
    EmbOptimType.SGD: Optimizer.SGD,
    EmbOptimType.EXACT_SGD: Optimizer.SGD,
    EmbOptimType.EXACT_ADAGRAD: Optimizer.ADAGRAD,
    EmbOptimType.ROWWISE_ADAGRAD: Optimizer.ROWWISE_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: Optimizer.ROWWISE_ADAGRAD,
    EmbOptimType.ADAM: Optimizer.ADAM,
}
_SPEC_FIELDS = ("eps", "beta1", "beta2", "bias_correction", "momentum", "max_norm", "l1", "l2", "beta")
# Where FBGEMM keeps tables and caches on a GPU: they say nothing about the result.
_GPU_MEMORY = {
    "bounds_check_mode",
    "cache_algorithm",
    "cache_load_factor",
    "cache_precision",
    "cache_reserved_memory",
    "cache_sets",
    "enforce_hbm",
    "prefetch_pipeline",
    "uvm_host_mapped",
    "use_one_tbe_per_table",
}
_HANDLED = {"optimizer", "learning_rate", "betas", "weight_decay", "weight_decay_mode"}
_HANDLED |= {"stochastic_rounding", "output_dtype", *_SPEC_FIELDS}


@dataclass(frozen=True)
class FusedParams:
    """What a group of tables is trained with: the spec, the initial learning rate, the output's dtype."""

    spec: OptimizerSpec
    learning_rate: float
    output_dtype: torch.dtype


def parse_fused_params(params: Mapping[str, Any] | None) -> FusedParams:
    """Reads TorchRec's fused parameters of a table group.

    `optimizer` is an FBGEMM `EmbOptimType`, or our `Optimizer` (FTRL has no FBGEMM name); the default, as
    FBGEMM's, is SGD with learning rate 0.01.  GPU cache settings are logged and not used.

    Raises ValueError for an optimizer or a parameter that we don't have.
    """
    params = dict(params or {})
    unknown = sorted(params.keys() - _HANDLED - _GPU_MEMORY)
    if unknown:
        raise ValueError(f"fused_params: {unknown} not supported; supported are {sorted(_HANDLED)}")
    if unused := sorted(params.keys() & _GPU_MEMORY - {"cache_precision"}):
        logger.warning("fused_params: %s set how a GPU caches tables and have no use here", unused)
    optimizer = params.get("optimizer", EmbOptimType.EXACT_SGD)
    if isinstance(optimizer, EmbOptimType):
        if optimizer not in _OPTIMIZERS:
            names = ", ".join(f"EmbOptimType.{kind.name}" for kind in _OPTIMIZERS)
            raise ValueError(
                f"fused_params: optimizer {optimizer.name} not supported; use {names}, or Optimizer.FTRL"
            )
        optimizer = _OPTIMIZERS[optimizer]
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"fused_params: optimizer must be an EmbOptimType or Optimizer, got {optimizer!r}")
    fields = {name: params[name] for name in _SPEC_FIELDS if name in params}
    if "betas" in params:
        fields["beta1"], fields["beta2"] = params["betas"]
    spec = OptimizerSpec(
        optimizer,
        **fields,
        weight_decay=float(params.get("weight_decay", 0.0)),
        decoupled_weight_decay=_decoupled(params, optimizer),
        stochastic_rounding=bool(params.get("stochastic_rounding", False)),
    )
    return FusedParams(spec, float(params.get("learning_rate", 0.01)), _dtype(params.get("output_dtype")))


def _decoupled(params: Mapping[str, Any], optimizer: Optimizer) -> bool:
    if not params.get("weight_decay"):
        return False
    mode = params.get("weight_decay_mode")
    if mode == WeightDecayMode.DECOUPLE:
        return True
    if mode == WeightDecayMode.L2:
        return False
    raise ValueError(
        f"fused_params: weight_decay with {optimizer.value} needs weight_decay_mode WeightDecayMode.L2 "
        f"(added to the gradient) or WeightDecayMode.DECOUPLE (off the weight), got {mode}"
    )


def _dtype(output: SparseType | None) -> torch.dtype:
    if output is None:
        return torch.float32
    if output not in (SparseType.FP32, SparseType.FP16, SparseType.BF16):
        raise ValueError(f"fused_params: output_dtype {output} not supported; use FP32, FP16 or BF16")
    return output.as_dtype()
