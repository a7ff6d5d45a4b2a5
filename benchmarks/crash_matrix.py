"""Kill -9 a two-rank run at random moments, resume it each time, compare its losses with an unbroken run.

    python benchmarks/crash_matrix.py --kills 50

An unbroken run on `--ranks` ranks gives the loss of every step.  Then the same run is started with
``train.resume=auto`` and killed, again and again: one rank or all of them, at a random time, or at the
moment when a checkpoint is being written or renamed (seen from outside: the program knows nothing of this
test).  When one rank dies, the others must end by themselves.  The last start is left alone.  Every loss
that any of the starts logged must be equal, to the bit, to the unbroken run's loss of that step.

Half of the kills wait for a phase of a checkpoint: the hidden folder appears (`staged`), holds a shard
(`writing`), holds its manifest (`renaming`), is gone again (`renamed`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parent.parent
MOMENTS = ("any", "any", "any", "any", "staged", "writing", "renaming", "renamed")
POLL_S = 0.0005
MAX_WAIT_STEPS = 100
MAX_START_S = 900.0
PEER_END_S = 120.0


@dataclass
class Tally:
    """What happened to the starts."""

    kills: Counter[str] = field(default_factory=Counter)
    peer_end_s: list[float] = field(default_factory=list)
    leftovers: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=1e9, help="no more kills after this time")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--checkpoint-every", type=int, default=5, help="steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: a temporary one")
    arguments = parser.parse_args()
    if arguments.keep:
        arguments.keep.mkdir(parents=True)
        sys.exit(not crash_matrix(arguments, arguments.keep))
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(not crash_matrix(arguments, Path(folder)))


def crash_matrix(arguments: argparse.Namespace, folder: Path) -> bool:
    """Run it and print the report; whether all is well."""
    started = time.perf_counter()
    rng = random.Random(arguments.seed)
    settings = [
        f"train.max_steps={arguments.steps}",
        f"train.checkpoint_every={arguments.checkpoint_every}",
        f"data.cache_dir={folder / 'data'}",
        f"run.output_dir={folder / 'runs'}",
    ]
    config = folder / "config.json"
    config.write_text(json.dumps(_CONFIG))
    with (folder / "output.txt").open("a+") as output:
        start = _Starter(config, settings, arguments.ranks, output)
        whole = start("whole", resume="never")
        _expect_end(whole, output)
        expected = _losses(folder / "runs" / "whole")
        assert sorted(expected) == list(range(1, arguments.steps + 1))
        print(
            f"unbroken run: {arguments.steps} steps, final loss {expected[arguments.steps][0]!r}", flush=True
        )
        tally = Tally()
        run = folder / "runs" / "broken"
        until = started + 60 * arguments.minutes
        while sum(tally.kills.values()) < arguments.kills and time.perf_counter() < until:
            _start_and_kill(start("broken", resume="auto"), run, rng, tally)
            killed = sum(tally.kills.values())
            print(
                f"kill {killed}/{arguments.kills}, newest checkpoint {_newest_step(run)}",
                end="\r",
                flush=True,
            )
        _expect_end(start("broken", resume="auto"), output)
    seen = _losses(run)
    return _report(expected, seen, tally, arguments, time.perf_counter() - started)


class _Starter:
    def __init__(self, config: Path, settings: list[str], ranks: int, output: IO[str]) -> None:
        self._config, self._settings, self._ranks, self._output = config, settings, ranks, output

    def __call__(self, name: str, *, resume: str) -> list[subprocess.Popen[bytes]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        command = [
            *(sys.executable, "-m", "recsys_tpu.train", "--config", str(self._config)),
            *self._settings,
            *(f"run.name={name}", f"train.resume={resume}"),
        ]
        common = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": str(self._ranks),
            "LOCAL_WORLD_SIZE": str(self._ranks),
            "OMP_NUM_THREADS": "1",
        }
        return [
            subprocess.Popen(
                command,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=self._output,
                stderr=self._output,
            )
            for rank in range(self._ranks)
        ]


def _start_and_kill(
    ranks: list[subprocess.Popen[bytes]], run: Path, rng: random.Random, tally: Tally
) -> None:
    before = _log_lines(run)
    try:
        # wait until this start trains, so that every kill follows some progress of its own
        _wait_for(lambda: _log_lines(run) > before + 1 or _any_ended(ranks), MAX_START_S)
        moment = rng.choice(MOMENTS)
        happens = _condition(moment, run, rng)
        _wait_for(lambda: happens() or _any_ended(ranks), MAX_START_S)
        if _any_ended(ranks):
            raise RuntimeError(
                f"the run ended before its kill ({moment}): give more --steps, or read output.txt (--keep)"
            )
        victims = ranks if rng.random() < 0.5 else [rng.choice(ranks)]
        for rank in victims:
            rank.send_signal(signal.SIGKILL)
        killed = time.perf_counter()
        for rank in ranks:  # the survivors notice, and end without help
            rank.wait(PEER_END_S)
        if len(victims) < len(ranks):
            tally.peer_end_s.append(time.perf_counter() - killed)
            assert all(rank.returncode != 0 for rank in ranks), "a survivor called itself successful"
        tally.kills[f"{'all ranks' if victims is ranks else 'one rank'}, {moment}"] += 1
        tally.leftovers += any((run / "checkpoints").glob(".step_*"))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _condition(moment: str, run: Path, rng: random.Random) -> Callable[[], bool]:
    checkpoints = run / "checkpoints"
    if moment == "any":
        # steps, not seconds: a fast machine must not reach the end of the run before its kills
        until = _log_lines(run) + rng.randint(0, MAX_WAIT_STEPS)
        return lambda: _log_lines(run) >= until
    seen = {"partial": False}

    def happens() -> bool:
        partial = next(iter(checkpoints.glob(".step_*.partial")), None)
        if partial is None:
            return moment == "renamed" and seen["partial"]
        seen["partial"] = True
        if moment == "staged":
            return True
        if moment == "writing":
            return any(partial.glob("*.distcp"))
        return moment == "renaming" and (partial / "manifest.json").exists()

    return happens


def _wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    until = time.perf_counter() + timeout_s
    while not condition():
        if time.perf_counter() > until:
            raise TimeoutError(f"nothing happened in {timeout_s:.0f} s")
        time.sleep(POLL_S)


def _any_ended(ranks: list[subprocess.Popen[bytes]]) -> bool:
    return any(rank.poll() is not None for rank in ranks)


def _expect_end(ranks: list[subprocess.Popen[bytes]], output: IO[str]) -> None:
    try:
        statuses = [rank.wait(3600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(statuses):
        output.seek(0)
        raise RuntimeError(f"statuses {statuses}: {output.read()[-3000:]}")


def _log_lines(run: Path) -> int:
    log = run / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def _losses(run: Path) -> dict[int, list[float]]:
    """Every logged loss of each step: a step that was trained again after a kill has several."""
    found: dict[int, list[float]] = {}
    for line in (run / "metrics.jsonl").read_bytes().split(b"\n"):
        try:
            event = json.loads(line)
        except ValueError:  # a kill can cut a line
            continue
        if event["event"] == "train":
            first = event["step"] - len(event["losses"]) + 1
            for offset, loss in enumerate(event["losses"]):
                found.setdefault(first + offset, []).append(loss)
    return found


def _newest_step(run: Path) -> int:
    steps = [int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*")]
    return max(steps, default=0)


def _report(
    expected: dict[int, list[float]],
    seen: dict[int, list[float]],
    tally: Tally,
    arguments: argparse.Namespace,
    seconds: float,
) -> bool:
    missing = sorted(set(expected) - set(seen))
    different = [
        (step, loss, expected[step][0]) for step in seen for loss in seen[step] if loss != expected[step][0]
    ]
    print(" " * 60, end="\r")
    for kind, count in sorted(tally.kills.items()):
        print(f"{count:4} x {kind}")
    print(f"{tally.leftovers} kills left an unfinished checkpoint, which no resume used")
    if tally.peer_end_s:
        print(f"survivors of a killed rank ended by themselves within {max(tally.peer_end_s):.1f} s")
    again = sum(len(losses) - 1 for losses in seen.values())
    print(
        f"{sum(tally.kills.values())} kills on {arguments.ranks} ranks, a checkpoint every "
        f"{arguments.checkpoint_every} steps: {len(seen)} of {len(expected)} steps logged "
        f"({again} trained again), {len(different)} losses differ, {len(missing)} steps missing, "
        f"{seconds:.0f} s"
    )
    for step, loss, wanted in different[:5]:
        print(f"  step {step}: {loss!r}, unbroken {wanted!r}")
    # steps that were trained, but whose log line the kill lost, are not missing from training
    return not different and arguments.steps in seen


_CONFIG = {
    "runtime": {"device": "cpu", "compile": False},
    "data": {
        "synthetic": {"train_rows": 64_000, "test_rows": 2_000, "num_embeddings": [5000, 300, 20, 1000]}
    },
    "model": {"embedding_dim": 16, "bottom_mlp": [32], "over_mlp": [32]},
    "train": {
        "batch_size": 128,
        "eval_batch_size": 512,
        "log_every": 1,
        "epochs": 100,
        "keep_checkpoints": 3,
    },
}


if __name__ == "__main__":
    main()
