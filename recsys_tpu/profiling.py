"""A profile of a window of steps, by config (`runtime.profile`).

On every device the host is traced by torch's profiler: `trace.json.gz` opens in Perfetto or
chrome://tracing, `operators.txt` lists where the time went.  On a TPU the device is traced too, by
torch_tpu's XProf profiler (rung: no TPU was there to run it on; docs/reliability.md).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from recsys_tpu.runtime import Runtime

_ROWS = 40


class StepProfiler:
    """Traces the configured steps of this rank; outside them it costs nothing.

    Args:
        directory: of the run; traces go to ``profile/rank_<r>_steps_<first>-<last>/`` in it.
    """

    def __init__(self, runtime: Runtime, directory: Path) -> None:
        settings = runtime.settings.profile
        self._runtime, self._directory = runtime, directory
        self._first, self._last = settings.first_step, settings.last_step
        self._chosen = settings.first_step is not None and runtime.rank in settings.ranks
        self._open: ExitStack | None = None
        self._trace: Any = None

    def before(self, step: int, last_step: int) -> None:
        """Call before step number `step` (from 1); begins the window if it starts here.

        `last_step` is the last one of the run: a window that reaches over it ends with it.
        """
        if self._chosen and step == self._first:
            self._last = min(self._last, last_step)
            self._runtime.synchronize()
            self._open = ExitStack()
            folder = self._folder()
            folder.mkdir(parents=True, exist_ok=True)
            self._trace = self._open.enter_context(
                torch.profiler.profile(
                    activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, acc_events=True
                )
            )
            if self._runtime.kind == "tpu":
                self._open.enter_context(_device_trace(folder, self._runtime.rank))

    def after(self, step: int) -> Path | None:
        """Call after step number `step`; ends the window if it ends here and returns where it was written."""
        if self._open is None or step < self._last:
            return None
        self._runtime.synchronize()
        self._open.close()
        self._open = None
        folder = self._folder()
        self._trace.export_chrome_trace(str(folder / "trace.json.gz"))
        table = self._trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=_ROWS)
        (folder / "operators.txt").write_text(table + "\n", encoding="utf-8")
        self._trace = None
        return folder

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Marks a phase of the step in the trace."""
        return nullcontext() if self._open is None else torch.profiler.record_function(f"phase: {name}")

    def close(self) -> None:
        """End a window that an error has cut short; nothing is written."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _folder(self) -> Path:
        steps = f"steps_{self._first}-{self._last}"
        return self._directory / "profile" / f"rank_{self._runtime.rank}_{steps}"


def _device_trace(folder: Path, rank: int) -> AbstractContextManager[Any]:
    profiler: Any = torch.tpu.profiler  # type: ignore[attr-defined]
    handler = profiler.xprof_trace_handler(str(folder), worker_rank=str(rank))
    trace: AbstractContextManager[Any] = profiler.profile(
        activities=[profiler.ProfilerActivity.TPU], on_trace_ready=handler
    )
    return trace
