"""Evaluation points, target, and a log that MLPerf's own compliance checker accepts; nothing is trained."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from recsys_tpu.config import Config, load_config
from recsys_tpu.errors import ConfigError
from recsys_tpu.metrics import ClickMetrics
from recsys_tpu.protocol.run import ProtocolRun
from recsys_tpu.run_log import RunLog

CONFIGS = Path(__file__).parent.parent / "configs"
TRAIN_ROWS, EVAL_ROWS = 4_195_197_692, 89_137_319


def metrics(auc: float) -> ClickMetrics:
    return ClickMetrics(auc, 0.12, 0.8, 1.0, EVAL_ROWS, 2_900_000)


def play(config: Config, aucs: dict[int, float], *, rows: int = TRAIN_ROWS) -> tuple[list[int], list[Any]]:
    """Steps that were evaluated in one epoch, and the events of the log; step by step as the Trainer."""
    per_epoch = -(-rows // config.train.batch_size)
    log = RunLog(config.run.directory, rank=0)
    run = ProtocolRun(
        config, batches_per_epoch=per_epoch, train_samples=rows, eval_samples=EVAL_ROWS, log=log, rank=0
    )
    run.start()
    evaluated = []
    step = 0
    for step in range(1, per_epoch + 1):
        last = step == per_epoch
        if run.evaluates_after(step) or last:
            evaluated.append(step)
            run.before_evaluation(step)
            run.after_evaluation(step, metrics(aucs.get(step, 0.79)))
            if run.reached:
                break
    run.end(step)
    run.close()
    log.close()
    text = (config.run.directory / "metrics.jsonl").read_text()
    return evaluated, [json.loads(line) for line in text.splitlines()]


def mlperf(tmp_path: Path) -> Config:
    return load_config(CONFIGS / "criteo_1tb_dlrm_dcnv2.yaml", [f"run.output_dir={tmp_path}"])


def test_twenty_evaluations_and_a_stop_at_the_target_in_a_log_that_the_checker_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp_compliance = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
    # a run's initialisation starts with its process; this process may be older than the checker allows
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: time.time() - 60)
    config = mlperf(tmp_path)
    evaluated, events = play(config, {48_000: 0.80274999, 51_200: 0.80276})
    assert evaluated == list(range(3200, 51_201, 3200))
    (target,) = [event for event in events if event["event"] == "target"]
    assert target["samples"] == 51_200 * 65_536
    assert target["epochs"] == pytest.approx(51_200 * 65_536 / TRAIN_ROWS, rel=1e-4)
    log = config.run.directory / "mllog.txt"
    checker = mlp_compliance.make_checker("training", "5.1.0", quiet=False, werror=False)
    valid = checker.check_file(str(log), "training_5.1.0/common.yaml")
    assert valid, capsys.readouterr().out
    last = json.loads(log.read_text().splitlines()[-1].removeprefix(":::MLLOG "))
    assert (last["key"], last["metadata"]["status"]) == ("run_stop", "success")


def test_an_epoch_without_the_target_is_evaluated_at_its_end_and_logged_as_aborted(tmp_path: Path) -> None:
    config = mlperf(tmp_path)
    evaluated, events = play(config, {})
    assert evaluated == [*range(3200, 64_001, 3200), 64_014]
    assert not [event for event in events if event["event"] == "target"]
    lines = (config.run.directory / "mllog.txt").read_text().splitlines()
    assert json.loads(lines[-1].removeprefix(":::MLLOG "))["metadata"]["status"] == "aborted"


def test_samples_to_the_target_count_a_short_last_batch_once(tmp_path: Path) -> None:
    config = load_config(
        CONFIGS / "criteo_1tb_dlrm.yaml",
        [f"run.output_dir={tmp_path}", "train.batch_size=64", "train.eval_batch_size=64"],
    )
    _, events = play(config, {16: 0.9}, rows=1000)
    assert [event["samples"] for event in events if event["event"] == "target"] == [1000]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.eval_every=5"], "eval_every or protocol.evaluations_per_epoch, not both"),
        (["protocol.target_auc=0.5"], "protocol.target_auc"),
        (["protocol.target=0.8"], "did you mean 'target_auc'"),
    ],
)
def test_a_wrong_protocol_is_an_error(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(CONFIGS / "criteo_1tb_dlrm.yaml", overrides)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mlperf_logging.mllog.mllog", None)
    with pytest.raises(ConfigError, match=r"pip install 'recsys-tpu\[mlperf\]'"):
        ProtocolRun(
            mlperf(tmp_path),
            batches_per_epoch=1,
            train_samples=1,
            eval_samples=1,
            log=SimpleNamespace(directory=tmp_path),  # type: ignore[arg-type]
            rank=0,
        )
