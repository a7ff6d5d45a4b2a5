"""What the host does to a batch around the exchange, on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import EnumerableShardingSpec, NoWait, ParameterSharding, ShardMetadata
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.embeddings.capacity import UNKNOWN, Capacities, Size
from recsys_tpu.sharding.host import (
    MeanFoldingInputDist,
    PreparedSplits,
    fold_mean,
    host_group,
    max_over_ranks,
    placed_on,
    prepare,
    written_out,
)


@settings(deadline=None)
@given(st.data())
def test_the_ids_of_a_mean_bag_share_a_weight_of_one(data: st.DataObject) -> None:
    """Against a loop over bags; equal and variable batch sizes, weighted and not."""
    keys = ["a", "b", "c"][: data.draw(st.integers(1, 3))]
    mean = np.array([data.draw(st.booleans()) for _ in keys])
    variable = data.draw(st.booleans())
    stride = data.draw(st.integers(0, 3))
    strides = [data.draw(st.integers(0, 3)) if variable else stride for _ in keys]
    lengths = [data.draw(st.integers(0, 4)) for _ in range(sum(strides))]
    weights = torch.rand(sum(lengths)) if data.draw(st.booleans()) else None
    features = KeyedJaggedTensor(
        keys=keys,
        values=torch.arange(sum(lengths)),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        weights=weights,
        stride=None if variable else stride,
        stride_per_key_per_rank=[[count] for count in strides] if variable else None,
    )
    expected, bag, at = [], 0, 0
    for key in range(len(keys)):
        for _ in range(strides[key]):
            for _ in range(lengths[bag]):
                own = 1.0 if weights is None else float(weights[at])
                expected.append(own / lengths[bag] if mean[key] else own)
                at += 1
            bag += 1
    folded = fold_mean(features, mean)
    assert folded.weights().tolist() == pytest.approx(expected, rel=1e-6)
    assert folded.weights().dtype == torch.float32
    assert folded.keys() == keys and folded.stride_per_key() == strides
    assert folded.variable_stride_per_key() == variable
    torch.testing.assert_close(folded.values(), features.values())
    torch.testing.assert_close(folded.lengths(), features.lengths())


def test_folding_comes_before_the_exchange() -> None:
    features = KeyedJaggedTensor(
        keys=["a", "b"], values=torch.arange(4), lengths=torch.tensor([2, 2]), weights=None
    )
    seen: list[KeyedJaggedTensor] = []

    class Exchange(nn.Module):
        def forward(self, found: KeyedJaggedTensor) -> Any:
            seen.append(found)
            return NoWait(NoWait(found))

    answer = MeanFoldingInputDist(Exchange(), [True, False])(features)
    assert seen[0].weights().tolist() == [0.5, 0.5, 1.0, 1.0]
    assert answer.wait().wait() is seen[0]


@dataclass
class _Sorted:
    sizes: list[Size]
    num_samples: int = 8
    shared_sizes: tuple[()] = ()
    smallest_shared: tuple[()] = ()


class _Lookup(nn.Module):
    """Sorts to the sizes that it was made with, pads to what it is told."""

    def __init__(self, *sizes: Size) -> None:
        super().__init__()
        self._sizes = list(sizes)

    def sort(self, features: str) -> _Sorted:
        self.features = features
        return _Sorted(self._sizes)

    def limits(self, features: str, max_ids: dict[str, int]) -> list[Size]:
        return [(UNKNOWN, UNKNOWN)] * len(self._sizes)

    def pad(self, ids: _Sorted, capacities: list[Size]) -> Any:
        return self.features, ids.sizes, capacities


class _Wrapped(nn.Module):
    """As DistributedDataParallel holds a lookup."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_each_lookup_gets_the_capacities_of_its_own_stacks() -> None:
    sizes = [(300, 200), (10, 5), (700, 600), (2000, 1)]
    lookups = [_Lookup(*sizes[:3]), _Wrapped(_Lookup(sizes[3]))]
    capacities = Capacities()
    first, second = prepare(lookups, ["x", "y"], capacities, {})  # type: ignore[arg-type]
    held = Capacities().hold(sizes)
    assert first == ("x", sizes[:3], held[:3])
    assert second == ("y", sizes[3:], held[3:])
    assert capacities.counters.steps == 1


