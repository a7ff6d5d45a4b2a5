"""Predict a split with a click model: `python -m recsys_tpu.predict --checkpoint … --output …`."""

from __future__ import annotations

from pathlib import Path

from recsys_tpu.checkpoint_command import checkpoint_parser, trainer_of
from recsys_tpu.errors import ConfigError, run_command

_EXAMPLES = """examples:
  python -m recsys_tpu.predict --checkpoint runs/dlrm/checkpoints/step_00001954 --output predictions.parquet
  python -m recsys_tpu.predict --checkpoint runs/dlrm/checkpoints/step_00001954 --split train \\
      --output predictions.parquet data.kind=parquet data.path=/data/preprocessed

Writes one row for each row of the split, in its order: label int8, probability float32.
"""


def main() -> None:
    parser = checkpoint_parser(
        "predict",
        "Write the click probabilities of a split, by the config that a checkpoint holds.",
        _EXAMPLES,
    )
    parser.add_argument("--output", type=Path, required=True, help="Parquet file to write")
    parser.add_argument("--split", default="test")
    parser.add_argument("--int8-tables", action="store_true", help="with tables in int8 (CPU)")
    arguments = parser.parse_args()
    with trainer_of(arguments.checkpoint, arguments.overrides) as trainer:
        from recsys_tpu.evaluation import write_predictions
        from recsys_tpu.inference.int8_tables import quantize_tables
        from recsys_tpu.tasks.click import ClickTask

        task = trainer.task
        if not isinstance(task, ClickTask):
            raise ConfigError(
                f"{arguments.checkpoint}: is of a {trainer.config.model.kind} run; predict is for click "
                "models (see `python -m recsys_tpu.retrieve` for two_tower)"
            )
        if trainer.runtime.world_size != 1:
            raise ConfigError("predict with one process: the rows are written in their order")
        trainer.load_weights(arguments.checkpoint)
        model = quantize_tables(trainer).model if arguments.int8_tables else trainer.model
        reader = task.reader_in_order(arguments.split)
        rows = write_predictions(model, reader, trainer.runtime, arguments.output)
        trainer.log.message(f"wrote {arguments.output}: {rows:,} rows of split {arguments.split}")


if __name__ == "__main__":
    run_command(main)
