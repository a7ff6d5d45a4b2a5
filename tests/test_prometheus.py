"""Prometheus text, read back by its grammar."""

from __future__ import annotations

import math
import re
from pathlib import Path

from recsys_tpu.prometheus import write_gauges

_SAMPLE = re.compile(r'^([a-zA-Z_:][a-zA-Z0-9_:]*)\{run="((?:[^"\\\n]|\\.)*)"\} (\S+)$')


def test_every_line_is_a_sample_or_its_type(tmp_path: Path) -> None:
    path = tmp_path / "metrics.prom"
    path.write_text("old")
    gauges = {"train_loss": 0.5, "test recall@10": 1, "lr": 1e-30, "bad": math.nan}
    write_gauges(path, gauges, {"run": 'a "quoted"\\ name\n'})
    text = path.read_text()
    assert text.endswith("\n")
    lines = text.splitlines()
    values = {}
    for kind, sample in zip(lines[::2], lines[1::2], strict=True):
        match = _SAMPLE.match(sample)
        assert match, sample
        assert kind == f"# TYPE {match[1]} gauge"
        assert match[2] == r"a \"quoted\"\\ name\n"
        values[match[1]] = float(match[3])
    assert values["recsys_tpu_train_loss"] == 0.5
    assert values["recsys_tpu_test_recall_10"] == 1.0
    assert values["recsys_tpu_lr"] == 1e-30
    assert math.isnan(values["recsys_tpu_bad"])
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.prom"]
