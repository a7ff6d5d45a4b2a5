"""The tables of one TorchRec group on one rank: lookups whose backward updates the tables in place.

Takes the place of FBGEMM's table-batched embedding behind TorchRec's kernel and fused-optimizer classes,
which call `split_embedding_weights`, `get_optimizer_state`, `get_learning_rate` and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recsys_tpu import kernels
from recsys_tpu.embeddings.debug_ids import check_ids
from recsys_tpu.embeddings.fused_params import FusedParams
from recsys_tpu.embeddings.stacks import LocalTable, StackView, TableStack, in_feature_order, make_stacks
from recsys_tpu.kernels import reference
from recsys_tpu.kernels.batch import LookupBatch, Optimizer
from recsys_tpu.kernels.debug import is_debugging
from recsys_tpu.kernels.optimizer import OptimizerSpec, hyper_tensor

# Names that FBGEMM gives the same state, so that checkpoints carry over.
STATE_NAMES = {
    Optimizer.SGD: ("momentum1",),
    Optimizer.ADAGRAD: ("momentum1",),
    Optimizer.ROWWISE_ADAGRAD: ("momentum1",),
    Optimizer.ADAM: ("exp_avg", "exp_avg_sq"),
    Optimizer.FTRL: ("z", "n"),
}
STEP_NAME = "step"


@dataclass(frozen=True)
class PooledInput:
    """A batch of one group, ready for the device: one lookup batch a stack.

    num_samples: samples of the whole exchange (ranks x local batch).
    """

    num_samples: int
    batches: list[LookupBatch]


class FusedTables(nn.Module):
    """Tables and their fused optimizer.

    tables: shards in TorchRec's order.  feature_tables: for each feature, the position of its table.
    """

    def __init__(
        self,
        tables: Sequence[LocalTable],
        feature_tables: Sequence[int],
        *,
        dtype: torch.dtype,
        params: FusedParams,
        device: torch.device,
    ) -> None:
        super().__init__()
        if dtype not in (torch.float32, torch.bfloat16):
            names = ", ".join(table.name for table in tables)
            raise ValueError(f"tables {names}: data type {dtype} not supported; use FP32 or BF16")
        self.spec: OptimizerSpec = params.spec
        self.tables = list(tables)
        self.feature_tables = list(feature_tables)
        self.stacks: list[TableStack] = make_stacks(tables, dtype=dtype, spec=params.spec, device=device)
        self._stack_of_table = {index: stack for stack in self.stacks for index in stack.tables}
        self._output_dtype = params.output_dtype
        self._learning_rate = params.learning_rate
        self._step = 0
        self._step_of_table = [torch.zeros(1, dtype=torch.int64, device=device) for _ in tables]
        self._hyper: Tensor | None = None
        self._to_rehearse: dict[int, list[LookupBatch]] = {}
        self._pure = False
        self._device = device
        self._held: list[_HeldUpdate] | None = None
        self._views: list[StackView] = []
        self._weights = [self._view(index, None) for index in range(len(tables))]
        self._states = [self._state_views(index) for index in range(len(tables))]
        # Autograd calls backward only for an output that depends on something with a gradient.
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def forward(self, batch: PooledInput) -> Tensor:
        """Pooled embeddings `[num_samples, sum of the features' dims]`, features in their order."""
        if is_debugging():
            self.check_ids(batch)
        samples = [output.view(batch.num_samples, -1) for output in self.pool(batch.batches)]
        return in_feature_order(samples, self.stacks, self.feature_tables)

    def check_ids(self, batch: PooledInput) -> None:
        """Raises IdRangeError for an id that its table doesn't have; reads the ids back."""
        if not self._pure:
            for stack, lookup in zip(self.stacks, batch.batches, strict=True):
                check_ids(self.tables, stack, self.feature_tables, lookup)

    def pool(self, batches: Sequence[LookupBatch]) -> list[Tensor]:
        """Each stack's pooled embeddings `[bags, dim]`."""
        return [output.to(self._output_dtype) for output in self._lookup(batches, per_id=False)]

    def sequence(self, batches: Sequence[LookupBatch]) -> list[Tensor]:
        """Each stack's rows, one an id: float32 `[id capacity, dim]`; padding is 0."""
        return self._lookup(batches, per_id=True)

    def _lookup(self, batches: Sequence[LookupBatch], *, per_id: bool) -> list[Tensor]:
        step = _OptimizerStep(self)
        return [
            FusedLookup.apply(self._anchor, step, stack, lookup, per_id)
            for stack, lookup in zip(self.stacks, batches, strict=True)
        ]

    def update(self, stack: TableStack, batch: LookupBatch, grad_output: Tensor) -> None:
        """Applies the optimizer to the rows that `batch` touched."""
        arguments = (stack.weights, stack.state, grad_output, batch, self.spec, self.hyper())
        if self._pure:
            stack.weights, stack.state = kernels.donating_update(*arguments)
            return
        kernels.fused_update(*arguments)
        for nothing in self._to_rehearse.pop(id(stack), ()):
            kernels.fused_update(stack.weights, stack.state, grad_output, nothing, self.spec, self.hyper())
            kernels.pooled_lookup(stack.weights, nothing, stack.dim)

    def rehearse(self, position: int, batch: LookupBatch) -> None:
        """Runs update and lookup of a stack on a batch without ids, so that their programs are there.

        They come behind the next update, with its gradient: a program is built for a gradient that may be a
        view, and for a table that an update has left, which is another program than that for a loaded one.
        """
        self._to_rehearse.setdefault(id(self.stacks[position]), []).append(batch)

    def hold_updates(self) -> None:
        """From now on the backward keeps its updates for `apply_held`."""
        self._held = self._held or []

    def hold(self, step: _OptimizerStep, stack: TableStack, batch: LookupBatch, grad_output: Tensor) -> bool:
        """Keeps an update if updates are held.  Raises ValueError for a second one of a stack in a step."""
        if self._held is None:
            return False
        if any(update.stack is stack for update in self._held):
            names = ", ".join(self.tables[index].name for index in stack.tables)
            raise ValueError(
                f"tables {names}: a second backward before their updates were applied; with clipping by the "
                "global norm a collection is looked up once a step"
            )
        self._held.append(_HeldUpdate(step, stack, batch, grad_output))
        return True

    def held_square_sum(self) -> Tensor:
        """Sum of squares of the gradients of all rows that were touched, a float32 scalar."""
        sums = [reference.row_gradients(held.batch, held.grad).square().sum() for held in self._held or ()]
        return torch.stack(sums).sum() if sums else torch.zeros((), device=self._device)

    def apply_held(self, scale: Tensor) -> None:
        """Runs the updates that were held, with their gradients times `scale`."""
        held, self._held = self._held or [], []
        for update in held:
            update.step.update(update.stack, update.batch, update.grad * scale)

    @contextmanager
    def pure(self, buffers: Sequence[Sequence[Tensor]], hyper: Tensor) -> Iterator[None]:
        """For tracing: within it the stacks hold `buffers` (weights, *state), and an update replaces them.

        What the stacks held before they hold afterwards, and no step is counted.
        """
        held = [(stack.weights, stack.state) for stack in self.stacks]
        before, self._pure, self._hyper = (self._step, self._hyper), True, hyper
        for stack, (weights, *state) in zip(self.stacks, buffers, strict=True):
            stack.weights, stack.state = weights, tuple(state)
        try:
            yield
        finally:
            self._pure, (self._step, self._hyper) = False, before
            for stack, (weights, states) in zip(self.stacks, held, strict=True):
                stack.weights, stack.state = weights, states

    @property
    def anchor(self) -> Tensor:
        """What every lookup's output depends on, for autograd."""
        return self._anchor

    def next_step(self) -> None:
        """Counts an optimizer step: what the updates that follow use for bias correction and rounding."""
        if not self._pure:
            self._step += 1
            self._hyper = None

    def hyper(self) -> Tensor:
        """The run-time part of the optimizer in the current step, see `hyper_tensor`."""
        if self._hyper is None:
            self._hyper = hyper_tensor(
                self.spec, learning_rate=self._learning_rate, step=self._step, device=self._device
            )
        return self._hyper

    # What TorchRec asks of an embedding kernel.

    def split_embedding_weights(self) -> list[Tensor]:
        """Each table's weights `[rows, dim]`: views that follow the training once refreshed by `flush`."""
        return self._weights

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """Each table's state by name: `[rows]` or `[rows, dim]`; the step, `[1]`, if the optimizer counts."""
        return self._states

    def get_learning_rate(self) -> float:
        return self._learning_rate

    def set_learning_rate(self, rate: float) -> None:
        self._learning_rate = float(rate)
        self._hyper = None

    def set_optimizer_step(self, step: int) -> None:
        self._step = step
        self._hyper = None
        self.flush()

    def flush(self) -> None:
        """Makes every view show the tables and state as they are now."""
        for view in self._views:
            view.refresh()
        with torch.no_grad():
            for step in self._step_of_table:
                step.fill_(self._step)

    def state_loaded(self) -> None:
        """Takes the step over from the state tensors, after something was copied into them."""
        if self.counts_steps and self._step_of_table:
            self._step = max(int(step) for step in self._step_of_table)
            self._hyper = None

    @property
    def counts_steps(self) -> bool:
        return self.spec.optimizer is Optimizer.ADAM

    def slice_of(self, index: int) -> tuple[Tensor, int, int]:
        """(flat weights, first element, last element) of a table: what a TorchRec table slice is made of."""
        stack = self._stack_of_table[index]
        start = stack.first_rows[index] * stack.dim
        return stack.weights, start, start + self.tables[index].rows * stack.dim

    def follow(self, view: Tensor, index: int) -> None:
        """Keeps `view`, a slice that starts with table `index`, pointing at the current weights."""
        stack = self._stack_of_table[index]
        self._views.append(StackView(view, stack, None, stack.first_rows[index] * stack.dim))

    def _view(self, index: int, buffer: int | None) -> Tensor:
        stack, table = self._stack_of_table[index], self.tables[index]
        source = stack.weights if buffer is None else stack.state[buffer]
        per_row = source.numel() // stack.num_rows
        start = stack.first_rows[index] * per_row
        part = source[start : start + table.rows * per_row]
        by_row = buffer is not None and self.spec.has_row_state
        view = part if by_row else part.view(table.rows, stack.dim)
        self._views.append(StackView(view, stack, buffer, start))
        return view

    def _state_views(self, index: int) -> dict[str, Tensor]:
        stack = self._stack_of_table[index]
        names = STATE_NAMES[self.spec.optimizer]
        views = {name: self._view(index, buffer) for buffer, name in enumerate(names[: len(stack.state)])}
        if self.counts_steps:
            views[STEP_NAME] = self._step_of_table[index]
        return views


