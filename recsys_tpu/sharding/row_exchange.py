"""The exchange in which rows travel: each distinct id of a batch once, in buffers of a static size.

host    distinct ids go to the owners of their rows (`row_routing`)
device  an owner looks them up, one row an id, and puts them into slots `[ranks x capacity, width]`
device  one even all-to-all a width brings every rank the rows of its own distinct ids
device  what a rank makes of them: bags of them, or one row an occurrence (`source_rows`)

In backward gradients go the same way back, one row a distinct id, and the owner updates its tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.types import Awaitable, NoWait, QuantizedCommCodec, QuantizedCommCodecs
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.embeddings.bags import to_device
from recsys_tpu.embeddings.preparation import SortedIds, sort_ids
from recsys_tpu.embeddings.stacks import TableStack
from recsys_tpu.kernels.batch import LookupBatch
from recsys_tpu.sharding.row_routing import Ints, Received, Routed, RowRouting, positions_in_runs

LINES = 128  # rows of what arrives: whole lines, as kernels want their tables


@dataclass(frozen=True)
class RowFeatures:
    """A rank's batch, where its ids were sent, and what the rank was asked for."""

    features: KeyedJaggedTensor
    routed: Routed
    received: Received

    def variable_stride_per_key(self) -> bool:
        """TorchRec asks; what arrives here has no bags."""
        return False


class RowInputDist(nn.Module):
    """Sends the distinct ids of each table to their owners, on the host.  A collective call."""

    def __init__(
        self, routing: RowRouting, tables: Sequence[str], group: dist.ProcessGroup | None, rank: int
    ) -> None:
        """tables: for each key of the features, the table that it reads."""
        super().__init__()
        self._routing, self._tables, self._group, self._rank = routing, list(tables), group, rank

    def forward(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[RowFeatures]]:
        values, ends = features.values().numpy(), features.offset_per_key()
        ids = [values[first:last] for first, last in pairwise(ends)]
        routed = self._routing.route(ids, self._tables)
        return NoWait(NoWait(RowFeatures(features, routed, self._exchange(routed))))

    def _exchange(self, routed: Routed) -> Received:
        shards = np.diff(self._routing.first_shard)
        if self._group is None or self._routing.ranks == 1:
            return Received(routed.counts[None, :], routed.ids)
        mine = int(shards[self._rank])
        counts = _all_to_all(routed.counts, shards, np.full(len(shards), mine), self._group)
        counts = counts.reshape(len(shards), mine)
        ends = np.cumsum(routed.counts)
        sent = np.diff(np.r_[0, ends][self._routing.first_shard])
        return Received(counts, _all_to_all(routed.ids, sent, counts.sum(1), self._group))


def _all_to_all(values: Ints, sent: Ints, received: Ints, group: dist.ProcessGroup) -> Ints:
    arrived = torch.empty(int(received.sum()), dtype=torch.int64)
    dist.all_to_all_single(
        arrived, torch.from_numpy(np.ascontiguousarray(values)), received.tolist(), sent.tolist(), group=group
    )
    return arrived.numpy()


@dataclass(frozen=True)
class StackIds:
    """The ids of one stack: sorted, and the (rank, slot of its buffer) that each row goes to."""

    ids: SortedIds
    ranks: Ints
    offsets: Ints


@dataclass(frozen=True)
class Moves:
    """How rows get from lookups into the buffer and gradients back: `[buffer rows]`, `[looked-up rows]`.

    An index of the length of what is read stands for a row of zeros.
    """

    index: Tensor
    back: Tensor


class OwnedRows:
    """The owner's side: which of this rank's stacks hold its shards."""

    def __init__(self, routing: RowRouting, rank: int, kernels: Sequence[Any]) -> None:
        self.routing = routing
        self.stacks: list[TableStack] = []
        stack_of_shard, first_rows = [], []
        for kernel in kernels:
            tables = kernel.emb_module
            where = {index: stack for stack in tables.stacks for index in stack.tables}
            for index in range(len(tables.tables)):
                stack_of_shard.append(len(self.stacks) + tables.stacks.index(where[index]))
                first_rows.append(where[index].first_rows[index])
            self.stacks += tables.stacks
        self._stack_of_shard = np.array(stack_of_shard, np.int64)
        self._first_rows = np.array(first_rows, np.int64)
        self._widths = np.array([shard.columns for shard in routing.shards[rank]], np.int64)
        assert len(self._widths) == len(self._first_rows)

    def sort(self, received: Received) -> list[StackIds]:
        """The ids of each stack, sorted.  Raises ValueError for an id that is no row of its shard."""
        shard, rank = received.shard_of_id(), received.rank_of_id()
        rows = received.ids + self._first_rows[shard]
        offsets = np.empty(len(rows), np.int64)
        for width in np.unique(self._widths):
            chosen = self._widths[shard] == width
            offsets[chosen] = positions_in_runs(rank[chosen])
        found = []
        for number, stack in enumerate(self.stacks):
            chosen = np.flatnonzero(self._stack_of_shard[shard] == number)
            count = len(chosen)
            ids = sort_ids(rows[chosen], num_bags=count, num_rows=stack.num_rows, bags=np.arange(count))
            found.append(StackIds(ids, rank[chosen], offsets[chosen]))
        return found

    def moves(
        self, sorted_ids: Sequence[StackIds], id_capacities: Sequence[int], slots: Mapping[int, int]
    ) -> dict[int, Moves]:
        """By width.  id_capacities: of each stack.  slots: by width, those of a pair of ranks."""
        found = {}
        for width, of_pair in slots.items():
            stacks = [number for number, stack in enumerate(self.stacks) if stack.dim == width]
            looked_up = sum(id_capacities[number] for number in stacks)
            buffer = self.routing.ranks * of_pair
            index, back = np.full(buffer, looked_up, np.int32), np.full(looked_up, buffer, np.int32)
            base = 0
            for number in stacks:
                stack = sorted_ids[number]
                places = stack.ranks * of_pair + stack.offsets
                index[places] = base + np.arange(len(places))
                back[base : base + len(places)] = places
                base += id_capacities[number]
            found[width] = Moves(torch.from_numpy(index), torch.from_numpy(back))
        return found


