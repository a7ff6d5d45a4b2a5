"""Plain-torch lookup and update: what every kernel is checked against, and what trains on CPU.

On CPU the valid ids are sliced off (their counts are at hand) and bags are summed by
`embedding_bag`, one after the other in id order, so that sums have the same bits on every run.  On a
device nothing depends on the counts: shapes are static, and padding is summed where nobody reads it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys_tpu.kernels import packing, rounding
from recsys_tpu.kernels.batch import LookupBatch
from recsys_tpu.kernels.optimizer import STEP, OptimizerSpec, regularised, row_terms, update_elements

_BLOCK_ELEMENTS = 1 << 17  # of rows updated together on a CPU: 512 KB of float32


def pooled_lookup(weights_flat: Tensor, batch: LookupBatch, dim: int) -> Tensor:
    """Weighted sum of each bag's rows: float32 `[B, dim]`; empty bags are 0."""
    table = _table(weights_flat, dim)
    if table.device.type == "cpu":
        valid = int(batch.counts[0])
        weights = None if batch.weights is None else batch.weights[:valid]
        return _sum_segments(table, batch.rows[:valid], batch.bag_offsets, weights)
    rows = table.index_select(0, batch.rows).float()
    if batch.weights is not None:
        rows = rows * batch.weights[:, None]
    pooled = torch.zeros(batch.num_bags + 1, dim, device=table.device)
    return pooled.index_add(0, batch.bags, rows)[: batch.num_bags]


def sequence_lookup(weights_flat: Tensor, batch: LookupBatch, dim: int) -> Tensor:
    """Each id's row, float32 `[N, dim]`, in the order of `batch.rows`; padding is 0, weights are ignored."""
    rows = _table(weights_flat, dim).index_select(0, batch.rows).float()
    return torch.where((batch.bags < batch.num_bags)[:, None], rows, 0.0)


def weight_gradient(weights_flat: Tensor, batch: LookupBatch, grad_output: Tensor) -> Tensor:
    """Gradient of a pooled lookup with respect to its per-id weights: float32 `[N]`; padding is 0."""
    dim = grad_output.shape[1]
    rows = _table(weights_flat, dim).index_select(0, batch.rows).float()
    bags = batch.bags.clamp(max=batch.num_bags - 1)
    dots = (grad_output.float().index_select(0, bags) * rows).sum(1)
    return torch.where(batch.bags < batch.num_bags, dots, 0.0)


def row_gradients(batch: LookupBatch, grad_output: Tensor) -> Tensor:
    """Gradient of each touched row on a device, duplicates summed: float32 `[U, dim]`, padding 0."""
    grad_output = grad_output.float()
    weights = batch.sorted_weights
    capacity = batch.unique_rows.shape[0]
    bags = batch.sorted_bags.clamp(max=grad_output.shape[0] - 1)
    each = grad_output.index_select(0, bags)
    if weights is not None:
        each = each * weights[:, None]
    total = torch.zeros(capacity + 1, grad_output.shape[1], device=grad_output.device)
    return total.index_add(0, batch.segments, each)[:capacity]


def fused_update(
    weights_flat: Tensor,
    state: tuple[Tensor, ...],
    grad_output: Tensor,
    batch: LookupBatch,
    spec: OptimizerSpec,
    hyper: Tensor,
) -> None:
    """Applies `spec` to every touched row, in place.

    weights_flat `[R * dim]` float32 or bfloat16, or packed; state: flat float32
    buffers of `spec.state_sizes`;
    grad_output `[B, dim]`, gradient of `pooled_lookup`'s output; hyper: see `hyper_tensor`.
    """
    dim = grad_output.shape[1]
    table = _table(weights_flat, dim)
    if table.device.type == "cpu":
        _update_in_blocks(table, state, grad_output.float(), batch, spec, hyper)
        return
    gradient = row_gradients(batch, grad_output)
    # Padding rewrites the first touched row with the value that this row gets anyway; when no row is
    # touched, with the value that it has.
    touched = batch.unique_rows < table.shape[0]
    positions = torch.arange(len(touched), dtype=torch.int32, device=table.device)
    positions = torch.where(touched, positions, 0)
    rows = batch.unique_rows.index_select(0, positions).clamp(max=table.shape[0] - 1).long()
    _apply(table, state, rows, gradient.index_select(0, positions), touched[:1], spec, hyper)


