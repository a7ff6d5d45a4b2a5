"""Which rank is missing when a run fails or stands still, and no rank that outlives the run.

A collective that times out says only that it timed out.  So every rank publishes, from a thread, the step
and phase it is in and the last collective it entered.  A rank whose collective fails reads what the others
published and names the one that is not there.  A rank that has not moved for long looks whether any other
one moves; if none does, and none has a reason to take its time, the run is hung and ends.  Every rank that
ends leaves a note, and one that is stuck elsewhere (so that it would never fail by itself) ends when it
finds the note.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from recsys_tpu.errors import LostRankError, UserError
from recsys_tpu.runtime.places import Board, Patience, Place, Whereabouts, end_stopped, furthest_behind

_INTERVAL_S = 1.0
_SILENT_S = 5.0
_GRACE_S = 8.0
_BUSY = 0.5
_AGAIN = "Start again with train.resume=auto"


class PeerWatch:
    """One per rank; does nothing in a world of one.

    Args:
        where: gives step, phase and patience of this rank; called from a thread.
        short_s: seconds that the run may stand still.
        long_s: the same where a rank compiles, writes a checkpoint or computes an evaluation.
        on_end: is told why, before the watch ends a process whose main thread does not come back.
        interval_s: seconds between two publications.
        grace_s: seconds that a rank has to end by itself once another one has failed.
    """

    def __init__(
        self,
        where: Callable[[], tuple[int, str, Patience]],
        *,
        short_s: float,
        long_s: float,
        on_end: Callable[[str], None] = lambda _: None,
        interval_s: float = _INTERVAL_S,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._where, self._short_s, self._long_s = where, short_s, long_s
        self._interval_s, self._grace_s, self._on_end = interval_s, grace_s, on_end
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._stopped = threading.Event()
        self._failed = False
        self._thread: threading.Thread | None = None
        if self._world_size > 1:
            self._me, self._board = Whereabouts(), Board()
            self._board.publish(self._place())
            self._thread = threading.Thread(target=self._run, name="peer-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching; after a failure the watch goes on until the process has ended."""
        if self._failed:
            return
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * self._interval_s)
            with suppress(RuntimeError):  # rank 0, which keeps the store, may have closed before
                self._board.publish(self._place(done=True))

    def explain(self, error: BaseException) -> LostRankError | None:
        """The error to raise in place of `error` if another rank is behind it; tells the other ranks.

        Takes up to a few seconds: a rank that has died is known by its silence.
        """
        if self._world_size == 1 or isinstance(error, UserError):
            return None
        mine = self._place()
        try:
            places, silent = self._look_twice()
        except RuntimeError:
            places, silent = {}, set()
            findings = ["rank 0 is gone, and with it what the others said"]
        else:
            findings = [
                finding
                for rank, place in places.items()
                if (finding := _finding(rank, place, mine, silent=rank in silent))
            ]
        if not _is_lost_connection(error) and not silent:
            return None
        message = (
            f"rank {self._rank} waited in vain in {mine.collective}, {mine}: "
            f"{'; '.join(findings) or 'every other rank is alive and at the same place'}. {_AGAIN}"
        )
        self.fail(message)
        return LostRankError(message)

    def fail(self, message: str) -> None:
        """Tell all ranks why this one ends; those that are stuck end too, and this one at the latest then."""
        if self._world_size == 1:
            return
        self._failed = True
        with suppress(RuntimeError):  # rank 0, which keeps the notes, may be gone: the others know by that
            self._board.leave_note(f"rank {self._rank}: {message}")

    # ---- the thread

    def _run(self) -> None:
        reason = None
        while reason is None:
            if self._stopped.wait(self._interval_s):
                return
            try:
                place = self._place()
                self._board.publish(place)
                if place.still_s > self._limit(place):
                    self._judge(place)
                reason = self._board.note()
            except RuntimeError:
                reason = "rank 0 is gone"
        if self._stopped.wait(self._grace_s):
            return
        step, phase, _ = self._where()
        stuck = "and does not come to its end" if self._failed else f"where it is stuck: {reason}"
        text = f"rank {self._rank} ends at step {step}, phase {phase}, {stuck}"
        print(f"error: {text}", file=sys.stderr, flush=True)
        self._on_end(text)
        os._exit(LostRankError.exit_status)  # the main thread does not come back from where it is

    def _judge(self, mine: Place) -> None:
        """Leave a note if no rank moves and none has a reason to take its time."""
        others, silent = self._look_twice()
        now = self._place()
        there = {rank: place for rank, place in others.items() if place is not None and not place.done}
        if not there or not now.same_as(mine):
            return
        for rank, place in there.items():
            still_s, limit = place.still_s, self._limit(place)
            if rank in silent:
                still_s = now.still_s
                if place.step < now.step:  # no step ends without it: it has left the place that it told last
                    limit = self._short_s
            if still_s <= limit:
                return
        for rank in silent & there.keys():
            end_stopped(there[rank])
        self._board.leave_note(f"rank {self._rank}: {_verdict(there | {self._rank: now}, silent)}")

    def _limit(self, place: Place) -> float:
        long = place.patience == "long" or (place.patience == "while busy" and place.busy > _BUSY)
        return self._long_s if long else self._short_s

    def _look_twice(self) -> tuple[dict[int, Place | None], set[int]]:
        """What the others say, and those that have said nothing new for seconds: a living rank has."""
        before = self._board.others()
        until = time.monotonic() + _SILENT_S + self._interval_s
        while time.monotonic() < until:
            time.sleep(self._interval_s)
            self._board.publish(self._place())  # other ranks may be looking too
        after = self._board.others()
        silent = {
            rank
            for rank, place in after.items()
            if place is not None and not place.done and (then := before[rank]) and then.beat == place.beat
        }
        return after, silent

    def _place(self, *, done: bool = False) -> Place:
        return self._me.place(*self._where(), done=done)


def _verdict(places: dict[int, Place], silent: set[int]) -> str:
    """What a run that stands still is told of by: the ranks behind, and where one of the others waits."""
    behind = sorted(silent) or furthest_behind(places) or sorted(places)
    told = "; ".join(
        f"rank {rank} {'is gone or stopped' if rank in silent else 'is alive, but does not move'}: "
        f"at {places[rank]}, last collective {places[rank].collective}"
        for rank in behind[:5]
    )
    more = f" and {len(behind) - 5} more ranks" if len(behind) > 5 else ""
    waiting = next((rank for rank in sorted(places) if rank not in behind), None)
    waits = (
        "every rank is there"
        if waiting is None
        else f"rank {waiting} waits in {places[waiting].collective}, {places[waiting]}"
    )
    still_s = max(place.still_s for place in places.values())
    return f"the run has stood still for {still_s:.0f} s: {told}{more}; {waits}. {_AGAIN}"


def _finding(rank: int, place: Place | None, mine: Place, *, silent: bool) -> str | None:
    if place is None:
        return f"rank {rank} never started"
    if silent:
        return f"rank {rank} is gone or stopped: last at {place}"
    if not place.same_as(mine):
        return f"rank {rank} is alive, but at {place} (last collective: {place.collective})"
    return None


def _is_lost_connection(error: BaseException) -> bool:
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError):
        return True
    # gloo's errors come as plain RuntimeErrors
    signs = ("Timed out waiting", "closed by peer", "reset by peer", "Broken pipe")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