def slots_of_pair(capacity: int, ranks: int) -> int:
    """`capacity`, rounded up so that what a rank receives is whole lines of rows."""
    step = LINES // int(np.gcd(LINES, ranks))
    return -(-capacity // step) * step


def on_device(moves: Moves, device: torch.device) -> Moves:
    return moves if device.type == "cpu" else Moves(moves.index.to(device), moves.back.to(device))


def padded_batches(
    sorted_ids: Sequence[StackIds], capacities: Sequence[tuple[int, int]], device: torch.device
) -> list[LookupBatch]:
    """One row an id: as many bags as ids fit, whatever the batch."""
    return [
        to_device(stack.ids.pad(ids, unique, num_bags=ids), device)
        for stack, (ids, unique) in zip(sorted_ids, capacities, strict=True)
    ]


def exchanged(
    looked_up: Sequence[tuple[int, Tensor]],
    moves: Mapping[int, Moves],
    anchor: Tensor,
    group: dist.ProcessGroup | None,
    codecs: QuantizedCommCodecs | None = None,
) -> dict[int, Tensor]:
    """By width: the rows `[ranks * slots, width]` of this rank's distinct ids.  A collective call.

    looked_up: (width, rows `[ids, width]`) of each stack.  anchor: an empty tensor that requires a gradient,
    so that a rank without tables takes part in the backward exchange.
    """
    arrived = {}
    for width, of_width in moves.items():
        parts = [rows for columns, rows in looked_up if columns == width]
        empty = anchor.reshape(0, 1).expand(0, width)
        rows = torch.cat([*(part.float() for part in parts), empty])
        buffer = _Rearranged.apply(rows, of_width)
        alone = group is None or group.size() == 1
        arrived[width] = buffer if alone else _Swapped.apply(buffer, group, codecs)
    return arrived


class _Rearranged(torch.autograd.Function):
    """Rows to slots.  Every row goes to one slot at most, so the gradient is a gather as well."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, moves: Moves) -> Tensor:
        ctx.moves = moves
        return _gather(rows, moves.index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather(grads[0], ctx.moves.back), None


def _gather(rows: Tensor, index: Tensor) -> Tensor:
    count = rows.shape[0]
    if count == 0:
        return rows.new_zeros(len(index), rows.shape[1])
    found = rows.index_select(0, index.clamp(max=count - 1))
    return torch.where((index < count)[:, None], found, 0.0)


class _Swapped(torch.autograd.Function):
    """Equal parts to every rank; in backward the same for gradients, which TorchRec divides by the ranks."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: dist.ProcessGroup, codecs: QuantizedCommCodecs | None
    ) -> Tensor:
        ctx.group, ctx.codecs = group, codecs
        return _swapped(rows, group, None if codecs is None else codecs.forward)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        gradient = grads[0]
        if get_gradient_division():
            gradient = gradient / ctx.group.size()
        codec = None if ctx.codecs is None else ctx.codecs.backward
        return _swapped(gradient, ctx.group, codec), None, None


def _swapped(rows: Tensor, group: dist.ProcessGroup, codec: QuantizedCommCodec[Any] | None) -> Tensor:
    """Raises ValueError for a codec that changes the shape of rows."""
    wire = rows.contiguous() if codec is None else codec.encode(rows.contiguous())
    if wire.shape != rows.shape:
        raise ValueError(
            f"codec {codec}: rows {tuple(rows.shape)} became {tuple(wire.shape)}; use FP16 or BF16"
        )
    arrived = torch.empty_like(wire)
    dist.all_to_all_single(arrived, wire, group=group)
    return arrived if codec is None else codec.decode(arrived).to(rows.dtype)
