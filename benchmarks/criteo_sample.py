"""A click model beside logistic regression and boosted trees on the 80,000 real (reconstructed) Criteo rows.

    RECSYS_TPU_DATA=/data python benchmarks/criteo_sample.py                                # the test rows
    RECSYS_TPU_DATA=/data python benchmarks/criteo_sample.py data.evaluate_on=validation    # to tune on

Trains the config with several seeds, on the CPU, and fits the others on the same split: rows 1-70,000 and
the 10,000 that follow in time, or with data.evaluate_on=validation rows 1-60,000 and 60,001-70,000, with
the test rows in neither part.  The others choose their regularisation, or their number of trees, on the last
15 % of their training rows.
"""

# ruff: noqa: E402 (the device is chosen before torch is imported)
from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

from recsys_tpu.config import load_config
from recsys_tpu.runtime.activation import activate

activate("cpu")

from recsys_tpu.baselines import constant_metrics, gradient_boosting_metrics, logistic_regression_metrics
from recsys_tpu.metrics import ClickMetrics
from recsys_tpu.quiet import quiet_libraries
from recsys_tpu.runtime import Runtime
from recsys_tpu.tasks.click import ClickTask
from recsys_tpu.trainer import Trainer

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, nargs="+", default=[ROOT / "configs/criteo_sample.yaml"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON of all results")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    quiet_libraries()
    print(f"command: {' '.join(sys.argv)}\nmachine: {platform.machine()}, {os.cpu_count()} cores")
    results: dict[str, list[ClickMetrics]] = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = [*arguments.overrides, f"run.output_dir={folder}", "train.baselines=false"]
        for path in arguments.config:
            results[path.stem] = []
            for seed in range(1, arguments.seeds + 1):
                results[path.stem].append(train(path, [*settings, f"run.seed={seed}"]))
    directory = data_directory(arguments.config[0], arguments.overrides)
    split = {"train": "train", "test": "test"}
    # neither of the two depends on a seed
    results["logistic regression"] = [logistic_regression_metrics(directory, **split, seed=1)]
    results["boosted trees"] = [gradient_boosting_metrics(directory, **split, seed=1)]
    results["constant"] = [constant_metrics(directory, **split)]
    show(results)
    if arguments.output:
        document = {name: [metrics.as_dict() for metrics in runs] for name, runs in results.items()}
        arguments.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def train(path: Path, overrides: list[str]) -> ClickMetrics:
    config = load_config(path, overrides)
    began = time.perf_counter()
    with Runtime.start(config.runtime) as runtime:
        trainer = Trainer(config, runtime)
        trainer.log.console.quiet = True
        metrics = trainer.run()
        trainer.close()
    assert isinstance(metrics, ClickMetrics)
    print(f"{path.stem}, seed {config.run.seed}: {metrics} ({time.perf_counter() - began:.0f} s)", flush=True)
    return metrics


def data_directory(path: Path, overrides: list[str]) -> Path:
    config = load_config(path, overrides)
    with Runtime.start(config.runtime) as runtime:
        return ClickTask(config, runtime).data_directory


def show(results: dict[str, list[ClickMetrics]]) -> None:
    first = next(iter(results.values()))[0]
    print(f"\n{first.rows:,} rows, {first.positives:,} positives; mean and deviation over seeds")
    for name, runs in results.items():
        cells = [f"{name:22} {len(runs)} runs"]
        for what in ("auc", "log_loss"):
            values = [getattr(run, what) for run in runs]
            deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
            cells.append(f"{what} {statistics.mean(values):.4f}{deviation}")
        print("  ".join(cells))


if __name__ == "__main__":
    main()
