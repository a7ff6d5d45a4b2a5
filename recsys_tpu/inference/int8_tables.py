"""Tables in int8 for inference: one scale and one offset a row, by TorchRec's quantized collection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import QuantConfig
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection

from recsys_tpu.errors import ConfigError
from recsys_tpu.evaluation import evaluate
from recsys_tpu.metrics import ClickMetrics
from recsys_tpu.sharding.whole import whole_state
from recsys_tpu.tasks.click import ClickTask
from recsys_tpu.trainer import Trainer


@dataclass(frozen=True)
class Int8Model:
    """A click model whose tables are int8, on the CPU; bytes: of all tables, as trained and in int8."""

    model: nn.Module
    float_bytes: int
    int8_bytes: int


def quantize_tables(trainer: Trainer) -> Int8Model:
    """The loaded model with every table in int8 and the dense part unchanged.

    A row ``w`` becomes ``round((w - min w) / scale)`` with ``scale = (max w - min w) / 255``; scale and
    minimum are kept before it in float16 (FBGEMM's row-wise quantization), so an element is off by scale / 2
    and the rounding of those two at most.

    Raises:
        ConfigError: the run is no click model, has several ranks, or is not on the CPU.
    """
    task = trainer.task
    if not isinstance(task, ClickTask):
        raise ConfigError(f"int8 tables are for click models; this is a {trainer.config.model.kind} run")
    if trainer.runtime.world_size != 1 or trainer.runtime.kind != "cpu":
        raise ConfigError("int8 tables are read on the CPU by one process: set runtime.device=cpu")
    tables, dense = whole_state(trainer.model)
    model: Any = task.build_model()
    collection = model.sparse_arch.embedding_bag_collection
    for name, weights in tables.items():
        collection.embedding_bags[name].weight = nn.Parameter(weights, requires_grad=False)
    missing = model.load_state_dict(dense, strict=False)
    assert not missing.unexpected_keys
    collection.qconfig = QuantConfig(
        activation=torch.quantization.PlaceholderObserver.with_args(dtype=torch.float32),
        weight=torch.quantization.PlaceholderObserver.with_args(dtype=torch.qint8),
    )
    quantized = QuantEmbeddingBagCollection.from_float(collection)
    model.sparse_arch.embedding_bag_collection = quantized
    return Int8Model(
        model=model.eval(),
        float_bytes=sum(table.numel() * table.element_size() for table in tables.values()),
        int8_bytes=sum(table.numel() * table.element_size() for table in quantized.state_dict().values()),
    )


def evaluate_int8(trainer: Trainer) -> tuple[ClickMetrics, Int8Model]:
    """Test metrics of the loaded model with int8 tables.  Raises ConfigError, see `quantize_tables`."""
    made = quantize_tables(trainer)
    assert isinstance(trainer.task, ClickTask)
    return evaluate(made.model, trainer.task.test_reader, trainer.runtime), made
