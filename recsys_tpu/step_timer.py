"""Where a step's time goes: seconds per phase, averaged between two reports."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

PHASES = ("data", "sparse_forward", "dense_forward", "backward", "optimizer")


class StepTimer:
    """Sums wall time per phase; `synchronize` waits for the device, so that a phase owns its work.

    `mark` gives a context in which each phase runs, by its name (a profiler's).

    Waiting keeps a device from running ahead of the host, so on an asynchronous device only some steps
    are timed: set `active` for them.

    Attributes:
        current: the phase that is going on now, timed or not.
        finished: the phases that have come to their end at least once.
    """

    def __init__(
        self,
        synchronize: Callable[[], None],
        mark: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._synchronize, self._mark = synchronize, mark
        self._seconds: dict[str, float] = defaultdict(float)
        self._steps = 0
        self._all_seconds: dict[str, float] = defaultdict(float)
        self._all_steps = 0
        self.active = True
        self.current = "start"
        self.finished: set[str] = set()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body as part of `name`; a phase entered inside another is taken out of the outer one."""
        outer, self.current = self.current, name
        with self._mark(name):
            if not self.active:
                yield
                self._leave(name, outer)
                return
            self._synchronize()
            start = time.perf_counter()
            inner_before = sum(self._seconds.values())
            yield
            self._synchronize()
        inner = sum(self._seconds.values()) - inner_before
        self._seconds[name] += time.perf_counter() - start - inner
        self._leave(name, outer)

    def _leave(self, name: str, outer: str) -> None:
        self.finished.add(name)
        self.current = outer

    def step_done(self) -> None:
        """Count one step."""
        self._steps += self.active

    def report(self) -> dict[str, float]:
        """Milliseconds per step by phase since the last report; starts over."""
        steps = max(self._steps, 1)
        result = {name: 1e3 * self._seconds.get(name, 0.0) / steps for name in PHASES}
        for name, seconds in self._seconds.items():
            self._all_seconds[name] += seconds
        self._all_steps += self._steps
        self._seconds.clear()
        self._steps = 0
        return result

    def summary(self) -> dict[str, float]:
        """Milliseconds per step by phase over all reports so far."""
        return {name: 1e3 * self._all_seconds.get(name, 0.0) / max(self._all_steps, 1) for name in PHASES}
