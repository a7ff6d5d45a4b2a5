"""The packages that emulation is built from, at the versions it was proven with.

Emulation edits a C function table and calls one private function of torch_tpu, so a version it was not
proven with is refused rather than tried.
"""

from __future__ import annotations

import importlib.metadata

from recsys_tpu.emulation.errors import EmulationError

PROVEN = {"torch-tpu": "0.2.0", "lammps-jax-pjrt-cpu": "0.11.2", "pypjrt": "0.1.1"}
"""Distribution name -> version.  The plugin is XLA's CPU backend behind the PJRT C API; pypjrt gives the
layouts of that interface's structs."""

PJRT_MAJOR = 0
PJRT_MINOR = 115
"""Version of the PJRT C API that the proven plugin implements."""

INSTALL = "pip install 'recsys-tpu[emulation]'"


def problems() -> list[str]:
    """Why emulation cannot work with what is installed; empty when it can."""
    found = []
    for name, proven in PROVEN.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} is not installed (needed: {proven})")
            continue
        if version != proven:
            found.append(f"{name} is {version}; emulation is proven with {proven} only")
    return found


def check() -> None:
    """Raise EmulationError if a package is missing or of another version."""
    if found := problems():
        raise EmulationError(f"cannot emulate the tpu device: {'; '.join(found)}. Run: {INSTALL}")
