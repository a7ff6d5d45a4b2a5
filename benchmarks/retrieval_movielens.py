"""Two-tower retrieval beside popularity, implicit ALS and BPR on MovieLens, all in one run.

    RECSYS_TPU_DATA=/data python benchmarks/retrieval_movielens.py

Every model sees the same leave-one-out split and is ranked by the same code: the whole catalogue, seen
items left out.  ALS and BPR are tuned here, on the validation split (a user's last but one event, the
last in neither part), by NDCG@10; then every model trains on all but the last events with five seeds and
is tested once per seed.  The two-tower's settings are those of the config; docs/retrieval.md says how
they were chosen (on the same validation split).  Needs `pip install 'recsys-tpu[benchmarks]'`.
"""

# ruff: noqa: E402 (the device is chosen before torch is imported)
from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # implicit has threads of its own
from recsys_tpu.config import Config, load_config
from recsys_tpu.runtime.activation import activate

activate("cpu")

import numpy as np
import scipy.sparse as sp
from implicit.als import AlternatingLeastSquares
from implicit.bpr import BayesianPersonalizedRanking
from rich.console import Console
from rich.table import Table

from recsys_tpu.quiet import quiet_libraries
from recsys_tpu.retrieval.ranking import RetrievalMetrics
from recsys_tpu.runtime import Runtime
from recsys_tpu.tasks.retrieval import RetrievalTask
from recsys_tpu.trainer import Trainer

ROOT = Path(__file__).parents[1]
# values that tuning goes through, one option at a time, from the first value of each on
ALS_VALUES: dict[str, list[Any]] = {
    "factors": [128, 64, 256],
    "regularization": [10.0, 1.0, 3.0, 30.0, 100.0],
    "alpha": [2.0, 1.0, 5.0, 10.0, 20.0],
    "iterations": [15, 7, 30],
}
BPR_VALUES: dict[str, list[Any]] = {
    "factors": [64, 32, 128],
    "learning_rate": [0.01, 0.005, 0.02, 0.05],
    "regularization": [0.01, 0.001, 0.003, 0.03],
    "iterations": [100, 50, 200],
}
Model = Callable[..., Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs/two_tower.yaml")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="processes; each seed is one job")
    parser.add_argument("--output", type=Path, help="JSON of all results")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    quiet_libraries()
    console = Console(highlight=False)
    console.print(f"command: {' '.join(sys.argv)}\nmachine: {platform.machine()}, {os.cpu_count()} cores")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        settings = (arguments.config, [*arguments.overrides, f"run.output_dir={folder}"])
        seeds = range(1, arguments.seeds + 1)
        others = pool.submit(run_others, *settings, seeds)
        towers = [pool.submit(run_two_tower, *settings, seed) for seed in seeds]
        tuned, results = others.result()
        for name, found in tuned.items():
            console.print(f"{name}: {found}")
        results["two-tower"] = [tower.result() for tower in towers]
    show(results, console)
    if arguments.output:
        document = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "tuned": tuned,
            "results": {name: [metrics.as_dict() for metrics in runs] for name, runs in results.items()},
        }
        arguments.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


@contextmanager
def task_of(config: Config) -> Iterator[RetrievalTask]:
    with Runtime.start(config.runtime) as runtime:
        yield RetrievalTask(config, runtime)


def run_others(
    path: Path, overrides: list[str], seeds: range
) -> tuple[dict[str, str], dict[str, list[RetrievalMetrics]]]:
    """(what tuning chose, metrics of popularity, ALS and BPR on the test split)."""
    chosen, tuned = {}, {}
    with task_of(load_config(path, [*overrides, "data.evaluate_on=validation"])) as task:
        for name, model, values in (
            ("implicit ALS", AlternatingLeastSquares, ALS_VALUES),
            ("implicit BPR", BayesianPersonalizedRanking, BPR_VALUES),
        ):
            best, options, tried = tune(task, model, values)
            tuned[name] = f"{tried} settings, validation NDCG@10 {best:.4f} with {options}"
            print(f"{name}: {tuned[name]}", flush=True)
            chosen[name] = (model, options)
    with task_of(load_config(path, [*overrides, "data.evaluate_on=test"])) as task:
        counts = np.bincount(task.log.items[task.holdout.train], minlength=len(task.log.item_keys))
        popularity = task.evaluation.metrics_of_vectors(
            np.ones((task.holdout.queries, 1), np.float32), counts[:, None].astype(np.float32)
        )
        results = {"popularity": [popularity]}
        for name, (model, options) in chosen.items():
            results[name] = [baseline(task, model, options, seed=seed) for seed in seeds]
    return tuned, results


