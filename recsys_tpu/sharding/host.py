"""The host side of the exchange: its process group, and MEAN weights folded in before a bag is split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, EnumerableShardingSpec, ParameterSharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.embeddings.bags import concatenated_ranges
from recsys_tpu.embeddings.capacity import UNKNOWN, Capacities, MaxOverRanks, Size
from recsys_tpu.runtime.process_group import new_host_group


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A gloo group of the same ranks, used by nothing else: its collectives may run beside the device's."""
    if group.size() == 1:
        return group
    return new_host_group(dist.get_process_group_ranks(group))


def placed_on(sharding: ParameterSharding, device: torch.device) -> ParameterSharding:
    """The same sharding with every shard on `device` of its rank.

    A plan numbers the chips of a host; a process sees one chip only, and calls it its first.
    """
    if sharding.sharding_spec is None or device.type == "meta":
        return sharding
    assert isinstance(sharding.sharding_spec, EnumerableShardingSpec)
    shards = []
    for shard in sharding.sharding_spec.shards:
        placement = shard.placement
        assert placement is not None
        remote = placement if isinstance(placement, torch.distributed._remote_device) else None
        rank = (remote or torch.distributed._remote_device(str(placement))).rank()
        shards.append(replace(shard, placement=torch.distributed._remote_device(f"rank:{rank}/{device}")))
    return replace(sharding, sharding_spec=EnumerableShardingSpec(shards))


def max_over_ranks(group: dist.ProcessGroup) -> MaxOverRanks | None:
    """Elementwise maximum over the ranks of a host group; None when there is only one."""
    if group.size() == 1:
        return None

    def maximum(values: NDArray[np.int64]) -> NDArray[np.int64]:
        tensor = torch.from_numpy(values.copy())
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        return tensor.numpy()

    return maximum


@contextmanager
def on_host(sharding: Any) -> Iterator[None]:
    """Within it a TorchRec sharding makes its dists for the host group."""
    device_pg = getattr(sharding, "_pg", None)
    sharding._pg = sharding.host_pg or device_pg
    try:
        yield
    finally:
        sharding._pg = device_pg


class SortedInput(Protocol):
    """A lookup's ids, sorted: the sizes that its buffers need, before they are padded to capacities."""

    @property
    def num_samples(self) -> int:
        """Samples that the lookup serves; 0 if they differ between features."""

    @property
    def shared_sizes(self) -> list[tuple[int, int]]:
        """Sizes of which every rank has the same list, and which must be equal on all ranks."""

    @property
    def smallest_shared(self) -> list[int]:
        """Where the ladders of the shared sizes begin."""

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(ids, distinct rows) of each stack of this rank."""


def prepare(
    lookups: Sequence[nn.Module],
    features: KJTList,
    capacities: Capacities,
    max_ids: Mapping[str, int],
) -> list[Any]:
    """Each lookup's `sort` and `pad` of what this rank received.  Collective: ranks agree on capacities.

    max_ids: ids that a sample has at most, by feature, where that is known.
    """
    unwrapped: list[Any] = [getattr(lookup, "module", lookup) for lookup in lookups]  # out of DDP
    inputs: list[SortedInput] = [lookup.sort(kjt) for lookup, kjt in zip(unwrapped, features, strict=True)]
    # Shared sizes come first: ranks agree on capacities place by place.
    needed = [size for one in inputs for size in one.shared_sizes]
    smallest = [size for one in inputs for size in one.smallest_shared]
    limits: list[Size] = [(UNKNOWN, UNKNOWN)] * len(needed)
    for lookup, one, kjt in zip(unwrapped, inputs, features, strict=True):
        needed += one.sizes
        limits += lookup.limits(kjt, max_ids)
    kind = kind_of_batch(one.num_samples for one in inputs)
    held = capacities.hold(needed, limits=limits, batch=kind, smallest=smallest)
    shared, own = iter(held[: len(smallest)]), iter(held[len(smallest) :])
    return [
        lookup.pad(one, [*islice(shared, len(one.shared_sizes)), *islice(own, len(one.sizes))])
        for lookup, one in zip(unwrapped, inputs, strict=True)
    ]


def kind_of_batch(num_samples: Iterable[int]) -> tuple[int, ...]:
    """What tells batches apart whose programs differ anyway, by the samples of each lookup."""
    return tuple(num_samples)


class PreparedSplits(Awaitable[Any]):
    """TorchRec's two-step wait for the ids (their sizes, then themselves), followed by `prepare`."""

    def __init__(
        self, splits: Awaitable[Awaitable[KJTList]], prepare: Callable[[KJTList], list[Any]]
    ) -> None:
        super().__init__()
        self._splits, self._prepare = splits, prepare

    def _wait_impl(self) -> Awaitable[list[Any]]:
        return _PreparedFeatures(self._splits.wait(), self._prepare)


class _PreparedFeatures(Awaitable[Any]):
    def __init__(self, features: Awaitable[KJTList], prepare: Callable[[KJTList], list[Any]]) -> None:
        super().__init__()
        self._features, self._prepare = features, prepare

    def _wait_impl(self) -> list[Any]:
        return self._prepare(self._features.wait())


class MeanFoldingInputDist(nn.Module):
    """Weighs the ids of MEAN features by 1 / length while a bag is whole, then runs TorchRec's input dist."""

    def __init__(self, input_dist: nn.Module, mean_features: Sequence[bool]) -> None:
        super().__init__()
        self._input_dist = input_dist
        self._mean_features = np.array(mean_features, np.bool_)

    def forward(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        return self._input_dist(fold_mean(features, self._mean_features))


def fold_mean(features: KeyedJaggedTensor, mean_features: NDArray[np.bool_]) -> KeyedJaggedTensor:
    """The same features with weights: those of MEAN features divided by the length of their bag."""
    lengths = features.lengths().reshape(-1).numpy().astype(np.int64)
    per_bag = np.repeat(mean_features, features.stride_per_key())
    share = np.where(per_bag, 1.0 / np.maximum(lengths, 1), 1.0).astype(np.float32)
    weights = torch.from_numpy(np.repeat(share, lengths))
    if features.weights_or_none() is not None:
        weights = weights * features.weights()
    variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=weights,
        lengths=features.lengths(),
        offsets=features.offsets(),
        stride=None if variable else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
        inverse_indices=features.inverse_indices_or_none(),
    )


def written_out(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same batch with every sample of every feature, from one whose features keep distinct samples only.

    Raises ValueError without the inverse indices that say which sample is which.
    """
    inverse = features.inverse_indices_or_none()
    if inverse is None:
        raise ValueError("features of variable batch size need inverse indices, which are missing")
    names, samples = inverse
    lengths = features.lengths().numpy()
    starts = np.cumsum(lengths) - lengths
    first_bags = np.cumsum([0, *features.stride_per_key()])
    bags = np.concatenate(
        [first_bags[key] + samples[names.index(name)].numpy() for key, name in enumerate(features.keys())]
    )
    places = concatenated_ranges(starts[bags], lengths[bags])
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values()[places],
        weights=None if weights is None else weights[places],
        lengths=torch.from_numpy(lengths[bags]),
        stride=samples.shape[1],
    )
