"""Progress on the terminal: a bar per phase with its rate and ETA, and one line when it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from recsys_tpu.data.criteo.pool import Report


class _RateColumn(TextColumn):
    def __init__(self, unit: str, scale: int) -> None:
        super().__init__("")
        self._unit, self._scale = unit, scale

    def render(self, task: Task) -> Text:
        speed = (task.finished_speed or task.speed or 0.0) / self._scale
        return Text(f"{speed:,.0f} {self._unit}/s")


@contextmanager
def phase(console: Console, name: str, total: int, *, unit: str, scale: int = 1) -> Iterator[Report]:
    """Show the progress of `total` units of work; yields the function that reports units done."""
    started = time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        _RateColumn(unit, scale),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=total)
        yield lambda amount: progress.advance(task, amount)
    seconds = time.perf_counter() - started
    amount = total / scale
    rate = amount / max(seconds, 1e-9)
    console.print(f"{name}: {amount:,.0f} {unit} in {seconds:,.1f} s ({rate:,.0f} {unit}/s)")
