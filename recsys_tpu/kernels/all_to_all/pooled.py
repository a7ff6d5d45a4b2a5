"""The exchanges of pooled embeddings between ranks, for torch tensors: differentiable, on every device.

`exchange_pooled`  each rank has looked up its own tables (or columns) for the whole batch and wants all
                   tables for its own samples
`sum_pooled`       each rank has partial sums, from its own rows, of the whole batch, and wants the totals
                   of its own samples

What travels to a rank is packed into lines of 128 elements; the transport is

    "kernel"      the remote-DMA kernels, as ops of the `tpu` device (real chips, or ahead-of-time
                  compilation for them)
    "collective"  `torch.distributed`'s collectives on the same lines: CPU tensors and emulated chips
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

Transport = Literal["kernel", "collective"]

LANES = 128  # `lines.LANES`, whose module needs JAX


@dataclass(frozen=True)
class MeshAxis:
    """Where the ranks of an exchange lie in a mesh of all ranks of the run: what a kernel needs to know.

    world: the group of all ranks.  shape: of the mesh, in the order of the ranks.  index: the axis along
    which the exchange runs.
    """

    world: dist.ProcessGroup
    shape: tuple[int, ...]
    index: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"axis{number}" for number in range(len(self.shape)))

    @property
    def name(self) -> str:
        return self.names[self.index]

    @property
    def label(self) -> str:
        """For names of ops: unique to the exchange."""
        return f"{self.world.group_name}_{'x'.join(map(str, self.shape))}_{self.index}"


@dataclass(frozen=True)
class _Exchange:
    group: dist.ProcessGroup
    axis: MeshAxis
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
    axis: MeshAxis | None = None,
) -> Tensor:
    """Pooled rows of this rank's tables for everyone, in; of everyone's tables for this rank's samples, out.

    pooled: float32 ``[ranks * B, dims[rank]]``, samples of rank 0 first.  dims: sum of the embedding dims
    of each rank's tables, the same list on every rank; 0 for a rank without tables.
    Returns float32 ``[B, sum(dims)]``, columns of rank 0 first.

    wire_dtype, grad_wire_dtype: None or torch.bfloat16, what values and gradients are rounded to while
    they travel.  grad_scale: factor on gradients, for example ``1 / ranks``, applied before the rounding.
    axis: where the group lies among all ranks, for a kernel; None if it is all of them.

    A collective: every rank of the group has to call it, forward and backward.
    Raises ValueError for shapes, dtypes or groups that it does not take.
    """
    dims = tuple(int(dim) for dim in dims)
    _check(pooled, process_group, dims, (wire_dtype, grad_wire_dtype))
    axis = _axis("exchange_pooled", pooled, process_group, transport, axis)
    batch = pooled.shape[0] // len(dims)
    if not batch or not any(dims):
        return pooled.new_zeros(batch, sum(dims)) + pooled.sum()  # empty, and part of the graph
    exchange = _Exchange(process_group, axis, dims, batch, transport, wire_dtype, grad_wire_dtype, grad_scale)
    return _ExchangePooled.apply(pooled, exchange)


def _check(
    pooled: Tensor,
    group: dist.ProcessGroup,
    dims: tuple[int, ...],
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


def _axis(
    op: str, pooled: Tensor, group: dist.ProcessGroup, transport: Transport, axis: MeshAxis | None
) -> MeshAxis:
    """`axis`, or that of a group of all ranks.  Raises ValueError if a kernel can't take tensor or group."""
    ranks, world = dist.get_world_size(group), dist.get_world_size()
    if transport == "kernel" and pooled.device.type != "tpu":
        raise ValueError(
            f"{op}(): transport 'kernel' takes tpu tensors, got a {pooled.device.type} tensor; "
            "use 'collective'"
        )
    if axis is None:
        if transport == "kernel" and ranks != world:
            raise ValueError(
                f"{op}(): transport 'kernel' needs the mesh axis of a group of {ranks} of {world} ranks; "
                "give axis, or use 'collective'"
            )
        return MeshAxis(group, (ranks,))
    if axis.shape[axis.index] != ranks or math.prod(axis.shape) != dist.get_world_size(axis.world):
        raise ValueError(
            f"{op}(): axis {axis.index} of a mesh {list(axis.shape)} is not a group of {ranks} among "
            f"{dist.get_world_size(axis.world)} ranks"
        )
    return axis


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
        return exchange_op(exchange.axis)(chunks, lines, back, scale, wire_dtype == torch.bfloat16)
    wire = (chunks * scale if scale != 1.0 else chunks).to(wire_dtype or chunks.dtype)
    # functional, so that a step can be traced with it
    arrived = functional.all_to_all_single(wire.contiguous(), None, None, exchange.group)
    return functional.wait_tensor(arrived).to(chunks.dtype)


def sum_pooled(
    partial: Tensor,
    process_group: dist.ProcessGroup,
    *,
    transport: Transport,
    grad_scale: float = 1.0,
    axis: MeshAxis | None = None,
) -> Tensor:
    """Everyone's partial sums for all samples, in; the totals of this rank's samples, out.

    partial: float32 ``[ranks * B, D]``, samples of rank 0 first.  Returns float32 ``[B, D]``.  The gradient
    is multiplied by `grad_scale` and gathered from everyone.  transport, axis: as of `exchange_pooled`.

    A collective: every rank of the group has to call it, forward and backward.
    Raises ValueError for shapes, dtypes or groups that it does not take.
    """
    ranks = dist.get_world_size(process_group)
    if partial.dim() != 2 or partial.shape[0] % ranks or partial.dtype != torch.float32:
        raise ValueError(
            f"sum_pooled(): expected float32 partial sums [{ranks} * B, D], got {partial.dtype} "
            f"{list(partial.shape)}"
        )
    axis = _axis("sum_pooled", partial, process_group, transport, axis)
    if not partial.numel():
        return partial.new_zeros(partial.shape[0] // ranks, partial.shape[1]) + partial.sum()
    return _SumPooled.apply(partial, process_group, axis, transport, grad_scale)


class _SumPooled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        partial: Tensor,
        group: dist.ProcessGroup,
        axis: MeshAxis,
        transport: Transport,
        grad_scale: float,
    ) -> Tensor:
        ctx.group, ctx.axis, ctx.transport, ctx.grad_scale = group, axis, transport, grad_scale
        ranks = dist.get_world_size(group)
        shape = (partial.shape[0] // ranks, partial.shape[1])
        elements = math.prod(shape)
        chunks = _to_lines(partial.reshape(ranks, elements), math.ceil(elements / LANES))
        if transport == "kernel":
            from recsys_tpu.kernels.all_to_all.op import sum_op  # late, because it needs JAX

            total = sum_op(axis)(chunks)
        else:
            total = functional.wait_tensor(functional.reduce_scatter_single(chunks, "sum", 0, group))
        return total.reshape(-1)[:elements].reshape(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0] * ctx.grad_scale if ctx.grad_scale != 1.0 else grads[0]
        elements = grad.numel()
        (lines,) = _to_lines(grad.reshape(1, -1), math.ceil(elements / LANES))
        if ctx.transport == "kernel":
            from recsys_tpu.kernels.all_to_all.op import gather_op

            gathered = gather_op(ctx.axis)(lines)
        else:
            gathered = functional.wait_tensor(functional.all_gather_single(lines, 0, ctx.group))
        ranks = dist.get_world_size(ctx.group)
        own = gathered.reshape(ranks, -1)[:, :elements].reshape(ranks * grad.shape[0], grad.shape[1])
        return own, None, None, None, None
