"""The train step of a config as one pure function: lookup, towers, backward, optimizers, exchange.

It is what a rank's chip executes per step, with the kernels of `recsys_tpu.kernels` inside, in the form
that torch_tpu lowers to one XLA program.  Tables are sharded table-wise over the ranks (each table on one
rank, pooled rows exchanged by all-to-all), dense weights are replicated.

Suffixes: N ids of a rank's tables, G global batch, B batch of a rank, F features, K tables of a rank,
W ranks, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

from recsys_tpu.config import Config, DenseOptimizerConfig, DLRMConfig
from recsys_tpu.embeddings.stacks import storage_rows
from recsys_tpu.errors import ConfigError
from recsys_tpu.kernels import LookupBatch, Optimizer, OptimizerSpec, ops, pooled_lookup
from recsys_tpu.kernels.optimizer import HYPER_SIZE
from recsys_tpu.kernels.variants import target_chip, variant_for
from recsys_tpu.models.build import build_click_model
from recsys_tpu.models.dlrm import DLRM

_BETAS = (0.9, 0.999)  # torch.optim.AdamW's defaults


@dataclass(frozen=True)
class Step:
    """A step ready for `aot.lower`."""

    function: Callable[..., tuple[Tensor, ...]]
    """Takes `arguments` in order; returns the loss, then the new state in the order of `state_names`."""
    arguments: dict[str, Tensor]
    """Name -> example, on the meta device."""
    state_names: tuple[str, ...]
    """The arguments that training changes: tables, weights, optimizer state."""

    @property
    def aliases(self) -> dict[int, int]:
        """Argument number -> output number, for every argument that the step replaces."""
        names = list(self.arguments)
        return {names.index(name): number + 1 for number, name in enumerate(self.state_names)}


class _Towers(nn.Module):
    """The dense part of a DLRM as a module of its own, for torch.func.functional_call."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.dense_arch, self.inter_arch, self.over_arch = model.dense_arch, model.inter_arch, model.over_arch

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        return DLRM.towers(self, dense, embedded)  # type: ignore[arg-type]


