"""Click prediction: binary cross-entropy, AUC beside an oracle and simple baselines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from recsys_tpu.baselines import constant_metrics, logistic_regression_metrics, oracle_metrics
from recsys_tpu.config import ClickDataConfig, Config, TwoTowerConfig
from recsys_tpu.data.batch import Batch
from recsys_tpu.data.metadata import DatasetMetadata
from recsys_tpu.data.multi_hot import MultiHotTables, ensure_multi_hot_tables
from recsys_tpu.data.reader import ParquetReader
from recsys_tpu.data.source import prepare_data
from recsys_tpu.evaluation import evaluate
from recsys_tpu.metrics import ClickMetrics
from recsys_tpu.models.build import build_click_model
from recsys_tpu.run_log import RunLog
from recsys_tpu.runtime import Runtime
from recsys_tpu.tasks.task import Task, on_rank_zero_first


class ClickTask(Task[Batch, ClickMetrics]):
    """A click model over a preprocessed Parquet directory with split `train` and one to evaluate on."""

    def __init__(self, config: Config, runtime: Runtime) -> None:
        assert isinstance(config.data, ClickDataConfig) and not isinstance(config.model, TwoTowerConfig)
        self._config, self._runtime = config, runtime
        self._data, self._model = config.data, config.model
        self.data_directory = on_rank_zero_first(runtime, lambda: prepare_data(self._data))
        self.metadata = DatasetMetadata.load(self.data_directory)
        self.num_embeddings = self._model.num_embeddings or self.metadata.num_embeddings
        self._multi_hot = self._prepare_multi_hot()
        self.train_reader = self._reader("train", config.train.batch_size, shuffle=self._data.shuffle)
        self.eval_split = self._data.evaluation_split
        self.test_reader = self._reader(self.eval_split, config.train.eval_batch_size, shuffle=False)
        self.batches_per_epoch = self.train_reader.batches_per_epoch
        self.max_ids_per_sample = self.train_reader.max_ids_per_sample
        self.train_samples, self.eval_samples = self.train_reader.rows, self.test_reader.rows

    def _prepare_multi_hot(self) -> MultiHotTables | None:
        settings, rows = self._data.multi_hot, self.num_embeddings
        if settings is None:
            return None
        self.metadata.check_table_sizes(rows)
        in_order = {name: rows[name] for name in self.metadata.sparse_features}
        return on_rank_zero_first(
            self._runtime, lambda: ensure_multi_hot_tables(settings, in_order, self._data.cache_dir)
        )

    def build_model(self) -> nn.Module:
        return build_click_model(
            self._model, self.num_embeddings, dense_in_features=len(self.metadata.dense_features)
        )

    def batches(self, epoch: int, *, start: int) -> Iterator[Batch]:
        return self.train_reader.epoch(epoch, start=start)

    def data_order(self) -> dict[str, Any]:
        return self.train_reader.order

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        on_device = batch.dense_to(self._runtime.device)
        with self._runtime.autocast():
            logits = model(on_device.dense, on_device.sparse)
        losses = torch.nn.functional.binary_cross_entropy_with_logits(
            logits.float(), on_device.labels, on_device.weights, reduction="sum"
        )
        return losses * (self._runtime.world_size / batch.global_rows)

    def evaluate(self, model: nn.Module) -> ClickMetrics:
        return evaluate(model, self.test_reader, self._runtime)

    def describe_data(self) -> str:
        return (
            f"{self.data_directory}: {self.train_reader.rows:,} train rows, "
            f"{self.test_reader.rows:,} {self._data.evaluate_on} rows"
        )

    def dataset(self) -> dict[str, Any]:
        metadata = self.metadata
        return {
            "directory": str(self.data_directory),
            "content": metadata.content_hash,
            "splits": {
                name: {"rows": split.rows, "positives": split.positives}
                for name, split in metadata.splits.items()
            },
            "recipe": metadata.recipe,
            "source": metadata.source,
        }

    def report(self, metrics: ClickMetrics, log: RunLog, step: int) -> None:
        rows: dict[str, ClickMetrics] = {self._model.kind: metrics}
        oracle = oracle_metrics(self.data_directory, self.eval_split)
        if oracle is not None:
            rows["oracle (true probabilities)"] = oracle
        if self._config.train.baselines:
            rows["logistic regression"] = logistic_regression_metrics(
                self.data_directory, train="train", test=self.eval_split, seed=self._config.run.seed
            )
            rows["constant"] = constant_metrics(self.data_directory, train="train", test=self.eval_split)
        table = Table(
            title=f"{self._data.evaluate_on} split, {metrics.rows:,} rows, {metrics.positives:,} positives"
        )
        for column in ("predictor", "AUC", "log loss", "norm. entropy", "calibration"):
            table.add_column(column, justify="left" if column == "predictor" else "right")
        for name, found in rows.items():
            values = (found.auc, found.log_loss, found.normalized_entropy, found.calibration)
            table.add_row(name, *(f"{value:.5f}" for value in values))
            log.event("report", step, {"predictor": name, **found.as_dict()})
        log.message(table)
        if oracle is not None:
            log.message(f"final AUC {metrics.auc:.5f}, oracle AUC {oracle.auc:.5f}")

    def reader_in_order(self, split: str) -> ParquetReader:
        """Every row of a split in the order of its files; for a world of one rank."""
        return self._reader(split, self._config.train.eval_batch_size, shuffle=False, lanes=1)

    def _reader(
        self, split: str, batch_size: int, *, shuffle: bool, lanes: int | None = None
    ) -> ParquetReader:
        data = self._data
        return ParquetReader(
            self.data_directory,
            split,
            batch_size=batch_size,
            rank=self._runtime.rank,
            world_size=self._runtime.world_size,
            lanes=lanes or data.lanes,
            shuffle=shuffle,
            seed=self._config.run.seed,
            window_row_groups=data.shuffle_row_groups,
            prefetch=data.prefetch_batches,
            num_embeddings=self.num_embeddings,
            multi_hot=self._multi_hot,
        )
