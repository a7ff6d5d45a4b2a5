"""Run under torchrun, lose and win ranks, and compare the losses with an unbroken run.

    python benchmarks/elastic.py

restarts   ``torchrun --nproc-per-node 2 --max-restarts 3``: a rank is killed twice; torchrun restarts both.
resize     2 ranks, then 4, then 1: torchrun gets SIGTERM and is started with another --nproc-per-node.
elastic    ``torchrun --nnodes 1:2``, two agents as on two hosts: one agent and its rank are killed, the other
           goes on alone; the first comes back and both go on together.

Every start makes a plan for the ranks it has and reads the newest checkpoint (``train.resume=auto``).
Printed are the ranks of each start, the steps that it did, and the largest relative difference between a
loss and that of the unbroken run of 2 ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import psutil

ROOT = Path(__file__).parent.parent
WAIT_S = 600.0
SAME_RANKS, OTHER_RANKS = 0.0, 1e-5  # largest relative difference that is allowed
CONFIG = {
    "runtime": {"device": "cpu", "compile": False},
    "data": {
        "synthetic": {"train_rows": 64_000, "test_rows": 2_000, "num_embeddings": [5000, 300, 20, 1000]}
    },
    "model": {"embedding_dim": 16, "bottom_mlp": [32], "over_mlp": [32]},
    "train": {"batch_size": 128, "eval_batch_size": 512, "log_every": 1, "epochs": 100},
}


class Agents:
    """Starts torchrun for one named run and watches its log."""

    def __init__(self, folder: Path, name: str, steps: int, output: IO[str]) -> None:
        self.run = folder / "runs" / name
        self._output = output
        config = folder / "config.json"
        config.write_text(json.dumps(CONFIG))
        self._train = [
            *("-m", "recsys_tpu.train", "--config", str(config), f"run.name={name}"),
            *(f"run.output_dir={folder / 'runs'}", f"data.cache_dir={folder / 'data'}"),
            *(f"train.max_steps={steps}", "train.checkpoint_every=10", "train.resume=auto"),
        ]

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, *self._train],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **_LOOPBACK},
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def events(self) -> list[dict[str, object]]:
        found = []
        log = self.run / "metrics.jsonl"
        for line in log.read_bytes().split(b"\n") if log.exists() else []:
            try:
                found.append(json.loads(line))
            except ValueError:  # a kill can cut a line
                continue
        return found

    def step(self) -> int:
        return max((int(e["step"]) for e in self.events() if e["event"] == "train"), default=0)  # type: ignore[call-overload]

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > until:
                raise TimeoutError(f"{self.run.name}: waited {WAIT_S:.0f} s for {what}")
            time.sleep(0.05)

    def wait_for_steps(self, steps: int) -> None:
        """Until this many steps more than now are logged."""
        goal = self.step() + steps
        self.wait_for(f"step {goal}", lambda: self.step() >= goal)

    def wait_for_start(self, ranks: int, after: int) -> None:
        """Until a start after the first `after` ones has trained a step on this many ranks."""
        self.wait_for(f"a start on {ranks} ranks", lambda: _trains(self.events(), ranks, after))


_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def _trains(events: list[dict[str, object]], ranks: int, after: int) -> bool:
    headers = [number for number, event in enumerate(events) if event["event"] == "header"]
    new = [number for number in headers[after:] if events[number]["world_size"] == ranks]
    return bool(new) and any(event["event"] == "train" for event in events[new[-1] :])


def _workers(agent: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(agent.pid).children()


def _expect(agent: subprocess.Popen[bytes], status: int = 0) -> None:
    found = agent.wait(WAIT_S)
    assert found == status, f"torchrun ended with {found}"


def restarts(agents: Agents) -> None:
    agent = agents.start("--nproc-per-node", "2", "--max-restarts", "3", "--master-port", "0", *_LOCAL)
    for starts, victim in enumerate((1, 0)):
        agents.wait_for_start(2, after=starts)
        agents.wait_for_steps(25)
        _workers(agent)[victim].kill()
    _expect(agent)


def resize(agents: Agents) -> None:
    for starts, ranks in enumerate((2, 4)):
        agent = agents.start("--nproc-per-node", str(ranks), *_LOCAL)
        agents.wait_for_start(ranks, after=starts)
        agents.wait_for_steps(25)
        agent.send_signal(signal.SIGTERM)  # torchrun passes it on; the ranks save and end
        agent.wait(WAIT_S)
    _expect(agents.start("--nproc-per-node", "1", *_LOCAL))


def elastic(agents: Agents) -> None:
    # the rest of --rdzv-conf only shortens waits that suit a cluster
    options = (
        *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "5", "--rdzv-backend", "c10d"),
        *(
            "--rdzv-endpoint",
            f"127.0.0.1:{_free_port()}",
            "--local-addr",
            "127.0.0.1",
            "--rdzv-id",
            "elastic",
        ),
        *(
            "--rdzv-conf",
            "last_call_timeout=5,join_timeout=120,keep_alive_interval=2,keep_alive_max_attempt=4",
        ),
    )
    first = agents.start(*options)
    time.sleep(2.0)  # it must be the one that keeps the rendezvous: the other is going to be lost
    second = agents.start(*options)
    agents.wait_for_start(2, after=0)
    agents.wait_for_steps(25)
    starts = sum(event["event"] == "header" for event in agents.events())
    for process in (*_workers(second), psutil.Process(second.pid)):
        process.kill()
    second.wait()
    agents.wait_for_start(1, after=starts)
    agents.wait_for_steps(25)
    starts = sum(event["event"] == "header" for event in agents.events())
    second = agents.start(*options)
    agents.wait_for_start(2, after=starts)
    _expect(first)
    _expect(second)


_LOCAL = ("--standalone",)
SCENARIOS = {
    "restarts": (restarts, SAME_RANKS),
    "resize": (resize, OTHER_RANKS),
    "elastic": (elastic, OTHER_RANKS),
}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _losses(events: list[dict[str, object]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for event in events:
        if event["event"] == "train":
            losses: list[float] = event["losses"]  # type: ignore[assignment]
            for step, loss in enumerate(losses, start=int(event["step"]) - len(losses) + 1):  # type: ignore[call-overload]
                found.setdefault(step, []).append(loss)
    return found


def _report(
    name: str, events: list[dict[str, object]], expected: dict[int, list[float]], allowed: float
) -> bool:
    starts, done = [], []
    for event in events:
        if event["event"] == "header":
            starts.append(event["world_size"])
            done.append(0)
        elif event["event"] == "train":
            done[-1] += len(event["losses"])  # type: ignore[arg-type]
    seen = _losses(events)
    missing = set(expected) - set(seen)
    difference = max(
        abs(loss - expected[step][0]) / abs(expected[step][0]) for step in seen for loss in seen[step]
    )
    good = not missing and difference <= allowed
    ranks = ", ".join(f"{count} steps on {ranks}" for ranks, count in zip(starts, done, strict=True))
    print(
        f"{'ok  ' if good else 'FAIL'} {name}: {ranks}; {len(seen)} of {len(expected)} steps, "
        f"largest relative difference {difference:.1e} (allowed {allowed:.0e})",
        flush=True,
    )
    return good


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenarios", nargs="*", help=f"{', '.join(SCENARIOS)}; default: all")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--keep", type=Path, help="new folder for the runs; default: a temporary one")
    arguments = parser.parse_args()
    wrong = set(arguments.scenarios) - set(SCENARIOS)
    if wrong:
        parser.error(f"no scenario {', '.join(wrong)}")
    if arguments.keep:
        arguments.keep.mkdir(parents=True)
        sys.exit(not run_scenarios(arguments, arguments.keep))
    with tempfile.TemporaryDirectory() as name:
        sys.exit(not run_scenarios(arguments, Path(name)))


def run_scenarios(arguments: argparse.Namespace, folder: Path) -> bool:
    """Run and report each; whether all is well."""
    good = True
    with (folder / "output.txt").open("a+") as output:
        whole = Agents(folder, "whole", arguments.steps, output)
        _expect(whole.start("--nproc-per-node", "2", *_LOCAL))
        expected = _losses(whole.events())
        for scenario in arguments.scenarios or SCENARIOS:
            run, allowed = SCENARIOS[scenario]
            agents = Agents(folder, scenario, arguments.steps, output)
            try:
                run(agents)
            except (AssertionError, TimeoutError) as error:
                output.seek(0)
                print(f"FAIL {scenario}: {error}\n{output.read()[-4000:]}", flush=True)
                good = False
                continue
            finally:
                _end_all()
            good &= _report(scenario, agents.events(), expected, allowed)
    return good


def _end_all() -> None:
    for process in psutil.Process().children(recursive=True):
        process.kill()


if __name__ == "__main__":
    main()
