"""What a run says: every rank its events; rank 0 the bar, `metrics.jsonl`, TensorBoard and `metrics.prom`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from recsys_tpu.prometheus import write_gauges
from recsys_tpu.rank_log import RankLog
from recsys_tpu.redaction import redact


class RunLog:
    """One per process; ranks other than 0 only write their events to `logs/` (see `RankLog`)."""

    def __init__(self, directory: Path, *, rank: int) -> None:
        self._active, self.directory = rank == 0, directory
        self._rank_log = RankLog(directory, rank)
        self.console = Console(quiet=not self._active, highlight=False, soft_wrap=True)
        if not self._active:
            return
        directory.mkdir(parents=True, exist_ok=True)
        self._jsonl = (directory / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        self._gauges: dict[str, float] = {}
        self._gauges_file, self._run_name = directory / "metrics.prom", directory.name
        self._board = SummaryWriter(str(directory / "tensorboard"))
        self._progress: Progress | None = None

    def start_progress(self, *, total: int, done: int) -> None:
        """Show the bar; on a terminal it moves, elsewhere lines are printed by `train_step`."""
        if self._active and self.console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[rate]:,.0f} samples/s"),
                TimeRemainingColumn(),
                TextColumn("loss {task.fields[loss]:.5f}"),
                console=self.console,
            )
            self._task = self._progress.add_task("train", total=total, completed=done, rate=0.0, loss=0.0)
            self._progress.start()

    def stop_progress(self) -> None:
        if self._active and self._progress:
            self._progress.stop()
            self._progress = None

    def message(self, text: Any) -> None:
        """Print a line (or a rich renderable) above the bar."""
        if self._active:
            self.console.print(redact(text) if isinstance(text, str) else text)

    def note(self, kind: str, /, *, level: str = "info", **values: Any) -> None:
        """Append an event to this rank's log only."""
        self._rank_log.event(kind, level=level, **values)

    def event(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """One line in this rank's log and metrics.jsonl; the numbers go to TensorBoard and metrics.prom."""
        self.note(kind, step=step, **values)
        if not self._active:
            return
        self._jsonl.write(json.dumps({"event": kind, "step": step, "time": time.time(), **values}) + "\n")
        for name, value in values.items():
            if isinstance(value, int | float):
                self._board.add_scalar(f"{kind}/{name}", value, step)
                self._gauges[f"{kind}_{name}"] = value
        self._gauges["step"] = step
        write_gauges(self._gauges_file, self._gauges, {"run": self._run_name})

    def train_steps(self, *, step: int, total: int, losses: list[float], values: dict[str, float]) -> None:
        """Log the steps up to `step` (their losses in order) with rates and phase times."""
        self.event("train", step, {"loss": losses[-1], **values, "losses": losses})
        if not self._active:
            return
        rate = values["samples_per_second"]
        if self._progress:
            self._progress.update(self._task, completed=step, rate=rate, loss=losses[-1])
            return
        seconds = values["eta_seconds"]
        self.console.print(
            f"step {step:>6}/{total}  loss {losses[-1]:.5f}  {rate:>9,.0f} samples/s  "
            f"eta {int(seconds) // 60}:{int(seconds) % 60:02}",
        )

    def close(self) -> None:
        self._rank_log.close()
        if self._active:
            self.stop_progress()
            self._jsonl.close()
            self._board.close()
