"""Host work ahead of the step that needs it: exchange and preparation of the next batches' ids, on a thread.

One thread a module, first come, first served: every rank issues the collectives of a module's host group
in the same order, whatever its main thread is doing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Input = TypeVar("Input")
Output = TypeVar("Output")


@dataclass
class HostTimes:
    """Seconds of host preparation, and of the steps' waiting for it."""

    prepared_s: float = 0.0
    waited_s: float = 0.0

    @property
    def overlap(self) -> float:
        """Share of the preparation that ran beside the steps, 0 to 1."""
        return max(0.0, 1 - self.waited_s / self.prepared_s) if self.prepared_s else 0.0


class Ahead(Generic[Input, Output]):
    """Runs `work` on inputs that were announced with `start`; `take` returns the result of the same object.

    Without `start`, `take` does the work itself.  An exception of the work is raised by `take`.
    """

    def __init__(self, work: Callable[[Input], Output]) -> None:
        self._work = work
        self._jobs: queue.SimpleQueue[tuple[Input, Future[Output]] | None] = queue.SimpleQueue()
        # The input is kept with its result: its id stays its own for as long.
        self._started: dict[int, tuple[Input, Future[Output]]] = {}
        self._thread: threading.Thread | None = None
        self.times = HostTimes()

    def start(self, value: Input) -> None:
        """Begins the work on `value` in the background, after what was started before."""
        if id(value) in self._started:
            raise ValueError("this batch is being prepared already; announce each batch once")
        self._started[id(value)] = (value, self._submit(value))

    def take(self, value: Input) -> Output:
        """The result for `value`, waiting if it isn't there yet."""
        began = time.perf_counter()
        try:
            if id(value) in self._started:
                return self._started.pop(id(value))[1].result()
            if self._thread is None:
                return self._timed(value)
            return self._submit(value).result()  # behind what was started: ranks keep one order
        finally:
            self.times.waited_s += time.perf_counter() - began

    def put(self, value: Input, result: Output) -> None:
        """Makes `result` what the next `take` of `value` returns."""
        done: Future[Output] = Future()
        done.set_result(result)
        self._started[id(value)] = (value, done)

    def close(self, timeout_s: float | None = None) -> None:
        """Ends the thread after the work that was started, and forgets its results.

        Raises TimeoutError when that takes longer than `timeout_s`: another rank did not take part.
        """
        if self._thread is None:
            return
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the preparation of {len(self._started)} batches did not end in {timeout_s} s: "
                "did every rank start the same batches?"
            )
        self._thread = None
        self._started.clear()

    def _submit(self, value: Input) -> Future[Output]:
        if self._thread is None:
            # A daemon: a rank that fails must be able to exit while a collective waits for the others.
            self._thread = threading.Thread(target=self._run, name="host-preparation", daemon=True)
            self._thread.start()
        future: Future[Output] = Future()
        self._jobs.put((value, future))
        return future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            value, future = job
            try:
                future.set_result(self._timed(value))
            except BaseException as error:
                future.set_exception(error)
            del job, value, future

    def _timed(self, value: Input) -> Output:
        began = time.perf_counter()
        try:
            return self._work(value)
        finally:
            self.times.prepared_s += time.perf_counter() - began


def modules_that_prepare(model: Any) -> list[Any]:
    """The sharded modules of a model, in an order that is the same on every rank."""
    return [module for module in model.modules() if isinstance(getattr(module, "ahead", None), Ahead)]
