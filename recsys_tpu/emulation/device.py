"""Activation: the one function that makes `torch.device("tpu")` work here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from recsys_tpu.emulation import quiet, requirements
from recsys_tpu.emulation.errors import EmulationError
from recsys_tpu.emulation.plugin import Plugin, library_path

# XLA's CPU compiler turns HLO's associative `scan` (cumsum, embedding_bag, repeat_interleave,
# segment_reduce, ...) into a reduce-window that its own code generator then aborts on.  Without that
# rewrite the scan becomes a loop, which works.
_SCAN_FLAG = "--xla_disable_hlo_passes=associative-scan-rewriter"

_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")

_plugin: Plugin | None = None


def is_active() -> bool:
    """Whether this process emulates the `tpu` device."""
    return _plugin is not None


def compilations() -> int:
    """How many programs XLA has compiled for the emulated device of this process.

    Raises:
        EmulationError: emulation is not active.
    """
    return _active_plugin().compilations


def compiled_programs(since: int) -> list[str]:
    """Names of the programs compiled after the first `since`; "" for those too long ago to be known.

    Raises:
        EmulationError: emulation is not active.
    """
    return _active_plugin().programs(since)


def _active_plugin() -> Plugin:
    if _plugin is None:
        raise EmulationError("no device is emulated in this process: call recsys_tpu.emulation.activate()")
    return _plugin


def activate(*, rank: int = 0, slice_size: int = 1) -> None:
    """Make the `tpu` device available, computed by XLA on the CPU.  Imports torch and torch_tpu.

    Call it before `import torch`; calling it again does nothing.  Processes started by torchrun each get
    their own emulated chip; their collectives go through `recsys_tpu.emulation.process_group`.

    Args:
        rank: with `slice_size`, which device of the slice this process owns.
        slice_size: devices of the slice that torch_tpu is shown.  More than one is for lowering
            programs with collectives (ahead-of-time compilation): such programs cannot run here.

    Raises:
        EmulationError: torch is already imported, or a package is missing or of an unproven version.
        ValueError: `rank` is outside the slice.
    """
    global _plugin
    if _plugin is not None:
        return
    if not 0 <= rank < slice_size:
        raise ValueError(f"rank {rank} is outside a slice of {slice_size} devices")
    if "torch" in sys.modules:
        raise EmulationError(
            "cannot emulate the tpu device: torch is imported already. Call "
            "recsys_tpu.emulation.activate() before the first `import torch`"
        )
    requirements.check()
    path = library_path()
    _set_environment(str(path))
    _plugin = Plugin(path, rank=rank, slice_size=slice_size)
    quiet.filter_warnings()
    with quiet.startup(), _outside_any_launch():
        import torch
        import torch_tpu  # noqa: F401
        from torch_tpu import _loader

        _loader._init_device("tpu")  # torch_tpu itself does this only when a TPU is on the PCI bus
        torch.ones(1, device="tpu").cpu()


def _set_environment(library: str) -> None:
    os.environ["TPU_LIBRARY_PATH"] = library
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # many ranks on one host
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TORCH_TPU_ALLOW_LEGACY_DEVICE_APIS", "1")  # torchrec calls torch.tpu.is_available
    quiet.set_log_level()
    flags = os.environ.get("XLA_FLAGS", "")
    if _SCAN_FLAG not in flags:
        if "--xla_disable_hlo_passes=" in flags:
            flags = flags.replace("--xla_disable_hlo_passes=", f"{_SCAN_FLAG},")
        else:
            flags = f"{flags} {_SCAN_FLAG}".strip()
        os.environ["XLA_FLAGS"] = flags


@contextmanager
def _outside_any_launch() -> Iterator[None]:
    """Hide torchrun's variables while the device starts: with them torch_tpu wants a real slice."""
    hidden = {name: os.environ.pop(name) for name in _LAUNCH_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
