"""Train the same run on 1, 2 and 4 ranks, on the CPU and on the emulated TPU, and compare every loss.

    python benchmarks/rank_matrix.py --steps 100

The table gives, for each device and number of ranks, the largest relative difference of a step's loss from
that of one rank on the CPU, and the step of it.  Float additions in another order are the only difference
that there may be; the command fails above `--allowed`.  It says nothing of speed: the device is emulated.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 3600
CONFIG = {
    "runtime": {"compile": False, "deterministic": True},
    "data": {
        "synthetic": {"train_rows": 64_000, "test_rows": 2_000, "num_embeddings": [5000, 300, 20, 1000]}
    },
    "model": {"embedding_dim": 16, "bottom_mlp": [32], "over_mlp": [32]},
    "train": {"batch_size": 256, "eval_batch_size": 512, "log_every": 10, "epochs": 100},
}


def losses(folder: Path, device: str, ranks: int, steps: int) -> list[float]:
    """The loss of every step of a run on `ranks` processes.

    Raises:
        RuntimeError: a rank failed, with what it said.
    """
    name = f"{device}-{ranks}"
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG))
    command = [
        *(sys.executable, "-m", "recsys_tpu.train", "--config", str(config), f"runtime.device={device}"),
        *(f"run.output_dir={folder / 'runs'}", f"data.cache_dir={folder / 'data'}", f"run.name={name}"),
        f"train.max_steps={steps}",
    ]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    with (folder / f"{name}.txt").open("w+") as output:
        processes = [
            subprocess.Popen(
                command,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=output,
                stderr=output,
            )
            for rank in range(ranks)
        ]
        try:
            statuses = [process.wait(TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(statuses):
            output.seek(0)
            raise RuntimeError(f"{name}: statuses {statuses}\n{output.read()[-3000:]}")
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [loss for event in events if event["event"] == "train" for loss in event["losses"]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--devices", nargs="+", default=["cpu", "tpu-emulated"])
    parser.add_argument("--allowed", type=float, default=1e-4)
    arguments = parser.parse_args()
    table = Table(title=f"{arguments.steps} steps, losses against one rank on the CPU")
    for column in ("device", "ranks", "largest relative difference", "at step", "last loss"):
        table.add_column(column, justify="left" if column == "device" else "right")
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference = losses(folder, "cpu", 1, arguments.steps)
        assert len(reference) == arguments.steps
        for device in arguments.devices:
            for ranks in arguments.ranks:
                again = (device, ranks) == ("cpu", 1)
                found = reference if again else losses(folder, device, ranks, arguments.steps)
                differences = [abs(a - b) / abs(b) for a, b in zip(found, reference, strict=True)]
                largest = max(differences)
                at = str(differences.index(largest) + 1) if largest else ""
                table.add_row(device, str(ranks), f"{largest:.1e}", at, f"{found[-1]:.6f}")
                print(f"{device} x {ranks}: {largest:.1e}", file=sys.stderr, flush=True)
                worst = max(worst, largest)
    Console().print(table)
    sys.exit(worst > arguments.allowed)


if __name__ == "__main__":
    main()
