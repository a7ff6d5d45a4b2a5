"""The exchange in which rows travel, at 2 to 256 simulated ranks: routing, slots, bags and gradients."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.embeddings.stacks import LocalTable, make_stacks
from recsys_tpu.kernels.batch import Optimizer
from recsys_tpu.kernels.optimizer import OptimizerSpec
from recsys_tpu.sharding.row_exchange import OwnedRows, _Rearranged, slots_of_pair
from recsys_tpu.sharding.row_routing import Received, Routed, RowRouting, TableShard
from recsys_tpu.sharding.source_rows import Column, in_slots, pooled_source

TABLES = {"t0": (50, 8), "t1": (7, 4), "t2": (400, 8)}  # rows, columns
KEYS = ("t0", "t2", "t1", "t2")  # the table of each feature: two read t2


def shards_of(world: int, kind: str) -> list[list[TableShard]]:
    """By rank: row-wise blocks, whole tables, or column halves."""
    found: list[list[TableShard]] = [[] for _ in range(world)]
    for number, (name, (rows, columns)) in enumerate(TABLES.items()):
        if kind == "table":
            found[number * 5 % world].append(TableShard(name, 0, rows, 0, columns))
        elif kind == "column":
            for half in range(2):
                owner = (number * 3 + half * 7) % world
                found[owner].append(TableShard(name, 0, rows, half * columns // 2, columns // 2))
        else:
            block = -(-rows // world)
            for rank in range(world):
                first = min(rank * block, rows)
                found[rank].append(TableShard(name, first, min(block, rows - first), 0, columns))
    return found


def batch_of(rank: int, samples: int, skewed: bool) -> KeyedJaggedTensor:
    rng = np.random.default_rng([3, rank])
    lengths = rng.integers(0, 4, (len(KEYS), samples))
    rows = [np.zeros(int(n.sum()), np.int64) for n in lengths]
    if not skewed:
        rows = [rng.integers(0, TABLES[KEYS[key]][0], len(ids)) for key, ids in enumerate(rows)]
    return KeyedJaggedTensor(
        keys=[f"f{key}" for key in range(len(KEYS))],
        values=torch.from_numpy(np.concatenate(rows)),
        lengths=torch.from_numpy(lengths.reshape(-1)),
        stride=samples,
    )


def received_by(routing: RowRouting, routed: list[Routed], rank: int) -> Received:
    first, last = routing.first_shard[rank], routing.first_shard[rank + 1]
    counts = np.stack([one.counts[first:last] for one in routed])
    parts = []
    for one in routed:
        ends = np.concatenate([[0], np.cumsum(one.counts)])
        parts.append(one.ids[ends[first] : ends[last]])
    return Received(counts, np.concatenate(parts))


class Owner:
    """A rank's tables, filled from the whole ones, and the rows that it sends."""

    def __init__(self, routing: RowRouting, rank: int, whole: dict[str, torch.Tensor]) -> None:
        shards = routing.shards[rank]
        local = [LocalTable(shard.table, shard.rows, shard.columns) for shard in shards]
        spec = OptimizerSpec(Optimizer.SGD)
        stacks = make_stacks(local, dtype=torch.float32, spec=spec, device=torch.device("cpu"))
        for stack in stacks:
            for index in stack.tables:
                shard, first = shards[index], stack.first_rows[index] * stack.dim
                rows = whole[shard.table][shard.first_row : shard.first_row + shard.rows]
                part = rows[:, shard.first_column : shard.first_column + shard.columns].reshape(-1)
                stack.weights[first : first + len(part)] = part
        kernel: Any = SimpleNamespace(emb_module=SimpleNamespace(stacks=stacks, tables=local))
        self.owned = OwnedRows(routing, rank, [kernel] if stacks else [])

    def buffers(self, received: Received, slots: dict[int, int]) -> dict[int, torch.Tensor]:
        """By width `[ranks, slots, width]`."""
        sorted_ids = self.owned.sort(received)
        capacities = [len(stack.ids.rows) + 3 for stack in sorted_ids]
        moves = self.owned.moves(sorted_ids, capacities, slots)
        found = {}
        for width, of_width in moves.items():
            rows = [torch.empty(0, width)]
            for stack, ids, capacity in zip(self.owned.stacks, sorted_ids, capacities, strict=True):
                if stack.dim == width:
                    looked_up = torch.full((capacity, width), float("nan"))  # padding must not be used
                    looked_up[: len(ids.ids.rows)] = stack.weights.view(-1, width)[ids.ids.rows]
                    rows.append(looked_up)
            leaf = torch.cat(rows).requires_grad_()
            buffer = _Rearranged.apply(leaf, of_width)
            # A gradient of 1 in each slot that is used comes back to its row, and none to padding.
            (gradient,) = torch.autograd.grad(buffer.sum(), leaf)
            used = (~leaf.isnan()).float().detach()
            assert torch.equal(gradient, used)
            found[width] = buffer.detach().view(len(received.counts), -1, width)
        return found


