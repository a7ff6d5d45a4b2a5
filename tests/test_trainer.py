"""The Trainer on tiny logs, in process; launches with several ranks are in test_train_command.py."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from recsys_tpu.checkpoint_storage import flat
from recsys_tpu.config import Config
from recsys_tpu.data.metadata import DatasetError
from recsys_tpu.errors import CheckpointError, ConfigError, TrainingDivergedError
from recsys_tpu.plain_state import read_checkpoint
from recsys_tpu.runtime import Runtime
from recsys_tpu.sharding.canonical_state import canonical_state
from recsys_tpu.sharding.planner import PlanDriftError
from recsys_tpu.trainer import Trainer


def tiny(tmp_path: Path, **changes: Any) -> Config:
    tree: dict[str, Any] = {
        "run": {"name": "tiny", "output_dir": str(tmp_path / "runs")},
        "runtime": {"device": "cpu", "compile": False},
        "data": {
            "cache_dir": str(tmp_path / "cache"),
            "synthetic": {"train_rows": 6000, "test_rows": 3000, "num_embeddings": [40, 7, 300, 3]},
        },
        "model": {"embedding_dim": 8, "bottom_mlp": [16], "over_mlp": [16]},
        "train": {"batch_size": 256, "eval_batch_size": 512, "log_every": 5, "max_steps": 20},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name] = value
    return Config.model_validate(tree)


@pytest.fixture
def start() -> Iterator[Any]:
    """Makes Trainers, each in its own Runtime; the one before is closed first."""
    opened: list[Runtime | Trainer] = []

    def close() -> None:
        while opened:
            opened.pop().close()

    def make(config: Config) -> Trainer:
        close()
        runtime = Runtime.start(config.runtime)
        opened.append(runtime)
        trainer = Trainer(config, runtime)
        opened.append(trainer)
        return trainer

    yield make
    close()


def events(config: Config, kind: str) -> list[dict[str, Any]]:
    lines = (config.run.directory / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def losses(config: Config) -> list[float]:
    return [loss for event in events(config, "train") for loss in event["losses"]]


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in trainer.model.state_dict().items():
        tensor = value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
        found[name] = tensor.detach().clone()
    return found


@pytest.mark.parametrize(
    "model",
    [
        {"kind": "dlrm_dcnv2", "bottom_mlp": [16], "over_mlp": [16], "cross_layers": 2, "cross_rank": 4},
        {"kind": "deepfm", "mlp": [16]},
        {"kind": "dcnv2", "mlp": [16], "cross_layers": 2},
    ],
    ids=lambda model: model["kind"],
)
def test_every_click_model_learns_and_resumes(model: dict[str, Any], tmp_path: Path, start: Any) -> None:
    config = tiny(tmp_path)
    config = Config.model_validate(config.model_dump() | {"model": model | {"embedding_dim": 8}})
    metrics = start(config).run()
    found = losses(config)
    assert sum(found[-5:]) < sum(found[:5])
    assert metrics.rows == 3000
    again = start(config.model_copy(update={"train": config.train.model_copy(update={"resume": "auto"})}))
    assert again.run() == metrics


def test_a_run_learns_writes_its_outputs_and_repeats(tmp_path: Path, start: Any) -> None:
    config = tiny(tmp_path, train__max_steps=None, train__epochs=3, train__eval_every=30)
    metrics = start(config).run()
    assert metrics.rows == 3000
    assert metrics.auc > 0.6
    directory = config.run.directory
    assert (directory / "config.yaml").exists()
    assert list((directory / "tensorboard").iterdir())
    found = losses(config)
    assert len(found) == 3 * 24  # ceil(6000 / 256) batches an epoch, none dropped
    assert [event["step"] for event in events(config, "test")] == [30, 60, 72]
    reports = {event["predictor"]: event for event in events(config, "report")}
    assert reports["oracle (true probabilities)"]["auc"] > metrics.auc
    again = tiny(tmp_path, train__max_steps=None, train__epochs=3, run__name="again")
    start(again).run()
    assert losses(again) == found


@pytest.mark.parametrize("dense", ["adamw", "adagrad", "sgd"])
@pytest.mark.parametrize("sparse", ["rowwise_adagrad", "adagrad", "sgd"])
def test_tables_and_towers_change_under_every_optimizer(
    tmp_path: Path, start: Any, dense: str, sparse: str
) -> None:
    config = tiny(tmp_path, optimizer__dense={"kind": dense}, optimizer__sparse={"kind": sparse})
    trainer = start(config)
    before = state(trainer)
    trainer.run()
    after = state(trainer)
    unchanged = [name for name in before if torch.equal(before[name], after[name])]
    assert unchanged == []
    assert all(torch.isfinite(value).all() for value in after.values())


def test_warm_up_reaches_the_tables(tmp_path: Path, start: Any) -> None:
    """A learning rate of almost nothing in the first steps must hold for fused optimizers too."""
    config = tiny(
        tmp_path,
        train__max_steps=1,
        optimizer__schedule={"warmup_steps": 10**9},
        optimizer__sparse={"kind": "sgd", "learning_rate": 1.0},
    )
    trainer = start(config)
    before = state(trainer)
    trainer.run()
    for name, value in state(trainer).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=1e-8)


def test_a_diverged_loss_ends_the_run_with_its_step(tmp_path: Path, start: Any) -> None:
    config = tiny(
        tmp_path,
        optimizer__dense={"kind": "sgd", "learning_rate": 1e20},
        train__checkpoint_every=1,
        train__max_steps=10,
    )
    trainer = start(config)
    with pytest.raises(TrainingDivergedError, match=r"the loss of step \d+ is (nan|inf).*learning_rate"):
        trainer.run()
    written = [path.name for path in trainer.store.list()]
    assert len(written) < 10
    assert all(torch.isfinite(torch.tensor(losses(config))).tolist())


def test_a_table_smaller_than_its_data_names_the_feature(tmp_path: Path, start: Any) -> None:
    sizes = {"C1": 40, "C2": 7, "C3": 299, "C4": 3}
    with pytest.raises(DatasetError, match="feature C3: the table has 299 rows"):
        start(tiny(tmp_path, model__num_embeddings=sizes))


def test_evaluating_a_checkpoint_gives_the_metrics_of_its_run(tmp_path: Path, start: Any) -> None:
    config = tiny(tmp_path)
    trainer = start(config)
    metrics = trainer.run()
    checkpoint = trainer.store.list()[-1]
    other = tiny(tmp_path, run__name="other", run__seed=5)
    assert start(other).evaluate_checkpoint(checkpoint) == metrics


def test_bf16_compute_stays_near_fp32(tmp_path: Path, start: Any) -> None:
    exact = start(tiny(tmp_path)).run()
    config = tiny(tmp_path, run__name="bf16", runtime__precision="bf16")
    trainer = start(config)
    rounded = trainer.run()
    assert rounded.log_loss != exact.log_loss
    assert rounded.log_loss == pytest.approx(exact.log_loss, rel=0.02)
    assert all(value.dtype == torch.float32 for value in state(trainer).values())


def test_a_run_writes_its_plan_and_takes_it_again(tmp_path: Path, start: Any) -> None:
    config = tiny(tmp_path)
    start(config).run()
    plan = config.run.directory / "plan.yaml"
    again = tiny(tmp_path, run__name="again", sharding__plan=str(plan))
    start(again).run()
    assert losses(again) == losses(config)


def test_a_plan_made_for_other_tables_is_refused(tmp_path: Path, start: Any) -> None:
    config = tiny(tmp_path)
    start(config)
    plan = str(config.run.directory / "plan.yaml")
    wider = tiny(tmp_path, model__embedding_dim=16, sharding__plan=plan)
    with pytest.raises(PlanDriftError, match="t_C1"):
        start(wider)


def test_a_topology_of_other_size_is_refused(tmp_path: Path, start: Any) -> None:
    with pytest.raises(ConfigError, match="v6e:2x2 has 4 ranks but the run has 1"):
        start(tiny(tmp_path, sharding__topology="v6e:2x2"))


@pytest.mark.parametrize("step", ["separate_ops", "one_program"])
def test_the_emulated_device_trains_as_the_cpu(
    tmp_path: Path, start: Any, tpu: torch.device, step: str
) -> None:
    on_cpu = tiny(tmp_path, train__max_steps=40)
    start(on_cpu).run()
    emulated = tiny(
        tmp_path,
        train__max_steps=40,
        run__name="emulated",
        runtime__device="tpu-emulated",
        runtime__compile=True,
        train__step=step,
    )
    trainer = start(emulated)
    before = state(trainer)
    trainer.run()
    assert losses(emulated) == pytest.approx(losses(on_cpu), rel=1e-4)
    after = state(trainer)
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    assert {value.device.type for value in after.values()} == {"tpu"}


@pytest.mark.parametrize("dense", [{"kind": "adagrad"}, {"kind": "sgd", "momentum": 0.9}])
def test_one_program_goes_on_from_a_checkpoint_of_separate_ops(
    tmp_path: Path, start: Any, tpu: torch.device, dense: dict[str, Any]
) -> None:
    """Optimizer state is in the same place in both forms, for every dense optimizer."""
    options = {"optimizer__dense": dense, "runtime__device": "tpu-emulated"}
    first = tiny(tmp_path, run__name="first", train__max_steps=8, train__checkpoint_every=4, **options)
    start(first).run()
    checkpoint = sorted((first.run.directory / "checkpoints").iterdir())[0]
    second = tiny(
        tmp_path,
        run__name="second",
        train__max_steps=8,
        train__step="one_program",
        train__resume=str(checkpoint),
        **options,
    )
    start(second).run()
    assert losses(second) == pytest.approx(losses(first)[4:], rel=1e-4)


def test_one_program_needs_a_tpu_device(tmp_path: Path, start: Any) -> None:
    with pytest.raises(ConfigError, match="one_program needs a tpu device"):
        start(tiny(tmp_path, train__step="one_program"))


def test_a_run_starts_from_a_plain_state_with_the_optimizer_where_another_ended(tmp_path, start):
    first = start(tiny(tmp_path, run__name="first", train__max_steps=10))
    first.run()
    (checkpoint,) = first.store.directory.glob("step_*")
    content = read_checkpoint(checkpoint)
    torch.save(content, tmp_path / "all.pt")
    again = tiny(tmp_path, run__name="again", train__start_from=tmp_path / "all.pt")
    second = start(again)
    second._resume()
    for name, value in content["model"].items():
        assert torch.equal(plain(second.model.state_dict()[name]), value), name
    state = flat(canonical_state(second.model, second.optimizer.state_dict()["state"]))
    assert state.keys() == content["optimizer"].keys()
    for name, value in content["optimizer"].items():
        assert torch.equal(plain(state[name]), value), name
    assert any(value.any() for value in content["optimizer"].values())

    lost = next(iter(content["optimizer"]))
    content["optimizer"].pop(lost)
    torch.save(content, tmp_path / "some.pt")
    some = tiny(tmp_path, run__name="some", train__start_from=tmp_path / "some.pt")
    with pytest.raises(CheckpointError, match=f"lacks {re.escape(lost)}"):
        start(some)._resume()
    partial = tiny(
        tmp_path, run__name="some", train__start_from=tmp_path / "some.pt", train__start_partial=True
    )
    start(partial)._resume()


def plain(value: Any) -> torch.Tensor:
    """The only shard of a tensor of one rank."""
    return value.local_shards()[0].tensor if isinstance(value, ShardedTensor) else value


def test_a_table_to_deduplicate_that_is_not_there_is_named(tmp_path, start):
    with pytest.raises(ConfigError, match=r"sharding.deduplicate names C1, but the tables are t_C1, t_C2"):
        start(tiny(tmp_path, sharding__deduplicate=["C1"]))
    start(tiny(tmp_path, sharding__deduplicate=["t_C1"]))
