"""What a checkpoint costs training: time that steps wait for it, beside writing it in the foreground.

    python benchmarks/checkpoint_cost.py

One run saves every `--every` steps in the background (as runs do), another waits for each write at once.
Printed are the seconds that training was kept waiting, as a part of all its time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from recsys_tpu.config import Config
from recsys_tpu.runtime.activation import activate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--rows", type=int, default=20_000, help="of each of 26 tables (dim 16)")
    arguments = parser.parse_args()
    activate("cpu")
    with tempfile.TemporaryDirectory() as folder:
        for background in (True, False):
            _measure(Path(folder), arguments, background=background)


def _measure(folder: Path, arguments: argparse.Namespace, *, background: bool) -> None:
    from recsys_tpu.runtime import Runtime
    from recsys_tpu.trainer import Trainer

    name = "background" if background else "foreground"
    config = Config.model_validate(
        {
            "run": {"name": name, "output_dir": str(folder / "runs")},
            "runtime": {"device": "cpu", "compile": False},
            "data": {
                "cache_dir": str(folder / "data"),
                "synthetic": {
                    "train_rows": 65_536,
                    "test_rows": 2000,
                    "num_embeddings": [arguments.rows] * 26,
                },
            },
            "train": {
                "batch_size": 2048,
                "epochs": 1000,
                "max_steps": arguments.steps,
                "checkpoint_every": arguments.every,
            },
        }
    )
    with Runtime.start(config.runtime) as runtime:
        trainer = Trainer(config, runtime)
        if not background:
            save = trainer.store.save

            def save_and_wait(*parts):  # type: ignore[no-untyped-def]
                folder = save(*parts)
                trainer.store.wait()
                return folder

            trainer.store.save = save_and_wait  # type: ignore[method-assign]
        started = time.perf_counter()
        trainer._train()
        seconds = time.perf_counter() - started
        blocked = trainer.store.blocked_s
        trainer.store.wait()
        newest = trainer.store.list()[-1]
        trainer.close()
    size = sum(path.stat().st_size for path in newest.iterdir())
    report = {
        "mode": name,
        "checkpoint_mib": round(size / 2**20, 1),
        "checkpoints": arguments.steps // arguments.every,
        "training_s": round(seconds, 2),
        "ms_a_step": round(1e3 * seconds / arguments.steps, 2),
        "blocked_ms_a_step": round(1e3 * blocked / arguments.steps, 3),
        "blocked_percent": round(100 * blocked / seconds, 2),
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
