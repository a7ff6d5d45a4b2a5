"""Predictions of a model over a whole split, gathered from every rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import nn

from recsys_tpu.data.reader import ParquetReader
from recsys_tpu.metrics import ClickMetrics, click_metrics
from recsys_tpu.runtime import Runtime


def evaluate(model: nn.Module, reader: ParquetReader, runtime: Runtime) -> ClickMetrics:
    """Metrics over every row of the reader's split; collective, the same result on all ranks.

    Raises:
        DatasetError: the split has only one class.
    """
    labels, logits = predict(model, reader, runtime)
    return click_metrics(labels, logits)


def predict(
    model: nn.Module, reader: ParquetReader, runtime: Runtime
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """(labels, logits) ``[rows]`` of the split, padding left out; collective."""
    was_training = model.training
    model.eval()
    collected = []
    with torch.no_grad():
        for batch in reader.epoch(0):
            on_device = batch.dense_to(runtime.device)
            with runtime.autocast():
                logits = model(on_device.dense, on_device.sparse)
            collected.append(torch.stack([batch.labels, logits.float().cpu(), batch.weights]))
    model.train(was_training)
    local = torch.cat(collected, dim=1)
    # every rank has the same number of equal batches, so the pieces are of one size
    pieces = [torch.empty_like(local) for _ in range(runtime.world_size)]
    dist.all_gather(pieces, local)
    everything = torch.cat(pieces, dim=1)
    labels, predictions, weights = everything.numpy()
    valid = weights > 0
    return labels[valid], predictions[valid]


def write_predictions(model: nn.Module, reader: ParquetReader, runtime: Runtime, path: Path) -> int:
    """Write label and probability of every row that the reader yields; returns their number.

    Batches are written as they come, under a temporary name that becomes `path` when all are there.

    Raises:
        DatasetError: see `ParquetReader`.
    """
    schema = pa.schema([("label", pa.int8()), ("probability", pa.float32())])
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = 0
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), pq.ParquetWriter(partial, schema) as writer:
            for batch in reader.epoch(0):
                on_device = batch.dense_to(runtime.device)
                with runtime.autocast():
                    logits = model(on_device.dense, on_device.sparse)
                valid = batch.weights > 0
                probability = logits.float().cpu()[valid].sigmoid().numpy()
                labels = batch.labels[valid].numpy().astype(np.int8)
                writer.write_table(pa.table([labels, probability], schema=schema))
                rows += len(labels)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
        model.train(was_training)
    return rows
