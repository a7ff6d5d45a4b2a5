"""The train step as one XLA program: lookups, towers, backward and every optimizer; tables are donated.

The other form (the trainer's default) runs lookups and updates as operations of their own around compiled
towers.  Both are the same code: this one traces the task's loss with tables, weights and optimizer state
as arguments, and puts what the program returns in their place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from recsys_tpu import dense_rules
from recsys_tpu.config import DenseOptimizerConfig
from recsys_tpu.data.batch import Batch
from recsys_tpu.embeddings.fused_tables import FusedTables
from recsys_tpu.errors import ConfigError
from recsys_tpu.kernels.debug import is_debugging
from recsys_tpu.kernels.one_program import compile_donating
from recsys_tpu.models.click_model import ClickModel
from recsys_tpu.runtime import Runtime
from recsys_tpu.tasks import Task

Program = Callable[..., tuple[Tensor, ...]]


class WholeStep:
    """Runs train steps of a model on one chip as one program, compiled anew only for new shapes.

    Raises:
        ConfigError: the run has several ranks, no `tpu` device, or no click model.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizer: CombinedOptimizer,
        task: Task[Any, Any],
        config: DenseOptimizerConfig,
        runtime: Runtime,
    ) -> None:
        _check(runtime, model)
        self._task, self._config, self._device = task, config, runtime.device
        self._model: Any = model.module
        self._collection: Any = self._model.sparse_arch.embedding_bag_collection
        self._tables = _fused_tables(self._collection)
        self._dense_optimizer = _dense_optimizer(optimizer)
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        parameters = [p for group in self._dense_optimizer.param_groups for p in group["params"]]
        self._weights: dict[str, nn.Parameter] = {names[id(p)]: p for p in parameters}
        # Constants of the towers, such as the pairs of an interaction.
        self._constants: dict[str, Tensor] = {
            name: value
            for name, value in self._model.named_buffers()
            if value.device.type == self._device.type
        }
        self._programs: dict[Any, Program] = {}

    def __call__(self, batch: Batch) -> Tensor:
        """Trains on a batch; returns the task's loss (scalar, on the device)."""
        ctx, prepared = self._collection.ahead.take(batch.sparse)
        if is_debugging():
            self._check_ids(prepared)
        on_device = batch.dense_to(self._device)
        inputs = (prepared, on_device.dense, on_device.labels, on_device.weights)
        tensors, form = _flattened(inputs)
        for tables in self._tables:
            tables.next_step()
        state = list(self._state())
        hypers = [tables.hyper() for tables in self._tables]
        arguments = [*state, *hypers, self._rate_and_corrections(), *self._constants.values(), *tensors]
        key = (form, batch.global_rows, *(tuple(value.shape) for value in tensors))
        if key not in self._programs:
            step = self._pure_step(ctx, batch, inputs, len(state))
            # Not the weights of the towers: on this device a clone may share its original's memory.
            donated = sum(1 for tables in self._tables for _ in _buffers(tables))
            self._programs[key] = compile_donating(step, arguments, donate=range(donated))
        loss, *new_state = self._programs[key](*arguments)
        with torch.no_grad():
            for tensor, result in zip(state, new_state, strict=True):
                tensor.set_(result)  # type: ignore[call-overload]
        return loss

    def _check_ids(self, prepared: Any) -> None:
        groups = [group for lookup in prepared for group in lookup.groups]
        for tables, group in zip(self._tables, groups, strict=True):
            tables.check_ids(group)

    def _state(self) -> Iterator[Tensor]:
        """All that a step changes, in one order: stacks with their state, weights with theirs."""
        for tables in self._tables:
            yield from _buffers(tables)
        for parameter in self._weights.values():
            yield parameter
            held = self._dense_optimizer.state[parameter]
            for kind in dense_rules.state_kinds(self._config):
                if held.get(kind) is None:  # as torch.optim starts
                    held[kind] = torch.zeros_like(parameter, requires_grad=False)
                yield held[kind]

    def _rate_and_corrections(self) -> Tensor:
        """Learning rate and bias corrections of the dense optimizer, `[3]`, after counting the step."""
        step = 1
        for parameter in self._weights.values():
            held = self._dense_optimizer.state[parameter]
            if self._config.kind != "sgd":
                step = int(held.setdefault("step", torch.zeros(())).add_(1))
        rate = self._dense_optimizer.param_groups[0]["lr"]
        values = [rate, *dense_rules.bias_corrections(step)]
        return torch.tensor(values, dtype=torch.float32).to(self._device)

    def _pure_step(self, ctx: Any, batch: Batch, inputs: Any, state_size: int) -> Program:
        """The step as a pure function of the arguments that `__call__` lists."""
        kinds = (dense_rules.WEIGHT, *dense_rules.state_kinds(self._config))

        def step(*arguments: Tensor) -> tuple[Tensor, ...]:
            state, rest = iter(arguments[:state_size]), iter(arguments[state_size:])
            buffers = [
                [[next(state) for _ in (stack.weights, *stack.state)] for stack in tables.stacks]
                for tables in self._tables
            ]
            dense = {name: {kind: next(state) for kind in kinds} for name in self._weights}
            leaves = {name: old[dense_rules.WEIGHT].detach().requires_grad_() for name, old in dense.items()}
            hypers = [next(rest) for _ in self._tables]
            scalars = next(rest)
            constants = {name: next(rest) for name in self._constants}
            traced = _map_tensors(inputs, lambda _: next(rest))
            with ExitStack() as stack:
                for tables, buffer, hyper in zip(self._tables, buffers, hypers, strict=True):
                    stack.enter_context(tables.pure(buffer, hyper))
                loss = self._loss(ctx, batch, traced, leaves | constants)
                # The anchors have no gradient; what leads to them is where the tables are updated.
                anchors = [tables.anchor for tables in self._tables]
                gradients = torch.autograd.grad(loss, [*leaves.values(), *anchors], allow_unused=True)
                new = [buffer for tables in self._tables for buffer in _buffers(tables)]
            for old, gradient in zip(dense.values(), gradients[: len(dense)], strict=True):
                values = dense_rules.updated(
                    self._config,
                    old,
                    gradient,
                    learning_rate=scalars[0],
                    corrections=(scalars[1], scalars[2]),
                )
                new += [values[kind] for kind in kinds]
            return (loss.detach(), *new)

        return step

    def _loss(self, ctx: Any, batch: Batch, traced: Any, values: dict[str, Tensor]) -> Tensor:
        """The task's loss, the model reading `values` by name and the prepared ids in `traced`."""
        prepared, dense, labels, weights = traced
        self._collection.ahead.put(batch.sparse, (ctx, prepared))

        def model(*arguments: Any) -> Any:
            return torch.func.functional_call(self._model, values, arguments)

        # Compiled towers are traced as the code that they are: a part of this program.
        with torch._dynamo.config.patch(error_on_nested_fx_trace=False):
            on_device = dataclasses.replace(batch, dense=dense, labels=labels, weights=weights)
            return self._task.loss(model, on_device)  # type: ignore[arg-type]


