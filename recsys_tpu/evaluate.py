"""Evaluate a checkpoint: `python -m recsys_tpu.evaluate --checkpoint runs/dlrm/checkpoints/step_N`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from recsys_tpu.config import load_config
from recsys_tpu.errors import CheckpointError, run_command
from recsys_tpu.quiet import quiet_libraries
from recsys_tpu.runtime.activation import activate

_CONFIG_FILE = "config.yaml"  # what checkpoint.py writes; that module imports torch, so it comes later
_EXAMPLES = """examples:
  python -m recsys_tpu.evaluate --checkpoint runs/dlrm/checkpoints/step_00001954
  python -m recsys_tpu.evaluate --checkpoint runs/dlrm/checkpoints/step_00001954 runtime.device=tpu-emulated
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recsys_tpu.evaluate",
        description="Report the test metrics of a checkpoint, with the config that is stored in it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder step_N of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the stored config")
    arguments = parser.parse_args()
    stored = arguments.checkpoint / _CONFIG_FILE
    if not stored.is_file():
        raise CheckpointError(f"{arguments.checkpoint}: not a checkpoint (it has no {_CONFIG_FILE})")
    with tempfile.TemporaryDirectory() as scratch:  # the run's own logs stay as they are
        overrides = [*arguments.overrides, f"run.output_dir={scratch}"]
        config = load_config(stored, overrides)
        activate(config.runtime.device, compile_cache=config.runtime.compile_cache)

        from recsys_tpu.runtime import Runtime
        from recsys_tpu.trainer import Trainer

        quiet_libraries()

        with Runtime.start(config.runtime) as runtime:
            trainer = Trainer(config, runtime)
            try:
                trainer.evaluate_checkpoint(arguments.checkpoint)
            finally:
                trainer.close()


if __name__ == "__main__":
    run_command(main)
