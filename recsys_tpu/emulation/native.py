"""Loads `shim.c`, built on first use."""

from __future__ import annotations

import ctypes
from pathlib import Path

from recsys_tpu.emulation.errors import EmulationError
from recsys_tpu.native import NativeBuildError, load_library

_SOURCE = Path(__file__).with_name("shim.c")
_FLAGS = ("-O2", "-shared", "-fPIC", "-std=c11")


def load_shim() -> ctypes.CDLL:
    """The shim as a library.

    Raises:
        EmulationError: there is no C compiler, or it fails.
    """
    try:
        return load_library(_SOURCE, _FLAGS)
    except NativeBuildError as error:
        raise EmulationError(f"emulating the tpu device: {error}") from error
