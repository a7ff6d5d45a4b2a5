"""torch.compile for every device, and the watch that no step recompiles once warm."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

import torch

from recsys_tpu.errors import UserError
from recsys_tpu.runtime.settings import DeviceKind

Function = TypeVar("Function", bound=Callable[..., Any])

log = logging.getLogger(__name__)


class CompilerMissingError(UserError, RuntimeError):
    """torch.compile on the CPU needs a C++ compiler and found none."""


def compile_for(kind: DeviceKind, function: Function) -> Function:
    """`function` (or module) under torch.compile with static shapes, for devices of `kind`.

    On the CPU the backend is inductor, named outright because torch_tpu, where loaded, makes another
    the default.

    Raises:
        CompilerMissingError: no C++ compiler on a CPU run.
    """
    if kind == "cpu":
        _require_cpp_compiler()
        return cast(Function, torch.compile(function, backend="inductor", dynamic=False))
    return cast(Function, torch.compile(function, dynamic=False))


def _require_cpp_compiler() -> None:
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise CompilerMissingError(
            "torch.compile on the CPU builds C++ and found no compiler: install g++ or clang++ "
            "(or name one in CXX), or set runtime.compile=false to run the dense towers eagerly"
        ) from error


@dataclass(frozen=True)
class Compilation:
    """One compilation that happened while the run was under way."""

    step: int
    """The step in which it happened, counted from 1."""
    function: str
    """`name (file:line)` of what was compiled; "device program" for an XLA compilation alone."""
    cause: str
    """`first`, `shape`, `dtype`, `guard`, `graph break` or `device program`."""
    detail: str
    """The guard that failed, as Dynamo words it."""
    seconds: float

    def __str__(self) -> str:
        return f"step {self.step}: {self.function} compiled, cause {self.cause}: {self.detail or 'no detail'}"


class CompileWatch:
    """Counts compilations step by step; those after the warm-up are faults and are warned about.

    Args:
        warmup_steps: steps in which compilation is expected.
        compiled_programs: names of the programs that the device's own compiler has built after the first
            so many, where that can be asked (the emulated device).  They catch eager operators that meet
            a new shape, which Dynamo does not see.
        synchronize: waits for the device.  Programs are built in the background, and the host runs ahead:
            without it those of the warm-up would be found in later steps.
    """

    def __init__(
        self,
        warmup_steps: int,
        compiled_programs: Callable[[int], list[str]] | None = None,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self.warmup_steps = warmup_steps
        self.warmup: list[Compilation] = []
        self.after_warmup: list[Compilation] = []
        self.first_step_compile_s = 0.0
        self._step = 0
        self._compiled_programs = compiled_programs
        self._synchronize = synchronize
        self._programs_seen = len(compiled_programs(0)) if compiled_programs else 0
        self._last_seen = _last(_dynamo_records())
        self._graph_breaks = _graph_break_reasons()
        self._functions: dict[str | None, str] = {}
        _notice_compilations()

    @property
    def compiling(self) -> bool:
        """Whether torch.compile is at work now, in any thread of this process."""
        return _compiling.is_set()

    def step_done(self) -> list[Compilation]:
        """Call after each step; returns (and warns about) compilations after the warm-up."""
        self._step += 1
        if self._step <= self.warmup_steps and self._synchronize:
            self._synchronize()
        found = self._new_dynamo() + self._new_graph_breaks()
        found += self._new_device_programs(any_dynamo=bool(found))
        if self._step == 1:
            self.first_step_compile_s = sum(c.seconds for c in found)
        if self._step <= self.warmup_steps:
            self.warmup += found
            return []
        for compilation in found:
            log.warning("compilation after warm-up: %s", compilation)
        self.after_warmup += found
        return found

    def expect_so_far(self) -> None:
        """What was compiled since the last step was expected: evaluations and logs have their own shapes."""
        self._last_seen = _last(_dynamo_records())
        self._graph_breaks = _graph_break_reasons()
        if self._compiled_programs:
            self._programs_seen += len(self._compiled_programs(self._programs_seen))

    def _new_dynamo(self) -> list[Compilation]:
        records = _dynamo_records()
        fresh = []
        for record in reversed(records):
            if record is self._last_seen:
                break
            fresh.append(record)
        self._last_seen = _last(records)
        return [self._from_record(record) for record in reversed(fresh)]

    def _from_record(self, record: Any) -> Compilation:
        reason = record.recompile_reason or ""
        if record.co_name is None:  # a backward is compiled later, under the id of its forward
            where = f"backward of {self._functions.get(record.compile_id, 'an earlier graph')}"
        else:
            where = f"{record.co_name} ({record.co_filename}:{record.co_firstlineno})"
            self._functions[record.compile_id] = where
        seconds = (record.duration_us or 0) / 1e6
        return Compilation(self._step, where, _cause(reason), reason, seconds)

    def _new_graph_breaks(self) -> list[Compilation]:
        reasons = _graph_break_reasons()
        new = [r for r, count in reasons.items() if count > self._graph_breaks.get(r, 0)]
        self._graph_breaks = reasons
        return [Compilation(self._step, "torch.compile", "graph break", r, 0.0) for r in new]

    def _new_device_programs(self, *, any_dynamo: bool) -> list[Compilation]:
        if self._compiled_programs is None:
            return []
        names = self._compiled_programs(self._programs_seen)
        self._programs_seen += len(names)
        if not names or any_dynamo:  # a Dynamo compilation explains them
            return []
        detail = f"an operator outside torch.compile met a new shape or dtype: {', '.join(names)}"
        return [Compilation(self._step, "device program", "device program", detail, 0.0)]


_compiling = threading.Event()


@cache
def _notice_compilations() -> None:
    from torch._dynamo.callback import on_compile_end, on_compile_start

    on_compile_start(lambda _: _compiling.set())
    on_compile_end(lambda _: _compiling.clear())


def _dynamo_records() -> list[Any]:
    from torch._dynamo.utils import get_compilation_metrics

    return get_compilation_metrics()


def _last(records: list[Any]) -> Any:
    return records[-1] if records else None


def _graph_break_reasons() -> dict[str, int]:
    from torch._dynamo.utils import counters

    return dict(counters["graph_break"])


def _cause(reason: str) -> str:
    if not reason:
        return "first"
    if "dtype mismatch" in reason:
        return "dtype"
    if "size mismatch" in reason or "stride mismatch" in reason or "rank mismatch" in reason:
        return "shape"
    return "guard"
