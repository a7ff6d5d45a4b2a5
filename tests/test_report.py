"""The report of runs that a few events stand for."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from recsys_tpu.config import dump_config, load_config
from recsys_tpu.report.__main__ import write_report
from recsys_tpu.report.chart import line_chart, smoothed
from recsys_tpu.report.content import auc_standard_error
from recsys_tpu.report.run_record import ReportError

CONFIGS = Path(__file__).parent.parent / "configs"
TERABYTE = {"train": (4_195_197_692, 134_000_000), "val": (89_137_319, 2_900_000)}


def write_run(
    directory: Path, config: str, *overrides: str, auc: float = 0.8, splits: Any = TERABYTE
) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(dump_config(load_config(CONFIGS / config, overrides)))
    rows, positives = splits["val"]
    metrics = {"log_loss": 0.12, "normalized_entropy": 0.8, "calibration": 1.0, "rows": rows}
    metrics |= {"positives": positives}
    sizes = {name: {"rows": split[0], "positives": split[1]} for name, split in splits.items()}
    file = {"name": "day_0.gz", "bytes": 5, "lines": 7, "sha256": "ab" * 32}
    train = {"loss": 0.2, "losses": [0.4, 0.3, 0.2], "samples_per_second": 1e6}
    events = [
        {"event": "header", "step": 0, "device": "cpu", "host": "a <host> | pipe", "data": "data/criteo-1tb"},
        {"event": "dataset", "step": 0, "content": "0123abcd", "splits": sizes, "source": {"files": [file]}},
        {"event": "train", "step": 3, **train},
        {"event": "test", "step": 3, "auc": auc - 0.01, **metrics},
        {"event": "train", "step": 6, **train},
        {"event": "test", "step": 6, "auc": auc, **metrics},
        {"event": "report", "step": 6, "predictor": "logistic regression", "auc": 0.7, **metrics},
        {"event": "time", "step": 6, "ms_backward": 4.5, "first_step_compile_s": 2.0, "recompilations": 0},
    ]
    lines = [json.dumps(event | {"time": 100.0 + number}) for number, event in enumerate(events)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return directory


class Checker(HTMLParser):
    """Every element that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_full_run_is_put_beside_the_published_target(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "criteo_1tb_dlrm_dcnv2.yaml", auc=0.80285)
    write_report([run], run)
    text = (run / "report.md").read_text()
    assert "| target | 0.80275 | +0.00010 |" in text
    assert "Comparable: the numbers of training and evaluation rows are the published ones." in text
    assert "target AUC 0.80275 was not reached in 6 steps" in text
    for expected in ("ab" * 32, "0123abcd", "a <host> \\| pipe", "| backward | 4.50 |", "batch_size: 65536"):
        assert expected in text
    page = (run / "report.html").read_text()
    Checker(page)
    assert "a &lt;host&gt; | pipe" in page
    for name in re.findall(r"\((report-\w+\.svg)\)", text):
        ElementTree.parse(run / name)  # well-formed


def test_other_rows_and_small_data_are_said_not_to_compare(tmp_path: Path) -> None:
    splits = TERABYTE | {"val": (89_137_318, 2_900_000)}
    write_report([write_run(tmp_path / "a", "criteo_1tb_dlrm.yaml", splits=splits)], tmp_path)
    assert "**Not comparable**: 4,195,197,692 training and 89,137,318" in (tmp_path / "report.md").read_text()
    small = {"train": (70_000, 15_000), "val": (10_000, 2_234)}
    write_report([write_run(tmp_path / "b", "criteo_1tb_dlrm_smoke.yaml", splits=small)], tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "**Not comparable**: the run is on data.kind=criteo_sample" in text
    assert "a check that the code works, not as a benchmark" in text
    assert "<strong>Not comparable</strong>" in (tmp_path / "report.html").read_text()


def test_seeds_are_averaged_and_other_differences_refused(tmp_path: Path) -> None:
    config = "criteo_1tb_dlrm.yaml"
    runs = [
        write_run(tmp_path / f"s{seed}", config, f"run.seed={seed}", f"run.name=s{seed}", auc=auc)
        for seed, auc in ((1, 0.80), (2, 0.81), (3, 0.82))
    ]
    write_report(runs, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| dlrm, mean | 0.81000 |" in text
    assert "| dlrm, standard deviation | 0.01000 |" in text
    other = write_run(tmp_path / "other", config, "train.batch_size=4096")
    with pytest.raises(ReportError, match="differ in more than seed and name"):
        write_report([runs[0], other], tmp_path)


def test_a_folder_without_a_finished_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"not the folder of a run"):
        write_report([tmp_path], tmp_path)
    run = write_run(tmp_path / "run", "criteo_1tb_dlrm.yaml")
    (run / "metrics.jsonl").write_text('{"event": "header", "step": 0, "time": 1.0}\n')
    with pytest.raises(ReportError, match="has not been evaluated yet"):
        write_report([run], tmp_path)
    (run / "metrics.jsonl").write_text('{"event": "header", "step": 0, "time": 1.0}\nhalf a li')
    with pytest.raises(ReportError, match="line 2: not an event"):
        write_report([run], tmp_path)


def test_the_standard_error_is_that_of_repeated_samples() -> None:
    rng = np.random.default_rng(0)
    positive, negative = rng.normal(1, 1, (400, 60)), rng.normal(0, 1, (400, 90))
    aucs = (positive[:, :, None] > negative[:, None, :]).mean((1, 2))
    assert auc_standard_error(float(aucs.mean()), 60, 90) == pytest.approx(aucs.std(), rel=0.1)


def test_charts_are_well_formed_for_one_point_and_many() -> None:
    for points in ([(5.0, 0.5)], [(float(x), 1.0 / (x + 1)) for x in range(10_000)]):
        chart = line_chart("a < b", {"one & only": points}, x_label="x", y_label="y", levels={"target": 0.7})
        assert "NaN" not in chart
        ElementTree.fromstring(chart)
    curve = smoothed({step: float(step) for step in range(1, 1001)}, points=10)
    assert len(curve) == 10
    assert curve[-1] == (1000, pytest.approx(950.5))
