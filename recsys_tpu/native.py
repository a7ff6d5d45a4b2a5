"""Builds a C source of this package once per user and machine, and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from recsys_tpu.errors import UserError


class NativeBuildError(UserError, RuntimeError):
    """There is no C compiler, it fails, or there is no folder to build in."""


def load_library(source: Path, flags: Sequence[str], *, machine: str = "") -> ctypes.CDLL:
    """`source` as a library, built on first use into the user's cache directory.

    Args:
        flags: of the compiler; they and the source decide whether a library that is there is taken.
        machine: what else it depends on, such as the processor under ``-march=native``.

    Raises:
        NativeBuildError: see there.
    """
    key = hashlib.sha256(source.read_bytes() + repr((tuple(flags), machine)).encode()).hexdigest()[:16]
    library = _cache_directory() / f"{source.stem}-{key}.so"
    if not library.exists():
        _build(source, flags, library)
    return ctypes.CDLL(str(library))


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(base, "recsys_tpu")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        directory = Path(tempfile.gettempdir(), f"recsys_tpu-{os.getuid()}")
        directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():  # never load what another user could have put there
        raise NativeBuildError(
            f"{directory} belongs to another user: set XDG_CACHE_HOME to a folder of yours"
        )
    return directory


def _build(source: Path, flags: Sequence[str], library: Path) -> None:
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise NativeBuildError(
            f"building {source.name} needs a C compiler (or one named in CC): apt-get install gcc"
        )
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder, library.name)
        command = [*compiler.split(), *flags, str(source), "-o", str(built), "-lm"]
        try:
            run = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise NativeBuildError(f"the C compiler {compiler!r} cannot be run: {error}") from error
        if run.returncode:
            raise NativeBuildError(f"{' '.join(command)} failed:\n{run.stderr}")
        built.replace(library)  # atomic: ranks that start together may all build it
