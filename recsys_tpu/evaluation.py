"""A model over a whole split: metrics of all ranks together, or predictions written to a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from recsys_tpu.data.reader import ParquetReader
from recsys_tpu.metrics import ClickMetrics
from recsys_tpu.runtime import Runtime
from recsys_tpu.streaming_metrics import StreamingClickMetrics


def evaluate(model: nn.Module, reader: ParquetReader, runtime: Runtime) -> ClickMetrics:
    """Metrics over every row of the reader's split; collective, the same result on all ranks.

    Raises:
        DatasetError: the split has only one class.
        TrainingDivergedError: a prediction is NaN.
    """
    found = StreamingClickMetrics()
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for batch in reader.epoch(0):
            on_device = batch.dense_to(runtime.device)
            with runtime.autocast():
                logits = model(on_device.dense, on_device.sparse)
            valid = batch.weights > 0
            found.add(batch.labels[valid].numpy(), logits.float().cpu()[valid].numpy())
    model.train(was_training)
    return found.result()


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
