"""`mllog.txt`: a run in the format of mlperf-logging, which MLPerf's compliance checker reads.

Keys and their order are those of the reference (mlcommons/training aa344c7, torchrec_dlrm/dlrm_main.py).
`cache_clear` is logged as false: nothing here clears the caches of the machine, which a submission must do.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import psutil

from recsys_tpu.config import Config
from recsys_tpu.errors import ConfigError
from recsys_tpu.protocol.settings import SubmissionConfig


class MLPerfLog:
    """Writes the events of one run; made when the run begins to set up."""

    def __init__(self, submission: SubmissionConfig, config: Config, directory: Path) -> None:
        """
        Raises:
            ConfigError: mlperf-logging is not installed.
        """
        try:
            from mlperf_logging.mllog.mllog import MLLogger
        except ImportError:
            raise ConfigError(
                "protocol.mllog needs mlperf-logging: pip install 'recsys-tpu[mlperf]', or leave it out"
            ) from None
        directory.mkdir(parents=True, exist_ok=True)
        self._handler = logging.FileHandler(directory / "mllog.txt", mode="w", encoding="utf-8")
        logger = logging.Logger("mllog", logging.INFO)  # not of the root: a run's other messages stay out
        logger.addHandler(self._handler)
        self._log = MLLogger(logger=logger, root_dir=str(Path(__file__).parents[2]))
        self._config = config
        self._event("cache_clear", False)
        self._log.start(key="init_start", time_ms=int(psutil.Process().create_time() * 1000))
        for name in ("benchmark", "org", "division", "status", "platform"):
            self._event(f"submission_{name}", getattr(submission, name))
        self._event("global_batch_size", config.train.batch_size)
        self._event("gradient_accumulation_steps", 1)
        self._event("seed", config.run.seed)
        self._optimizer_events()

    def run_started(self, *, train_samples: int, eval_samples: int) -> None:
        """The first touch of the data."""
        self._log.end(key="init_stop")
        self._log.start(key="run_start")
        self._event("train_samples", train_samples)
        self._event("eval_samples", eval_samples)
        self._log.start(key="epoch_start", metadata={"epoch_num": 0})

    def evaluation_started(self, epoch: float) -> None:
        self._log.start(key="eval_start", metadata={"epoch_num": epoch})

    def evaluated(self, epoch: float, auc: float) -> None:
        self._event("eval_accuracy", auc, {"epoch_num": epoch})
        self._log.end(key="eval_stop", metadata={"epoch_num": epoch})

    def run_ended(self, epoch: float, *, success: bool) -> None:
        """The target was reached, or training is over; a run without a target ends in success."""
        self._log.end(key="epoch_stop", metadata={"epoch_num": epoch})
        status = "success" if success else "aborted"
        self._log.end(key="run_stop", metadata={"status": status, "epoch_num": epoch})

    def close(self) -> None:
        self._handler.close()

    def _optimizer_events(self) -> None:
        dense, schedule = self._config.optimizer.dense, self._config.optimizer.schedule
        sparse = self._config.optimizer.sparse
        name = "adagrad" if dense.kind == sparse.kind == "adagrad" else f"{dense.kind} and {sparse.kind}"
        self._event("opt_name", name)
        self._event("opt_base_learning_rate", dense.learning_rate)
        if sparse.learning_rate != dense.learning_rate:
            self._event("opt_sparse_base_learning_rate", sparse.learning_rate)
        self._event("opt_weight_decay", dense.weight_decay)
        if "adagrad" in name:  # torch's defaults, which the config cannot change
            self._event("opt_adagrad_learning_rate_decay", 0)
            self._event("opt_adagrad_initial_accumulator_value", 0)
            self._event("opt_adagrad_epsilon", dense.eps)
        self._event("opt_learning_rate_warmup_steps", schedule.warmup_steps)
        self._event("opt_learning_rate_decay_start_step", schedule.decay_start_step or 0)
        self._event("opt_learning_rate_decay_steps", schedule.decay_steps or 0)

    def _event(self, key: str, value: Any, metadata: dict[str, Any] | None = None) -> None:
        self._log.event(key=key, value=value, metadata=metadata)
