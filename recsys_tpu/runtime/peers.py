"""Which rank is missing when a collective fails, and no rank that outlives the run.

A collective that times out says only that it timed out.  So every rank publishes, from a thread, the step
and phase it is in and the last collective it entered; a rank whose collective fails reads what the others
published and names the one that is not there.  It also leaves a note, and a rank that is stuck elsewhere
(so that it would never fail by itself) ends when it finds the note.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from recsys_tpu.errors import LostRankError, UserError

_INTERVAL_S = 1.0
_SILENT_S = 5.0
_GRACE_S = 8.0
_NOTE = "peers/failed"
_GONE = "is gone or stopped"


@dataclass(frozen=True)
class Place:
    """Where a rank is: its step, the phase of it, its last collective, and when it said so."""

    step: int
    phase: str
    collective: str
    collectives: int
    time: float

    def __str__(self) -> str:
        return f"step {self.step}, phase {self.phase}"


class PeerWatch:
    """One per rank; does nothing in a world of one.

    Args:
        where: gives (step, phase) of this rank; called from a thread.
        interval_s: seconds between two publications.
        grace_s: seconds that a rank has to end by itself once another one has failed.
    """

    def __init__(
        self,
        where: Callable[[], tuple[int, str]],
        *,
        interval_s: float = _INTERVAL_S,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._where, self._interval_s, self._grace_s = where, interval_s, grace_s
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._stopped = threading.Event()
        self._failed = False
        self._thread: threading.Thread | None = None
        if self._world_size > 1:
            # a connection of its own: the main thread may sit in a call on the other one
            self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            self._publish()
            self._thread = threading.Thread(target=self._run, name="peer-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching; after a failure the watch goes on until the process has ended."""
        if self._failed:
            return
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * self._interval_s)

    def explain(self, error: BaseException) -> LostRankError | None:
        """The error to raise in place of `error` if another rank is behind it; tells the other ranks.

        Takes up to a few seconds: a rank that has died is known by its silence.
        """
        if self._world_size == 1 or isinstance(error, UserError):
            return None
        mine = self._place()
        time.sleep(_SILENT_S + self._interval_s)  # by now a living rank has published again
        findings = [
            finding
            for rank in range(self._world_size)
            if rank != self._rank and (finding := self._finding(rank, mine))
        ]
        if not _is_lost_connection(error) and not any(_GONE in finding for finding in findings):
            return None
        message = (
            f"rank {self._rank} waited in vain in {mine.collective}, step {mine.step}, phase {mine.phase}: "
            f"{'; '.join(findings) or 'every other rank is alive and at the same place'}. "
            "Start again with train.resume=auto"
        )
        self.fail(message)
        return LostRankError(message)

    def fail(self, message: str) -> None:
        """Tell all ranks why this one ends; those that are stuck end too, and this one at the latest then."""
        if self._world_size == 1:
            return
        self._failed = True
        try:
            if not self._store.check([_NOTE]):
                self._store.set(_NOTE, f"rank {self._rank}: {message}")
        except RuntimeError:
            pass  # rank 0, which keeps the notes, is gone: the others know by that

    def _finding(self, rank: int, mine: Place) -> str | None:
        try:
            key = f"peers/{rank}"
            if not self._store.check([key]):
                return f"rank {rank} never started"
            place = Place(**json.loads(self._store.get(key)))
        except RuntimeError:
            return "rank 0 is gone, and with it what the others said"
        silent = time.time() - place.time
        if silent > _SILENT_S:
            return f"rank {rank} {_GONE}: silent for {silent:.0f} s, last at {place}"
        if (place.step, place.collectives) != (mine.step, mine.collectives) or place.phase != mine.phase:
            return f"rank {rank} is alive, but at {place} (last collective: {place.collective})"
        return None

    def _place(self) -> Place:
        step, phase = self._where()
        collective, count = last_collective()
        return Place(step, phase, collective, count, time.time())

    def _publish(self) -> None:
        self._store.set(f"peers/{self._rank}", json.dumps(asdict(self._place())))

    def _run(self) -> None:
        reason = None
        while reason is None:
            if self._stopped.wait(self._interval_s):
                return
            try:
                self._publish()
                if self._store.check([_NOTE]):
                    reason = self._store.get(_NOTE).decode()
            except RuntimeError:
                reason = "rank 0 is gone"
        if self._stopped.wait(self._grace_s):
            return
        step, phase = self._where()
        stuck = "and does not come to its end" if self._failed else f"where it is stuck: {reason}"
        text = f"error: rank {self._rank} ends at step {step}, phase {phase}, {stuck}"
        print(text, file=sys.stderr, flush=True)
        os._exit(LostRankError.exit_status)  # the main thread does not come back from where it is


def last_collective() -> tuple[str, int]:
    """Name and shapes of the collective that this process entered last, and how many there were.

    From torch's flight recorder, which knows gloo; another backend gives "an unrecorded collective".
    """
    try:
        dump = torch._C._distributed_c10d._dump_fr_trace_json  # type: ignore[attr-defined]
        record = json.loads(dump())
        entries = record.get("entries", [])
        last = entries[-1]
        shapes = " ".join(str(shape) for shape in last["input_sizes"])
        return f"{last['profiling_name']} {shapes} of group {last['process_group'][0]}", int(
            last["record_id"]
        )
    except (AttributeError, RuntimeError, ValueError, LookupError, TypeError):
        return "an unrecorded collective", -1


def _is_lost_connection(error: BaseException) -> bool:
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError):
        return True
    # gloo's errors come as plain RuntimeErrors
    signs = ("Timed out waiting", "closed by peer", "reset by peer", "Broken pipe")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
