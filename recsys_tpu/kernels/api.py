"""The operations that the rest of the package calls, on whatever device their tensors are.

A lookup can be used eagerly and inside torch.compile; it is differentiable in the per-id weights.
The table never takes part in autograd (its gradient would be as large as the table):
`fused_update` takes the gradient of the lookup's output and changes the touched rows in place.  It
belongs outside torch.compile: a table that a compiled graph mutates is copied whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recsys_tpu.kernels import debug, host, packing, reference
from recsys_tpu.kernels.batch import LookupBatch
from recsys_tpu.kernels.optimizer import HYPER_SIZE, OptimizerSpec
from recsys_tpu.kernels.variants import Variant, target_chip, variant_for


def pooled_lookup(weights_flat: Tensor, batch: LookupBatch, dim: int) -> Tensor:
    """Weighted sum of each bag's rows: float32 `[B, dim]`; empty bags are 0.

    weights_flat: flat `[R * dim]` float32 or bfloat16 table stack, or bfloat16 packed in int32 words
    (see `packed`; what the TPU kernels take).  Differentiable in `batch.weights`; that backward must run
    before `fused_update` changes the table.
    Raises ValueError for a table of another type or shape.
    """
    _check_table("pooled_lookup", weights_flat, dim)
    _check_ids("pooled_lookup", weights_flat, batch, dim)
    if batch.weights is not None and batch.weights.requires_grad and torch.is_grad_enabled():
        return _WeightedLookup.apply(batch.weights, weights_flat, batch, dim)
    return _pooled(weights_flat, batch, dim)


def sequence_lookup(weights_flat: Tensor, batch: LookupBatch, dim: int) -> Tensor:
    """Each id's row, float32 `[N, dim]`, in the order of `batch.rows`; padding is 0, weights are ignored.

    Update with the gradient of the output and `batch.per_id()`.
    """
    _check_table("sequence_lookup", weights_flat, dim)
    _check_ids("sequence_lookup", weights_flat, batch, dim)
    op = _lookup_op(weights_flat.device, "sequence")
    if op is None:
        return reference.sequence_lookup(weights_flat, batch, dim)
    return _call(op, weights_flat, batch.rows, batch.bags, batch.num_bags, dim)


def fused_update(
    weights_flat: Tensor,
    state: tuple[Tensor, ...],
    grad_output: Tensor,
    batch: LookupBatch,
    spec: OptimizerSpec,
    hyper: Tensor,
) -> None:
    """Applies `spec` to every touched row, in place; its cost follows the rows touched, not the table.

    weights_flat `[R * dim]`; state: flat float32 buffers of `spec.state_sizes(R, dim)`; grad_output
    `[B, dim]`, the gradient of `pooled_lookup`'s output; hyper: see `hyper_tensor`.  Table and state
    must own their storage: on a device it is exchanged for the result's.
    Raises ValueError for tensors that don't fit together.
    """
    _check_update(weights_flat, state, grad_output, batch, spec, hyper)
    with torch.no_grad():
        if variant_for(weights_flat.device) is Variant.REFERENCE:
            host.fused_update(weights_flat, state, grad_output, batch, spec, hyper)
            return
        new_weights, new_state = donating_update(weights_flat, state, grad_output, batch, spec, hyper)
        exchanges: Any = zip((weights_flat, *state), (new_weights, *new_state), strict=True)
        for tensor, result in exchanges:
            tensor.set_(result)


def donating_update(
    weights_flat: Tensor,
    state: tuple[Tensor, ...],
    grad_output: Tensor,
    batch: LookupBatch,
    spec: OptimizerSpec,
    hyper: Tensor,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`fused_update` as a pure function, (new table, new state), for a whole step in one program.

    Run on a device, it takes over the memory of `weights_flat` and `state`, which are dead afterwards.
    In a program that is lowered whole, the program's own donation does that.
    Raises ValueError on a CPU, where there is nothing to donate.
    """
    _check_update(weights_flat, state, grad_output, batch, spec, hyper)
    variant = variant_for(weights_flat.device)
    if variant is Variant.REFERENCE:
        raise ValueError("donating_update: tensors must be on a tpu device; on CPU use fused_update")
    from recsys_tpu.kernels import ops

    occurrences = (batch.sorted_bags, batch.segments, batch.sorted_weights)
    results: list[Tensor] = ops.update_op(variant, target_chip(), spec, debug.is_debugging())(
        weights_flat, list(state), grad_output, batch.unique_rows, batch.row_offsets, *occurrences, hyper
    )
    return results[0], tuple(results[1:])


