"""Samples a second of a training on the emulated `tpu` device, beside the same training on the CPU.

    python benchmarks/emulated_speed.py --config configs/dlrm.yaml --rounds 8

Two processes hold the same run, one on each device, compiled and warm.  They train by turns, `--steps` at a
time, one always idle while the other works, and who begins changes every round: a load on the machine that
lasts longer than a turn hits both.  The ratio is that of the medians; the range of the rounds' own ratios
says how steady it is.  It says nothing about a TPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DEVICES = ("cpu", "tpu-emulated")


class Turns:
    """A worker process on one device; `take` has it train for some steps."""

    def __init__(self, device: str, arguments: argparse.Namespace, folder: str) -> None:
        command = [sys.executable, __file__, "--worker", device, "--config", str(arguments.config)]
        command += [*arguments.overrides, f"run.output_dir={folder}/{device}"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def take(self, steps: int) -> dict[str, Any]:
        """Seconds that `steps` steps took, and their last loss."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                result: dict[str, Any] = json.loads(line)
                return result
        raise RuntimeError("a worker ended; its error is above")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def worker(device: str, config_path: Path, overrides: list[str]) -> None:
    """Reads numbers of steps from stdin, trains them, prints what they took."""
    from recsys_tpu.config import load_config
    from recsys_tpu.runtime.activation import activate

    config = load_config(config_path, [*overrides, f"runtime.device={device}", "train.epochs=1000"])
    activate(device)
    from recsys_tpu.quiet import quiet_libraries
    from recsys_tpu.runtime import Runtime
    from recsys_tpu.trainer import Trainer

    quiet_libraries()
    with Runtime.start(config.runtime) as runtime:
        trainer = Trainer(config, runtime)
        batches = trainer._batches()
        for line in sys.stdin:
            began, steps = time.perf_counter(), int(line)
            for _ in range(steps):
                loss = trainer._train_step(next(batches))
                trainer.step += 1
            last = float(loss.cpu())
            runtime.synchronize()
            seconds = time.perf_counter() - began
            late = len(runtime.compile_watch.after_warmup)
            print(json.dumps({"seconds": seconds, "loss": last, "recompilations": late}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("configs/dlrm.yaml"))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="of one turn")
    parser.add_argument("--warmup", type=int, default=20, help="steps before the first round")
    parser.add_argument("--worker", choices=DEVICES, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    if arguments.worker:
        worker(arguments.worker, arguments.config, arguments.overrides)
        return
    from recsys_tpu.config import load_config

    batch = load_config(arguments.config, arguments.overrides).train.batch_size
    rates: dict[str, list[float]] = {device: [] for device in DEVICES}
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        turns = {device: Turns(device, arguments, folder) for device in DEVICES}
        try:
            for device in DEVICES:
                turns[device].take(arguments.warmup)
            for round_ in range(arguments.rounds):
                for device in DEVICES if round_ % 2 else reversed(DEVICES):
                    results[device] = turns[device].take(arguments.steps)
                    rates[device].append(batch * arguments.steps / results[device]["seconds"])
        finally:
            for turn in turns.values():
                turn.close()
    ratios = [emulated / cpu for cpu, emulated in zip(*rates.values(), strict=True)]
    for device in DEVICES:
        rate, loss = statistics.median(rates[device]), results[device]["loss"]
        print(f"{device}: {rate:,.0f} samples/s, last loss {loss:.6f}")
    ratio = statistics.median(rates["tpu-emulated"]) / statistics.median(rates["cpu"])
    print(f"ratio {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds)")
    print(f"recompilations on the emulated device after warm-up: {results['tpu-emulated']['recompilations']}")
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores; {' '.join(sys.argv)}")


if __name__ == "__main__":
    main()