def test_a_lookup_without_features_is_an_error() -> None:
    with pytest.raises(ValueError):
        prepare([_Lookup((1, 1))], [], Capacities(), {})  # type: ignore[arg-type]


def test_the_two_waits_come_before_the_preparation() -> None:
    features = KJTList([])
    prepared: list[KJTList] = []

    def note(found: KJTList) -> list[Any]:
        prepared.append(found)
        return ["ready"]

    splits = PreparedSplits(NoWait(NoWait(features)), note)
    second = splits.wait()
    assert not prepared
    assert second.wait() == ["ready"] and prepared == [features]


def test_shards_are_placed_on_the_one_chip_that_a_process_sees() -> None:
    shards = [
        ShardMetadata(shard_offsets=[0, 8 * n], shard_sizes=[4, 8], placement=f"rank:{n}/cuda:{n}")
        for n in range(2)
    ]
    spec = EnumerableShardingSpec(shards)
    sharding = ParameterSharding("column_wise", "fused", [0, 1], sharding_spec=spec)
    placed = placed_on(sharding, torch.device("cpu")).sharding_spec
    assert isinstance(placed, EnumerableShardingSpec)
    assert [str(shard.placement) for shard in placed.shards] == ["rank:0/cpu", "rank:1/cpu"]
    assert [shard.shard_offsets for shard in placed.shards] == [[0, 0], [0, 8]]
    assert placed_on(sharding, torch.device("meta")) is sharding
    data_parallel = ParameterSharding("data_parallel", "dense", [0, 1], sharding_spec=None)
    assert placed_on(data_parallel, torch.device("cpu")) is data_parallel


class _Group:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def test_one_rank_needs_no_group_and_no_agreement() -> None:
    group: Any = _Group(1)
    assert host_group(group) is group and max_over_ranks(group) is None


def test_the_maximum_is_over_the_group_and_leaves_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = _Group(2)

    def all_reduce(tensor: torch.Tensor, op: Any, group: Any) -> None:
        assert op == dist.ReduceOp.MAX and group.size() == 2
        tensor.copy_(torch.maximum(tensor, torch.tensor([5, 1])))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    maximum = max_over_ranks(group)
    assert maximum is not None
    own = np.array([3, 4])
    assert maximum(own).tolist() == [5, 4] and own.tolist() == [3, 4]


@given(st.data())
def test_a_batch_of_distinct_samples_is_written_out(data: st.DataObject) -> None:
    """Against a loop over samples; inverse indices name their features in an order of their own."""
    keys = ["a", "b", "c"][: data.draw(st.integers(1, 3))]
    samples = data.draw(st.integers(1, 4))
    weighted = data.draw(st.booleans())
    bags = {key: data.draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1)) for key in keys}
    inverse = {
        key: data.draw(st.lists(st.integers(0, len(bags[key]) - 1), min_size=samples, max_size=samples))
        for key in keys
    }
    ids = [i for key in keys for bag in bags[key] for i in bag]
    named = keys[::-1]
    whole = written_out(
        KeyedJaggedTensor(
            keys=keys,
            values=torch.tensor(ids, dtype=torch.int64),
            weights=torch.arange(len(ids), dtype=torch.float32) if weighted else None,
            lengths=torch.tensor([len(bag) for key in keys for bag in bags[key]]),
            stride_per_key_per_rank=[[len(bags[key])] for key in keys],
            inverse_indices=(named, torch.tensor([inverse[key] for key in named])),
        )
    )
    assert whole.keys() == keys and whole.stride() == samples
    starts = iter(np.cumsum([0, *(len(bag) for key in keys for bag in bags[key])]).tolist())
    first = {key: [next(starts) for _ in bags[key]] for key in keys}
    for key in keys:
        jagged = whole[key]
        expected = [bags[key][one] for one in inverse[key]]
        assert jagged.values().tolist() == [i for bag in expected for i in bag]
        assert jagged.lengths().tolist() == [len(bag) for bag in expected]
        if weighted:
            places = [first[key][one] + j for one in inverse[key] for j in range(len(bags[key][one]))]
            assert jagged.weights().tolist() == places


def test_a_batch_of_distinct_samples_needs_its_inverse_indices() -> None:
    features = KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match="need inverse indices"):
        written_out(features)
