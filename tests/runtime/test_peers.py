"""Verdicts of the watch over ranks, from places that ranks could have published."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from recsys_tpu.runtime import places
from recsys_tpu.runtime.peers import PeerWatch
from recsys_tpu.runtime.places import Board, Place, Whereabouts, end_stopped, furthest_behind

HERE = Place("x", "data", "short", "gloo:all_to_all", 7, 40.0, 0.0, 3, "elsewhere", 1, 0.0)  # type: ignore[arg-type]


def _place(**changes: object) -> Place:
    return replace(HERE, **({"step": 5} | changes))


class FakeBoard:
    """The other ranks as this test moves them; no store, no processes."""

    def __init__(self, *answers: dict[int, Place | None]) -> None:
        self.answers, self.left = list(answers), None

    def publish(self, place: Place) -> None: ...

    def others(self) -> dict[int, Place | None]:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def note(self) -> str | None:
        return self.left

    def leave_note(self, text: str) -> None:
        self.left = self.left or text


def _judged(*answers: dict[int, Place | None], mine: Place | None = None) -> str | None:
    watch = PeerWatch.__new__(PeerWatch)
    watch._short_s, watch._long_s, watch._interval_s, watch._rank = 30.0, 600.0, 0.001, 0
    watch._board = FakeBoard(*answers)  # type: ignore[assignment]
    own = mine or _place(collectives=9, phase="backward")
    watch._place = lambda done=False: own  # type: ignore[method-assign]
    watch._judge(own)
    return watch._board.note()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recsys_tpu.runtime.peers._SILENT_S", 0.0)


def _alive(**changes: object) -> tuple[dict[int, Place | None], dict[int, Place | None]]:
    place = _place(**changes)
    return {1: place}, {1: replace(place, beat=place.beat + 6)}


def test_a_rank_that_does_not_move_is_named_with_collective_and_step():
    note = _judged(*_alive())
    assert note is not None and "the run has stood still for 40 s" in note
    assert (
        "rank 1 is alive, but does not move: at step 5, phase data, last collective gloo:all_to_all" in note
    )
    assert "rank 0 waits in gloo:all_to_all, step 5, phase backward" in note


def test_a_silent_rank_is_named():
    note = _judged({1: _place()})
    assert note is not None and "rank 1 is gone or stopped: at step 5, phase data" in note


@pytest.mark.parametrize(
    "changes",
    [
        {"patience": "long"},  # it compiles, or writes a checkpoint
        {"patience": "while busy", "busy": 0.9},  # it computes the metrics of a large split
        {"still_s": 3.0},  # it has just moved
        {"done": True},  # it has ended well; this rank writes the report
    ],
)
def test_no_alarm_while_a_rank_has_a_reason(changes):
    assert _judged(*_alive(**changes)) is None


def test_an_evaluation_that_computes_nothing_is_hung():
    note = _judged(*_alive(patience="while busy", busy=0.0, phase="evaluation"))
    assert note is not None and "phase evaluation" in note


def test_a_reason_does_not_last_for_ever():
    note = _judged(*_alive(patience="long", still_s=601.0))
    assert note is not None and "rank 1" in note


def test_a_silent_rank_that_was_compiling_has_the_time_to():
    assert _judged({1: _place(patience="long")}) is None


def test_a_silent_rank_that_has_compiled_has_not():
    """It told its place last in the first step, and was stopped within a second after it."""
    note = _judged({1: _place(step=1, patience="long")})
    assert note is not None and "rank 1 is gone or stopped: at step 1" in note


def test_those_behind_are_the_ones_that_are_waited_for():
    at = {0: _place(collectives=9), 1: _place(collectives=7), 2: _place(step=4, collectives=50)}
    assert furthest_behind(at) == [2]
    assert furthest_behind({0: at[0], 1: at[1]}) == [1]
    assert furthest_behind({0: at[0], 1: at[0]}) == []


def test_a_place_knows_since_when_it_has_not_moved(monkeypatch):
    count = [4]
    monkeypatch.setattr(places, "last_collective", lambda: ("gloo:all_reduce", count[0]))
    me = Whereabouts()
    me.place(1, "data", "short")
    time.sleep(0.05)
    second = me.place(1, "data", "short")
    assert second.still_s >= 0.05 and second.beat == 2
    count[0] += 1
    assert me.place(1, "data", "short").still_s == 0.0


def test_only_a_process_that_is_the_rank_is_ended():
    """Another process may have got the number of a rank that has ended: its start time differs."""
    me = Whereabouts().place(1, "data", "short")
    end_stopped(me)  # never itself
    end_stopped(replace(me, pid=1))  # init: not started when the rank was
    end_stopped(replace(me, host="another", pid=2**22 - 1))
    assert threading.main_thread().is_alive()


def test_the_first_note_is_believed():
    store = dist.HashStore()
    board = Board.__new__(Board)
    board._store, board._rank, board._world_size = store, 0, 1
    assert board.note() is None
    board.leave_note("first")
    board.leave_note("second")
    assert board.note() == "first"
