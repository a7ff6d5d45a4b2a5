"""SIGTERM ends a run with a checkpoint: machines that are taken away (TPU VMs, spot nodes) send it first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from recsys_tpu.runtime.process_group import new_host_group


class StopVote:
    """Whether any rank was told to stop; all ranks agree on the step after which they do.

    Ranks get the signal at different moments, and some may not get it at all.  So after every step each
    rank sends its flag to all others in the background, and looks at the sum one step later: no step waits
    for it, and every rank sees the same sum at the same step.
    """

    def __init__(self) -> None:
        """Collective: makes a process group of its own."""
        self._asked = threading.Event()
        self._alone = dist.get_world_size() == 1
        self._group = None if self._alone else new_host_group()
        self._votes: torch.Tensor | None = None
        self._sent: dist.Work | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM as a request to stop; only the main thread of a process can do that."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _on_signal(self, _: int, __: FrameType | None) -> None:
        self._asked.set()

    def agreed(self) -> bool:
        """Call after every step; collective. True on every rank at the same step, once any was asked."""
        if self._alone:
            return self._asked.is_set()
        stop = False
        if self._sent is not None and self._votes is not None:
            self._sent.wait()
            stop = bool(self._votes.item())
        self._votes = torch.tensor([self._asked.is_set()], dtype=torch.int32)
        self._sent = dist.all_reduce(self._votes, group=self._group, async_op=True)
        return stop
