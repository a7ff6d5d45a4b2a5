"""Retrieval: two towers, sampled softmax over all ranks, exact ranking of the catalogue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from recsys_tpu.config import Config, EventsConfig, TwoTowerConfig
from recsys_tpu.data.events import Ids, Positions, load_events
from recsys_tpu.data.events_source import prepare_events
from recsys_tpu.data.holdout import hold_out
from recsys_tpu.data.retrieval_features import RetrievalFeatures
from recsys_tpu.data.retrieval_reader import RetrievalBatch, RetrievalReader
from recsys_tpu.models.two_tower import TwoTower, build_two_tower
from recsys_tpu.retrieval.evaluation import CatalogueEvaluation
from recsys_tpu.retrieval.frequency import FrequencyEstimator
from recsys_tpu.retrieval.loss import gather_rows, sampled_softmax
from recsys_tpu.retrieval.mining import MinedNegatives
from recsys_tpu.retrieval.ranking import RetrievalMetrics
from recsys_tpu.run_log import RunLog
from recsys_tpu.runtime import Runtime
from recsys_tpu.tasks.task import Task, on_rank_zero_first


class RetrievalTask(Task[RetrievalBatch, RetrievalMetrics]):
    """A two-tower model over a folder of events, held in memory."""

    def __init__(self, config: Config, runtime: Runtime) -> None:
        assert isinstance(config.data, EventsConfig) and isinstance(config.model, TwoTowerConfig)
        self._data, self._model, self._runtime = config.data, config.model, runtime
        self.directory = on_rank_zero_first(runtime, lambda: prepare_events(self._data))
        self.log = load_events(self.directory)
        self.holdout = hold_out(
            self.log,
            split=self._data.split,
            evaluate_on=self._data.evaluate_on,
            temporal_fraction=self._data.temporal_fraction,
            exclude_seen=self._data.exclude_seen,
        )
        self.features = RetrievalFeatures(
            self.log, self.holdout.train, histories=self._model.histories, user_id=self._model.user_id
        )
        self.num_embeddings = {table.name: table.rows for table in self.features.tables}
        self.max_ids_per_sample = self.features.max_ids_per_sample
        self.evaluation = CatalogueEvaluation(
            self.log,
            self.holdout,
            self.features,
            runtime,
            batch_size=config.train.eval_batch_size,
            cutoffs=self._data.cutoffs,
            exclude_seen=self._data.exclude_seen,
        )
        self.mined = self._mined_negatives(config.run.seed)
        self.reader = RetrievalReader(
            self.log,
            self.holdout.train,
            self.features,
            batch_size=config.train.batch_size,
            uniform_negatives=self._model.uniform_negatives,
            mined_negatives=self._model.mined_negatives.count,
            mine=None if self.mined is None else self.mined.draw,
            rank=runtime.rank,
            world_size=runtime.world_size,
            seed=config.run.seed,
        )
        self.batches_per_epoch = self.reader.batches_per_epoch
        self.exclude_seen = self._data.exclude_seen
        self.normalize = self._model.similarity == "cosine"
        self._batch_size = config.train.batch_size
        self._frequency = FrequencyEstimator(len(self.log.item_keys), window=self._model.frequency_window)
        self._sampled_softmax = runtime.compile(sampled_softmax)

    def _mined_negatives(self, seed: int) -> MinedNegatives | None:
        mining = self._model.mined_negatives
        if not mining.count:
            return None
        _, stops = self.known_events()
        return MinedNegatives(self.log, stops, self.evaluation, self._runtime, mining, seed=seed)

    def build_model(self) -> TwoTower:
        return build_two_tower(
            {table.name: (table.rows, table.features) for table in self.features.tables},
            embedding_dim=self._model.embedding_dim,
            query_features=self.features.query_features,
            item_features=self.features.item_features,
            query_mlp=self._model.query_mlp,
            item_mlp=self._model.item_mlp,
            dropout=self._model.dropout,
            normalize=self.normalize,
        )

    def known_events(self) -> tuple[Ids, Positions]:
        """Every user, and the position before which the user's events are training events."""
        users = np.arange(len(self.log.user_keys), dtype=np.int32)
        known = np.bincount(self.log.users[self.holdout.train], minlength=len(users))
        return users, self.log.user_starts[:-1] + known

    def batches(self, epoch: int, *, start: int) -> Iterator[RetrievalBatch]:
        return self.reader.epoch(epoch, start=start)

    def prepare_steps(self, model: nn.Module, step: int) -> int | None:
        if self.mined is None:
            return None
        every = self._model.mined_negatives.every
        if step % every == 0:
            self.mined.refresh(model)
        return every - step % every

    def loss(self, model: nn.Module, batch: RetrievalBatch) -> Tensor:
        runtime, device = self._runtime, self._runtime.device
        self._frequency.update(batch.positives)
        with runtime.autocast():
            query_RD, items_RD = model(batch.sparse)
        rows = len(batch.item_ids)
        candidates_CD = gather_rows(items_RD.float(), runtime.process_group)
        losses = self._sampled_softmax(
            query_RD[:rows].float(),
            candidates_CD,
            item_ids_B=batch.item_ids.to(device),
            candidate_ids_C=batch.candidate_ids.to(device),
            position_B=(torch.arange(rows) + runtime.rank * len(items_RD)).to(device),
            log_q_C=self._log_q(batch.candidate_ids).to(device),
            temperature=self._model.temperature,
            hard_negatives=self._model.hard_negatives,
        )
        weighted = (losses * batch.weights.to(device)).sum()
        return weighted * (runtime.world_size / len(batch.positives))

    def _log_q(self, candidate_ids: Tensor) -> Tensor:
        """Log of how often an item is expected among the candidates of a step: in-batch, uniform, mined."""
        items = candidate_ids.clamp(min=0)  # padding is left out of the loss
        in_batch = self._batch_size * self._frequency.probability(items)
        uniform = self._model.uniform_negatives / len(self.log.item_keys)
        mined = 0.0 if self.mined is None else torch.from_numpy(self.mined.expected)[items]
        log_q = (in_batch + uniform + mined).log()
        return torch.where(candidate_ids < 0, 0.0, log_q).float()

    def data_order(self) -> dict[str, Any]:
        if self.mined is None:
            return self.reader.order
        return {**self.reader.order, "mined_negatives": self._model.mined_negatives.model_dump()}

    def evaluate(self, model: nn.Module) -> RetrievalMetrics:
        return self.evaluation.metrics(model)

    def describe_data(self) -> str:
        left_out = f", {self.holdout.unreachable} seen before left out" if self.holdout.unreachable else ""
        return (
            f"{self.directory}: {len(self.log.user_keys):,} users, {len(self.log.item_keys):,} items, "
            f"{len(self.holdout.train):,} training events; {self._data.split}, {self._data.evaluate_on}: "
            f"{len(self.holdout.targets):,} targets of {self.holdout.queries:,} users{left_out}"
        )

    def report(self, metrics: RetrievalMetrics, log: RunLog, step: int) -> None:
        counts = np.bincount(self.log.items[self.holdout.train], minlength=len(self.log.item_keys))
        rows = {
            self._model.kind: metrics,
            "popularity": self.evaluation.metrics_of_vectors(
                np.ones((self.holdout.queries, 1), np.float32), counts[:, None].astype(np.float32)
            ),
        }
        cutoffs = list(metrics.recall)
        table = Table(
            title=f"{self._data.evaluate_on} split, {metrics.queries:,} queries, all "
            f"{len(self.log.item_keys):,} items ranked{', seen ones left out' * self._data.exclude_seen}"
        )
        table.add_column("predictor")
        coverage = f"coverage@{metrics.coverage_at}"
        for name in (*(f"{kind}@{k}" for kind in ("recall", "NDCG") for k in cutoffs), "MRR", coverage):
            table.add_column(name, justify="right")
        for name, found in rows.items():
            values = [*found.recall.values(), *found.ndcg.values(), found.mrr, found.coverage]
            table.add_row(name, *(f"{value:.4f}" for value in values))
            log.event("report", step, {"predictor": name, **found.as_dict()})
        log.message(table)

    def state(self) -> dict[str, Tensor]:
        counts = {"item_counts": self._frequency.counts, "item_counts_scale": self._frequency.scale}
        return counts if self.mined is None else {**counts, "mined_pool": self.mined.pool}

    def load_state(self, state: dict[str, Any]) -> None:
        self._frequency.counts.copy_(state["item_counts"])
        self._frequency.scale.copy_(state["item_counts_scale"])
        if self.mined is not None:
            self.mined.load_pool(state["mined_pool"])