def tune(
    task: RetrievalTask, model: Model, values: dict[str, list[Any]]
) -> tuple[float, dict[str, Any], int]:
    """(validation NDCG@10, options, settings tried): each option in turn, until none can be bettered."""
    found: dict[tuple[Any, ...], float] = {}

    def score(options: dict[str, Any]) -> float:
        key = tuple(options.values())
        if key not in found:
            found[key] = baseline(task, model, options, seed=1).ndcg[10]
        return found[key]

    best = {name: choices[0] for name, choices in values.items()}
    before = None
    while best != before:
        before = dict(best)
        for name, choices in values.items():
            best = max(({**best, name: choice} for choice in choices), key=score)
    return score(best), best, len(found)


def run_two_tower(path: Path, overrides: list[str], seed: int) -> RetrievalMetrics:
    quiet_libraries()
    more = ["data.evaluate_on=test", f"run.seed={seed}", f"run.name=seed{seed}"]
    config = load_config(path, [*overrides, *more])
    started = time.perf_counter()
    with Runtime.start(config.runtime) as runtime:
        trainer = Trainer(config, runtime)
        trainer.log.console.quiet = True
        metrics = trainer.run()
        trainer.close()
    assert isinstance(metrics, RetrievalMetrics)
    print(f"two-tower, seed {seed}: {metrics} ({time.perf_counter() - started:.0f} s)", flush=True)
    return metrics


def baseline(task: RetrievalTask, model: Model, options: dict[str, Any], *, seed: int) -> RetrievalMetrics:
    train = task.holdout.train
    shape = (len(task.log.user_keys), len(task.log.item_keys))
    pairs = (task.log.users[train], task.log.items[train])
    matrix = sp.csr_matrix((np.ones(len(train), np.float32), pairs), shape=shape)
    fitted = model(**options, random_state=seed, num_threads=1)  # more threads do not repeat
    fitted.fit(matrix, show_progress=False)
    return task.evaluation.metrics_of_vectors(fitted.user_factors[task.holdout.users], fitted.item_factors)


def show(results: dict[str, list[RetrievalMetrics]], console: Console) -> None:
    first = next(iter(results.values()))[0]
    table = Table(title=f"test split, {first.queries:,} queries, whole catalogue ranked; mean ± deviation")
    for column in ("model", "seeds", "NDCG@10", "recall@10", "MRR", "coverage@10"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, runs in results.items():
        values = {
            "ndcg": [run.ndcg[10] for run in runs],
            "recall": [run.recall[10] for run in runs],
            "mrr": [run.mrr for run in runs],
            "coverage": [run.coverage for run in runs],
        }
        cells = [
            f"{np.mean(found):.4f}" + (f" ± {np.std(found, ddof=1):.4f}" if len(found) > 1 else "")
            for found in values.values()
        ]
        table.add_row(name, str(len(runs)), *cells)
    console.print(table)
    best = max((name for name in results if name != "two-tower"), key=lambda n: mean_ndcg(results[n]))
    ratio = mean_ndcg(results["two-tower"]) / mean_ndcg(results[best])
    console.print(f"two-tower over the best of the others ({best}): NDCG@10 x {ratio:.2f}")


def mean_ndcg(runs: list[RetrievalMetrics]) -> float:
    return float(np.mean([run.ndcg[10] for run in runs]))


if __name__ == "__main__":
    main()
