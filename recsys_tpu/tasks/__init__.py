"""What a run trains: a task is a model, its data, its loss and its evaluation; the Trainer is the loop."""

from __future__ import annotations

from typing import Any

from recsys_tpu.config import Config, TwoTowerConfig
from recsys_tpu.runtime import Runtime
from recsys_tpu.tasks.click import ClickTask
from recsys_tpu.tasks.retrieval import RetrievalTask
from recsys_tpu.tasks.task import Metrics, Task

__all__ = ["Metrics", "Task", "build_task"]


def build_task(config: Config, runtime: Runtime) -> Task[Any, Any]:
    """The task that the config's model stands for, with its data prepared; collective.

    Raises:
        DatasetError, ConfigError: the data is missing or damaged, or does not fit the model.
    """
    if isinstance(config.model, TwoTowerConfig):
        return RetrievalTask(config, runtime)
    return ClickTask(config, runtime)
