"""The state of a sharded model put together on one rank, for export and quantization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

_TABLES = ".embedding_bags."


def whole_state(model: DistributedModelParallel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(tables by name, ``[rows, D]`` float32; all else by its name in the unsharded model), on the host.

    For a world of one rank, which holds every shard.  A table of one shard is not copied.
    """
    assert model._env.world_size == 1
    state: dict[str, Any] = model.state_dict()
    tables = {
        name.split(".")[-2]: _whole(value)
        for name, value in state.items()
        if _TABLES in name and name.endswith(".weight")
    }
    dense = {name: _whole(value) for name, value in state.items() if _TABLES not in name}
    return tables, dense


def _whole(value: Tensor | ShardedTensor) -> Tensor:
    if not isinstance(value, ShardedTensor):
        return value.detach().cpu()
    shards = value.local_shards()
    if len(shards) == 1:
        return shards[0].tensor.detach().cpu().float()
    whole = torch.empty(value.size(), dtype=torch.float32)
    for shard in shards:
        row, column = shard.metadata.shard_offsets
        rows, columns = shard.metadata.shard_sizes
        whole[row : row + rows, column : column + columns] = shard.tensor.detach().cpu()
    return whole
