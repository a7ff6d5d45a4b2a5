"""How a process reaches libtpu's compiler on a machine without a TPU.

The emulated device and libtpu are found through the same environment variable, so whatever compiles with
libtpu runs in a process of its own.  Imports neither torch nor JAX.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLES = {
    "TPU_SKIP_MDS_QUERY": "1",  # do not ask a metadata server which TPU this is
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several compilations at once
}
# What the caller's process set for another device; libtpu must not see it.
_FOREIGN_VARIABLES = ("TPU_LIBRARY_PATH", "XLA_FLAGS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def environment() -> dict[str, str]:
    """The environment of a subprocess that compiles with libtpu; this package is on its path."""
    inherited = {name: value for name, value in os.environ.items() if name not in _FOREIGN_VARIABLES}
    paths = [str(Path(__file__).parents[1]), inherited.get("PYTHONPATH", "")]
    return {
        **inherited,
        **VARIABLES,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
