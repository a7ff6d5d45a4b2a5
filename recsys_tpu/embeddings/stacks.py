"""Table stacks: the tables of one width on one rank, one after the other in a flat buffer.

A stack is one lookup and one update a step, however many tables it holds.  The optimizer's state lies in
flat buffers of the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recsys_tpu.kernels.host import zeros_in_huge_pages
from recsys_tpu.kernels.optimizer import OptimizerSpec

LINE = 128  # words of HBM that a TensorCore reads at once
MAX_STACK_BYTES = 16 << 30  # the SparseCore compiler refuses larger tensors
MAX_STACK_ELEMENTS = (1 << 31) - 1  # element offsets inside a program are int32


@dataclass(frozen=True)
class LocalTable:
    """The part of a table that this rank stores: `rows` x `dim` of table `name`."""

    name: str
    rows: int
    dim: int


class TableStack:
    """Tables of one dim in one flat buffer, with the state of their fused optimizer.

    tables: positions of its tables in the list that the stacks were made from, in storage order.
    first_rows: the row of the stack where each of them starts.
    weights: `[num_rows * dim]`; state: float32 buffers of `spec.state_sizes(num_rows, dim)`.
    """

    def __init__(
        self,
        tables: Sequence[tuple[int, LocalTable]],
        *,
        dtype: torch.dtype,
        spec: OptimizerSpec,
        device: torch.device,
    ) -> None:
        self.dim = tables[0][1].dim
        self.tables = [index for index, _ in tables]
        self.first_rows: dict[int, int] = {}
        rows = 0
        for index, table in tables:
            self.first_rows[index] = rows
            rows += table.rows
        self.num_rows = storage_rows(rows)
        self.weights = _zeros(self.num_rows * self.dim, dtype, device)
        self.state = tuple(
            _zeros(size, torch.float32, device) for size in spec.state_sizes(self.num_rows, self.dim)
        )


def _zeros(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return zeros_in_huge_pages(elements, dtype)
    return torch.zeros(elements, dtype=dtype, device=device)


def storage_rows(rows: int) -> int:
    """Rows that a stack of `rows` is given: at least one, and whole lines at any dim.

    A TensorCore reads HBM in lines of 128 words, of row-wise state too.  A shard may have no rows (more
    ranks than rows); a lookup of nothing still needs a row to point at.
    """
    return -(-max(rows, 1) // LINE) * LINE


def make_stacks(
    tables: Sequence[LocalTable], *, dtype: torch.dtype, spec: OptimizerSpec, device: torch.device
) -> list[TableStack]:
    """Stacks of `tables`, each no larger than a chip's compiler takes; widths in order of first appearance.

    Shards of one table that follow each other stay next to each other.  Raises ValueError for a table that
    is too large by itself.
    """
    return [
        TableStack(chunk, dtype=dtype, spec=spec, device=device)
        for dim in dict.fromkeys(table.dim for table in tables)
        for chunk in _chunks([(i, t) for i, t in enumerate(tables) if t.dim == dim], dtype)
    ]


def _chunks(
    tables: list[tuple[int, LocalTable]], dtype: torch.dtype
) -> Iterator[list[tuple[int, LocalTable]]]:
    limit = min(MAX_STACK_BYTES // dtype.itemsize, MAX_STACK_ELEMENTS)
    chunk: list[tuple[int, LocalTable]] = []
    elements = 0
    for same_table in _consecutive(tables):
        size = sum(table.rows * table.dim for _, table in same_table)
        if size > limit:
            name = same_table[0][1].name
            raise ValueError(
                f"table {name}: {size:,} elements on one rank, but a buffer holds at most {limit:,}; "
                "shard it row-wise or column-wise over more ranks"
            )
        if chunk and elements + size > limit:
            yield chunk
            chunk, elements = [], 0
        chunk += same_table
        elements += size
    if chunk:
        yield chunk


def _consecutive(tables: list[tuple[int, LocalTable]]) -> Iterator[list[tuple[int, LocalTable]]]:
    """Runs of shards of the same table."""
    run: list[tuple[int, LocalTable]] = []
    for index, table in tables:
        if run and run[-1][1].name != table.name:
            yield run
            run = []
        run.append((index, table))
    if run:
        yield run


def features_of(stack: TableStack, feature_tables: Sequence[int]) -> list[int]:
    """Positions of the features that read `stack`, of all features' table positions."""
    return [feature for feature, table in enumerate(feature_tables) if table in stack.first_rows]


def in_feature_order(
    outputs: Sequence[Tensor], stacks: Sequence[TableStack], feature_tables: Sequence[int]
) -> Tensor:
    """Stack outputs `[samples, features * dim]` side by side, columns in the order of the features."""
    if len(outputs) == 1:
        return outputs[0]
    columns: dict[int, Tensor] = {}
    for stack, output in zip(stacks, outputs, strict=True):
        columns.update(zip(features_of(stack, feature_tables), output.split(stack.dim, dim=1), strict=True))
    return torch.cat([columns[feature] for feature in range(len(feature_tables))], dim=1)


@dataclass
class StackView:
    """A view of a part of a stack's buffer, which `refresh` points at the buffer's current storage.

    An update may put a new buffer in the stack's place (a donated one is gone), and views don't follow.
    """

    view: Tensor
    stack: TableStack
    buffer: int | None  # None: the weights; otherwise the index of a state buffer
    start: int

    def refresh(self) -> None:
        buffer = self.stack.weights if self.buffer is None else self.stack.state[self.buffer]
        if self.view.untyped_storage()._cdata == buffer.untyped_storage()._cdata:
            return
        with torch.no_grad():
            self.view.set_(buffer.untyped_storage(), self.start, self.view.shape, self.view.stride())
