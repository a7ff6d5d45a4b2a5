"""Choose the device before `import torch`, because torch loads its device backends while importing.

`import torch` loads torch_tpu by entry point; whether it does, and which PJRT library it then talks to,
is decided by environment variables that it reads once.  `activate` sets them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from recsys_tpu.errors import UserError
from recsys_tpu.runtime.settings import CompileCacheConfig, DeviceChoice, DeviceKind

_GOOGLE_PCI_VENDOR = "0x1ae0"
_TPU_PCI_DEVICES = {
    "0x005e": "TPU v4",
    "0x0062": "TPU v5p",
    "0x0063": "TPU v5e",
    "0x006f": "TPU v6e",
    "0x0076": "TPU7x",
}
_PCI_ROOT = Path("/sys/bus/pci/devices")

_active: DeviceKind | None = None


class ActivationError(UserError, RuntimeError):
    """The device cannot be activated (any more) in this process; the message says what to do."""


def tpus_on_pci_bus(root: Path = _PCI_ROOT) -> list[str]:
    """Names of the TPUs that sit on the PCI bus, without touching them.

    The identifiers are those of torch_tpu's `hardware.py`.
    """
    names = []
    for device in sorted(root.iterdir()) if root.is_dir() else []:
        try:
            vendor = (device / "vendor").read_text().strip()
            model = (device / "device").read_text().strip()
        except OSError:
            continue
        if vendor == _GOOGLE_PCI_VENDOR and model in _TPU_PCI_DEVICES:
            names.append(_TPU_PCI_DEVICES[model])
    return names


def resolve(device: DeviceChoice) -> DeviceKind:
    """The kind of device that `device` means on this machine.

    Raises:
        ValueError: `device` is no known choice.
    """
    if device == "auto":
        return "tpu" if tpus_on_pci_bus() else "cpu"
    if device in ("cpu", "tpu", "tpu-emulated"):
        return device
    raise ValueError(f"runtime.device is {device!r}; expected one of auto, cpu, tpu, tpu-emulated")


def active() -> DeviceKind | None:
    """The kind activated in this process, or None."""
    return _active


def activate(device: DeviceChoice = "auto", *, compile_cache: CompileCacheConfig | None = None) -> DeviceKind:
    """Make `device` the one that `import torch` will find, and return its kind.

    Call it before `import torch`.  Calling it again with a device of the same kind does nothing; in a
    process that emulates the `tpu` device, `cpu` is available too.

    Raises:
        ValueError: `device` is no known choice.
        ActivationError: torch was imported already, another device is active, or what the device needs
            is not installed or not there.
    """
    global _active
    kind = resolve(device)
    if _active == kind or (_active == "tpu-emulated" and kind == "cpu"):
        return kind
    _refuse_if_too_late(kind)
    _set_cache_environment(compile_cache or CompileCacheConfig())
    # OpenMP workers that spin while they wait take the cores from other ranks and from the reader
    # (seen: a step 10 times slower on two busy cores); libgomp reads this once, when torch loads it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # c10d's notices (no hooks, no device id) say nothing that a user can act on; errors are kept
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if kind == "cpu":
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    elif kind == "tpu":
        _activate_tpu()
    else:
        _activate_emulation()
    _active = kind
    return kind


def _refuse_if_too_late(kind: DeviceKind) -> None:
    if _active is not None:
        raise ActivationError(
            f"this process has activated device {_active!r} and cannot change to {kind!r}: "
            "start another process for it"
        )
    if "torch" not in sys.modules:
        return
    if kind == "cpu" and "torch_tpu" not in sys.modules:
        return
    if kind == "tpu-emulated" and "recsys_tpu.emulation" in sys.modules:
        from recsys_tpu import emulation

        if emulation.is_active():
            return
    raise ActivationError(
        f"cannot activate device {kind!r}: torch is imported already, and it chooses its device backends "
        "while importing. Call recsys_tpu.runtime.activation.activate() before the first `import torch` "
        "(and before anything that imports torch)"
    )


def _activate_tpu() -> None:
    if importlib.util.find_spec("torch_tpu") is None:
        raise ActivationError("device 'tpu' needs torch-tpu: pip install 'recsys-tpu[tpu]'")
    if not tpus_on_pci_bus():
        raise ActivationError(
            "device 'tpu' asked for, but no TPU is on the PCI bus of this machine. "
            "Use runtime.device=tpu-emulated (pip install 'recsys-tpu[emulation]') or runtime.device=cpu"
        )
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
    # TorchRec calls torch.tpu.is_available(), which torch_tpu refuses to user code without this.
    os.environ.setdefault("TORCH_TPU_ALLOW_LEGACY_DEVICE_APIS", "1")


def _activate_emulation() -> None:
    from recsys_tpu import emulation

    try:
        emulation.activate()
    except emulation.EmulationError as error:
        raise ActivationError(str(error)) from error


def _set_cache_environment(cache: CompileCacheConfig) -> None:
    if not cache.share_between_local_ranks:
        os.environ["TORCH_TPU_TIER2_COMPILATION_CACHE"] = "0"
    if cache.directory is not None:
        os.environ["TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"] = cache.directory
    if cache.inductor_directory is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache.inductor_directory)
    if cache.jax_directory is not None:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache.jax_directory)
