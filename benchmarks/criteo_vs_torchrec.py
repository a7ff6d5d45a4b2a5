"""TorchRec's stock DLRM and ours on the same rows: loss curves beside each other, and samples a second.

    python benchmarks/criteo_vs_torchrec.py                                            # synthetic click log
    RECSYS_TPU_DATA=/data python benchmarks/criteo_vs_torchrec.py --config configs/criteo_sample.yaml

Ours is the Trainer.  The other side is TorchRec's DLRM, EmbeddingBagCollection, DistributedModelParallel,
fused row-wise Adagrad and TrainPipelineSparseDist; it reads the same batches and follows the same
schedule.  Two comparisons:

same start   both begin with our initial weights (seed 1): the largest relative difference of a loss
own seeds    each begins with its own; in windows of steps the means over the seeds are compared, and
             their distance is given in standard errors of the seeds (the noise band is 3 of them)

The last, partly filled batch of an epoch is left out on both sides (TorchRec's step knows no padding).
Runs take turns; samples a second are those of the training loops alone, wall and CPU time.
"""

# ruff: noqa: E402 (the device is chosen before torch is imported)
from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recsys_tpu.config import Config, load_config
from recsys_tpu.runtime.activation import activate

activate("cpu")

import numpy as np
import numpy.typing as npt
import torch
from torchrec_dlrm import StockDLRM, stock_dlrm, torchrec_batch

from recsys_tpu.data.batch import Batch
from recsys_tpu.errors import ConfigError, run_command
from recsys_tpu.evaluation import evaluate
from recsys_tpu.metrics import ClickMetrics
from recsys_tpu.models.settings import DLRMConfig
from recsys_tpu.optimizers import LearningRateSchedule
from recsys_tpu.quiet import quiet_libraries
from recsys_tpu.runtime import Runtime
from recsys_tpu.sharding.whole import whole_state
from recsys_tpu.tasks.click import ClickTask
from recsys_tpu.trainer import Trainer

ROOT = Path(__file__).parents[1]


@dataclass
class Run:
    losses: npt.NDArray[np.float64]
    metrics: ClickMetrics
    wall_s: float
    cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "configs/dlrm.yaml")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--output", type=Path, help="JSON of all losses")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    quiet_libraries()
    print(f"command: {' '.join(sys.argv)}")
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads")
    runs: dict[str, list[Run]] = {"ours": [], "torchrec": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, arguments.seeds + 1):
            overrides = [*arguments.overrides, f"run.output_dir={folder}/{seed}", f"run.seed={seed}"]
            config = load_config(arguments.config, [*overrides, "train.baselines=false"])
            if not isinstance(config.model, DLRMConfig):
                raise ConfigError(f"model.kind={config.model.kind}: TorchRec's side is a DLRM")
            with Runtime.start(config.runtime) as runtime:
                trainer = Trainer(config, runtime)
                leave_out_partial_batches(trainer)
                if seed == 1:
                    start = stock(trainer)
                    copy_weights(trainer, start)
                    same = train_stock(trainer, start)
                runs["torchrec"].append(train_stock(trainer, stock(trainer)))
                runs["ours"].append(train_ours(trainer))
                trainer.close()
    report_same_start(runs["ours"][0], same)
    report_seeds(runs, arguments.windows)
    report_speed(runs, config)
    if arguments.output:
        losses = {name: [run.losses.tolist() for run in of_name] for name, of_name in runs.items()}
        arguments.output.write_text(json.dumps({**losses, "same_start": same.losses.tolist()}) + "\n")


def leave_out_partial_batches(trainer: Trainer) -> None:
    """Epochs, and with them the schedule, of full batches only."""
    task, train = trainer.task, trainer.config.train
    assert isinstance(task, ClickTask)
    task.batches_per_epoch = task.train_reader.rows // train.batch_size
    trainer.total_steps = min(train.epochs * task.batches_per_epoch, train.max_steps or trainer.total_steps)
    schedule = trainer.config.optimizer.schedule
    trainer.schedule = LearningRateSchedule(trainer.optimizer, schedule, trainer.total_steps)


def batches(trainer: Trainer) -> Iterator[Batch]:
    """The run's training batches but the partly filled ones."""
    task = trainer.task
    assert isinstance(task, ClickTask)
    for epoch in range(trainer.config.train.epochs):
        for batch in task.batches(epoch, start=0):
            if batch.global_rows == trainer.config.train.batch_size:
                yield batch


