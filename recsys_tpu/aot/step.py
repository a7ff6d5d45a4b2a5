"""The train step of a config as one pure function: lookup, exchange, towers, backward, optimizers.

It is what a rank's chip executes per step, with the kernels of `recsys_tpu.kernels` inside, in the form
that torch_tpu lowers to one XLA program.  Tables are sharded in one way over the ranks (`tables`), their
lookups, exchanges and updates are those of the sharder; dense weights are replicated.  No table is
materialised: every argument is a meta tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from recsys_tpu import dense_rules
from recsys_tpu.aot.models import ModelPart, model_part
from recsys_tpu.aot.tables import ONE_RANK, RankTables, Slice, rank_tables
from recsys_tpu.config import Config
from recsys_tpu.embeddings.capacity import Size
from recsys_tpu.embeddings.dense_tables import DenseLookup
from recsys_tpu.kernels import LookupBatch, Optimizer, OptimizerSpec, donating_update, pooled_lookup
from recsys_tpu.kernels.all_to_all.pooled import Transport
from recsys_tpu.kernels.optimizer import HYPER_SIZE
from recsys_tpu.sharding.pooled_exchange import WIRE_DTYPES


@dataclass(frozen=True)
class Step:
    """A step ready for `aot.lower`."""

    function: Callable[..., tuple[Tensor, ...]]
    """Takes `arguments` in order; returns the loss, then the new state in the order of `state_names`."""
    arguments: dict[str, Tensor]
    """Name -> example, on the meta device."""
    state_names: tuple[str, ...]
    """The arguments that training changes: tables, weights, optimizer state."""
    table_bytes: int
    """Of the tables of one rank, without optimizer state."""

    @property
    def aliases(self) -> dict[int, int]:
        """Argument number -> output number, for every argument that the step replaces."""
        names = list(self.arguments)
        return {names.index(name): number + 1 for number, name in enumerate(self.state_names)}


def build_step(
    config: Config,
    *,
    ranks: Slice = ONE_RANK,
    sharding: str = "table_wise",
    transport: Transport = "collective",
) -> Step:
    """The step of rank 0 of a slice.

    Args:
        ranks: over one, the process is inside `slice_group`.
        sharding: one of TorchRec's sharding types, for every table.
        transport: of pooled rows: XLA's collectives, or our kernels.

    Raises:
        ConfigError: the sizes of the model are not known, or don't fit the ranks.
    """
    part = model_part(config, world_size=ranks.ranks, group=ranks.group)
    spec = _sparse_spec(config)
    tables = rank_tables(
        part.tables,
        sharding,
        spec=spec,
        max_ids=part.max_ids,
        samples=part.samples,
        within_slice=ranks,
        transport=transport,
        wire_dtype=WIRE_DTYPES[config.sharding.wire],
    )
    return (
        _replicated(config, part, tables, ranks)
        if tables.replicated
        else _sharded(config, part, tables, ranks)
    )


def _sharded(config: Config, part: ModelPart, tables: RankTables, ranks: Slice) -> Step:
    """Tables are trained by the fused optimizer, on the rank that stores them."""
    spec, dense = _sparse_spec(config), part.dense.to("tpu")
    table_state = {
        name: value
        for number, stack in enumerate(tables.stacks)
        for name, value in (
            (f"table.{number}", stack.weights),
            *((f"table_state.{number}.{n}", value) for n, value in enumerate(stack.state)),
        )
    }
    dense_state = _dense_state(config, dict(dense.named_parameters()))
    state = {**table_state, **dense_state}
    inputs = {**part.inputs, **_batch_inputs(tables, part.weighted), **_hyper_inputs()}
    names = [name for name, _ in dense.named_parameters()]

    def step(*arguments: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip([*state, *inputs], arguments, strict=True))
        batches = [_lookup_batch(given, tables, number) for number in range(len(tables.stacks))]
        pooled = [
            pooled_lookup(given[f"table.{number}"], batch, stack.dim).detach().requires_grad_()
            for number, (stack, batch) in enumerate(zip(tables.stacks, batches, strict=True))
        ]
        leaves = {name: given[f"weight.{name}"].detach().requires_grad_() for name in names}
        loss = _loss(part, leaves, tables.to_samples(pooled), given, ranks)
        gradients = torch.autograd.grad(loss, [*pooled, *leaves.values()])
        of_pooled, of_dense = gradients[: len(pooled)], gradients[len(pooled) :]
        new: dict[str, Tensor] = {}
        for number, (stack, batch, gradient) in enumerate(
            zip(tables.stacks, batches, of_pooled, strict=True)
        ):
            old = tuple(given[f"table_state.{number}.{n}"] for n in range(len(stack.state)))
            table, updated = donating_update(
                given[f"table.{number}"], old, gradient, batch, spec, given["hyper"]
            )
            new[f"table.{number}"] = table
            new.update({f"table_state.{number}.{n}": value for n, value in enumerate(updated)})
        new.update(_updated_dense(config, given, names, _mean_over_ranks(of_dense, ranks)))
        return (loss.detach(), *(new[name] for name in state))

    return Step(step, {**state, **inputs}, tuple(state), _bytes(tables))


def _replicated(config: Config, part: ModelPart, tables: RankTables, ranks: Slice) -> Step:
    """Every rank holds the tables and trains them with the dense optimizer, from gradients of their size."""
    dense = part.dense.to("tpu")
    of_tables = {f"table.{number}": stack.weights for number, stack in enumerate(tables.stacks)}
    parameters = {**of_tables, **dict(dense.named_parameters())}
    state = _dense_state(config, parameters)
    inputs = {**part.inputs, **_batch_inputs(tables, part.weighted), **_hyper_inputs()}

    def step(*arguments: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip([*state, *inputs], arguments, strict=True))
        leaves = {name: given[f"weight.{name}"].detach().requires_grad_() for name in parameters}
        pooled = [
            DenseLookup.apply(leaves[f"table.{number}"], stack.dim, _lookup_batch(given, tables, number))
            for number, stack in enumerate(tables.stacks)
        ]
        weights = {name: leaf for name, leaf in leaves.items() if name not in of_tables}
        loss = _loss(part, weights, tables.to_samples(pooled), given, ranks)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        new = _updated_dense(config, given, list(parameters), _mean_over_ranks(gradients, ranks))
        return (loss.detach(), *(new[name] for name in state))

    return Step(step, {**state, **inputs}, tuple(state), _bytes(tables))


def _loss(
    part: ModelPart,
    weights: Mapping[str, Tensor],
    embedded: Tensor,
    given: Mapping[str, Tensor],
    ranks: Slice,
) -> Tensor:
    """This rank's share of the global mean loss times the ranks, as `Task.loss`."""
    inputs = {name: given[name] for name in part.inputs}
    total = torch.func.functional_call(part.dense, dict(weights), (embedded,), inputs)
    return total * (ranks.ranks / part.loss_rows)


