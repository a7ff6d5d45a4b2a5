"""What the Trainer asks of the protocol while it runs."""

from __future__ import annotations

import time
from typing import Any

from recsys_tpu.config import Config
from recsys_tpu.metrics import ClickMetrics
from recsys_tpu.protocol.mllog import MLPerfLog
from recsys_tpu.run_log import RunLog


class ProtocolRun:
    """Evaluation points, the target, and samples to it.

    Args:
        config: `train` and `protocol` are read.
        batches_per_epoch: steps of an epoch.
        train_samples: rows of an epoch; None where the task has none to speak of.
        eval_samples: rows of the evaluation split; None likewise.
        log: where the target is noted.
        rank: rank 0 writes mllog.txt.
    """

    def __init__(
        self,
        config: Config,
        *,
        batches_per_epoch: int,
        train_samples: int | None,
        eval_samples: int | None,
        log: RunLog,
        rank: int,
    ) -> None:
        self._config, self._log = config, log
        self._per_epoch = batches_per_epoch
        self._samples = train_samples, eval_samples
        self._started = time.perf_counter()
        self.reached = False
        points = config.protocol.evaluations_per_epoch
        if points is None:
            self._eval_every, self._within_epoch = config.train.eval_every, False
        else:
            assert train_samples is not None  # the config allows a protocol for click models only
            self._eval_every = max(train_samples // (config.train.batch_size * points), 1)
            self._within_epoch = True
        submission = config.protocol.mllog
        self._mllog = MLPerfLog(submission, config, log.directory) if submission and rank == 0 else None

    def start(self) -> None:
        """Training begins."""
        self._started = time.perf_counter()
        train_samples, eval_samples = self._samples
        if self._mllog:
            assert train_samples is not None and eval_samples is not None
            self._mllog.run_started(train_samples=train_samples, eval_samples=eval_samples)

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation follows this step (the run's last evaluates anyway)."""
        if not self._eval_every:
            return False
        number = (step - 1) % self._per_epoch + 1 if self._within_epoch else step
        return number % self._eval_every == 0

    def before_evaluation(self, step: int) -> None:
        if self._mllog:
            self._mllog.evaluation_started(self._epoch(step))

    def after_evaluation(self, step: int, metrics: Any) -> None:
        """Note the result; `reached` says from now on whether the target was met."""
        if not isinstance(metrics, ClickMetrics):
            return
        if self._mllog:
            self._mllog.evaluated(self._epoch(step), metrics.auc)
        target = self._config.protocol.target_auc
        if target is None or metrics.auc < target or self.reached:
            return
        self.reached = True
        samples, seconds = self._samples_after(step), time.perf_counter() - self._started
        self._log.message(
            f"step {step:>6}  target AUC {target} reached after {samples:,} samples "
            f"({self._epoch(step):.4f} epochs), {seconds:,.0f} s after the start of this process's training"
        )
        self._log.event(
            "target",
            step,
            {
                "target_auc": target,
                "auc": metrics.auc,
                "samples": samples,
                "epochs": self._epoch(step),
                "seconds": seconds,
            },
        )

    def end(self, step: int) -> None:
        """The run is over."""
        target = self._config.protocol.target_auc
        if target is not None and not self.reached:
            self._log.message(f"step {step:>6}  target AUC {target} was not reached")
        if self._mllog:
            self._mllog.run_ended(self._epoch(step), success=target is None or self.reached)

    def close(self) -> None:
        if self._mllog:
            self._mllog.close()

    def _epoch(self, step: int) -> float:
        return step / self._per_epoch

    def _samples_after(self, step: int) -> int:
        """Rows trained on: the last batch of an epoch may be short."""
        rows = self._samples[0]
        assert rows is not None
        epochs, rest = divmod(step, self._per_epoch)
        return epochs * rows + min(rest * self._config.train.batch_size, rows)