def weight_gradient(weights_flat: Tensor, batch: LookupBatch, grad_output: Tensor) -> Tensor:
    """Gradient of `pooled_lookup` with respect to `batch.weights`: float32 `[N]`; padding is 0."""
    op = _lookup_op(weights_flat.device, "weight gradient")
    if op is None:
        return reference.weight_gradient(weights_flat, batch, grad_output)
    return _call(op, weights_flat, batch.rows, batch.bags, grad_output)


@torch.compiler.assume_constant_result
def _lookup_op(device: torch.device, kind: str) -> str | None:
    """Name of the op to call, or None for the reference; a constant to torch.compile."""
    variant = variant_for(device)
    if variant is Variant.REFERENCE:
        return None
    from recsys_tpu.kernels import ops

    return ops.register_lookups(variant, target_chip(), debug.is_debugging())[kind]


def _call(op: str, *arguments: Any) -> Tensor:
    return getattr(torch.ops.recsys_tpu, op)(*arguments)


def _pooled(weights_flat: Tensor, batch: LookupBatch, dim: int) -> Tensor:
    op = _lookup_op(weights_flat.device, "pooled")
    if op is None:
        return host.pooled_lookup(weights_flat, batch, dim)
    ids = (batch.rows, batch.bags, batch.bag_offsets, batch.weights)
    return _call(op, weights_flat, *ids, batch.num_bags, dim)


class _WeightedLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, weights_flat: Tensor, batch: LookupBatch, dim: int) -> Tensor:
        # The table itself is kept, not its values: backward must run before the table's fused_update.
        ctx.weights_flat, ctx.batch = weights_flat, batch
        return _pooled(weights_flat, batch, dim)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        return weight_gradient(ctx.weights_flat, ctx.batch, grad_output), None, None, None


def _check_table(op: str, weights_flat: Tensor, dim: int) -> None:
    if weights_flat.dtype not in (torch.float32, torch.bfloat16, torch.int32):
        raise ValueError(f"{op}: expected a float32, bfloat16 or packed table, got {weights_flat.dtype}")
    if weights_flat.dtype is torch.int32 and dim % 2:
        raise ValueError(f"{op}: a packed bfloat16 table needs an even dim, got {dim}")
    if weights_flat.dim() != 1 or weights_flat.numel() % packing.words_per_row(weights_flat, dim):
        shape = tuple(weights_flat.shape)
        raise ValueError(f"{op}: expected a flat table of rows of {dim} elements, got shape {shape}")
    if weights_flat.requires_grad:
        raise ValueError(
            f"{op}: a table takes no part in autograd; pass a tensor with requires_grad=False, "
            "and the gradient of the lookup's output to fused_update"
        )


def _check_ids(op: str, weights_flat: Tensor, batch: LookupBatch, dim: int) -> None:
    if debug.is_debugging():
        num_rows = weights_flat.numel() // packing.words_per_row(weights_flat, dim)
        debug.check_batch(op, batch, num_rows)


def _check_update(
    weights_flat: Tensor,
    state: tuple[Tensor, ...],
    grad_output: Tensor,
    batch: LookupBatch,
    spec: OptimizerSpec,
    hyper: Tensor,
) -> None:
    dim = grad_output.shape[1]
    _check_table("fused_update", weights_flat, dim)
    _check_ids("fused_update", weights_flat, batch, dim)
    if grad_output.shape[0] != batch.num_bags:
        raise ValueError(
            f"fused_update: {batch.num_bags} bags, but a gradient of {grad_output.shape[0]} rows"
        )
    expected = spec.state_sizes(weights_flat.numel() // packing.words_per_row(weights_flat, dim), dim)
    got = tuple(buffer.numel() for buffer in state)
    if got != expected:
        raise ValueError(f"fused_update: {spec.optimizer.value} keeps state of sizes {expected}, got {got}")
    if any(buffer.dtype is not torch.float32 or buffer.dim() != 1 for buffer in state):
        raise ValueError("fused_update: state buffers must be flat float32 tensors")
    if hyper.shape != (HYPER_SIZE,):
        raise ValueError(
            f"fused_update: expected hyper_tensor's {HYPER_SIZE} values, got {tuple(hyper.shape)}"
        )
