"""What the commands that read a checkpoint share: arguments, and a Trainer of the config stored in it."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from recsys_tpu.config import load_config
from recsys_tpu.errors import CheckpointError
from recsys_tpu.quiet import quiet_libraries
from recsys_tpu.runtime.activation import activate

if TYPE_CHECKING:
    from recsys_tpu.trainer import Trainer

_CONFIG_FILE = "config.yaml"  # what checkpoint.py writes; that module imports torch, so it comes later


def checkpoint_parser(command: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A parser with ``--checkpoint`` and overrides of the config that is stored in it."""
    parser = argparse.ArgumentParser(
        prog=f"python -m recsys_tpu.{command}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder step_N of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the stored config")
    return parser


@contextmanager
def trainer_of(checkpoint: Path, overrides: Sequence[str]) -> Iterator[Trainer]:
    """A Trainer of the stored config, its weights not loaded yet; the run's own logs stay as they are.

    Raises:
        CheckpointError: the folder is no checkpoint.
        ConfigError, DatasetError: see `load_config`, `Trainer`.
    """
    stored = checkpoint / _CONFIG_FILE
    if not stored.is_file():
        raise CheckpointError(f"{checkpoint}: not a checkpoint (it has no {_CONFIG_FILE})")
    with tempfile.TemporaryDirectory() as scratch:
        config = load_config(stored, [*overrides, f"run.output_dir={scratch}"])
        activate(config.runtime.device, compile_cache=config.runtime.compile_cache)

        from recsys_tpu.runtime import Runtime
        from recsys_tpu.trainer import Trainer

        quiet_libraries()

        with Runtime.start(config.runtime) as runtime:
            trainer = Trainer(config, runtime)
            try:
                yield trainer
            finally:
                trainer.close()
