"""First values of tables that do not depend on how the tables are sharded.

Every block of rows has its own counter-based generator, keyed by (seed, table, block): any shard can be
filled without the rest of the table, and one rank and a thousand start from the same model.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

_BLOCK_ROWS = 16_384


def initialize_tables(state: dict[str, Tensor], tables: dict[str, BaseEmbeddingConfig], seed: int) -> None:
    """Fill the local shards in `state` in place, uniform in ``+-1 / sqrt(rows)`` (as TorchRec and DLRM).

    Args:
        state: a (sharded) state_dict; tables are the entries that end in ``<table>.weight``.
        tables: config of each table by name; every one must occur in `state`.
        seed: together with the table's name it decides all values.

    Raises:
        KeyError: a table is not in `state`: it would have kept undefined values.
    """
    keys = {key.split(".")[-2]: key for key in state if key.endswith(".weight") and key.count(".")}
    for name, config in tables.items():
        if name not in keys:
            raise KeyError(f"table {name} is not in the model's state, so it cannot be initialised")
        bound = config.num_embeddings**-0.5
        value = state[keys[name]]
        for local, (row, column) in _local_shards(value):
            _fill(local, row, column, config, bound, seed)


def _local_shards(value: Tensor | ShardedTensor) -> list[tuple[Tensor, tuple[int, int]]]:
    """(tensor, (first row, first column)) of each shard on this rank."""
    if isinstance(value, ShardedTensor):
        return [
            (shard.tensor, (int(shard.metadata.shard_offsets[0]), int(shard.metadata.shard_offsets[1])))
            for shard in value.local_shards()
        ]
    return [(value.data if isinstance(value, nn.Parameter) else value, (0, 0))]


def _fill(local: Tensor, row: int, column: int, table: BaseEmbeddingConfig, bound: float, seed: int) -> None:
    rows, columns = local.shape
    key = zlib.crc32(table.name.encode())
    first_block = row // _BLOCK_ROWS
    last_block = -(-(row + rows) // _BLOCK_ROWS)
    with torch.no_grad():
        for block in range(first_block, last_block):
            generator = np.random.Generator(np.random.Philox(key=[seed, (key << 32) | block]))
            start = block * _BLOCK_ROWS
            shape = (min(_BLOCK_ROWS, table.num_embeddings - start), table.embedding_dim)
            values = generator.random(shape, dtype=np.float32) * (2 * bound) - bound
            low, high = max(row, start), min(row + rows, start + _BLOCK_ROWS)
            part = values[low - start : high - start, column : column + columns]
            local[low - row : high - row].copy_(torch.from_numpy(np.ascontiguousarray(part)).to(local.dtype))
