"""What a run left in its folder, read back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recsys_tpu.config import Config, load_config
from recsys_tpu.errors import UserError


class ReportError(UserError, ValueError):
    """A folder is not that of a run, or the run has nothing to report yet."""


@dataclass(frozen=True)
class RunRecord:
    """One run.

    Attributes:
        losses: global mean loss by step; of a step that was trained twice (after a crash) the later one.
        evaluations: metrics by step.
        predictors: metrics of the model and of what it was compared with, by name.
        header, dataset, time, target: the last event of that kind; empty where the run wrote none.
        seconds: between the first and the last event, pauses between restarts included.
        samples_per_second: median over the logged stretches.
        starts: how often the run was started.
    """

    directory: Path
    config: Config
    losses: dict[int, float]
    evaluations: dict[int, dict[str, Any]]
    predictors: dict[str, dict[str, Any]]
    header: dict[str, Any]
    dataset: dict[str, Any]
    time: dict[str, Any]
    target: dict[str, Any]
    seconds: float
    samples_per_second: float
    starts: int

    @property
    def steps(self) -> int:
        return max([*self.losses, *self.evaluations])

    @property
    def final(self) -> dict[str, Any]:
        """Metrics of the last evaluation."""
        return self.evaluations[max(self.evaluations)]


def read_run(directory: Path) -> RunRecord:
    """Read `directory`/metrics.jsonl and config.yaml.

    Raises:
        ReportError: a file is missing, or the run has no evaluation.
    """
    log = directory / "metrics.jsonl"
    if not log.is_file():
        raise ReportError(f"{directory}: not the folder of a run (it has no {log.name})")
    events = [_event(log, number, line) for number, line in enumerate(log.read_text().splitlines(), 1)]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_kind.setdefault(event["event"], []).append(event)
    if "test" not in by_kind:
        raise ReportError(f"{log}: the run has not been evaluated yet; there is nothing to report")
    losses: dict[int, float] = {}
    for event in by_kind.get("train", []):
        first = event["step"] - len(event["losses"]) + 1
        losses |= dict(enumerate(event["losses"], first))
    rates = sorted(event["samples_per_second"] for event in by_kind.get("train", []))

    def last(kind: str) -> dict[str, Any]:
        return by_kind.get(kind, [{}])[-1]

    return RunRecord(
        directory=directory,
        config=load_config(directory / "config.yaml"),
        losses=losses,
        evaluations={event["step"]: event for event in by_kind["test"]},
        predictors={event["predictor"]: event for event in by_kind.get("report", [])},
        header=last("header"),
        dataset=last("dataset"),
        time=last("time"),
        target=last("target"),
        seconds=events[-1]["time"] - events[0]["time"],
        samples_per_second=rates[len(rates) // 2] if rates else 0.0,
        starts=len(by_kind.get("header", [])),
    )


def _event(log: Path, number: int, line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
        assert isinstance(event, dict) and {"event", "step", "time"} <= event.keys()
    except (ValueError, AssertionError):
        raise ReportError(f"{log}, line {number}: not an event of a run: {line[:80]!r}") from None
    return event
