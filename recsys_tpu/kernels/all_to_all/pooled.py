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

import functools
import math
from collections.abc import Callable, Sequence
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
        sent, received = [exchange.elements[exchange.rank]] * len(exchange.dims), exchange.elements
        chunks = _to_lines(list(pooled.reshape(len(exchange.dims), sent[0])), exchange.lines)
        arrived = _transport(chunks, sent, received, exchange, exchange.wire_dtype, 1.0)
        parts = [
            chunk.reshape(-1)[: exchange.batch * dim].reshape(exchange.batch, dim)
            for chunk, dim in zip(arrived, exchange.dims, strict=True)
        ]
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        exchange: _Exchange = ctx.exchange
        sent, received = exchange.elements, [exchange.elements[exchange.rank]] * len(exchange.dims)
        parts = [part.reshape(-1) for part in grads[0].split(exchange.dims, dim=1)]
        chunks = _to_lines(parts, exchange.lines)
        arrived = _transport(chunks, sent, received, exchange, exchange.grad_wire_dtype, exchange.grad_scale)
        own = arrived.reshape(len(exchange.dims), -1)[:, : received[0]]
        return own.reshape(len(exchange.dims) * exchange.batch, exchange.dims[exchange.rank]), None


def _to_lines(chunks: list[Tensor], lines: int) -> Tensor:
    """Flat chunks of any lengths to ``[ranks, lines, 128]``, padded with zeros."""
    padded = [torch.nn.functional.pad(chunk, (0, lines * LANES - chunk.numel())) for chunk in chunks]
    return torch.stack(padded).reshape(len(chunks), lines, LANES)


def _transport(
    chunks: Tensor,
    sent: list[int],
    received: list[int],
    exchange: _Exchange,
    wire_dtype: torch.dtype | None,
    scale: float,
) -> Tensor:
    """``[ranks, lines, 128]`` whose chunk ``i`` came from rank ``i``; `sent`, `received` in elements."""
    if exchange.transport == "kernel":
        counts = [
            torch.tensor([math.ceil(n / LANES) for n in elements], dtype=torch.int32, device=chunks.device)
            for elements in (sent, received)
        ]
        op = _kernel_op(exchange.group)
        bf16, even = wire_dtype == torch.bfloat16, len({*sent, *received}) == 1
        return op(chunks, *counts, scale, bf16, even)
    wire = (chunks * scale if scale != 1.0 else chunks).to(wire_dtype or chunks.dtype)
    arrived = torch.empty_like(wire)
    dist.all_to_all_single(arrived, wire, group=exchange.group)
    return arrived.to(chunks.dtype)


@functools.cache
def _kernel_op(group: dist.ProcessGroup) -> Callable[..., Tensor]:
    """The kernel between the ranks of `group` as an op of the `tpu` device, registered on first use."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from recsys_tpu.kernels.all_to_all import api, lines

    assert lines.LANES == LANES
    pallas = torch.get_device_module("tpu").pallas
    mesh = pallas.get_pallas_mesh(("rank",), process_group=group)
    shards = PartitionSpec("rank")

    @pallas.jax_op(
        f"recsys_tpu::exchange_{abs(hash(group.group_name))}",
        mesh=mesh,
        input_partition_specs=(("rank",),) * 3,
        output_partition_specs=(("rank",),),
    )
    def exchange_lines(
        chunks: jax.Array,
        send_counts: jax.Array,
        received_counts: jax.Array,
        scale: float,
        bf16: bool,
        even: bool,
    ) -> jax.Array:
        options: dict[str, Any] = {
            "axis": "rank",
            "scale": scale,
            "wire_dtype": jnp.bfloat16 if bf16 else None,
        }

        def one_chip(chunks: jax.Array, send: jax.Array, received: jax.Array) -> jax.Array:
            if even:
                return api.all_to_all(chunks, **options)
            return api.ragged_all_to_all(chunks, send, received_counts=received, **options)[0]

        on_every_chip = jax.shard_map(one_chip, mesh=mesh, in_specs=shards, out_specs=shards, check_vma=False)
        return on_every_chip(chunks, send_counts, received_counts)

    return exchange_lines
