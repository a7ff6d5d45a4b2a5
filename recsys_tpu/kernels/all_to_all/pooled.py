"""The exchange of pooled embeddings between ranks, for torch tensors: differentiable, on every device.

Each rank has looked up its own tables for the whole batch, ``[ranks * B, dims[rank]]``, and wants all
tables for its own samples, ``[B, sum(dims)]``.  What travels to a rank is packed into lines of 128
elements; the transport is

    "kernel"      the remote-DMA kernel, as an op of the `tpu` device (real chips, or ahead-of-time
                  compilation for them)
    "collective"  `torch.distributed.all_to_all_single` of the same lines: CPU tensors, emulated chips,
                  and groups that the kernel cannot take
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Transport = Literal["kernel", "collective"]

LANES = 128  # `lines.LANES`, whose module needs JAX


@dataclass(frozen=True)
class _Exchange:
    group: dist.ProcessGroup
    dims: tuple[int, ...]
    batch: int
    transport: Transport
    wire_dtype: torch.dtype | None
    grad_wire_dtype: torch.dtype | None
    grad_scale: float

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def elements(self) -> list[int]:
        """What each rank sends to every rank, in elements."""
        return [self.batch * dim for dim in self.dims]

    @property
    def lines(self) -> int:
        """Capacity of one rank's chunk, in lines."""
        return math.ceil(max(self.elements) / LANES)


def exchange_pooled(
    pooled: Tensor,
    process_group: dist.ProcessGroup,
    *,
    dims: Sequence[int],
    transport: Transport,
    wire_dtype: torch.dtype | None = None,
    grad_wire_dtype: torch.dtype | None = None,
    grad_scale: float = 1.0,
) -> Tensor:
    """Pooled rows of this rank's tables for everyone, in; of everyone's tables for this rank's samples, out.

    pooled: float32 ``[ranks * B, dims[rank]]``, samples of rank 0 first.  dims: sum of the embedding dims
    of each rank's tables, the same list on every rank; 0 for a rank without tables.
    Returns float32 ``[B, sum(dims)]``, columns of rank 0 first.

    wire_dtype, grad_wire_dtype: None or torch.bfloat16, what values and gradients are rounded to while
    they travel.  grad_scale: factor on gradients, for example ``1 / ranks``, applied before the rounding.

    A collective: every rank of the group has to call it, forward and backward.
    Raises ValueError for shapes, dtypes or groups that it does not take.
    """
    dims = tuple(int(dim) for dim in dims)
    _check(pooled, process_group, dims, transport, (wire_dtype, grad_wire_dtype))
    batch = pooled.shape[0] // len(dims)
    if not batch or not any(dims):
        return pooled.new_zeros(batch, sum(dims)) + pooled.sum()  # empty, and part of the graph
    exchange = _Exchange(process_group, dims, batch, transport, wire_dtype, grad_wire_dtype, grad_scale)
    return _ExchangePooled.apply(pooled, exchange)


def _check(
    pooled: Tensor,
    group: dist.ProcessGroup,
    dims: tuple[int, ...],
    transport: Transport,
    wire_dtypes: tuple[torch.dtype | None, ...],
) -> None:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if len(dims) != ranks or min(dims) < 0:
        raise ValueError(f"exchange_pooled(): expected {ranks} dims, one for each rank, got {list(dims)}")
    if pooled.dim() != 2 or pooled.shape[1] != dims[rank] or pooled.shape[0] % ranks:
        raise ValueError(
            f"exchange_pooled(): expected pooled [{ranks} * B, {dims[rank]}] on rank {rank}, got "
            f"{list(pooled.shape)}"
        )
    if pooled.dtype != torch.float32:
        raise ValueError(f"exchange_pooled(): expected float32 pooled rows, got {pooled.dtype}")
    for wire_dtype in wire_dtypes:
        if wire_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(
                f"exchange_pooled(): expected a wire dtype of bfloat16 or None, got {wire_dtype}"
            )
    if transport == "kernel" and (pooled.device.type != "tpu" or ranks != dist.get_world_size()):
        raise ValueError(
            "exchange_pooled(): transport 'kernel' takes tpu tensors and the group of all ranks, got a "
            f"{pooled.device.type} tensor and {ranks} of {dist.get_world_size()} ranks; use 'collective'"
        )


class _ExchangePooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pooled: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        own = exchange.elements[exchange.rank]
        chunks = _to_lines(pooled.reshape(len(exchange.dims), own), exchange.lines)
        arrived = _transport(chunks, exchange, back=False, wire_dtype=exchange.wire_dtype, scale=1.0)
        parts = [
            chunk.reshape(-1)[: exchange.batch * dim].reshape(exchange.batch, dim)
            for chunk, dim in zip(arrived, exchange.dims, strict=True)
        ]
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        exchange: _Exchange = ctx.exchange
        parts = [part.reshape(1, -1) for part in grads[0].split(exchange.dims, dim=1)]
        arrived = _transport(
            torch.cat([_to_lines(part, exchange.lines) for part in parts]),
            exchange,
            back=True,
            wire_dtype=exchange.grad_wire_dtype,
            scale=exchange.grad_scale,
        )
        own = arrived.reshape(len(exchange.dims), -1)[:, : exchange.elements[exchange.rank]]
        return own.reshape(len(exchange.dims) * exchange.batch, exchange.dims[exchange.rank]), None


def _to_lines(chunks: Tensor, lines: int) -> Tensor:
    """``[ranks, elements]`` to ``[ranks, lines, 128]``, padded with zeros."""
    padded = torch.nn.functional.pad(chunks, (0, lines * LANES - chunks.shape[1]))
    return padded.reshape(len(chunks), lines, LANES)


def _transport(
    chunks: Tensor, exchange: _Exchange, *, back: bool, wire_dtype: torch.dtype | None, scale: float
) -> Tensor:
    """``[ranks, lines, 128]`` whose chunk ``i`` came from rank ``i``; `back` is the gradient's way."""
    if exchange.transport == "kernel":
        from recsys_tpu.kernels.all_to_all.op import exchange_op  # late, because it needs JAX

        lines = [math.ceil(elements / LANES) for elements in exchange.elements]
        return exchange_op(exchange.group)(chunks, lines, back, scale, wire_dtype == torch.bfloat16)
    wire = (chunks * scale if scale != 1.0 else chunks).to(wire_dtype or chunks.dtype)
    arrived = torch.empty_like(wire)
    dist.all_to_all_single(arrived, wire, group=exchange.group)
    return arrived.to(chunks.dtype)
