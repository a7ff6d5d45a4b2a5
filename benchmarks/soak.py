"""Train for a given time and watch what must stay flat: memory, file descriptors, throughput, disk.

    python benchmarks/soak.py --minutes 45

Checkpoints and evaluations go on all the while.  The first third counts as warm-up.  Reported are the
medians of the second and the last third; the command fails if memory grows by 1 % or more, descriptors
grow at all, throughput falls by 10 % or more, or more checkpoints than configured are left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
KEEP = 3
MAX_END_S = 900.0  # on a machine that is busy with other things
_CONFIG = {
    "runtime": {"device": "cpu"},
    "data": {"synthetic": {"train_rows": 500_000, "test_rows": 20_000}},
    "train": {
        "batch_size": 1024,
        "epochs": 1_000_000,
        "log_every": 20,
        "eval_every": 500,
        "checkpoint_every": 100,
        "keep_checkpoints": KEEP,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=45.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--keep", type=Path, help="new folder for the run; default: a temporary one")
    arguments = parser.parse_args()
    if arguments.keep:
        arguments.keep.mkdir(parents=True)
        sys.exit(not soak(arguments.keep, 60 * arguments.minutes, arguments.every))
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(not soak(Path(folder), 60 * arguments.minutes, arguments.every))


def soak(folder: Path, seconds: float, every: float) -> bool:
    """Run it and print the report; whether all is flat."""
    config = folder / "config.json"
    config.write_text(json.dumps(_CONFIG))
    command = [
        *(sys.executable, "-m", "recsys_tpu.train", "--config", str(config)),
        *(f"run.output_dir={folder / 'runs'}", f"data.cache_dir={folder / 'data'}", "run.name=soak"),
    ]
    log = folder / "runs" / "soak" / "metrics.jsonl"
    with (folder / "output.txt").open("w+") as output, (folder / "samples.txt").open("w") as recorded:
        process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=output, stderr=output
        )
        try:
            while not log.exists() or "train" not in log.read_text():
                time.sleep(0.5)
                assert process.poll() is None, (folder / "output.txt").read_text()[-3000:]
            watched = psutil.Process(process.pid)
            samples: list[tuple[float, int, int]] = []
            started = time.time()
            while time.time() - started < seconds:
                time.sleep(every)
                assert process.poll() is None, (folder / "output.txt").read_text()[-3000:]
                samples.append((time.time(), watched.memory_full_info().uss, watched.num_fds()))
                print(*samples[-1], file=recorded, flush=True)  # time, USS in bytes, descriptors
            process.send_signal(signal.SIGTERM)
            status = process.wait(MAX_END_S)
        finally:
            process.kill()
            process.wait()
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return _report(samples, events, started, status, folder / "runs" / "soak" / "checkpoints")


def _report(
    samples: list[tuple[float, int, int]],
    events: list[dict[str, float]],
    started: float,
    status: int,
    checkpoints: Path,
) -> bool:
    length = samples[-1][0] - started

    def thirds(points: list[tuple[float, float]]) -> tuple[float, float]:
        middle = [value for at, value in points if length / 3 <= at - started < 2 * length / 3]
        last = [value for at, value in points if at - started >= 2 * length / 3]
        return statistics.median(middle), statistics.median(last)

    rates = [(e["time"], e["samples_per_second"]) for e in events if e["event"] == "train"]
    memory = thirds([(at, uss / 2**20) for at, uss, _ in samples])
    descriptors = thirds([(at, float(fds)) for at, _, fds in samples])
    speed = thirds(rates)
    left = sorted(path.name for path in checkpoints.iterdir())
    evaluations = sum(event["event"] == "test" for event in events)
    print(
        f"{length / 60:.1f} min, {events[-1]['step']} steps, {evaluations} evaluations, status {status}, "
        f"highest memory seen {max(uss for _, uss, _ in samples) / 2**20:.1f} MiB"
    )
    checks = {
        f"memory (USS) {memory[0]:.1f} -> {memory[1]:.1f} MiB ({_change(memory)})": memory[1]
        < 1.01 * memory[0],
        f"descriptors {descriptors[0]:.0f} -> {descriptors[1]:.0f}": descriptors[1] <= descriptors[0],
        f"throughput {speed[0]:,.0f} -> {speed[1]:,.0f} samples/s ({_change(speed)})": speed[1]
        > 0.9 * speed[0],
        f"checkpoints left: {', '.join(left)}": len(left) == KEEP,
        "SIGTERM ended it with a checkpoint (status 143)": status == 143,
    }
    for text, good in checks.items():
        print(f"{'ok  ' if good else 'FAIL'} {text}")
    return all(checks.values())


def _change(pair: tuple[float, float]) -> str:
    return f"{100 * (pair[1] / pair[0] - 1):+.2f} %"


if __name__ == "__main__":
    main()
