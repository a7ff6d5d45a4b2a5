"""Optimizer state as a checkpoint keeps it: the same for every plan, world size and sharding type.

TorchRec's own state_dict is nearly that: weights, and states of one value per element or per row, are
ShardedTensors of the whole table, which torch.distributed.checkpoint reshards.  Two things are not: the
row-wise Adagrad sum of a column-sharded table (one value per row *and shard*), and the step of an
optimizer that counts (one value per shard).  Canonically a row has one sum and a table one step.

Column shards to rows: the mean square of a row is the mean of its shards' mean squares, weighted with
their widths.  Rows to column shards: every shard takes the row's sum.

A data-parallel table is trained by an optimizer of torch, which names the same state otherwise: what torch's
Adagrad and Adam keep goes by the names of the fused ones.  Adagrad's count of steps is left out (torch needs
it for `lr_decay` only, and a fused Adagrad doesn't count).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import ShardingType

from recsys_tpu.embeddings.fused_params import parse_fused_params
from recsys_tpu.embeddings.fused_tables import STEP_NAME, FusedTables
from recsys_tpu.sharding.embedding_bag_collection import TpuShardedEmbeddingBagCollection
from recsys_tpu.sharding.embedding_collection import TpuShardedEmbeddingCollection
from recsys_tpu.sharding.kernels import FusedKernel, FusedSequenceKernel

State = dict[str, dict[str, Any]]  # parameter -> "<table>.<state>" -> tensor, as in a KeyedOptimizer
_ROW_STATE = "momentum1"
_REPLICATED = {  # names in torch.optim (all of an optimizer's) -> those of the fused optimizers
    frozenset(("sum", "step")): {"sum": "momentum1"},
    frozenset(("exp_avg", "exp_avg_sq", "step")): {
        "exp_avg": "momentum1",
        "exp_avg_sq": "exp_avg_sq",
        "step": STEP_NAME,
    },
}
_Sharded = TpuShardedEmbeddingBagCollection | TpuShardedEmbeddingCollection


@dataclass(frozen=True)
class _Part:
    """One shard of a table on this rank."""

    tables: FusedTables
    position: int
    first_row: int
    share: float  # of the table's columns

    @property
    def state(self) -> dict[str, Tensor]:
        return self.tables.get_optimizer_state()[self.position]

    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.tables.tables[self.position].rows)


def canonical_state(model: nn.Module, state: Mapping[str, Mapping[str, Any]]) -> State:
    """`state`, the "state" of an optimizer's state_dict, in its canonical form; collective.

    What differs between plans is replaced by plain tensors; the rest is the same (live) tensors.
    """
    result = {parameter: dict(entries) for parameter, entries in state.items()}
    for module, path in _sharded_modules(model):
        parts = _parts(module)
        for table in _replicated_tables(module):
            for entries in _entries(result, path, table):
                _rename(entries, table)
        for table, rows in _tables_with_column_sums(module):
            sums = torch.zeros(rows)
            for part in parts.get(table, ()):
                sums[part.rows()] += part.share * part.state[_ROW_STATE].detach().cpu()
            dist.all_reduce(sums, group=module.host_group)
            for entries in _entries(result, path, table):
                entries[f"{table}.{_ROW_STATE}"] = sums
        for table, of_table in parts.items():
            if STEP_NAME in of_table[0].state:
                for entries in _entries(result, path, table):
                    entries[f"{table}.{STEP_NAME}"] = of_table[0].state[STEP_NAME].detach().cpu().clone()
    return result


def restore_state(model: nn.Module, canonical: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes a loaded canonical state into the tables' optimizers, where it isn't live tensors already."""
    for module, path in _sharded_modules(model):
        with_sums = {table for table, _ in _tables_with_column_sums(module)}
        for table, parts in _parts(module).items():
            for entries in _entries(canonical, path, table):
                for part in parts:
                    _restore(part, entries, table, sums=table in with_sums)


def _restore(part: _Part, entries: Mapping[str, Any], table: str, *, sums: bool) -> None:
    if sums:
        part.state[_ROW_STATE].copy_(entries[f"{table}.{_ROW_STATE}"][part.rows()])
    if STEP_NAME in part.state:
        part.tables.set_optimizer_step(int(entries[f"{table}.{STEP_NAME}"]))


def _rename(entries: dict[str, Any], table: str) -> None:
    """A data-parallel table's state by its canonical names; the tensors stay the live ones."""
    names = _REPLICATED.get(frozenset(entries))
    if names is None:
        return  # another optimizer's, which no fused one could take over
    found = dict(entries)
    entries.clear()
    for name, canonical in names.items():
        value = found[name]
        entries[f"{table}.{canonical}"] = value.view(1) if canonical == STEP_NAME else value


def _sharded_modules(model: nn.Module) -> Iterator[tuple[_Sharded, str]]:
    """Every sharded collection, and what the names of its tables begin with."""
    for path, module in model.named_modules():
        if isinstance(module, _Sharded):
            wrappers = ("_dmp_wrapped_module", "module")
            names = [name for name in path.split(".") if name and name not in wrappers]
            pooled = isinstance(module, TpuShardedEmbeddingBagCollection)
            yield module, ".".join([*names, "embedding_bags" if pooled else "embeddings"])


def _parts(module: _Sharded) -> dict[str, list[_Part]]:
    """This rank's shards of every fused table, with current views."""
    parts: dict[str, list[_Part]] = {}
    for lookup in module._lookups:
        if isinstance(lookup, DistributedDataParallel):
            continue
        for kernel in lookup._emb_modules:
            if not isinstance(kernel, FusedKernel | FusedSequenceKernel):
                continue
            kernel.flush()
            for position, table in enumerate(kernel.config.embedding_tables):
                assert table.local_metadata is not None
                first_row = int(table.local_metadata.shard_offsets[0])
                part = _Part(kernel.emb_module, position, first_row, table.local_cols / table.embedding_dim)
                parts.setdefault(table.name, []).append(part)
    return parts


def _replicated_tables(module: _Sharded) -> list[str]:
    return [
        info.embedding_config.name
        for infos in module.sharding_type_to_sharding_infos.values()
        for info in infos
        if info.param_sharding.sharding_type == ShardingType.DATA_PARALLEL.value
    ]


def _tables_with_column_sums(module: _Sharded) -> list[tuple[str, int]]:
    """(table, rows) of the column-sharded tables with one sum a row: the same list on every rank."""
    return [
        (info.embedding_config.name, info.embedding_config.num_embeddings)
        for infos in module.sharding_type_to_sharding_infos.values()
        for info in infos
        if _is_column_sharded(info.param_sharding, info.embedding_config.embedding_dim)
        and parse_fused_params(info.fused_params).spec.has_row_state
    ]


def _is_column_sharded(sharding: Any, dim: int) -> bool:
    spec = sharding.sharding_spec
    return spec is not None and any(shard.shard_sizes[1] != dim for shard in spec.shards)


def _entries(state: Mapping[str, Any], path: str, table: str) -> list[Any]:
    """The entries of a table's parameter, whatever an optimizer puts before its name."""
    suffix = f"{path}.{table}.weight"
    return [entries for name, entries in state.items() if name == suffix or name.endswith(f".{suffix}")]
