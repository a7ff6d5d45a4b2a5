"""SIGTERM saves and ends; a hung or dead rank is named, and nothing outlives the run."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from recsys_tpu.checkpoint_storage import damage
from recsys_tpu.errors import LostRankError, PreemptedError
from tests.tiny_run import losses, run, start_ranks, tiny_config, trainer

RANK = str(Path(__file__).with_name("tiny_rank.py"))
TIMEOUT_S = 10.0


def test_sigterm_saves_the_step_and_resume_goes_on(tmp_path: Path):
    whole = run(tiny_config(tmp_path, run__name="whole"))
    config = tiny_config(tmp_path)
    with trainer(config) as made:
        train_step = made._train_step

        def signalled(batch):
            if made.step == 16:
                os.kill(os.getpid(), signal.SIGTERM)
            return train_step(batch)

        made._train_step = signalled
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(PreemptedError, match=r"saved step 17 of 40 .*train\.resume=auto"):
            made.run()
        assert signal.getsignal(signal.SIGTERM) is before
    assert losses(config.run.directory) == {step: whole[step] for step in range(1, 18)}
    (checkpoint,) = (config.run.directory / "checkpoints").iterdir()
    assert checkpoint.name == "step_00000017" and damage(checkpoint) is None
    again = run(tiny_config(tmp_path, train__resume="auto"))
    assert again == {step: whole[step] for step in range(18, 41)}


def _ranks(tmp_path: Path, output, **overrides: object) -> list[subprocess.Popen[str]]:
    config = tiny_config(
        tmp_path,
        train__max_steps=100_000,
        train__epochs=100_000,
        train__log_every=1,
        runtime__collective_timeout_s=TIMEOUT_S,
        **overrides,
    )
    (tmp_path / "config.json").write_text(config.model_dump_json())
    log = config.run.directory / "metrics.jsonl"
    ranks = start_ranks([RANK, str(tmp_path / "config.json")], 2, output=output)
    until = time.monotonic() + 150
    while not log.exists() or log.read_bytes().count(b"\n") < 5:
        assert time.monotonic() < until and all(rank.poll() is None for rank in ranks), _text(output)
        time.sleep(0.1)
    return ranks


def _text(output) -> str:
    output.seek(0)
    return output.read()[-4000:]


def _end(ranks: list[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        rank.kill()
        rank.wait()


@pytest.mark.slow
def test_sigterm_to_one_of_two_ranks_stops_both_at_the_same_step(tmp_path: Path):
    with tempfile.TemporaryFile("w+") as output:
        ranks = _ranks(tmp_path, output)
        try:
            ranks[1].terminate()
            assert [rank.wait(60) for rank in ranks] == [PreemptedError.exit_status] * 2, _text(output)
        finally:
            _end(ranks)
        assert "SIGTERM: saved step" in _text(output)
    (checkpoint,) = (tmp_path / "runs" / "tiny" / "checkpoints").iterdir()
    assert damage(checkpoint) is None
    assert int(checkpoint.name.removeprefix("step_")) == max(losses(tmp_path / "runs" / "tiny"))


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL])
def test_a_lost_rank_is_named_with_collective_and_step(tmp_path: Path, sent: signal.Signals):
    with tempfile.TemporaryFile("w+") as output:
        ranks = _ranks(tmp_path, output)
        try:
            ranks[1].send_signal(sent)
            started = time.monotonic()
            assert ranks[0].wait(60) == LostRankError.exit_status, _text(output)
            assert time.monotonic() - started < 60
            # a stopped rank cannot end itself; the other one ends it, so that nothing stays behind
            assert ranks[1].wait(1) == -signal.SIGKILL
        finally:
            _end(ranks)
        text = _text(output)
    assert "rank 1 is gone or stopped" in text and "gloo:" in text and "at step" in text, text


@pytest.mark.slow
def test_a_rank_stuck_in_its_data_is_named_and_ends_too(tmp_path: Path):
    """Rank 1 sleeps reading two steps ahead: none of its collectives fails, yet it must end with rank 0."""
    path = tmp_path / "config.json"
    path.write_text(tiny_config(tmp_path, runtime__collective_timeout_s=TIMEOUT_S).model_dump_json())
    with tempfile.TemporaryFile("w+") as output:
        ranks = start_ranks([RANK, str(path)], 2, output=output, TINY_STUCK_AT="7")
        try:
            statuses = [rank.wait(200) for rank in ranks]
        finally:
            _end(ranks)
        text = _text(output)
    assert statuses == [LostRankError.exit_status] * 2, text
    assert "rank 1 is alive, but does not move: at step 6, phase data" in text, text
    assert "rank 0 waits in gloo:" in text, text
    assert "rank 1 ends at step 6, phase data, where it is stuck: rank" in text, text
