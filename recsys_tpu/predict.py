"""Predict a split with a DLRM checkpoint: `python -m recsys_tpu.predict --checkpoint … --output …`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from recsys_tpu.config import ClickDataConfig, load_config
from recsys_tpu.errors import CheckpointError, ConfigError, run_command
from recsys_tpu.quiet import quiet_libraries
from recsys_tpu.runtime.activation import activate

_CONFIG_FILE = "config.yaml"  # what checkpoint.py writes; that module imports torch, so it comes later
_EXAMPLES = """examples:
  python -m recsys_tpu.predict --checkpoint runs/dlrm/checkpoints/step_00001954 --output predictions.parquet
  python -m recsys_tpu.predict --checkpoint runs/dlrm/checkpoints/step_00001954 --split train \\
      --output predictions.parquet data.kind=parquet data.path=/data/preprocessed

Writes one row for each row of the split, in its order: label int8, probability float32.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recsys_tpu.predict",
        description="Write the click probabilities of a split, by the config that a checkpoint holds.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder step_N of a DLRM run")
    parser.add_argument("--output", type=Path, required=True, help="Parquet file to write")
    parser.add_argument("--split", default="test")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the stored config")
    arguments = parser.parse_args()
    stored = arguments.checkpoint / _CONFIG_FILE
    if not stored.is_file():
        raise CheckpointError(f"{arguments.checkpoint}: not a checkpoint (it has no {_CONFIG_FILE})")
    with tempfile.TemporaryDirectory() as scratch:  # the run's own logs stay as they are
        config = load_config(stored, [*arguments.overrides, f"run.output_dir={scratch}"])
        if not isinstance(config.data, ClickDataConfig):
            raise ConfigError(
                f"{arguments.checkpoint}: is of a {config.model.kind} run; predict is for click models (see "
                "`python -m recsys_tpu.retrieve` for two_tower)"
            )
        activate(config.runtime.device, compile_cache=config.runtime.compile_cache)

        from recsys_tpu.evaluation import write_predictions
        from recsys_tpu.runtime import Runtime
        from recsys_tpu.tasks.click import ClickTask
        from recsys_tpu.trainer import Trainer

        quiet_libraries()

        with Runtime.start(config.runtime) as runtime:
            if runtime.world_size != 1:
                raise ConfigError("predict with one process: the rows are written in their order")
            trainer = Trainer(config, runtime)
            try:
                trainer.load_weights(arguments.checkpoint)
                assert isinstance(trainer.task, ClickTask)  # the kind of data says so
                reader = trainer.task.reader_in_order(arguments.split)
                rows = write_predictions(trainer.model, reader, runtime, arguments.output)
                trainer.log.message(f"wrote {arguments.output}: {rows:,} rows of split {arguments.split}")
            finally:
                trainer.close()


if __name__ == "__main__":
    run_command(main)
