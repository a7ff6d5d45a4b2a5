"""TorchRec's own DLRM, as its examples train it: the other side of the benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch as TorchRecBatch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models import dlrm as torchrec_dlrm
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_tpu.config import DenseOptimizerConfig, SparseOptimizerConfig
from recsys_tpu.data.batch import Batch


@dataclass
class StockDLRM:
    """DLRM, EmbeddingBagCollection under DistributedModelParallel with fused row-wise Adagrad, pipeline."""

    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    pipeline: Any

    def step(self, batches: Iterator[TorchRecBatch]) -> Tensor:
        """Train on the next batch; its loss.  The batches must be the same iterator in every call."""
        loss, _, _ = self.pipeline.progress(batches)
        assert isinstance(loss, Tensor)
        return loss

    def predictor(self) -> nn.Module:
        """``(dense, sparse)`` to logits ``[B]``, as our models; training is over then."""
        self.pipeline.detach()
        return _Predictor(self.model.module.model)


class _Predictor(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.model(dense, sparse)
        return logits.squeeze(-1)


def stock_dlrm(
    num_embeddings: Mapping[str, int],
    *,
    embedding_dim: int,
    dense_in_features: int,
    bottom_mlp: Sequence[int],
    over_mlp: Sequence[int],
    dense: DenseOptimizerConfig,
    sparse: SparseOptimizerConfig,
) -> StockDLRM:
    """A model on this process alone, on the CPU, planned by TorchRec, each table with its fused optimizer."""
    assert sparse.kind == "rowwise_adagrad", "the stock side is written for row-wise Adagrad"
    tables = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=f"t_{feature}", embedding_dim=embedding_dim, num_embeddings=rows, feature_names=[feature]
            )
            for feature, rows in num_embeddings.items()
        ],
    )
    rates = {"lr": sparse.learning_rate, "eps": sparse.eps}
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), rates)
    plain = torchrec_dlrm.DLRM(
        tables,
        dense_in_features,
        [*bottom_mlp, embedding_dim],
        [*over_mlp, 1],
        dense_device=torch.device("cpu"),
    )
    whole = torchrec_dlrm.DLRMTrain(plain)
    # left to itself the planner replicates small tables, which no fused optimizer trains
    fused = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, local_world_size=1, compute_device="cpu"),
        constraints={table.name: fused for table in tables.embedding_bag_configs()},
    )
    sharders: list[Any] = [EmbeddingBagCollectionSharder()]
    plan = planner.plan(whole, sharders)
    model = DistributedModelParallel(whole, device=torch.device("cpu"), plan=plan, sharders=sharders)
    classes: dict[str, Any] = {"adamw": torch.optim.AdamW, "adagrad": torch.optim.Adagrad}
    options = {"lr": dense.learning_rate, "eps": dense.eps, "weight_decay": dense.weight_decay}
    towers = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: classes[dense.kind](parameters, **options),
    )
    optimizer = CombinedOptimizer([("sparse", model.fused_optimizer), ("dense", towers)])
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    model.train()
    return StockDLRM(model, optimizer, pipeline)


def torchrec_batch(batch: Batch) -> TorchRecBatch:
    return TorchRecBatch(batch.dense, batch.sparse, batch.labels)