WORLDS = [
    (2, "row", [3, 3], False),
    (3, "table", [2, 0, 5], False),
    (4, "column", [2] * 4, False),
    (64, "row", [rank % 4 for rank in range(64)], False),
    (128, "table", [1] * 128, False),
    (128, "row", [2] * 128, True),
    (256, "row", [1] * 256, False),
    (256, "column", [rank % 2 for rank in range(256)], False),
]


@pytest.mark.parametrize(
    ("world", "kind", "samples", "skewed"), WORLDS, ids=[f"{w}-{k}-{s}" for w, k, _, s in WORLDS]
)
def test_every_rank_gets_the_bags_of_its_own_samples(
    world: int, kind: str, samples: list[int], skewed: bool
) -> None:
    rng = np.random.default_rng(0)
    whole = {name: torch.from_numpy(rng.normal(size=shape)).float() for name, shape in TABLES.items()}
    routing = RowRouting(shards_of(world, kind))
    batches = [batch_of(rank, samples[rank], skewed) for rank in range(world)]
    routed = [routing.route(values_of(batch), KEYS) for batch in batches]
    needed = {width: max(one.most_for_one_rank(width) for one in routed) for width in routing.widths}
    slots = {width: slots_of_pair(needed[width], world) for width in routing.widths}
    sent = [
        Owner(routing, rank, whole).buffers(received_by(routing, routed, rank), slots)
        for rank in range(world)
    ]
    for rank, batch in enumerate(batches):
        for column_of_key, found in bags(routing, routed[rank], batch, slots, sent, rank):
            expected = expected_bags(batch, column_of_key, whole)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def values_of(batch: KeyedJaggedTensor) -> list[NDArray[np.int64]]:
    ends = batch.offset_per_key()
    return [batch.values().numpy()[first:last] for first, last in itertools.pairwise(ends)]


def bags(
    routing: RowRouting,
    routed: Routed,
    batch: KeyedJaggedTensor,
    slots: dict[int, int],
    sent: list[dict[int, torch.Tensor]],
    rank: int,
) -> Any:
    columns = [
        Column(f"e{key}", key, block, routing.columns[block])
        for key, table in enumerate(KEYS)
        for block in routing.blocks_of(table)
    ]
    for width in routing.widths:
        arrived = torch.cat([buffers[width][rank] for buffers in sent]).numpy()
        of_width = [column for column in columns if column.width == width]
        ids = in_slots(
            pooled_source(batch, routed, of_width), routed.slots(width, slots[width]), len(arrived)
        )
        pooled = np.zeros((ids.num_bags, width))
        np.add.at(pooled, ids.bags, arrived[ids.rows])
        for position, column in enumerate(of_width):
            yield column, pooled.reshape(batch.stride(), len(of_width), width)[:, position]


def expected_bags(
    batch: KeyedJaggedTensor, column: Column, whole: dict[str, torch.Tensor]
) -> NDArray[np.float64]:
    first = column.block[1]
    table = whole[KEYS[column.key]][:, first : first + column.width].numpy()
    jagged = batch[f"f{column.key}"].to_dense()
    return np.array([table[ids.numpy()].sum(0) for ids in jagged]).reshape(-1, column.width)


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(0, 6), max_size=20), min_size=1, max_size=3),
    world=st.integers(1, 9),
    kind=st.sampled_from(("row", "table", "column")),
)
def test_each_distinct_id_is_sent_once_to_each_block_of_its_table(
    ids: list[list[int]], world: int, kind: str
) -> None:
    routing = RowRouting(shards_of(world, kind))
    tables = ["t1"] * len(ids)
    routed = routing.route([np.array(of_key, np.int64) for of_key in ids], tables)
    distinct = {value for of_key in ids for value in of_key}
    assert len(routed.ids) == int(routed.counts.sum()) == len(distinct) * len(routing.blocks_of("t1"))
    shard = np.repeat(np.arange(len(routed.counts)), routed.counts)
    flat = [one for of_rank in routing.shards for one in of_rank]
    sent = sorted(flat[number].first_row + value for number, value in zip(shard, routed.ids, strict=True))
    assert sent == sorted([*distinct] * len(routing.blocks_of("t1")))


def test_an_id_that_no_shard_has_is_named() -> None:
    routing = RowRouting(shards_of(2, "row"))
    for bad in (7, -1):
        with pytest.raises(ValueError, match=f"id {bad} is not a row of table t1"):
            routing.route([np.array([0, bad])], ["t1"])
