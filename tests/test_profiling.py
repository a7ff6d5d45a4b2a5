from __future__ import annotations

import gzip
import json
from pathlib import Path

from tests.tiny_run import run, tiny_config


def test_a_window_of_steps_is_traced_with_its_phases(tmp_path: Path):
    config = tiny_config(
        tmp_path, train__max_steps=8, runtime__profile={"first_step": 3, "steps": 2}, run__name="profiled"
    )
    losses = run(config)
    folder = config.run.directory / "profile" / "rank_0_steps_3-4"
    events = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("phase: backward") == 2 and names.count("phase: dense_forward") == 2
    assert "aten::addmm" in (folder / "operators.txt").read_text()
    assert losses == run(tiny_config(tmp_path, train__max_steps=8))  # tracing changes nothing


def test_a_window_over_the_end_ends_with_the_run_and_other_ranks_write_nothing(tmp_path: Path):
    profile = {"first_step": 5, "steps": 100, "ranks": [0]}
    config = tiny_config(tmp_path, train__max_steps=6, runtime__profile=profile)
    run(config)
    assert [path.name for path in (config.run.directory / "profile").iterdir()] == ["rank_0_steps_5-6"]
    other = tiny_config(
        tmp_path, train__max_steps=6, runtime__profile=profile | {"ranks": [1]}, run__name="other"
    )
    run(other)
    assert not (other.run.directory / "profile").exists()
