"""A run's device, process group, precision and compilation policy in one object."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from recsys_tpu.runtime import activation, compilation, process_group
from recsys_tpu.runtime.settings import DeviceKind, RuntimeConfig

Function = TypeVar("Function", bound=Callable[..., Any])

_RUNG: dict[DeviceKind, str] = {
    "cpu": "reference: torch on the CPU",
    "tpu-emulated": "emulated device: torch_tpu on XLA's CPU plugin, no TPU involved",
    "tpu": "TPU",
}
_DISTRIBUTIONS = ("torch", "torchrec", "fbgemm-gpu-cpu", "torch-tpu", "libtpu", "jax")


class Runtime:
    """Where and how a run computes.  Make one with `Runtime.start` and `close` it (or use `with`).

    Attributes:
        settings: the config it was started from.
        kind: cpu, tpu or tpu-emulated.
        device: the torch device of this rank.
        rank, world_size, local_rank, local_world_size: this process's place in the run.
        process_group: the default process group; collectives take tensors on `device` and on the CPU.
        compile_watch: counts compilations; call its `step_done()` after every step.
    """

    def __init__(
        self,
        settings: RuntimeConfig,
        kind: DeviceKind,
        ranks: process_group.Ranks,
        group: dist.ProcessGroup,
    ) -> None:
        self.settings = settings
        self.kind = kind
        self.device = torch.device("cpu") if kind == "cpu" else torch.device("tpu", 0)
        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self.local_rank = ranks.local_rank
        self.local_world_size = ranks.local_world_size
        self.process_group = group
        self.compile_watch = compilation.CompileWatch(
            settings.warmup_steps, _compiled_programs(kind), self.synchronize if kind != "cpu" else None
        )

    @classmethod
    def start(cls, settings: RuntimeConfig | None = None) -> Runtime:
        """Activate the device if that is still to be done, join the process group, set precisions.

        Raises:
            ActivationError: the device cannot be had in this process.
            ValueError: torchrun's environment is inconsistent.
            RuntimeError: another Runtime is open.
        """
        settings = settings or RuntimeConfig()
        kind = activation.activate(settings.device, compile_cache=settings.compile_cache)
        ranks = process_group.Ranks.from_environment()
        group = process_group.start(kind, ranks, timeout_s=settings.compile_timeout_s)
        torch.set_float32_matmul_precision(settings.matmul_precision)
        torch.use_deterministic_algorithms(settings.deterministic)
        return cls(settings, kind, ranks, group)

    def compile(self, function: Function) -> Function:
        """`function` or module under torch.compile for this device, or unchanged with `compile: false`.

        Raises:
            CompilerMissingError: on the CPU without a C++ compiler.
        """
        return compilation.compile_for(self.kind, function) if self.settings.compile else function

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Context of the dense forward: bfloat16 compute with float32 weights, or plain float32."""
        if self.settings.precision == "fp32":
            yield
            return
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            yield

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.kind != "cpu":
            torch.accelerator.synchronize()

    def describe(self) -> dict[str, Any]:
        """What the header of a run states."""
        return {
            "device": self.kind,
            "proof": _RUNG[self.kind],
            "world_size": self.world_size,
            "precision": self.settings.precision,
            "matmul_precision": self.settings.matmul_precision,
            "compile": self.settings.compile,
            "deterministic": self.settings.deterministic,
            "versions": {name: _version(name) for name in _DISTRIBUTIONS if _version(name)},
            "host": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        }

    def close(self) -> None:
        """Leave the process group.  Closing twice is harmless."""
        if dist.is_initialized() and dist.group.WORLD is self.process_group:
            dist.destroy_process_group()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _compiled_programs(kind: DeviceKind) -> Callable[[int], list[str]] | None:
    if kind != "tpu-emulated":
        return None
    from recsys_tpu import emulation

    return emulation.compiled_programs


def _version(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None
