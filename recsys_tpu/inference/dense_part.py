"""The dense part of a click model as a program that runs without TorchRec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from recsys_tpu.data.batch import Batch
from recsys_tpu.data.metadata import write_json_atomically
from recsys_tpu.sharding.whole import whole_state
from recsys_tpu.tasks.click import ClickTask
from recsys_tpu.trainer import Trainer

PROGRAM_FILE = "dense.pt2"
INFO_FILE = "dense.json"


class DensePartInfo(BaseModel):
    """The content of dense.json: what the program takes.

    dense_features: columns of its first argument, ``[B, features]`` float32, transformed as in training.
    tables: the table of each of the F vectors of its second argument, ``[B, F, embedding_dim]`` float32.
    max_difference: largest difference of its logits to the trained model's, on the batch it was checked with.
    """

    model_config = ConfigDict(extra="forbid")

    checkpoint: str
    dense_features: list[str]
    sparse_features: list[str]
    embedding_dim: int
    checked_rows: int
    max_difference: float


class DensePart(nn.Module):
    """The towers of a model without its tables."""

    def __init__(self, model: Any, weights: dict[str, Tensor]) -> None:
        super().__init__()
        model.sparse_arch = nn.Identity()
        model.load_state_dict(weights)
        self.model = model

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """``[B, dense features]`` and ``[B, F, D]`` to logits ``[B]``."""
        logits: Tensor = self.model.towers(dense, embedded)
        return logits


def export_dense_part(trainer: Trainer, checkpoint: Path, directory: Path) -> DensePartInfo:
    """Write the towers of the loaded model as a program for any batch size, and check it on real rows.

    Returns the content of dense.json, which is written last.
    """
    task = trainer.task
    assert isinstance(task, ClickTask) and trainer.runtime.world_size == 1
    part = DensePart(task.build_model(), whole_state(trainer.model)[1]).eval()
    batch = next(iter(task.reader_in_order("test").epoch(0)))
    trainer.model.eval()
    with torch.no_grad():
        embedded = _embedded(trainer.model, batch)
        rows = torch.export.Dim("batch", min=1)
        program = torch.export.export(
            part, (batch.dense[:2], embedded[:2]), dynamic_shapes=({0: rows}, {0: rows})
        )
        directory.mkdir(parents=True, exist_ok=True)
        (directory / INFO_FILE).unlink(missing_ok=True)
        torch.export.save(program, directory / PROGRAM_FILE)
        found = torch.export.load(directory / PROGRAM_FILE).module()(batch.dense, embedded)
        expected = trainer.model(batch.dense_to(trainer.runtime.device).dense, batch.sparse).float().cpu()
    info = DensePartInfo(
        checkpoint=str(checkpoint),
        dense_features=list(task.metadata.dense_features),
        sparse_features=list(task.metadata.sparse_features),
        embedding_dim=embedded.shape[2],
        checked_rows=int((batch.weights > 0).sum()),
        max_difference=float((found - expected).abs().max()),
    )
    write_json_atomically(directory / INFO_FILE, info.model_dump())
    return info


def _embedded(model: Any, batch: Batch) -> Tensor:
    embedded: Tensor = model.module.sparse_arch(batch.sparse)
    return embedded.float().cpu()
