"""Evaluate a checkpoint: `python -m recsys_tpu.evaluate --checkpoint runs/dlrm/checkpoints/step_N`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys_tpu.checkpoint_command import checkpoint_parser, trainer_of
from recsys_tpu.errors import run_command

if TYPE_CHECKING:
    from recsys_tpu.trainer import Trainer

_EXAMPLES = """examples:
  python -m recsys_tpu.evaluate --checkpoint runs/dlrm/checkpoints/step_00001954
  python -m recsys_tpu.evaluate --checkpoint runs/dlrm/checkpoints/step_00001954 runtime.device=tpu-emulated
  python -m recsys_tpu.evaluate --checkpoint runs/dlrm/checkpoints/step_00001954 --int8-tables
"""


def main() -> None:
    parser = checkpoint_parser(
        "evaluate",
        "Report the test metrics of a checkpoint, with the config that is stored in it.",
        _EXAMPLES,
    )
    parser.add_argument(
        "--int8-tables", action="store_true", help="also with tables in int8, and what that costs (DLRM, CPU)"
    )
    arguments = parser.parse_args()
    with trainer_of(arguments.checkpoint, arguments.overrides) as trainer:
        metrics = trainer.evaluate_checkpoint(arguments.checkpoint)
        if arguments.int8_tables:
            _report_int8(trainer, metrics.as_dict())


def _report_int8(trainer: Trainer, trained: dict[str, float]) -> None:
    from recsys_tpu.inference.int8_tables import evaluate_int8

    metrics, made = evaluate_int8(trainer)
    say = trainer.log.message
    say(f"int8 tables: test {metrics}")
    say(
        f"int8 tables: AUC {metrics.auc - trained['auc']:+.6f}, log loss "
        f"{metrics.log_loss - trained['log_loss']:+.6f}; {made.int8_bytes:,} bytes of tables, "
        f"{made.float_bytes:,} as trained"
    )


if __name__ == "__main__":
    run_command(main)
