"""The dense part of a config's model with its loss, as one module over embedded features.

Suffixes: B samples of a rank, F features, D embedding dim, C candidates of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from recsys_tpu.config import ClickDataConfig, Config, EventsConfig, TwoTowerConfig
from recsys_tpu.data.events import load_events
from recsys_tpu.data.events_source import prepare_events
from recsys_tpu.data.holdout import hold_out
from recsys_tpu.data.metadata import DatasetMetadata
from recsys_tpu.data.retrieval_features import RetrievalFeatures
from recsys_tpu.data.synthetic import NUM_DENSE
from recsys_tpu.errors import ConfigError
from recsys_tpu.models.build import build_click_model
from recsys_tpu.models.two_tower import build_two_tower
from recsys_tpu.retrieval.loss import gather_rows, sampled_softmax


@dataclass(frozen=True)
class ModelPart:
    """What is compiled beside the tables.

    dense: called with ``[B, F, D]`` and `inputs`, returns the sum of the samples' losses, scalar.
    inputs: name -> example of one rank, on the meta device.
    samples: of one rank that are looked up; loss_rows: of all ranks that the loss is the mean over.
    """

    tables: Sequence[EmbeddingBagConfig]
    dense: nn.Module
    inputs: Mapping[str, Tensor]
    samples: int
    loss_rows: int
    max_ids: Mapping[str, int] = field(default_factory=dict)

    @property
    def weighted(self) -> bool:
        """Whether ids have weights: MEAN pooling folds 1 / length in."""
        return any(table.pooling.name == "MEAN" for table in self.tables)


def model_part(config: Config, *, world_size: int, group: dist.ProcessGroup | None = None) -> ModelPart:
    """The dense part of `config` for one of `world_size` ranks.  Tables stay on the meta device.

    Raises:
        ConfigError: a size is only known from data that is not there, or the batch does not divide.
    """
    batch_size = config.train.batch_size
    if batch_size % world_size:
        raise ConfigError(f"train.batch_size={batch_size} is not a multiple of the {world_size} devices")
    if isinstance(config.model, TwoTowerConfig):
        return _two_tower(config, config.model, world_size, group)
    num_embeddings, dense_in_features = table_sizes(config)
    model = build_click_model(config.model, num_embeddings, dense_in_features=dense_in_features)
    tables = model.sparse_arch.embedding_bag_collection.embedding_bag_configs()
    rows = batch_size // world_size
    return ModelPart(
        tables=tables,
        dense=_ClickLoss(model, config.runtime.precision),
        inputs={
            "dense": torch.empty(rows, dense_in_features, device="meta"),
            "labels": torch.empty(rows, device="meta"),
        },
        samples=rows,
        loss_rows=batch_size,
        max_ids=_multi_hot_sizes(config),
    )


def _multi_hot_sizes(config: Config) -> dict[str, int]:
    assert isinstance(config.data, ClickDataConfig)
    return dict(config.data.multi_hot.sizes) if config.data.multi_hot else {}


def table_sizes(config: Config) -> tuple[Mapping[str, int], int]:
    """(rows of each table by feature, number of dense features) of a click model, without reading any rows.

    Raises:
        ConfigError: only the data would tell.
    """
    data = config.data
    assert isinstance(data, ClickDataConfig)
    sizes = getattr(config.model, "num_embeddings", None)
    if data.kind == "parquet" and data.path is not None:
        if sizes is not None and not data.path.exists():
            return sizes, NUM_DENSE
        metadata = DatasetMetadata.load(data.path)
        return sizes or metadata.num_embeddings, len(metadata.dense_features)
    if data.kind == "synthetic":
        return sizes or data.synthetic.table_rows, NUM_DENSE
    if sizes is None:
        raise ConfigError(f"data.kind={data.kind}: give the rows of each table as model.num_embeddings")
    return sizes, NUM_DENSE


class _Dense(nn.Module):
    """A model without its lookups: `model.towers` is what is left to call."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__()
        model.sparse_arch = nn.Module()
        self.model: Any = model
        self._bf16 = precision == "bf16"

    def towers(self, *inputs: Tensor) -> Any:
        with torch.autocast("tpu", torch.bfloat16, enabled=self._bf16):
            return self.model.towers(*inputs)


class _ClickLoss(_Dense):
    def forward(self, embedded_BFD: Tensor, dense: Tensor, labels: Tensor) -> Tensor:
        logits = self.towers(dense, embedded_BFD)
        return nn.functional.binary_cross_entropy_with_logits(logits.float(), labels, reduction="sum")


class _TwoTowerLoss(_Dense):
    def __init__(
        self, model: nn.Module, config: TwoTowerConfig, precision: str, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(model, precision)
        self._config, self._group = config, group

    def forward(
        self,
        embedded_RFD: Tensor,
        item_ids: Tensor,
        candidate_ids: Tensor,
        position: Tensor,
        log_q: Tensor,
        weights: Tensor,
    ) -> Tensor:
        query_RD, items_RD = self.towers(embedded_RFD)
        candidates_CD = items_RD.float()
        if self._group is not None:
            candidates_CD = gather_rows(candidates_CD, self._group)
        losses = sampled_softmax(
            query_RD[: len(item_ids)].float(),
            candidates_CD,
            item_ids_B=item_ids,
            candidate_ids_C=candidate_ids,
            position_B=position,
            log_q_C=log_q,
            temperature=self._config.temperature,
            hard_negatives=self._config.hard_negatives,
        )
        return (losses * weights).sum()


def _two_tower(
    config: Config, model: TwoTowerConfig, world_size: int, group: dist.ProcessGroup | None
) -> ModelPart:
    """Table sizes come from the events, which are read as for training."""
    data = config.data
    assert isinstance(data, EventsConfig)
    log = load_events(prepare_events(data))
    holdout = hold_out(
        log,
        split=data.split,
        evaluate_on=data.evaluate_on,
        temporal_fraction=data.temporal_fraction,
        exclude_seen=data.exclude_seen,
    )
    features = RetrievalFeatures(log, holdout.train, histories=model.histories, user_id=model.user_id)
    negatives = model.uniform_negatives + model.mined_negatives.count
    pairs = config.train.batch_size // world_size
    if negatives % world_size:
        raise ConfigError(f"{negatives} negatives are not a multiple of the {world_size} devices")
    rows = pairs + negatives // world_size
    towers = build_two_tower(
        {table.name: (table.rows, table.features) for table in features.tables},
        embedding_dim=model.embedding_dim,
        query_features=features.query_features,
        item_features=features.item_features,
        query_mlp=model.query_mlp,
        item_mlp=model.item_mlp,
        dropout=0.0,  # random masks would be inputs; they change neither sizes nor products
        normalize=model.similarity == "cosine",
    )
    tables = towers.sparse_arch.embedding_bag_collection.embedding_bag_configs()
    candidates = world_size * rows
    with torch.device("meta"):
        inputs = {
            "item_ids": torch.empty(pairs, dtype=torch.int32),
            "candidate_ids": torch.empty(candidates, dtype=torch.int32),
            "position": torch.empty(pairs, dtype=torch.int32),
            "log_q": torch.empty(candidates),
            "weights": torch.empty(pairs),
        }
    return ModelPart(
        tables=tables,
        dense=_TwoTowerLoss(towers, model, config.runtime.precision, group),
        inputs=inputs,
        samples=rows,
        loss_rows=config.train.batch_size,
        max_ids=features.max_ids_per_sample,
    )