def _check(runtime: Runtime, model: DistributedModelParallel) -> None:
    if runtime.device.type != "tpu":
        raise ConfigError(
            "train.step=one_program needs a tpu device (runtime.device tpu or tpu-emulated), not "
            f"{runtime.kind}"
        )
    if runtime.world_size > 1:
        raise ConfigError(
            f"train.step=one_program trains on one chip, but the run has {runtime.world_size} ranks: use "
            "separate_ops"
        )
    if not isinstance(model.module, ClickModel):
        raise ConfigError("train.step=one_program trains click models only: use separate_ops")


def _fused_tables(collection: Any) -> list[FusedTables]:
    """The tables of a sharded collection, group after group."""
    lookups: list[Any] = [getattr(lookup, "module", lookup) for lookup in collection._lookups]  # out of DDP
    found = [kernel.emb_module for lookup in lookups for kernel in lookup._emb_modules]
    for tables in found:
        if not isinstance(tables, FusedTables):
            names = ", ".join(table.name for table in tables.tables)
            raise ConfigError(f"train.step=one_program: the plan makes {names} data-parallel; shard them")
    return found


def _dense_optimizer(optimizer: CombinedOptimizer) -> torch.optim.Optimizer:
    wrapper = dict(optimizer.optimizers)["dense"]
    assert isinstance(wrapper, KeyedOptimizerWrapper)
    return wrapper._optimizer


def _buffers(tables: FusedTables) -> Iterator[Tensor]:
    """Weights and state of each stack."""
    for stack in tables.stacks:
        yield from (stack.weights, *stack.state)


def _flattened(value: Any) -> tuple[list[Tensor], str]:
    """The tensors in `value`, and the rest of it as text."""
    tensors: list[Tensor] = []
    rest = _map_tensors(value, tensors.append)
    return tensors, repr(rest)


def _map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """`value` with the result of `function` in the place of each tensor, also in dataclasses and lists."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(item, function) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _map_tensors(getattr(value, f.name), function) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value
