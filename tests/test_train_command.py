"""The commands as a user types them, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TINY = [
    "runtime.device=cpu",
    "runtime.compile=false",
    "data.synthetic.train_rows=30000",
    "data.synthetic.test_rows=3000",
    "train.batch_size=256",
    "train.log_every=25",
    "train.max_steps=100",
    "optimizer.schedule.decay_start_step=null",
]


def run(*command: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, env=environment, capture_output=True, text=True
    )


def losses(directory: Path) -> list[float]:
    events = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [loss for event in events if event["event"] == "train" for loss in event["losses"]]


def test_help_shows_examples(tmp_path: Path) -> None:
    for module in ("recsys_tpu.train", "recsys_tpu.evaluate"):
        done = run(module, "--help", tmp_path=tmp_path)
        assert done.returncode == 0
        assert "examples:" in done.stdout


def test_a_users_error_is_one_message_and_status_2(tmp_path: Path) -> None:
    done = run("recsys_tpu.train", "--config", "missing.yaml", tmp_path=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == ["error: missing.yaml: no such config file"]


@pytest.mark.slow
def test_two_ranks_train_to_the_same_losses_as_one(tmp_path: Path) -> None:
    config = ["--config", str(ROOT / "configs/dlrm.yaml"), *TINY]
    alone = run("recsys_tpu.train", *config, "run.name=one", tmp_path=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert "oracle AUC" in alone.stdout
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "recsys_tpu.train"]
    pair = run(*launcher, *config, "run.name=two", tmp_path=tmp_path)
    assert pair.returncode == 0, pair.stderr
    one, two = losses(tmp_path / "runs/one"), losses(tmp_path / "runs/two")
    assert len(one) == 100
    assert two == pytest.approx(one, rel=1e-4)
    checkpoint = str(tmp_path / "runs/two/checkpoints/step_00000100")
    evaluated = run("recsys_tpu.evaluate", "--checkpoint", checkpoint, tmp_path=tmp_path)
    assert evaluated.returncode == 0, evaluated.stderr
    line = next(line for line in pair.stdout.splitlines() if line.startswith("final AUC"))
    assert line in evaluated.stdout