class _OptimizerStep:
    """One forward's updates, of all stacks, are one step, counted when the first of them comes."""

    def __init__(self, tables: FusedTables) -> None:
        self._tables = tables
        self._counted = False

    def apply(self, stack: TableStack, batch: LookupBatch, grad_output: Tensor) -> None:
        """Updates a stack, or leaves it for later if updates are held."""
        if not self._tables.hold(self, stack, batch, grad_output):
            self.update(stack, batch, grad_output)

    def update(self, stack: TableStack, batch: LookupBatch, grad_output: Tensor) -> None:
        if not self._counted:
            self._tables.next_step()
            self._counted = True
        self._tables.update(stack, batch, grad_output)


@dataclass(frozen=True)
class _HeldUpdate:
    """An update of which backward has left the gradient of the lookup's output, `[bags, dim]`."""

    step: _OptimizerStep
    stack: TableStack
    batch: LookupBatch
    grad: Tensor


class FusedLookup(torch.autograd.Function):
    """Lookup of one stack, pooled or one row an id; its backward updates the stack, without a gradient."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, step: _OptimizerStep, stack: TableStack, batch: LookupBatch, per_id: bool
    ) -> Tensor:
        ctx.step, ctx.stack, ctx.batch = step, stack, batch.per_id() if per_id else batch
        if per_id:
            return kernels.sequence_lookup(stack.weights, batch, stack.dim)
        return kernels.pooled_lookup(stack.weights, batch, stack.dim)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, ...]:
        ctx.step.apply(ctx.stack, ctx.batch, grad_output)
        return (None,) * 5
