"""The two forms of a train step on the emulated device, and the CPU: the same losses, and what each costs.

`train.step=separate_ops`: lookups and donating updates as operations around compiled towers;
`train.step=one_program`: the whole step as one donated XLA program.  Each form trains the same config in a
process of its own, one after the other.  An emulated device is XLA on the CPU: this is not a TPU's speed.

    python benchmarks/step_forms.py --config configs/dlrm.yaml --steps 100
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
from pathlib import Path

FORMS = {
    "cpu": ["runtime.device=cpu"],
    "separate_ops": ["runtime.device=tpu-emulated", "train.step=separate_ops"],
    "one_program": ["runtime.device=tpu-emulated", "train.step=one_program"],
}


def train(form: str, config: Path, steps: int, folder: Path) -> tuple[list[float], float, int]:
    """(loss of each step, median samples per second between logs but the first, compilations after the
    warm-up) of a run."""
    overrides = [f"run.output_dir={folder}", f"run.name={form}", f"train.max_steps={steps}"]
    overrides += ["train.log_every=10", *FORMS[form]]
    command = [sys.executable, "-m", "recsys_tpu.train", "--config", str(config), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    lines = (folder / form / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    written = [json.loads(line) for line in lines]
    events = [event for event in written if event["event"] == "train"]
    (late,) = (event["recompilations"] for event in written if event["event"] == "time")
    losses = [loss for event in events for loss in event["losses"]]
    return losses, statistics.median(event["samples_per_second"] for event in events[1:]), late


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("configs/dlrm.yaml"))
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {form: train(form, options.config, options.steps, Path(folder)) for form in FORMS}
    print(f"{options.config}, {options.steps} steps, {os.cpu_count()} cores, {platform.machine()}")
    expected = found["cpu"][0]
    for form, (losses, rate, late) in found.items():
        assert len(losses) == options.steps
        differences = [abs(a / b - 1) for a, b in zip(losses, expected, strict=True)]
        print(
            f"{form:>13}  last loss {losses[-1]:.6f}  largest relative difference from cpu "
            f"{max(differences):.1e}  {rate:9,.0f} samples/s  {rate / found['cpu'][1]:5.2f}x of cpu  "
            f"{late} late compilations"
        )


if __name__ == "__main__":
    main()
