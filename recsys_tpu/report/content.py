"""What the report says, as blocks that both pages are made from."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recsys_tpu.config import ClickDataConfig, dump_config
from recsys_tpu.report.chart import line_chart, smoothed
from recsys_tpu.report.published import PUBLISHED, Published
from recsys_tpu.report.run_record import ReportError, RunRecord

_SMALL_ERROR = 0.001  # a standard error above the differences that papers compare


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Chart:
    name: str
    svg: str


Block = Text | Table | Code | Chart


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


def report_sections(runs: Sequence[RunRecord]) -> list[Section]:
    """The report of runs that differ in nothing but their seed and name.

    Raises:
        ReportError: the runs differ in more, or are not of a click model.
    """
    _check_comparable(runs)
    return [
        Section("Result", _result(runs)),
        *(
            [Section("Beside published results", _published(runs))]
            if runs[0].config.protocol.compare_with
            else []
        ),
        Section("Curves", _curves(runs)),
        Section("Data", _data(runs[0])),
        Section("Hardware and software", [Table(["", "value"], _pairs(_described(runs[0])))]),
        Section("Time", _time(runs)),
        Section("Config", [Code(dump_config(runs[0].config))]),
    ]


def auc_standard_error(auc: float, positives: int, negatives: int) -> float:
    """Of the AUC of a sample (Hanley and McNeil, 1982: the meaning and use of the area under a ROC curve)."""
    q1, q2 = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    variance = auc * (1 - auc) + (positives - 1) * (q1 - auc**2) + (negatives - 1) * (q2 - auc**2)
    return math.sqrt(variance / (positives * negatives))


def _check_comparable(runs: Sequence[RunRecord]) -> None:
    for run in runs:
        if not isinstance(run.config.data, ClickDataConfig):
            raise ReportError(
                f"{run.directory}: a run of model.kind={run.config.model.kind}; click models only"
            )
        if _without_seed(run) != _without_seed(runs[0]):
            raise ReportError(
                f"{run.directory} and {runs[0].directory} differ in more than seed and name; "
                "give one report to each"
            )


def _without_seed(run: RunRecord) -> dict[str, Any]:
    tree = run.config.model_dump(mode="json")
    tree["run"] = {}
    tree["train"]["resume"] = ""
    return tree


def _result(runs: Sequence[RunRecord]) -> list[Block]:
    rows = [
        [name, *(_metric(found[key]) for key in ("auc", "log_loss", "normalized_entropy", "calibration"))]
        for name, found in _predictors(runs)
    ]
    blocks: list[Block] = [Table(["predictor", "AUC", "log loss", "norm. entropy", "calibration"], rows)]
    final = runs[0].final
    negatives = final["rows"] - final["positives"]
    error = auc_standard_error(final["auc"], final["positives"], negatives)
    blocks.append(
        Text(
            f"Evaluated on all {final['rows']:,} rows of split {_data_config(runs[0]).evaluation_split!r} "
            f"({final['positives']:,} clicks). The standard error of an AUC on so many rows is {error:.5f}"
            + (
                ": too large to tell models apart that differ by a few thousandths. Read this as a check "
                "that the code works, not as a benchmark."
                if error > _SMALL_ERROR
                else "."
            )
        )
    )
    for run in runs:
        blocks.append(Text(f"{run.directory.name}, seed {run.config.run.seed}: {_target(run)}"))
    return blocks


def _predictors(runs: Sequence[RunRecord]) -> list[tuple[str, dict[str, float]]]:
    """The model of each run, their mean, then what they were compared with."""
    kind = runs[0].config.model.kind
    rows = [(f"{kind}, seed {run.config.run.seed}", run.final) for run in runs]
    keys = ("auc", "log_loss", "normalized_entropy", "calibration")
    if len(runs) > 1:
        for name, summary in (("mean", statistics.mean), ("standard deviation", statistics.stdev)):
            rows.append((f"{kind}, {name}", {key: summary(run.final[key] for run in runs) for key in keys}))
    others = {name: found for name, found in runs[0].predictors.items() if name != kind}
    return [*rows, *others.items()]


def _target(run: RunRecord) -> str:
    target = run.config.protocol.target_auc
    if target is None:
        return f"no target; {run.steps:,} steps"
    if not run.target:
        return f"target AUC {target} was not reached in {run.steps:,} steps"
    return (
        f"target AUC {target} reached with {run.target['auc']:.5f} after {run.target['samples']:,} samples "
        f"({run.target['epochs']:.4f} epochs)"
    )


def _published(runs: Sequence[RunRecord]) -> list[Block]:
    name = runs[0].config.protocol.compare_with
    assert name is not None
    published = PUBLISHED[name]
    found = statistics.mean(run.final["auc"] for run in runs)
    found_loss = statistics.mean(run.final["log_loss"] for run in runs)
    rows = [
        [
            result.name,
            _metric(result.auc),
            "" if result.auc is None else f"{found - result.auc:+.5f}",
            _metric(result.log_loss),
            "" if result.log_loss is None else f"{found_loss - result.log_loss:+.5f}",
            result.note,
        ]
        for result in published.results
    ]
    rows.append(
        [
            "this run" if len(runs) == 1 else f"mean of {len(runs)}",
            _metric(found),
            "",
            _metric(found_loss),
            "",
            "",
        ]
    )
    return [
        Text(f"{published.title}. Source: {published.source}."),
        Table(["published", "AUC", "found - it", "log loss", "found - it", "note"], rows),
        Text(_comparability(runs[0], published)),
    ]


def _comparability(run: RunRecord, published: Published) -> str:
    if _data_config(run).kind != "parquet":
        kind = _data_config(run).kind
        return f"**Not comparable**: the run is on data.kind={kind}, not on the published data."
    splits = run.dataset.get("splits", {})
    found = splits.get("train", {}).get("rows"), run.final["rows"]
    if found == (published.train_rows, published.eval_rows):
        return "Comparable: the numbers of training and evaluation rows are the published ones."
    return (
        f"**Not comparable**: {found[0]:,} training and {found[1]:,} evaluation rows, published are "
        f"{published.train_rows:,} and {published.eval_rows:,}."
    )


def _curves(runs: Sequence[RunRecord]) -> list[Block]:
    batch = runs[0].config.train.batch_size

    def name(run: RunRecord) -> str:
        return f"seed {run.config.run.seed}"

    losses = {
        name(run): [(step * batch, loss) for step, loss in smoothed(run.losses)] for run in runs if run.losses
    }
    aucs = {
        name(run): [(step * batch, found["auc"]) for step, found in sorted(run.evaluations.items())]
        for run in runs
    }
    target = runs[0].config.protocol.target_auc
    blocks: list[Block] = []
    if losses:
        svg = line_chart("training loss", losses, x_label="samples", y_label="mean log loss")
        blocks.append(Chart("loss", svg))
    svg = line_chart(
        "AUC of the evaluation split",
        aucs,
        x_label="samples",
        y_label="AUC",
        levels={} if target is None else {"target": target},
    )
    blocks.append(Chart("auc", svg))
    rows = [
        [name(run), f"{step:,}", f"{step * batch:,}", _metric(found["auc"]), _metric(found["log_loss"])]
        for run in runs
        for step, found in sorted(run.evaluations.items())
    ]
    blocks.append(Table(["run", "step", "samples", "AUC", "log loss"], rows))
    return blocks


def _data(run: RunRecord) -> list[Block]:
    splits = run.dataset.get("splits", {})
    rows = [
        [
            name,
            f"{split['rows']:,}",
            "" if split["positives"] is None else f"{split['positives'] / split['rows']:.5f}",
        ]
        for name, split in splits.items()
    ]
    files = run.dataset.get("source", {}).get("files", [])
    blocks: list[Block] = [
        Text(
            f"{run.header.get('data', '')}. Fingerprint of metadata.json: "
            f"{run.dataset.get('content', 'unknown')}."
        )
    ]
    if rows:
        blocks.append(Table(["split", "rows", "click rate"], rows))
    if files:
        blocks.append(
            Table(
                ["source file", "bytes", "lines", "SHA-256"],
                [
                    [item["name"], f"{item['bytes']:,}", f"{item['lines']:,}", item["sha256"]]
                    for item in files
                ],
            )
        )
    else:
        blocks.append(Code(_compact(run.dataset.get("source", {}))))
    return blocks


def _described(run: RunRecord) -> dict[str, Any]:
    left_out = {"event", "step", "time", "data", "steps"}
    return {name: value for name, value in run.header.items() if name not in left_out}


def _time(runs: Sequence[RunRecord]) -> list[Block]:
    rows = [
        [
            f"seed {run.config.run.seed}",
            f"{run.seconds:,.0f}",
            f"{run.samples_per_second:,.0f}",
            str(run.starts),
            f"{run.time.get('first_step_compile_s', 0.0):.1f}",
            str(run.time.get("recompilations", "")),
        ]
        for run in runs
    ]
    phases = {name: value for name, value in runs[0].time.items() if name.startswith("ms_")}
    return [
        Table(
            [
                "run",
                "seconds in all",
                "samples/s, median",
                "starts",
                "compile s, first step",
                "recompilations",
            ],
            rows,
        ),
        Table(["phase", "ms a step"], [[name[3:], f"{value:.2f}"] for name, value in phases.items()]),
        Text("The table update is part of backward; evaluation and checkpoint are spread over the steps."),
    ]


def _data_config(run: RunRecord) -> ClickDataConfig:
    assert isinstance(run.config.data, ClickDataConfig)
    return run.config.data


def _metric(value: float | None) -> str:
    return "" if value is None else f"{value:.5f}"


def _compact(tree: dict[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in tree.items())


def _pairs(tree: dict[str, Any]) -> list[list[str]]:
    return [[name, _flat(value)] for name, value in tree.items()]


def _flat(value: Any) -> str:
    return (
        ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else str(value)
    )
