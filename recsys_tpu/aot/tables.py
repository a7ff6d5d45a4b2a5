"""What one rank of a slice stores, looks up and exchanges when all tables are sharded in one way.

A program with collectives is the same on every rank, so every rank takes part with as many columns as the
one that has most, and stores what the fullest one stores.  Only sizes are worked out here: which tables they
are makes no difference to the program.

Suffixes: G samples of all ranks, B of one, D embedding dim, F features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from recsys_tpu.embeddings.capacity import HEADROOM, Size, rung
from recsys_tpu.embeddings.stacks import (
    MAX_STACK_ELEMENTS,
    LocalTable,
    TableStack,
    features_of,
    make_stacks,
)
from recsys_tpu.errors import ConfigError
from recsys_tpu.kernels.all_to_all.pooled import MeshAxis, Transport
from recsys_tpu.kernels.optimizer import OptimizerSpec
from recsys_tpu.sharding.pooled_exchange import Stage, all_to_all, reduce_scatter

_SPLIT_COLUMNS = (
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
    ShardingType.GRID_SHARD.value,
)
_IN_ROW_GROUPS = (ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)
_FEWEST_COLUMN_SHARDS = 2


@dataclass(frozen=True)
class Slice:
    """The ranks of a slice, in row groups (TorchRec: nodes) of equal size."""

    group: dist.ProcessGroup | None
    within: dist.ProcessGroup | None
    """The ranks of this rank's row group."""
    across: dist.ProcessGroup | None
    """The ranks with this rank's place in each row group; None if there is one row group only."""
    ranks: int = 1
    row_group: int = 1

    @property
    def row_groups(self) -> int:
        return self.ranks // self.row_group


ONE_RANK = Slice(None, None, None)


@dataclass(frozen=True)
class RankTables:
    """What a rank has of the tables: its stacks, how many ids they see, and the way to the samples."""

    stacks: list[TableStack]
    features: list[int]
    """Features that read each stack."""
    sizes: list[Size]
    """(ids, distinct rows) that each stack's buffers hold in a step."""
    samples: int
    """Samples whose bags the rank looks up: of all ranks, or with data parallelism its own."""
    replicated: bool
    slots: int
    """Columns of the rank's share in the exchange, in units of the width of a shard."""
    stages: list[Stage]
    shape: tuple[int, int, int]
    """``[B, F, D]`` of what arrives."""

    def to_samples(self, pooled: Sequence[Tensor]) -> Tensor:
        """Pooled rows ``[samples * features, width]`` of each stack to ``[B, F, D]``."""
        columns = torch.cat([rows.reshape(self.samples, -1) for rows in pooled], dim=1)
        width = self.stacks[0].dim
        columns = nn.functional.pad(columns, (0, self.slots * width - columns.shape[1]))
        for stage in self.stages:
            columns = stage(columns)
        batch, features, dim = self.shape
        return columns[:, : features * dim].reshape(batch, features, dim)


