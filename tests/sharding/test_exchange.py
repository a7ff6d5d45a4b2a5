"""The exchange of ids and of pooled rows at 2 to 256 ranks, simulated in one process.

Every rank's batch goes through TorchRec's routing (bucketize, splits, reordering after the all-to-all);
the all-to-all itself is a transposition of lists; our preparation, a lookup in numpy, and the way back
follow.  The sum is compared with pooling each rank's own batch from the whole table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torchrec.distributed.dist_data import _get_recat
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.embeddings.bags import StackFeatures, sort_for_stack
from recsys_tpu.sharding.host import fold_mean
from recsys_tpu.sharding.lookups import jagged_features

FEATURES, DIM = 3, 4


@dataclass(frozen=True)
class World:
    ranks: int
    rows: int  # of each table; feature f reads table f
    samples: list[int]  # of each rank
    skewed: bool

    def table(self) -> NDArray[np.float64]:
        return np.random.default_rng(0).normal(size=(FEATURES, self.rows, DIM))

    def batch(self, rank: int) -> KeyedJaggedTensor:
        rng = np.random.default_rng([1, rank])
        lengths = rng.integers(0, 4, FEATURES * self.samples[rank])
        count = int(lengths.sum())
        ids = np.zeros(count, np.int64) if self.skewed else rng.integers(0, self.rows, count)
        return KeyedJaggedTensor(
            keys=[f"f{feature}" for feature in range(FEATURES)],
            values=torch.from_numpy(ids),
            lengths=torch.from_numpy(lengths),
            stride=self.samples[rank],
        )


WORLDS = [
    World(ranks, rows, [3] * ranks, skewed=False)
    for ranks, rows in ((2, 50), (3, 7), (8, 100), (64, 1000), (128, 1000), (256, 200), (256, 5000))
] + [
    World(128, 1000, [rank % 4 for rank in range(128)], skewed=False),  # uneven, some ranks with nothing
    World(64, 640, [2] * 64, skewed=True),  # every id belongs to rank 0
]


def all_to_all(batches: list[KeyedJaggedTensor], splits: list[int]) -> list[KeyedJaggedTensor]:
    """What every rank receives when each sends `splits[d]` of its keys to rank d."""
    ranks = len(batches)
    sent = []
    for batch in batches:
        tensors = batch.dist_tensors()
        cuts = batch.dist_splits(splits)
        sent.append([tensor.split(cut) for tensor, cut in zip(tensors, cuts, strict=True)])
    starts = np.cumsum([0, *splits])
    received = []
    strides = [batch.stride() for batch in batches]
    for rank in range(ranks):
        parts = [torch.cat([of_rank[kind][rank] for of_rank in sent]) for kind in range(len(sent[0]))]
        received.append(
            KeyedJaggedTensor.dist_init(
                keys=batches[0].keys()[starts[rank] : starts[rank + 1]],
                tensors=parts,
                variable_stride_per_key=False,
                num_workers=ranks,
                recat=_get_recat(splits[rank], ranks, 1, torch.device("cpu"), strides),
                stride_per_rank=strides,
            )
        )
    return received


def pool(features: KeyedJaggedTensor, shard: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rank's lookup: `[all samples, features, dim]`, from sorted and deduplicated ids."""
    tables, rows, dim = shard.shape
    stack = StackFeatures(np.arange(tables), np.arange(tables) * rows, max(tables * rows, 1))
    ids = sort_for_stack(jagged_features(features), stack, mean=False)
    weights = np.ones(len(ids.rows)) if ids.weights is None else ids.weights
    pooled = np.zeros((ids.num_bags, dim))
    unique = ids.sorted_rows[ids.first]
    rows_of_occurrence = shard.reshape(-1, dim)[unique][ids.segments]
    np.add.at(pooled, ids.bags[ids.order], rows_of_occurrence * weights[ids.order][:, None])
    return pooled.reshape(features.stride(), tables, dim)


def pooled_here(batch: KeyedJaggedTensor, table: NDArray[np.float64], *, mean: bool) -> NDArray[np.float64]:
    """The unsharded pooling of one rank's batch, by a loop."""
    pooled = np.zeros((batch.stride(), FEATURES, DIM))
    for feature, jagged in enumerate(batch.to_dict().values()):
        for sample, ids in enumerate(jagged.to_dense()):
            rows = table[feature, ids.numpy()]
            pooled[sample, feature] = rows.sum(0) / (max(len(rows), 1) if mean else 1)
    return pooled


@pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"{w.ranks}x{w.rows}{'-skewed' if w.skewed else ''}")
def test_row_wise_exchange(world: World) -> None:
    table = world.table()
    mean_features = np.array([False, True, False])
    block = -(-world.rows // world.ranks)
    blocks = torch.full((FEATURES,), block)
    batches = [world.batch(rank) for rank in range(world.ranks)]
    sent = [
        bucketize_kjt_before_all2all(fold_mean(batch, mean_features), world.ranks, blocks)[0]
        for batch in batches
    ]
    partial = [
        pool(received, table[:, rank * block : (rank + 1) * block])
        for rank, received in enumerate(all_to_all(sent, [FEATURES] * world.ranks))
    ]
    total = np.sum(partial, axis=0)
    ends = np.cumsum(world.samples)
    for rank, batch in enumerate(batches):
        mine = total[ends[rank] - world.samples[rank] : ends[rank]]
        expected = pooled_here(batch, table, mean=False)
        expected[:, 1] = pooled_here(batch, table, mean=True)[:, 1]
        np.testing.assert_allclose(mine, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"{w.ranks}x{w.rows}{'-skewed' if w.skewed else ''}")
def test_table_wise_exchange(world: World) -> None:
    table = world.table()
    owners = sorted(
        int(owner) for owner in np.random.default_rng(world.ranks).integers(0, world.ranks, FEATURES)
    )
    splits = [owners.count(rank) for rank in range(world.ranks)]
    batches = [world.batch(rank) for rank in range(world.ranks)]
    received = all_to_all(batches, splits)
    starts = np.cumsum([0, *splits])
    pooled = [
        pool(received[rank], table[starts[rank] : starts[rank + 1]])
        for rank in range(world.ranks)
        if splits[rank]
    ]
    whole = np.concatenate(pooled, axis=1)  # each owner sends its features' columns
    ends = np.cumsum(world.samples)
    for rank, batch in enumerate(batches):
        mine = whole[ends[rank] - world.samples[rank] : ends[rank]]
        np.testing.assert_allclose(mine, pooled_here(batch, table, mean=False), rtol=1e-9, atol=1e-12)
