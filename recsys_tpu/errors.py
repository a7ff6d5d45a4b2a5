"""Errors that a user can mend: printed as one message, without a traceback, by every command."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable


class UserError(Exception):
    """Something in the config, the data or the machine; the message says what to do about it."""


class ConfigError(UserError, ValueError):
    """The config names a key that does not exist or gives it a value it cannot have."""


class CheckpointError(UserError, ValueError):
    """A checkpoint is missing, incomplete or belongs to another model."""


class TrainingDivergedError(UserError, ArithmeticError):
    """The loss is no longer a number."""


def run_command(command: Callable[[], None]) -> None:
    """Run a command-line entry point; end the process with status 2 and a message on a user's error."""
    try:
        command()
    except UserError as error:
        sys.exit(_failed(str(error)))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT):
            raise
        hint = {
            errno.ENOSPC: "The disk is full: free space or set run.output_dir to another disk.",
            errno.EROFS: "The file system is read-only: set run.output_dir to a writable folder.",
            errno.EACCES: "Permission denied: check who owns the folder.",
            errno.ENOENT: "No such file or folder: check the path.",
        }[error.errno]
        sys.exit(_failed(f"{error.filename or 'output'}: {error.strerror}. {hint}"))


def _failed(message: str) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return 2