def _sparse_spec(config: Config) -> OptimizerSpec:
    sparse = config.optimizer.sparse
    kinds = {
        "rowwise_adagrad": Optimizer.ROWWISE_ADAGRAD,
        "adagrad": Optimizer.ADAGRAD,
        "sgd": Optimizer.SGD,
    }
    return OptimizerSpec(kinds[sparse.kind], eps=sparse.eps)


def _dense_state(config: Config, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"{kind}.{name}": torch.empty(parameter.shape, device="meta")
        for kind in _dense_kinds(config)
        for name, parameter in parameters.items()
    }


def _updated_dense(
    config: Config, given: Mapping[str, Tensor], names: Sequence[str], gradients: Sequence[Tensor]
) -> dict[str, Tensor]:
    rate, *corrections = given["dense_hyper"].unbind()
    new: dict[str, Tensor] = {}
    for name, gradient in zip(names, gradients, strict=True):
        old = {kind: given[f"{kind}.{name}"] for kind in _dense_kinds(config)}
        values = dense_rules.updated(
            config.optimizer.dense, old, gradient, learning_rate=rate, corrections=corrections
        )
        new.update({f"{kind}.{name}": value for kind, value in values.items()})
    return new


def _dense_kinds(config: Config) -> tuple[str, ...]:
    return (dense_rules.WEIGHT, *dense_rules.state_kinds(config.optimizer.dense))


def _hyper_inputs() -> dict[str, Tensor]:
    """Of the tables, and of the dense optimizer: its learning rate and two bias corrections."""
    sizes = {"hyper": HYPER_SIZE, "dense_hyper": 3}
    return {name: torch.empty(size, device="meta") for name, size in sizes.items()}


def _batch_inputs(tables: RankTables, weighted: bool) -> dict[str, Tensor]:
    """See `LookupBatch` for the index tensors."""
    inputs: dict[str, Tensor] = {}
    for number, (features, size) in enumerate(zip(tables.features, tables.sizes, strict=True)):
        of_stack = _index_inputs(size, tables.samples * features)
        if weighted:
            of_stack |= {
                name: torch.empty(size[0], device="meta") for name in ("weights_N", "sorted_weights_N")
            }
        inputs |= {f"{name}.{number}": value for name, value in of_stack.items()}
    return inputs


def _index_inputs(size: Size, bags: int) -> dict[str, Tensor]:
    ids, unique = size
    lengths = {
        "rows_N": ids,
        "bags_N": ids,
        "bag_offsets": bags + 1,
        "unique_rows": unique,
        "row_offsets": unique + 1,
        "sorted_bags_N": ids,
        "segments_N": ids,
        "order_N": ids,
        "counts": 2,
    }
    return {name: torch.empty(n, dtype=torch.int32, device="meta") for name, n in lengths.items()}


def _lookup_batch(given: Mapping[str, Tensor], tables: RankTables, number: int) -> LookupBatch:
    def of_stack(name: str) -> Any:
        return given.get(f"{name}.{number}")

    return LookupBatch(
        num_bags=tables.samples * tables.features[number],
        rows=of_stack("rows_N"),
        bags=of_stack("bags_N"),
        weights=of_stack("weights_N"),
        bag_offsets=of_stack("bag_offsets"),
        unique_rows=of_stack("unique_rows"),
        row_offsets=of_stack("row_offsets"),
        sorted_bags=of_stack("sorted_bags_N"),
        sorted_weights=of_stack("sorted_weights_N"),
        segments=of_stack("segments_N"),
        order=of_stack("order_N"),
        counts=of_stack("counts"),
    )


def _mean_over_ranks(gradients: Sequence[Tensor], ranks: Slice) -> list[Tensor]:
    """All dense gradients in one all-reduce."""
    if ranks.group is None:
        return list(gradients)
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    group: dist.ProcessGroup = ranks.group
    total = functional.all_reduce(flat, "sum", group) / ranks.ranks
    parts = total.split([gradient.numel() for gradient in gradients])
    return [part.reshape(gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]


def _bytes(tables: RankTables) -> int:
    return sum(stack.weights.numel() * stack.weights.element_size() for stack in tables.stacks)
