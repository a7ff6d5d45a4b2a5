"""Train a config in several ways and compare every loss with that of one rank on the CPU.

    python benchmarks/same_losses.py --steps 100 \\
        --run 1 runtime.device=tpu-emulated --run 4 runtime.device=tpu-emulated \\
        --run 4 runtime.device=tpu-emulated sharding.exchange=pallas

`--run RANKS [key=value ...]` is one way, started by torchrun (one rank: by python).  The table gives its
largest relative difference of a step's loss from the reference, and from the way before it.  Float additions
in another order are the only difference that there may be; the command fails above `--allowed`.  It says
nothing of speed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 3600


def losses(folder: Path, number: int, arguments: argparse.Namespace, way: list[str]) -> list[float]:
    """The loss of every step of one run.

    Raises:
        RuntimeError: the run failed, with the end of what it said.
    """
    ranks, *overrides = way
    train = ["-m", "recsys_tpu.train", "--config", str(arguments.config), *arguments.overrides, *overrides]
    train += [f"train.max_steps={arguments.steps}", "train.epochs=1000", "train.baselines=false"]
    train += ["runtime.deterministic=true", f"run.output_dir={folder}", f"run.name=way-{number}"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    # without it torchrun's own process would load torch_tpu, which only the ranks need
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    if ranks == "1":
        torchrun, environment = [], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *torchrun, *train],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(way)}: status {done.returncode}\n{done.stdout[-3000:]}")
    lines = (folder / f"way-{number}" / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [loss for event in events if event["event"] == "train" for loss in event["losses"]]


def largest_difference(found: list[float], expected: list[float]) -> tuple[float, int]:
    """Largest relative difference of a loss, and its step (from 1)."""
    differences = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
    largest = max(differences)
    return largest, differences.index(largest) + 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "configs/dlrm.yaml")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--run", nargs="+", action="append", required=True, metavar="RANKS key=value")
    parser.add_argument("--overrides", nargs="*", default=[], metavar="key=value", help="of every run")
    parser.add_argument("--allowed", type=float, default=1e-4)
    arguments = parser.parse_args()
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores; {' '.join(sys.argv)}")
    table = Table(title=f"{arguments.config.name}: losses of {arguments.steps} steps against one CPU rank")
    for column in ("run", "largest relative difference", "at step", "to the run before", "last loss"):
        table.add_column(column, justify="left" if column == "run" else "right")
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        reference = losses(Path(name), 0, arguments, ["1", "runtime.device=cpu"])
        assert len(reference) == arguments.steps
        table.add_row("1 runtime.device=cpu", "", "", "", f"{reference[-1]:.7f}")
        before = reference
        for number, way in enumerate(arguments.run, 1):
            found = losses(Path(name), number, arguments, way)
            largest, step = largest_difference(found, reference)
            row = [f"{largest:.1e}", str(step), f"{largest_difference(found, before)[0]:.1e}"]
            table.add_row(" ".join(way), *row, f"{found[-1]:.7f}")
            print(f"{' '.join(way)}: {largest:.1e}", file=sys.stderr, flush=True)
            worst, before = max(worst, largest), found
    Console(width=max(120, Console().width)).print(table)
    sys.exit(worst > arguments.allowed)


if __name__ == "__main__":
    main()
