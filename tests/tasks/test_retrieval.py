"""Two-tower runs on planted clusters, in process, and over two ranks and the emulated device."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recsys_tpu.config import Config
from recsys_tpu.errors import CheckpointError, ConfigError
from recsys_tpu.inference.int8_tables import quantize_tables
from recsys_tpu.retrieval.ranking import RetrievalMetrics
from recsys_tpu.runtime import Runtime
from recsys_tpu.trainer import Trainer

ROOT = Path(__file__).parents[2]
TINY = {"clusters": 8, "items_per_cluster": 15, "users_per_cluster": 30, "unseen_per_user": 3}


def tiny(tmp_path: Path, **changes: Any) -> Config:
    tree: dict[str, Any] = {
        "run": {"name": "tiny", "output_dir": str(tmp_path / "runs")},
        "runtime": {"device": "cpu", "compile": False},
        "data": {"kind": "planted_clusters", "cache_dir": str(tmp_path / "cache"), "planted_clusters": TINY},
        "model": {"kind": "two_tower", "embedding_dim": 8, "query_mlp": [16], "item_mlp": [16]},
        "optimizer": {"sparse": {"learning_rate": 0.1}},
        "train": {"batch_size": 128, "eval_batch_size": 100, "log_every": 5, "epochs": 4},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name] = value
    return Config.model_validate(tree)


@pytest.fixture
def run() -> Iterator[Any]:
    """Trains a config in a Runtime of its own and returns (trainer, metrics)."""
    opened: list[Any] = []

    def start(config: Config) -> tuple[Trainer, RetrievalMetrics]:
        while opened:
            opened.pop().close()
        opened.append(runtime := Runtime.start(config.runtime))
        opened.append(trainer := Trainer(config, runtime))
        metrics = trainer.run()
        assert isinstance(metrics, RetrievalMetrics)
        return trainer, metrics

    yield start
    while opened:
        opened.pop().close()


def losses(directory: Path) -> list[float]:
    events = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [loss for event in events if event["event"] == "train" for loss in event["losses"]]


def test_planted_clusters_are_recovered(tmp_path: Path, run: Any) -> None:
    config = tiny(tmp_path)
    _, metrics = run(config)
    assert metrics.queries == 240
    assert metrics.recall[10] >= 0.9
    reports = [json.loads(line) for line in (config.run.directory / "metrics.jsonl").open()]
    popularity = next(r for r in reports if r.get("predictor") == "popularity")
    assert popularity["recall@10"] < 0.3


@pytest.mark.parametrize(
    "model",
    [
        {"similarity": "dot", "temperature": 1.0},
        {"uniform_negatives": 64, "user_id": False},
        {"hard_negatives": 32, "dropout": 0.1},
        {"mined_negatives": {"count": 64, "every": 20, "pool": 30}},
    ],
)
def test_every_variant_learns(tmp_path: Path, run: Any, model: dict[str, Any]) -> None:
    config = tiny(tmp_path, **{f"model__{name}": value for name, value in model.items()})
    _, metrics = run(config)
    assert metrics.recall[10] >= 0.9


def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path, run: Any) -> None:
    whole, _ = run(tiny(tmp_path, run__name="whole", train__max_steps=20))
    expected = {name: value.clone() for name, value in whole.task.state().items()}
    run(tiny(tmp_path, run__name="parts", train__max_steps=20, train__checkpoint_every=10))
    folder = tmp_path / "runs/parts/checkpoints"
    (folder / "step_00000020").rename(folder / "gone")
    again, _ = run(tiny(tmp_path, run__name="parts", train__max_steps=20, train__resume="auto"))
    assert losses(tmp_path / "runs/parts")[20:] == losses(tmp_path / "runs/whole")[10:]
    for name, value in again.task.state().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_a_checkpoint_of_another_order_is_refused(tmp_path: Path, run: Any) -> None:
    run(tiny(tmp_path, train__max_steps=5))
    with pytest.raises(CheckpointError, match="batch_size was 128, now 64"):
        run(tiny(tmp_path, train__batch_size=64, train__resume="auto"))


def test_int8_tables_are_for_click_models(tmp_path: Path, run: Any) -> None:
    trainer, _ = run(tiny(tmp_path, train__max_steps=1))
    with pytest.raises(ConfigError, match="a two_tower run"):
        quantize_tables(trainer)


def command(tmp_path: Path, name: str, *overrides: str, ranks: int = 1) -> list[float]:
    """Losses of a run of the command in a process of its own, or several."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    done = subprocess.run(
        [
            sys.executable, *(launcher if ranks > 1 else []), "-m", "recsys_tpu.train",
            "--config", str(ROOT / "configs/two_tower_synthetic.yaml"), "runtime.compile=false",
            f"run.name={name}", "model.uniform_negatives=64",
            "model.mined_negatives={count: 32, every: 5, pool: 20}", "model.embedding_dim=8",
            "train.batch_size=256", "train.max_steps=12", *overrides,
        ],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return losses(tmp_path / "runs" / name)


def recall_at_50(directory: Path) -> float:
    events = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return float(next(event for event in events if event["event"] == "test")["recall@50"])


@pytest.mark.slow
def test_two_ranks_and_the_emulated_device_train_as_one_rank_on_the_cpu(
    tmp_path: Path, tpu: torch.device
) -> None:
    one = command(tmp_path, "one")
    two = command(tmp_path, "two", ranks=2)
    emulated = command(tmp_path, "emulated", "runtime.device=tpu-emulated")
    assert len(one) == 12
    assert two == pytest.approx(one, rel=1e-5)
    assert emulated == pytest.approx(one, rel=1e-5)
    expected = recall_at_50(tmp_path / "runs/one")
    for name in ("two", "emulated"):
        assert recall_at_50(tmp_path / "runs" / name) == pytest.approx(expected, abs=2e-3)