def _update_in_blocks(
    table: Tensor,
    state: tuple[Tensor, ...],
    grad_output: Tensor,
    batch: LookupBatch,
    spec: OptimizerSpec,
    hyper: Tensor,
) -> None:
    """The update on a CPU, so many rows at a time that what a block needs stays in the cache."""
    unique = int(batch.counts[1])
    block = max(_BLOCK_ELEMENTS // table.shape[1], 1)
    for first in range(0, unique, block):
        last = min(first + block, unique)
        offsets = batch.row_offsets[first : last + 1]
        start, stop = int(offsets[0]), int(offsets[-1])
        weights = None if batch.sorted_weights is None else batch.sorted_weights[start:stop]
        gradient = _sum_segments(grad_output, batch.sorted_bags[start:stop], offsets - start, weights)
        _apply(table, state, batch.unique_rows[first:last].long(), gradient, None, spec, hyper)


def _table(weights_flat: Tensor, dim: int) -> Tensor:
    """`[R, dim]` view of a flat table."""
    if weights_flat.dtype is torch.int32:
        weights_flat = packing.unpacked(weights_flat)
    return weights_flat.view(-1, dim)


def _apply(
    table: Tensor,
    state: tuple[Tensor, ...],
    rows: Tensor,
    gradient: Tensor,
    any_touched: Tensor | None,
    spec: OptimizerSpec,
    hyper: Tensor,
) -> None:
    """Reads `rows` of table and state, steps, writes them back; `any_touched` False writes what was read."""
    dim = table.shape[1]
    old = table.index_select(0, rows)
    weight = old.float()
    buffers = state if spec.has_row_state else tuple(buffer.view(-1, dim) for buffer in state)
    current = tuple(buffer.index_select(0, rows) for buffer in buffers)
    gradient = regularised(spec, weight, gradient)
    divisor, new_row_state = None, None
    if spec.needs_square_sum:
        row_state = current[0][:, None] if spec.has_row_state else None
        square_sum = gradient.square().sum(1, keepdim=True)
        scale, divisor, new_row_state = row_terms(torch, spec, dim, square_sum, row_state)
        gradient = gradient if scale is None else gradient * scale
    elements = () if spec.has_row_state else current
    weight, elements = update_elements(torch, spec, hyper, weight, gradient, elements, divisor)
    rounded = _round(weight, rows, spec, hyper, table.dtype)
    updated = (new_row_state[:, 0],) if new_row_state is not None else elements
    if any_touched is not None:
        rounded = torch.where(any_touched, rounded, old)
        updated = tuple(torch.where(any_touched, new, was) for new, was in zip(updated, current, strict=True))
    table.index_copy_(0, rows, rounded)
    for buffer, new in zip(buffers, updated, strict=True):
        buffer.index_copy_(0, rows, new)


def _round(weight: Tensor, rows: Tensor, spec: OptimizerSpec, hyper: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is not torch.bfloat16 or not spec.stochastic_rounding:
        return weight.to(dtype)
    columns = torch.arange(weight.shape[1], dtype=torch.int32, device=weight.device)
    random = rounding.noise(
        hyper[STEP].to(torch.int32), rows.to(torch.int32)[:, None] * weight.shape[1] + columns
    )
    bits = rounding.add_noise(weight.view(torch.int32), random, torch.where)
    return (bits & -65536).view(torch.float32).to(dtype)


def _sum_segments(source: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """CPU: sums of `source[indices] * weights` between consecutive offsets, in order, in float32."""
    if source.dtype is not torch.float32:
        source = source.index_select(0, indices).float()
        indices = torch.arange(len(indices), dtype=offsets.dtype)
    if len(indices) == 0:
        return torch.zeros(len(offsets) - 1, source.shape[1])
    return F.embedding_bag(
        indices, source, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
