"""Run tasks in worker processes, with progress, and stop them all at the first error."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import TypeVar

Report = Callable[[int], None]
_Task = TypeVar("_Task")

_POLL_SECONDS = 0.2
_counter: Synchronized[int]
_stop: Event


class WorkerDied(RuntimeError):
    """A worker process was killed from outside."""


class _Stopped(Exception):
    """Raised inside a worker when another task failed."""


def run_tasks(
    function: Callable[[_Task, Report], None], tasks: Sequence[_Task], *, jobs: int, report: Report
) -> None:
    """Call ``function(task, report)`` for every task, `jobs` at a time; `report` adds to the progress.

    With one job everything runs in this process.

    Raises:
        WorkerDied: a worker was killed.
        Exception: what the first failing task raised.
    """
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        for task in tasks:
            function(task, report)
        return
    # Not fork: the parent has threads (Arrow, the progress bar), which a forked child would lack.
    context = multiprocessing.get_context("spawn")
    counter: Synchronized[int] = context.Value("q", 0)
    stop = context.Event()
    reported = 0
    with ProcessPoolExecutor(jobs, context, initializer=_start_worker, initargs=(counter, stop)) as executor:
        futures = [executor.submit(_run_task, function, task) for task in tasks]
        try:
            pending = set(futures)
            while pending:
                done, pending = wait(pending, timeout=_POLL_SECONDS, return_when=FIRST_EXCEPTION)
                report(counter.value - reported)
                reported = counter.value
                for future in done:
                    future.result()
        except BrokenProcessPool:
            raise WorkerDied(
                "a worker process was killed, perhaps for lack of memory; run the same command again to "
                "continue, with fewer --jobs if it happens again"
            ) from None
        finally:
            stop.set()
            executor.shutdown(wait=True, cancel_futures=True)


def _start_worker(counter: Synchronized[int], stop: Event) -> None:
    global _counter, _stop
    _counter, _stop = counter, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which stops its workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # the parent was killed: nobody would take the results


def _run_task(function: Callable[[_Task, Report], None], task: _Task) -> None:
    function(task, _report)


def _report(amount: int) -> None:
    if _stop.is_set():
        raise _Stopped
    with _counter.get_lock():
        _counter.value += amount
