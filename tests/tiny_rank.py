"""One rank in a process of its own: ``tiny_rank.py CONFIG.json [STOP_AT]  CONFIG.json [STOP_AT] ...``.

The runs follow each other; one with STOP_AT is interrupted before step STOP_AT + 1.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from recsys_tpu.config import Config
from recsys_tpu.errors import run_command
from recsys_tpu.runtime.activation import activate
from tests.tiny_run import get_stuck, stop_at, trainer


def _train(arguments: list[str]) -> None:
    ports = os.environ["TINY_PORTS"].split()
    while arguments:
        os.environ["MASTER_PORT"] = ports.pop(0)  # the store of the run before may still listen on its own
        with trainer(Config.model_validate_json(Path(arguments.pop(0)).read_text())) as made:
            if arguments and arguments[0].isdigit():
                stop_at(made, int(arguments.pop(0)))
            if "TINY_STUCK_AT" in os.environ and made.runtime.rank == 1:
                get_stuck(made, int(os.environ["TINY_STUCK_AT"]))
            with contextlib.suppress(KeyboardInterrupt):
                made.run()


if __name__ == "__main__":
    activate("cpu")
    run_command(lambda: _train(sys.argv[1:]))