def rows_of_fullest_rank(num_embeddings: Mapping[str, int], world_size: int) -> tuple[int, int]:
    """(rows, tables) of the rank with most rows, tables placed largest first on the emptiest rank.

    Every rank takes part in the exchange with as many tables as the one that has most.
    """
    rows, tables = [0] * world_size, [0] * world_size
    for size in sorted(num_embeddings.values(), reverse=True):
        open_ranks = [r for r in range(world_size) if tables[r] < -(-len(num_embeddings) // world_size)]
        rank = min(open_ranks, key=rows.__getitem__)
        rows[rank] += size
        tables[rank] += 1
    return max(rows), max(tables)


def build_step(
    config: Config,
    num_embeddings: Mapping[str, int],
    *,
    dense_in_features: int,
    world_size: int = 1,
) -> Step:
    """The step of rank 0 of `world_size` ranks.

    Args:
        num_embeddings: rows of each table, by feature.
        dense_in_features: number of dense features.
        world_size: ranks; over 1, the process is inside `slice_group(world_size)`.

    Raises:
        ConfigError: the model is no DLRM, or the global batch is not divisible by the ranks.
    """
    if not isinstance(config.model, DLRMConfig):
        raise ConfigError(f"the step of model.kind={config.model.kind} cannot be compiled yet, only dlrm's")
    batch_size = config.train.batch_size
    if batch_size % world_size:
        raise ConfigError(f"train.batch_size={batch_size} is not a multiple of the {world_size} devices")
    dim = config.model.embedding_dim
    features = len(num_embeddings)
    rows, tables = rows_of_fullest_rank(num_embeddings, world_size)
    rows = storage_rows(rows)
    model = build_click_model(config.model, num_embeddings, dense_in_features=dense_in_features)
    assert isinstance(model, DLRM)
    towers = _Towers(model).to("tpu")
    spec = _sparse_spec(config)
    with torch.device("meta"):
        table_state = _table_arguments(spec, rows, dim)
        weights = {f"weight.{name}": torch.empty_like(p) for name, p in towers.named_parameters()}
        dense_state = {
            f"{kind}.{name}": torch.empty_like(p)
            for kind in _dense_state_kinds(config.optimizer.dense)
            for name, p in towers.named_parameters()
        }
        state = {**table_state, **weights, **dense_state}
        inputs = _batch_arguments(batch_size, batch_size // world_size, tables, dense_in_features)
    exchange = _Exchange(world_size, tables, features)
    dense_update = _dense_update(config.optimizer.dense)
    names = [name.removeprefix("weight.") for name in weights]
    precision = config.runtime.precision

    def step(*arguments: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip([*state, *inputs], arguments, strict=True))
        batch = _lookup_batch(given, tables * batch_size)
        pooled = pooled_lookup(given["table"], batch, dim)
        embedded = exchange.to_samples(pooled).detach().requires_grad_()
        leaves = {name: given[f"weight.{name}"].detach().requires_grad_() for name in names}
        with torch.autocast("tpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = torch.func.functional_call(towers, leaves, (given["dense"], embedded))
        losses = nn.functional.binary_cross_entropy_with_logits(
            logits.float(), given["labels"], reduction="sum"
        )
        loss = losses / batch_size
        embedded_gradient, *gradients = torch.autograd.grad(loss, [embedded, *leaves.values()])
        gradients = _summed_over_ranks(gradients, world_size)
        update = ops.update_op(variant_for(pooled.device), target_chip(), spec)
        new_table = update(
            given["table"],
            [given[name] for name in table_state if name != "table"],
            exchange.to_owners(embedded_gradient),
            batch.unique_rows,
            batch.row_offsets,
            batch.sorted_bags,
            batch.segments,
            batch.sorted_weights,
            given["hyper"],
        )
        new_dense = dense_update(given, names, gradients)
        return (loss.detach(), *new_table, *(new_dense[name] for name in [*weights, *dense_state]))

    return Step(step, {**state, **inputs}, tuple(state))


def _sparse_spec(config: Config) -> OptimizerSpec:
    sparse = config.optimizer.sparse
    kinds = {
        "rowwise_adagrad": Optimizer.ROWWISE_ADAGRAD,
        "adagrad": Optimizer.ADAGRAD,
        "sgd": Optimizer.SGD,
    }
    return OptimizerSpec(kinds[sparse.kind], eps=sparse.eps)


def _table_arguments(spec: OptimizerSpec, rows: int, dim: int) -> dict[str, Tensor]:
    sizes = spec.state_sizes(rows, dim)
    states = {f"table_state.{number}": torch.empty(size) for number, size in enumerate(sizes)}
    return {"table": torch.empty(rows * dim), **states}


def _batch_arguments(global_batch: int, batch: int, tables: int, dense: int) -> dict[str, Tensor]:
    """One id per table and sample; see `LookupBatch` for the index tensors."""
    ids = tables * global_batch

    def index(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32)

    return {
        "dense": torch.empty(batch, dense),
        "labels": torch.empty(batch),
        "rows_N": index(ids),
        "bags_N": index(ids),
        "bag_offsets": index(ids + 1),
        "unique_rows": index(ids),
        "row_offsets": index(ids + 1),
        "sorted_bags_N": index(ids),
        "segments_N": index(ids),
        "order_N": index(ids),
        "counts": index(2),
        "hyper": torch.empty(HYPER_SIZE),
        "step": torch.empty(()),
    }


def _lookup_batch(given: Mapping[str, Tensor], num_bags: int) -> LookupBatch:
    return LookupBatch(
        num_bags=num_bags,
        rows=given["rows_N"],
        bags=given["bags_N"],
        weights=None,
        bag_offsets=given["bag_offsets"],
        unique_rows=given["unique_rows"],
        row_offsets=given["row_offsets"],
        sorted_bags=given["sorted_bags_N"],
        sorted_weights=None,
        segments=given["segments_N"],
        order=given["order_N"],
        counts=given["counts"],
    )


class _Exchange:
    """Pooled rows from the owners of the tables to the ranks of the samples, and gradients back."""

    def __init__(self, world_size: int, tables: int, features: int) -> None:
        self.world_size, self.tables, self.features = world_size, tables, features

    def to_samples(self, pooled: Tensor) -> Tensor:
        """``[K * G, D]`` of the rank's tables to ``[B, F, D]`` of its samples."""
        dim = pooled.shape[1]
        x_KWBD = pooled.reshape(self.tables, self.world_size, -1, dim)
        x_WKBD = self._all_to_all(x_KWBD.transpose(0, 1))
        return x_WKBD.reshape(self.world_size * self.tables, -1, dim)[: self.features].transpose(0, 1)

    def to_owners(self, gradient: Tensor) -> Tensor:
        """``[B, F, D]`` to ``[K * G, D]``; tables that fill up a rank get zeros."""
        batch, _, dim = gradient.shape
        missing = self.world_size * self.tables - self.features
        x_FBD = nn.functional.pad(gradient.transpose(0, 1), (0, 0, 0, 0, 0, missing))
        x_WKBD = self._all_to_all(x_FBD.reshape(self.world_size, self.tables, batch, dim))
        return x_WKBD.transpose(0, 1).reshape(-1, dim)

    def _all_to_all(self, tensor: Tensor) -> Tensor:
        if self.world_size == 1:
            return tensor
        return functional.all_to_all_single(tensor.contiguous(), None, None, _world())


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None, "a sharded step is built inside slice_group()"
    return dist.group.WORLD


def _summed_over_ranks(gradients: Sequence[Tensor], world_size: int) -> list[Tensor]:
    """All dense gradients in one all-reduce."""
    if world_size == 1:
        return list(gradients)
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    parts = functional.all_reduce(flat, "sum", _world()).split([g.numel() for g in gradients])
    return [part.reshape(g.shape) for part, g in zip(parts, gradients, strict=True)]


StateKind = Literal["moment1", "moment2", "sum", "momentum"]


def _dense_state_kinds(config: DenseOptimizerConfig) -> tuple[StateKind, ...]:
    if config.kind == "adamw":
        return ("moment1", "moment2")
    if config.kind == "adagrad":
        return ("sum",)
    return ("momentum",) if config.momentum else ()


def _dense_update(
    config: DenseOptimizerConfig,
) -> Callable[[Mapping[str, Tensor], Sequence[str], Sequence[Tensor]], dict[str, Tensor]]:
    """torch.optim's AdamW, Adagrad or SGD as a pure function: (arguments, names, gradients) -> new state."""
    rules: dict[str, Callable[..., dict[str, Tensor]]] = {"adamw": _adamw, "adagrad": _adagrad, "sgd": _sgd}
    rule = rules[config.kind]

    def update(given: Mapping[str, Tensor], names: Sequence[str], gradients: Sequence[Tensor]) -> Any:
        new: dict[str, Tensor] = {}
        for name, gradient in zip(names, gradients, strict=True):
            kinds = ("weight", *_dense_state_kinds(config))
            old = {kind: given[f"{kind}.{name}"] for kind in kinds}
            updated = rule(config, old, gradient, given["step"])
            new.update({f"{kind}.{name}": value for kind, value in updated.items()})
        return new

    return update


def _adamw(
    config: DenseOptimizerConfig, old: Mapping[str, Tensor], gradient: Tensor, step: Tensor
) -> dict[str, Tensor]:
    beta1, beta2 = _BETAS
    moment1 = beta1 * old["moment1"] + (1 - beta1) * gradient
    moment2 = beta2 * old["moment2"] + (1 - beta2) * gradient.square()
    root = (moment2 / (1 - beta2**step)).sqrt() + config.eps
    kept = old["weight"] * (1 - config.learning_rate * config.weight_decay)
    weight = kept - config.learning_rate * (moment1 / (1 - beta1**step)) / root
    return {"weight": weight, "moment1": moment1, "moment2": moment2}


def _adagrad(
    config: DenseOptimizerConfig, old: Mapping[str, Tensor], gradient: Tensor, step: Tensor
) -> dict[str, Tensor]:
    gradient = gradient + config.weight_decay * old["weight"]
    total = old["sum"] + gradient.square()
    return {
        "weight": old["weight"] - config.learning_rate * gradient / (total.sqrt() + config.eps),
        "sum": total,
    }


def _sgd(
    config: DenseOptimizerConfig, old: Mapping[str, Tensor], gradient: Tensor, step: Tensor
) -> dict[str, Tensor]:
    gradient = gradient + config.weight_decay * old["weight"]
    if not config.momentum:
        return {"weight": old["weight"] - config.learning_rate * gradient}
    momentum = config.momentum * old["momentum"] + gradient
    return {"weight": old["weight"] - config.learning_rate * momentum, "momentum": momentum}
