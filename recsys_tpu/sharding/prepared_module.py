"""What the sharded collections share: host group, checks of a batch, preparation ahead of its step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, ShardingEnv
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recsys_tpu.embeddings.capacity import Capacities, CapacityCounters
from recsys_tpu.sharding.ahead import Ahead
from recsys_tpu.sharding.host import PreparedSplits, host_group, kind_of_batch, max_over_ranks, prepare
from recsys_tpu.sharding.validation import FeatureLimits, Validation, check_features

# torch_tpu builds a program when it first runs, and once more when it runs again on another program's result.
_REHEARSALS = 3


class PreparedModule:
    """Mixed into a sharded TorchRec collection: ids are checked, exchanged, sorted and padded on the host.

    `ahead.start(features)` begins that for a later batch.
    """

    def _set_up_host(
        self: Any,
        shardings: Iterable[Any],
        configs: Iterable[BaseEmbeddingConfig],
        validate: Validation,
        max_ids_per_sample: Mapping[str, int],
    ) -> None:
        group = self._env.process_group
        assert group is not None, "the sharder needs a process group, of one rank at least"
        self._host_pg = host_group(group)
        for of_type in shardings:
            of_type.host_pg = self._host_pg
        self._validate = validate
        self._capacities = Capacities(max_over_ranks(self._host_pg))
        self._max_ids = dict(max_ids_per_sample)
        self._rehearsed: set[tuple[int, ...]] = set()
        self._limits = FeatureLimits.of_tables(configs)
        self.ahead: Ahead[KeyedJaggedTensor, Any] = Ahead(self._exchange_and_prepare)

    @property
    def host_group(self: Any) -> dist.ProcessGroup:
        """The group of this module's exchange of ids: CPU tensors, and nobody else's collectives."""
        return self._host_pg

    @property
    def capacity_counters(self: Any) -> CapacityCounters:
        """Padding and ladder moves of this module so far."""
        counters: CapacityCounters = self._capacities.counters
        return counters

    def input_dist(self: Any, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Awaitable[list[Any]]]:
        """Starts the exchange of ids, on the host.  Raises InvalidFeatureError for ids that no table has.

        features may be a TensorDict as well.
        """
        features = maybe_td_to_kjt(features).to(torch.device("cpu"))
        check_features(features, self._limits, self._validate)
        return PreparedSplits(super().input_dist(ctx, features), self.prepare)  # type: ignore[misc]

    def _create_input_dist(self: Any, *arguments: Any, **options: Any) -> None:
        super()._create_input_dist(*arguments, **options)  # type: ignore[misc]
        if self._features_order:  # features are put in order on the host
            order = torch.tensor(self._features_order, dtype=torch.int32)
            self.register_buffer("_features_order_tensor", order, persistent=False)

    def forward(self: Any, features: KeyedJaggedTensor) -> Any:
        """Embeddings of a batch, whose host part may have been begun by `ahead.start`."""
        ctx, prepared = self.ahead.take(features)
        self._rehearse(prepared)
        return self.compute_and_output_dist(ctx, prepared)

    def _exchange_and_prepare(self: Any, features: KeyedJaggedTensor) -> tuple[Any, list[Any]]:
        ctx = self.create_context()
        return ctx, self.input_dist(ctx, features).wait().wait()

    def prepare(self: Any, features: KJTList) -> list[Any]:
        """Sorts and pads the ids that this rank received.  A collective call: ranks agree on capacities."""
        return prepare(self._lookups, features, self._capacities, self._max_ids)

    def _rehearse(self: Any, prepared: list[Any]) -> None:
        """Has the programs of all buffer sizes compiled when the first batch of its kind comes to train.

        On a CPU nothing is compiled; for an evaluation a size is compiled when it is met, and so is one of
        an exchange of rows.
        """
        kind = kind_of_batch(of_lookup.num_samples for of_lookup in prepared)
        if self._device.type == "cpu" or not self.training or kind in self._rehearsed:
            return
        self._rehearsed.add(kind)
        shared = sum(of_lookup.num_shared for of_lookup in prepared)
        for _ in range(_REHEARSALS):
            levels = iter(self._capacities.levels(kind)[shared:])
            for lookup, of_lookup in zip(self._lookups, prepared, strict=True):
                unwrapped: Any = getattr(lookup, "module", lookup)  # out of DDP
                unwrapped.rehearse(of_lookup, levels)


def data_parallel(lookup: nn.Module, env: ShardingEnv) -> DistributedDataParallel:
    """The lookup of replicated tables, with gradients averaged over the ranks.

    As TorchRec's, but without device_ids, which the tpu device doesn't take, and without static_graph, which
    needs pinned host memory, which the emulated device doesn't have.
    """
    return DistributedDataParallel(
        lookup, process_group=env.process_group, gradient_as_bucket_view=True, broadcast_buffers=False
    )
