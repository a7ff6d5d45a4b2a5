"""Disks that are full, read-only or slow, the first two as real file systems in a mount namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from recsys_tpu.checkpoint_storage import CheckpointWriter, damage
from tests.tiny_run import ROOT, run, tiny_config, trainer

RANK = str(Path(__file__).with_name("tiny_rank.py"))


def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0


# $1: folder to mount at, $2: python, $3: tiny_rank.py, $4 and $5: configs
_SCRIPT = """
mount -t tmpfs -o size=4m none "$1"
"$2" "$3" "$4"; echo "first: $?"
cp -r "$1/runs/tiny/checkpoints" "$1/../kept"
dd if=/dev/zero of="$1/filler" bs=1k status=none 2>/dev/null
rm "$1"/runs/tiny/tensorboard/*   # room for the logs of the next start, not for a checkpoint
"$2" "$3" "$5"; echo "full: $?"
rm "$1/filler"
diff -r "$1/../kept/step_00000005" "$1/runs/tiny/checkpoints/step_00000005" && echo intact
mount -o remount,ro "$1"
"$2" "$3" "$5"; echo "read-only: $?"
"""


@pytest.mark.slow
@pytest.mark.skipif(not _can_mount(), reason="needs unshare -rm, to mount a disk of its own")
def test_a_full_and_a_read_only_disk(tmp_path: Path):
    """A file system of 4 MiB: the kernel's own ENOSPC and EROFS, wherever in the run they come."""
    disk = tmp_path / "disk"
    disk.mkdir()
    run(tiny_config(tmp_path, train__max_steps=1, run__name="data"))  # the data lies on another disk
    for name, steps in (("first", 5), ("second", 10)):
        config = tiny_config(tmp_path, run__output_dir=str(disk / "runs"), train__resume="auto")
        config.train.max_steps = steps
        (tmp_path / f"{name}.json").write_text(config.model_dump_json())
    script = subprocess.run(
        [
            *("unshare", "-rm", "sh", "-c", _SCRIPT, "sh", disk, sys.executable, RANK),
            *(tmp_path / "first.json", tmp_path / "second.json"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TINY_PORTS": "0"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    said = script.stdout + script.stderr
    for line in ("first: 0", "full: 2", "intact", "read-only: 2"):
        assert line in script.stdout.splitlines(), said
    assert "disk is full" in script.stderr and "file system is read-only" in script.stderr, said


def test_a_slow_disk_does_not_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first checkpoint, of step 10, is written only once the run has come to step 15."""
    come_to_15 = threading.Event()
    write = CheckpointWriter.write_data

    def slow(self: CheckpointWriter, *arguments: object) -> object:
        assert come_to_15.wait(60), "training waited for the disk"
        return write(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointWriter, "write_data", slow)
    config = tiny_config(tmp_path, train__max_steps=20, train__checkpoint_every=10)
    with trainer(config) as made:
        train_step = made._train_step

        def step(batch: object) -> object:
            if made.step == 15:
                assert not list((config.run.directory / "checkpoints").glob("step_*"))
                come_to_15.set()
            return train_step(batch)

        made._train_step = step
        made.run()
    found = sorted((config.run.directory / "checkpoints").iterdir())
    assert [path.name for path in found] == ["step_00000010", "step_00000020"]
    assert not any(damage(path) for path in found)
