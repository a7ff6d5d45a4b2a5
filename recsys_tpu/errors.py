"""Errors that a user can mend: printed as one message, without a traceback, by every command."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

from recsys_tpu.redaction import redact


class UserError(Exception):
    """Something in the config, the data or the machine; the message says what to do about it."""

    exit_status = 2


class ConfigError(UserError, ValueError):
    """The config names a key that does not exist or gives it a value it cannot have."""


class CheckpointError(UserError, ValueError):
    """A checkpoint is missing, incomplete or belongs to another model."""


class LostRankError(UserError, RuntimeError):
    """A rank died or hangs; the message names it, the collective and the step."""

    exit_status = 3


class PreemptedError(UserError):
    """SIGTERM came: the run has saved and can be resumed."""

    exit_status = 143  # 128 + SIGTERM, as a shell says it


class TrainingDivergedError(UserError, ArithmeticError):
    """The loss is no longer a number."""


def run_command(command: Callable[[], None]) -> None:
    """Run a command-line entry point; a user's error ends it with a message and the error's own status."""
    try:
        command()
    except UserError as error:
        _print(str(error))
        sys.exit(error.exit_status)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT):
            raise
        hint = {
            errno.ENOSPC: "The disk is full: free space or set run.output_dir to another disk.",
            errno.EROFS: "The file system is read-only: set run.output_dir to a writable folder.",
            errno.EACCES: "Permission denied: check who owns the folder.",
            errno.ENOENT: "No such file or folder: check the path.",
        }[error.errno]
        _print(f"{error.filename or 'output'}: {error.strerror}. {hint}")
        sys.exit(UserError.exit_status)


def _print(message: str) -> None:
    print(f"error: {redact(message)}", file=sys.stderr, flush=True)