def rank_tables(
    configs: Sequence[EmbeddingBagConfig],
    kind: str,
    *,
    spec: OptimizerSpec,
    max_ids: Mapping[str, int],
    samples: int,
    within_slice: Slice,
    transport: Transport,
    wire_dtype: torch.dtype | None = None,
) -> RankTables:
    """The fullest rank's part of `configs`, each of them sharded as `kind`.

    Args:
        max_ids: ids of a sample at most, by feature; 1 where missing.
        samples: of one rank in a step.

    Raises:
        ConfigError: the tables can't be sharded so, or a shard is larger than a buffer can be.
    """
    dim = configs[0].embedding_dim
    if any(config.embedding_dim != dim for config in configs):
        raise ConfigError("tables of several embedding dims cannot be compiled in one step yet")
    features = sum(len(config.feature_names) for config in configs)
    shards = [_Shard(config, config.num_embeddings, dim) for config in configs]
    parts, places = _split(kind, within_slice)
    shards = [replace(shard, rows=-(-shard.rows // parts)) for shard in shards]
    if kind in _SPLIT_COLUMNS and within_slice.ranks > 1:
        columns = _column_shards(dim, max(shard.rows for shard in shards))
        shards = [replace(shard, width=dim // columns) for shard in shards for _ in range(columns)]
    local, slots = _fullest(shards, places, max_ids)
    replicated = kind == ShardingType.DATA_PARALLEL.value
    looked_up = samples if replicated else samples * within_slice.ranks
    feature_tables = [position for position, shard in enumerate(local) for _ in shard.config.feature_names]
    names = [name for shard in local for name in shard.config.feature_names]
    try:
        stacks = make_stacks(
            [LocalTable(shard.config.name, shard.rows, shard.width) for shard in local],
            dtype=torch.float32,
            spec=spec,
            device=torch.device("meta"),
        )
    except ValueError as error:
        raise ConfigError(f"sharded {kind} over {within_slice.ranks} ranks: {error}") from error
    readers = [features_of(stack, feature_tables) for stack in stacks]
    sizes = []
    for stack, of_stack in zip(stacks, readers, strict=True):
        ids = looked_up * sum(max_ids.get(names[feature], 1) for feature in of_stack)
        if parts > 1:  # rows spread over ranks see their share of the ids
            ids = math.ceil(ids / parts * HEADROOM)
        sizes.append((rung(ids), min(rung(ids), rung(stack.num_rows))))
    columns = slots * local[0].width
    stages = [] if replicated else _stages(kind, within_slice, columns, transport, wire_dtype)
    return RankTables(
        stacks=stacks,
        features=[len(of_stack) for of_stack in readers],
        sizes=sizes,
        samples=looked_up,
        replicated=replicated,
        slots=slots,
        stages=stages,
        shape=(samples, features, dim),
    )


@dataclass(frozen=True)
class _Shard:
    config: EmbeddingBagConfig
    rows: int
    width: int

    @property
    def features(self) -> int:
        return len(self.config.feature_names)


def _split(kind: str, ranks: Slice) -> tuple[int, int]:
    """(parts that the rows of a table are cut into, places that whole tables or columns are spread over)."""
    if kind == ShardingType.ROW_WISE.value:
        return ranks.ranks, 1
    if kind in _IN_ROW_GROUPS:
        return ranks.row_group, ranks.row_groups
    if kind == ShardingType.DATA_PARALLEL.value:
        return 1, 1
    return 1, ranks.ranks


def _column_shards(dim: int, rows: int) -> int:
    """Two, or as many more as keep each shard of the largest table within a buffer.

    Raises:
        ConfigError: the dim cannot be split so.
    """
    columns = _FEWEST_COLUMN_SHARDS
    while rows * dim // columns > MAX_STACK_ELEMENTS and dim % (2 * columns) == 0:
        columns *= 2
    if dim % columns:
        raise ConfigError(f"model.embedding_dim={dim} cannot be split into {columns} columns")
    return columns


def _fullest(shards: Sequence[_Shard], places: int, max_ids: Mapping[str, int]) -> tuple[list[_Shard], int]:
    """The shards of the place with most elements (of equal ones, with most ids), largest first on the
    emptiest, and the features that a place serves at most."""
    limit = -(-len(shards) // places)
    at: list[list[int]] = [[] for _ in range(places)]
    filled = [0] * places
    for index in sorted(range(len(shards)), key=lambda i: shards[i].rows * shards[i].width, reverse=True):
        place = min((p for p in range(places) if len(at[p]) < limit), key=filled.__getitem__)
        at[place].append(index)
        filled[place] += shards[index].rows * shards[index].width
    ids = [
        sum(max_ids.get(name, 1) for index in of_place for name in shards[index].config.feature_names)
        for of_place in at
    ]
    fullest = max(range(places), key=lambda place: (filled[place], ids[place]))
    slots = max(sum(shards[index].features for index in of_place) for of_place in at)
    return [shards[index] for index in sorted(at[fullest])], slots


def _stages(
    kind: str, ranks: Slice, columns: int, transport: Transport, wire_dtype: torch.dtype | None
) -> list[Stage]:
    if ranks.group is None:
        return []
    stages: list[Stage] = []
    if kind == ShardingType.ROW_WISE.value:
        return [reduce_scatter(ranks.group, transport)]
    if kind in _IN_ROW_GROUPS:
        shape = (ranks.row_groups, ranks.row_group)
        if ranks.row_group > 1:
            assert ranks.within is not None
            stages.append(reduce_scatter(ranks.within, transport, MeshAxis(ranks.group, shape, 1)))
        if ranks.row_groups > 1:
            assert ranks.across is not None
            dims = [columns] * ranks.row_groups
            axis = MeshAxis(ranks.group, shape, 0)
            stages.append(all_to_all(ranks.across, dims, transport, axis, wire_dtype=wire_dtype))
        return stages
    return [all_to_all(ranks.group, [columns] * ranks.ranks, transport, wire_dtype=wire_dtype)]