def stock(trainer: Trainer) -> StockDLRM:
    task, model, optimizer = trainer.task, trainer.config.model, trainer.config.optimizer
    assert isinstance(task, ClickTask) and isinstance(model, DLRMConfig)
    torch.manual_seed(trainer.config.run.seed)
    return stock_dlrm(
        task.num_embeddings,
        embedding_dim=model.embedding_dim,
        dense_in_features=len(task.metadata.dense_features),
        bottom_mlp=model.bottom_mlp,
        over_mlp=model.over_mlp,
        dense=optimizer.dense,
        sparse=optimizer.sparse,
    )


def copy_weights(trainer: Trainer, to: StockDLRM) -> None:
    tables, dense = whole_state(trainer.model)
    state = to.model.state_dict()
    for name, value in state.items():
        if ".embedding_bags." in name:
            (shard,) = value.local_shards()
            shard.tensor.copy_(tables[name.split(".")[-2]])
        else:
            value.copy_(dense[name.removeprefix("model.")])


def train_stock(trainer: Trainer, model: StockDLRM) -> Run:
    steps = trainer.total_steps
    schedule = LearningRateSchedule(model.optimizer, trainer.config.optimizer.schedule, steps)
    source, losses = map(torchrec_batch, batches(trainer)), []
    wall, cpu = time.perf_counter(), time.process_time()
    for step in range(steps):
        schedule.apply(step)
        losses.append(model.step(source).item())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    task = trainer.task
    assert isinstance(task, ClickTask)
    metrics = evaluate(model.predictor(), task.test_reader, trainer.runtime)
    print(f"torchrec, seed {trainer.config.run.seed}: {metrics} ({wall:.0f} s)", flush=True)
    return Run(np.array(losses), metrics, wall, cpu)


def train_ours(trainer: Trainer) -> Run:
    task = trainer.task
    assert isinstance(task, ClickTask)
    losses: list[float] = []
    train_step = trainer._train_step

    def recording(batch: Batch) -> torch.Tensor:
        loss = train_step(batch)
        losses.append(float(loss))
        return loss

    trainer._train_step = recording  # type: ignore[method-assign]
    trainer.log.console.quiet = True
    wall, cpu = time.perf_counter(), time.process_time()
    trainer._train()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    metrics = task.evaluate(trainer.model)
    print(f"ours, seed {trainer.config.run.seed}: {metrics} ({wall:.0f} s)", flush=True)
    return Run(np.array(losses), metrics, wall, cpu)


def report_same_start(ours: Run, theirs: Run) -> None:
    apart = np.abs(ours.losses - theirs.losses) / theirs.losses
    print(f"\nsame start, {len(apart):,} steps: losses differ by {apart.max():.1e} relative at most,")
    print(f"by {apart[:100].max():.1e} in the first 100 steps")
    print(f"AUC {ours.metrics.auc:.5f} (ours) and {theirs.metrics.auc:.5f}")


def report_seeds(runs: dict[str, list[Run]], windows: int) -> None:
    means = {
        name: np.array([[part.mean() for part in np.array_split(run.losses, windows)] for run in of_name])
        for name, of_name in runs.items()
    }
    print(f"\nown seeds, {len(runs['ours'])} each; mean loss in {windows} windows of steps")
    errors = []
    for window in range(windows):
        a, b = means["ours"][:, window], means["torchrec"][:, window]
        error = np.sqrt((a.var(ddof=1) + b.var(ddof=1)) / len(a))
        errors.append(abs(a.mean() - b.mean()) / error)
        print(f"{window + 1:>4}  ours {a.mean():.5f}  torchrec {b.mean():.5f}  apart {errors[-1]:.1f} errors")
    print(f"within the band of 3 standard errors in {sum(e <= 3 for e in errors)} of {windows} windows")
    for name, of_name in runs.items():
        auc, loss = ([getattr(run.metrics, what) for run in of_name] for what in ("auc", "log_loss"))
        print(
            f"{name:9} AUC {np.mean(auc):.5f} ± {np.std(auc, ddof=1):.5f}  "
            f"log loss {np.mean(loss):.5f} ± {np.std(loss, ddof=1):.5f}"
        )


def report_speed(runs: dict[str, list[Run]], config: Config) -> None:
    print()
    rates = {}
    for name, of_name in runs.items():
        samples = sum(len(run.losses) for run in of_name) * config.train.batch_size
        rates[name] = [samples / sum(getattr(run, what) for run in of_name) for what in ("wall_s", "cpu_s")]
        print(f"{name:9} {rates[name][0]:9,.0f} samples/s of wall time, {rates[name][1]:9,.0f} of CPU time")
    wall, cpu = (mine / theirs for mine, theirs in zip(rates["ours"], rates["torchrec"], strict=True))
    print(f"ours over TorchRec's: x {wall:.2f} wall, x {cpu:.2f} CPU (a compiled run's first step included)")


if __name__ == "__main__":
    run_command(main)
