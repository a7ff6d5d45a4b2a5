"""The bundle holds what a run left, none of the secrets planted in it, and neither data nor weights."""

from __future__ import annotations

import json
import os
import sys
import tarfile
from pathlib import Path

import pytest

from recsys_tpu import doctor
from recsys_tpu.errors import UserError
from recsys_tpu.support_bundle import LAST_BYTES, write_bundle
from tests.tiny_run import run, tiny_config

SECRETS = {"hunter2", "sesame", "ghp_0123456789abcdefghijABCDEFGHIJ012345"}


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    config = tiny_config(tmp_path, train__max_steps=5)
    run(config)
    return config.run.directory


def _contents(bundle: Path) -> dict[str, str]:
    with tarfile.open(bundle) as archive:
        return {
            member.name.removeprefix("support/"): archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
        }


def test_what_is_in_it(tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TPU_ACCESS_TOKEN", "sesame")
    monkeypatch.setenv("HF_TOKEN", "sesame")
    log = finished / "logs" / "rank_00000.jsonl"
    log.write_text(log.read_text() + "read gs://me:hunter2@bucket failed\n")
    config = finished / "config.yaml"
    config.write_text(config.read_text() + "# " + "ghp_0123456789abcdefghijABCDEFGHIJ012345\n")
    write_bundle(tmp_path / "out.tar.gz", [{"name": "cpu", "works": True}], finished)
    found = _contents(tmp_path / "out.tar.gz")
    assert set(found) == {
        *("doctor.json", "versions.txt", "machine.json", "environment.json", "run/config.yaml"),
        *(
            "run/plan.yaml",
            "run/metrics.prom",
            "run/metrics.jsonl",
            "run/logs/rank_00000.jsonl",
            "run/files.txt",
        ),
    }
    assert not [name for name, text in found.items() for secret in SECRETS if secret in text]
    assert json.loads(found["doctor.json"]) == [{"name": "cpu", "works": True}]
    assert json.loads(found["environment.json"])["TPU_ACCESS_TOKEN"] == "[hidden]"
    assert "torch==2.13.0" in found["versions.txt"]
    assert "recsys_tpu_train_loss" in found["run/metrics.prom"]
    assert "checkpoints/step_00000005/manifest.json" in found["run/files.txt"]


def test_of_long_logs_the_end_is_taken_from_a_whole_line_on(tmp_path: Path, finished: Path):
    with (finished / "logs" / "rank_00003.jsonl").open("w") as file:
        for number in range(LAST_BYTES // 10):
            file.write(json.dumps({"number": number}) + "\n")
    write_bundle(tmp_path / "out.tar.gz", [], finished)
    lines = _contents(tmp_path / "out.tar.gz")["run/logs/rank_00003.jsonl"].splitlines()
    assert json.loads(lines[-1]) == {"number": LAST_BYTES // 10 - 1}
    assert all(json.loads(line) for line in lines[:2]) and len("\n".join(lines)) <= LAST_BYTES


def test_a_folder_that_is_no_run_and_a_place_that_cannot_be_written(tmp_path: Path, finished: Path):
    with pytest.raises(UserError, match="not the folder of a run"):
        write_bundle(tmp_path / "out.tar.gz", [], tmp_path)
    with pytest.raises(UserError, match=r"gone/out\.tar\.gz: cannot be written"):
        write_bundle(tmp_path / "gone" / "out.tar.gz", [], finished)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(doctor, "findings", lambda: iter([doctor.Finding("cpu", True, "works")]))
    bundle = tmp_path / "out.tar.gz"
    monkeypatch.setattr(sys, "argv", ["doctor", "--device", "cpu", "--bundle", str(bundle)])
    with pytest.raises(SystemExit) as ended:
        doctor.main()
    assert ended.value.code == 0 and "4 files" in capsys.readouterr().out
    assert _contents(bundle).keys() == {"doctor.json", "versions.txt", "machine.json", "environment.json"}
    monkeypatch.setattr(sys, "argv", ["doctor", "--run", os.fspath(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        doctor.main()
    assert ended.value.code == 2
