"""Where every rank of a run is, told through the run's key-value store, and what that says of a failure."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Literal

import psutil
import torch
import torch.distributed as dist

Patience = Literal["short", "while busy", "long"]
"""How long a rank may stay at a place: longer where waiting is normal, or as long as it computes."""

_NOTE = "peers/failed"


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        step: the step it is in, counted from 1.
        phase: the part of the step.
        patience: how long it may stay here.
        collective: the last collective that it entered, and with `collectives` which one that was.
        still_s: seconds since it came here, by its own clock.
        busy: processor time it used since it said so last, over the time that passed.
        beat: how often it has said so; a rank whose beat stands still is gone or stopped.
        host, pid: its process, with `started` to tell it from a later one of the same number.
        done: it has left the run in good order.
    """

    step: int
    phase: str
    patience: Patience
    collective: str
    collectives: int
    still_s: float
    busy: float
    beat: int
    host: str
    pid: int
    started: float
    done: bool = False

    def __str__(self) -> str:
        return f"step {self.step}, phase {self.phase}"

    def same_as(self, other: Place) -> bool:
        """Whether nothing has moved between the two."""
        mine, theirs = ((place.step, place.phase, place.collectives, place.done) for place in (self, other))
        return mine == theirs


class Board:
    """What the ranks of a run tell each other, over a connection of its own to the run's store.

    The main thread may sit in a call on the other connection.
    """

    def __init__(self) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]

    def publish(self, place: Place) -> None:
        """
        Raises:
            RuntimeError: rank 0, which keeps the store, is gone.
        """
        self._store.set(f"peers/{self._rank}", json.dumps(asdict(place)))

    def others(self) -> dict[int, Place | None]:
        """What every other rank said last; None where it has said nothing.

        Raises:
            RuntimeError: rank 0, which keeps the store, is gone.
        """
        found: dict[int, Place | None] = {}
        for rank in range(self._world_size):
            if rank != self._rank:
                key = f"peers/{rank}"
                there = self._store.check([key])
                found[rank] = Place(**json.loads(self._store.get(key))) if there else None
        return found

    def note(self) -> str | None:
        """Why the run ends, if a rank has said so."""
        return self._store.get(_NOTE).decode() if self._store.check([_NOTE]) else None

    def leave_note(self, text: str) -> None:
        """Say why the run ends; the first rank to say so is believed."""
        if self.note() is None:
            self._store.set(_NOTE, text)


class Whereabouts:
    """Makes this rank's places: knows since when it has not moved, and how busy it is."""

    def __init__(self) -> None:
        self._host, self._process = socket.gethostname(), psutil.Process()
        self._beat = 0
        self._last: Place | None = None
        self._since = self._said = time.monotonic()
        self._processor_s = time.process_time()
        self._lock = threading.Lock()

    def place(self, step: int, phase: str, patience: Patience, *, done: bool = False) -> Place:
        """This rank's place now; any thread may ask."""
        collective, count = last_collective()
        with self._lock:
            now, processor_s = time.monotonic(), time.process_time()
            self._beat += 1
            place = Place(
                step=step,
                phase=phase,
                patience=patience,
                collective=collective,
                collectives=count,
                still_s=0.0,
                busy=(processor_s - self._processor_s) / max(now - self._said, 1e-3),
                beat=self._beat,
                host=self._host,
                pid=self._process.pid,
                started=self._process.create_time(),
                done=done,
            )
            if self._last is None or not place.same_as(self._last):
                self._since = now
            self._last, self._said, self._processor_s = place, now, processor_s
            return replace(place, still_s=now - self._since)


def end_stopped(place: Place) -> None:
    """Kill a rank of this host that no longer lives its life (SIGSTOP), so that it does not stay behind."""
    if place.host != socket.gethostname() or place.pid == os.getpid():
        return
    with suppress(psutil.Error):  # it may have ended
        process = psutil.Process(place.pid)
        if process.create_time() == place.started:
            process.kill()


def furthest_behind(places: dict[int, Place]) -> Sequence[int]:
    """The ranks that the others wait for: those with the fewest steps and collectives.

    Empty when all are at the same place.
    """
    at = {rank: (place.step, place.collectives) for rank, place in places.items()}
    least = min(at.values())
    behind = [rank for rank, where in sorted(at.items()) if where == least]
    return behind if len(behind) < len(places) else []


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
