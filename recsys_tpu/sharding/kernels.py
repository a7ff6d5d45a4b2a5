"""TorchRec embedding kernels over our table stacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import (
    BaseBatchedEmbedding,
    BaseBatchedEmbeddingBag,
    EmbeddingFusedOptimizer,
)
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingType
from torchrec.distributed.utils import append_prefix
from torchrec.modules.embedding_configs import data_type_to_dtype
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule

from recsys_tpu.embeddings.dense_tables import DenseTables
from recsys_tpu.embeddings.fused_params import parse_fused_params
from recsys_tpu.embeddings.fused_tables import FusedTables, PooledInput
from recsys_tpu.embeddings.stacks import LocalTable
from recsys_tpu.kernels.batch import LookupBatch


def local_tables(config: GroupedEmbeddingConfig) -> list[LocalTable]:
    """The shards of a group that this rank stores."""
    return [LocalTable(table.name, table.local_rows, table.local_cols) for table in config.embedding_tables]


def feature_tables(config: GroupedEmbeddingConfig) -> list[int]:
    """For each feature of a group, the position of its table."""
    return [
        position
        for position, table in enumerate(config.embedding_tables)
        for _ in range(table.num_features())
    ]


class StackOptimizer(EmbeddingFusedOptimizer):
    """TorchRec's view of a group's fused optimizer.  Reading `state` first makes its views current."""

    _emb_module: Any

    @property
    def state(self) -> Any:
        self._emb_module.flush()
        return self._state

    @state.setter
    def state(self, value: Any) -> None:
        self._state = value

    def post_load_state_dict(self) -> None:
        self._emb_module.state_loaded()
        self._emb_module.set_learning_rate(self.param_groups[0]["lr"])


class _TableSlices:
    """What fused and dense kernels share: how a table (or its column shards) appears as one parameter."""

    def _slices(self: Any) -> Iterator[tuple[str, int, TableBatchedEmbeddingSlice]]:
        """(table, position of its first shard, slice) of each table of the group."""
        module: Any = self.emb_module
        tables = module.tables
        position = 0
        while position < len(tables):
            name, dim = tables[position].name, tables[position].dim
            flat, start, end = module.slice_of(position)
            after = position + 1
            while after < len(tables) and tables[after].name == name:
                if tables[after].dim != dim:
                    raise ValueError(
                        f"table {name}: column shards {dim} and {tables[after].dim} wide on one rank; "
                        "a plan must give a rank shards of equal width"
                    )
                end = module.slice_of(after)[2]
                after += 1
            rows = sum(tables[index].rows for index in range(position, after))
            yield name, position, TableBatchedEmbeddingSlice(flat, start, end, rows, dim)
            position = after

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        yield from ()


class _Fused(_TableSlices, FusedOptimizerModule):
    """A TorchRec kernel over `FusedTables`: its parameters carry the optimizer that trains them."""

    _emb_module: FusedTables
    _optim: StackOptimizer

    def _make(
        self: Any, config: GroupedEmbeddingConfig, pg: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self._emb_module = FusedTables(
            local_tables(config),
            feature_tables(config),
            dtype=data_type_to_dtype(config.data_type),
            params=parse_fused_params(config.fused_params),
            device=device,
        )
        self._optim = StackOptimizer(config, self._emb_module, pg)
        self.init_parameters()

    @property
    def emb_module(self) -> FusedTables:
        return self._emb_module

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        return self._optim

    def named_parameters(
        self: Any, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        self.flush()
        for name, weight in self.named_split_embedding_weights(prefix, recurse, remove_duplicate):
            yield name, _fused(nn.Parameter(weight), EmptyFusedOptimizer())

    def named_parameters_by_table(self: Any) -> Iterator[tuple[str, TableBatchedEmbeddingSlice]]:
        for name, position, weight in self._slices():
            self._emb_module.follow(weight, position)
            optimizer = StackOptimizer(
                self._config,
                self._emb_module,
                self._pg,
                create_for_table=name,
                param_weight_for_table=weight,
                embedding_weights_by_table=self._emb_module.split_embedding_weights(),
                all_optimizer_states=self._emb_module.get_optimizer_state(),
            )
            yield name, _fused(weight, optimizer)

    def flush(self) -> None:
        """Called before a state_dict is read."""
        self._emb_module.flush()

    def purge(self) -> None:
        """Called before a state_dict is loaded into the views."""
        self._emb_module.flush()


class FusedKernel(_Fused, BaseBatchedEmbeddingBag[Tensor]):
    """Pooled embeddings of a group of tables, trained by the fused optimizer in its backward."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device,
        sharding_type: ShardingType | None = None,
    ) -> None:
        super().__init__(config, pg, device, sharding_type)
        self._make(config, pg, device)

    def forward(self, batch: PooledInput) -> Tensor:
        return self._emb_module(batch)


class FusedSequenceKernel(_Fused, BaseBatchedEmbedding[list[Tensor]]):
    """Unpooled embeddings of a group of tables, trained by the fused optimizer in its backward."""

    def __init__(
        self, config: GroupedEmbeddingConfig, pg: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        super().__init__(config, pg, device)
        self._make(config, pg, device)

    def forward(self, batches: Sequence[LookupBatch]) -> list[Tensor]:
        return self._emb_module.sequence(batches)


class _Dense(_TableSlices):
    """A TorchRec kernel over `DenseTables`: one ordinary parameter a stack."""

    def _make(self: Any, config: GroupedEmbeddingConfig, device: torch.device) -> None:
        self._emb_module = DenseTables(
            local_tables(config),
            feature_tables(config),
            dtype=data_type_to_dtype(config.data_type),
            output_dtype=parse_fused_params(config.fused_params).output_dtype,
            device=device,
        )
        self._param_per_table = {name: weight for name, _, weight in self._slices()}
        self.init_parameters()

    @property
    def emb_module(self: Any) -> DenseTables:
        tables: DenseTables = self._emb_module
        return tables

    def named_parameters(
        self: Any, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for stack, parameter in zip(self._emb_module.stacks, self._emb_module.weights, strict=True):
            names = "/".join(self._emb_module.tables[index].name for index in stack.tables)
            yield append_prefix(prefix, f"{names}.weight"), parameter


class DenseKernel(_Dense, BaseBatchedEmbeddingBag[Tensor]):
    """Pooled embeddings of replicated tables, trained by any optimizer from their gradients."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device,
        sharding_type: ShardingType | None = None,
    ) -> None:
        super().__init__(config, pg, device, sharding_type)
        self._make(config, device)

    def forward(self, batch: PooledInput) -> Tensor:
        return self._emb_module(batch)


class DenseSequenceKernel(_Dense, BaseBatchedEmbedding[list[Tensor]]):
    """Unpooled embeddings of replicated tables: `pool` with a bag for every id."""

    def __init__(
        self, config: GroupedEmbeddingConfig, pg: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        super().__init__(config, pg, device)
        self._make(config, device)

    def forward(self, batches: Sequence[LookupBatch]) -> list[Tensor]:
        return self._emb_module.pool(batches)


def _fused(parameter: Any, optimizer: FusedOptimizer) -> Any:
    parameter._in_backward_optimizers = [optimizer]
    return parameter
