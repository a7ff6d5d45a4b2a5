"""Export the dense part of a click model: `python -m recsys_tpu.export --checkpoint … --output …`."""

from __future__ import annotations

from pathlib import Path

from recsys_tpu.checkpoint_command import checkpoint_parser, trainer_of
from recsys_tpu.errors import ConfigError, run_command

_EXAMPLES = """examples:
  python -m recsys_tpu.export --checkpoint runs/dlrm/checkpoints/step_00001954 --output exported

Writes dense.pt2, the towers as a torch.export program for any batch size, and dense.json, which says what it
takes. Without TorchRec, `torch.export.load("exported/dense.pt2").module()(dense, embedded)` gives logits.
The query tower of a two-tower model: `python -m recsys_tpu.retrieve index`.
"""


def main() -> None:
    parser = checkpoint_parser("export", "Write the dense part of a click model as a program.", _EXAMPLES)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args()
    with trainer_of(arguments.checkpoint, arguments.overrides) as trainer:
        from recsys_tpu.inference.dense_part import PROGRAM_FILE, export_dense_part
        from recsys_tpu.tasks.click import ClickTask

        if not isinstance(trainer.task, ClickTask):
            raise ConfigError(
                f"{arguments.checkpoint}: is of a {trainer.config.model.kind} run; export takes click models "
                "(see `python -m recsys_tpu.retrieve index` for two_tower)"
            )
        if trainer.runtime.world_size != 1:
            raise ConfigError(
                "export with one process: a checkpoint of any number of ranks can be read by one"
            )
        trainer.load_weights(arguments.checkpoint)
        info = export_dense_part(trainer, arguments.checkpoint, arguments.output)
        trainer.log.message(
            f"wrote {arguments.output / PROGRAM_FILE}: logits of {info.checked_rows:,} test rows differ from "
            f"the trained model's by {info.max_difference:.1e} at most"
        )


if __name__ == "__main__":
    run_command(main)
