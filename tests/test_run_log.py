"""One line an event on every rank; secrets in none of them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from recsys_tpu.errors import TrainingDivergedError
from recsys_tpu.rank_log import RankLog
from tests.tiny_run import tiny_config, trainer

COMMON = {"time", "rank", "hostname", "pid", "level", "event"}


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_event_of_a_run_is_one_line_with_its_rank(tmp_path: Path):
    config = tiny_config(tmp_path, train__max_steps=10, train__checkpoint_every=5)
    with trainer(config) as made:
        made.run()
    lines = _lines(config.run.directory / "logs" / "rank_00000.jsonl")
    assert all(line.keys() >= COMMON and line["rank"] == 0 for line in lines)
    kinds = [line["event"] for line in lines]
    expected = "header dataset train checkpoint train checkpoint test report report time finished"
    assert kinds == expected.split()
    assert [line["step"] for line in lines if line["event"] == "checkpoint"] == [5, 10]
    assert lines[-1]["step"] == 10


def test_a_failure_is_the_last_event(tmp_path: Path):
    config = tiny_config(tmp_path, optimizer__dense__kind="sgd", optimizer__dense__learning_rate=1e30)
    with pytest.raises(TrainingDivergedError), trainer(config) as made:
        made.run()
    last = _lines(config.run.directory / "logs" / "rank_00000.jsonl")[-1]
    assert last["event"] == "failed" and last["level"] == "error"
    assert last["error_type"] == "TrainingDivergedError" and "the loss of step" in str(last["error"])


def test_warnings_of_libraries_are_events_and_secrets_are_hidden(tmp_path: Path):
    log = RankLog(tmp_path, rank=7)
    logging.getLogger("some.library").warning("retrying gs://me:hunter2@bucket, token=abc123\nsecond line")
    log.event("start", argv=["data.path=x", "api_key=sesame"], settings={"password": "sesame", "steps": 3})
    log.close()
    logging.getLogger("some.library").warning("after the end")
    warning, start = _lines(tmp_path / "logs" / "rank_00007.jsonl")
    assert warning["level"] == "warning" and warning["logger"] == "some.library" and warning["rank"] == 7
    assert warning["message"] == "retrying gs://[hidden]@bucket, token=[hidden]\nsecond line"
    assert start["settings"] == {"password": "[hidden]", "steps": 3}
    assert start["argv"] == ["data.path=x", "api_key=[hidden]"]


def test_what_a_rank_said_before_it_is_killed_is_there(tmp_path: Path):
    log = RankLog(tmp_path, rank=0)
    log.event("step", step=1)
    assert [line["step"] for line in _lines(log.path)] == [1]  # not closed, not flushed by hand
    log.close()
