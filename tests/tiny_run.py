"""A training run small enough for a unit test: 4 tables, 681 dense parameters, 125 steps an epoch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from recsys_tpu.config import Config

_RUNS = 3  # runs that one process may do after each other
ROOT = Path(__file__).parent.parent
BASE: dict[str, Any] = {
    "run": {"name": "tiny"},
    "runtime": {"device": "cpu", "compile": False},
    "data": {"synthetic": {"train_rows": 16_000, "test_rows": 1000, "num_embeddings": [50, 30, 20, 10]}},
    "model": {"embedding_dim": 8, "bottom_mlp": [16], "over_mlp": [16]},
    "train": {"batch_size": 128, "eval_batch_size": 256, "max_steps": 40, "log_every": 5},
}


def tiny_config(directory: Path, **overrides: Any) -> Config:
    """`BASE` with its outputs and data under `directory`; overrides are ``section__key=value``."""
    tree = json.loads(json.dumps(BASE))
    tree["run"]["output_dir"] = str(directory / "runs")
    tree["data"]["cache_dir"] = str(directory / "data")
    for name, value in overrides.items():
        *parents, last = name.split("__")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return Config.model_validate(tree)


@contextmanager
def trainer(config: Config) -> Iterator[Any]:
    """A Trainer of a world of one (or of what the environment says)."""
    from recsys_tpu.runtime import Runtime
    from recsys_tpu.trainer import Trainer

    with Runtime.start(config.runtime) as runtime:
        made = Trainer(config, runtime)
        try:
            yield made
        finally:
            made.close()


def run(config: Config) -> dict[int, float]:
    """Train; returns the loss of each step that this call trained."""
    log = config.run.directory / "metrics.jsonl"
    before = len(log.read_text().splitlines()) if log.exists() else 0
    with trainer(config) as made:
        made.run()
    return losses(config.run.directory, skip_lines=before)


def stop_at(made: Any, step: int) -> None:
    """Let a Trainer be interrupted before it trains step `step` + 1."""
    train_step = made._train_step

    def stopping(batch: Any) -> Any:
        if made.step == step:
            made.store.wait()
            raise KeyboardInterrupt
        return train_step(batch)

    made._train_step = stopping


def get_stuck(made: Any, batch_number: int) -> None:
    """Let a Trainer's reader sleep for ever before it yields batch `batch_number`."""
    batches = made.task.batches

    def stuck(epoch: int, *, start: int) -> Iterator[Any]:
        for number, batch in enumerate(batches(epoch, start=start)):
            if number == batch_number:
                time.sleep(3600)
            yield batch

    made.task.batches = stuck


def losses(run_directory: Path, *, skip_lines: int = 0) -> dict[int, float]:
    """Loss by step number (the first is 1) in metrics.jsonl; the last report of a step counts."""
    result: dict[int, float] = {}
    for line in (run_directory / "metrics.jsonl").read_text().splitlines()[skip_lines:]:
        event = json.loads(line)
        if event["event"] == "train":
            first = event["step"] - len(event["losses"]) + 1
            result |= {first + offset: value for offset, value in enumerate(event["losses"])}
    return result


def start_ranks(
    arguments: list[str], world_size: int, *, output: IO[str], **environment: str
) -> list[subprocess.Popen[str]]:
    """``python <arguments>`` once a rank, with torchrun's variables; no agent watches over them."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(_RUNS)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        ports = [str(probe.getsockname()[1]) for probe in probes]
    common = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": ports[0],
        "TINY_PORTS": " ".join(ports),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=output,
            stderr=output,
            text=True,
        )
        for rank in range(world_size)
    ]


def run_ranks(arguments: list[str], world_size: int, *, timeout_s: float = 240) -> str:
    """Output of all ranks together.

    Raises:
        AssertionError: a rank ended with another status than 0, with the output.
    """
    with tempfile.TemporaryFile("w+") as output:
        processes = start_ranks(arguments, world_size, output=output)
        try:
            statuses = [process.wait(timeout_s) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        output.seek(0)
        text = output.read()
    assert statuses == [0] * world_size, text[-4000:]
    return text
