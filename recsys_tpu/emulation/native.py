"""Builds `shim.c` once per user and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from recsys_tpu.emulation.errors import EmulationError

_SOURCE = Path(__file__).with_name("shim.c")
_FLAGS = ("-O2", "-shared", "-fPIC", "-std=c11")


def load_shim() -> ctypes.CDLL:
    """The shim as a library, built on first use into the user's cache directory.

    Raises:
        EmulationError: there is no C compiler, or it fails.
    """
    source = _SOURCE.read_bytes()
    key = hashlib.sha256(source + repr(_FLAGS).encode()).hexdigest()[:16]
    library = _cache_directory() / f"emulation-{key}.so"
    if not library.exists():
        _build(library)
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
        raise EmulationError(f"{directory} belongs to another user: set XDG_CACHE_HOME to a folder of yours")
    return directory


def _build(library: Path) -> None:
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise EmulationError(
            "emulating the tpu device needs a C compiler (or one named in CC): apt-get install gcc"
        )
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder, library.name)
        command = [*compiler.split(), *_FLAGS, str(_SOURCE), "-o", str(built)]
        try:
            run = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise EmulationError(f"the C compiler {compiler!r} cannot be run: {error}") from error
        if run.returncode:
            raise EmulationError(f"{' '.join(command)} failed:\n{run.stderr}")
        built.replace(library)  # atomic: ranks that start together may all build it
