"""Runs proofs of a module in a process of their own, each with a deadline that ends a hang.

An interpreted kernel that waits for a DMA which never comes blocks inside a callback, where no Python
timeout reaches; only killing the process does.  Many proofs share one process, to pay its start-up once.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from recsys_tpu import libtpu

ROOT = Path(__file__).parents[3]

Proof = Callable[[], object]


def serve(proofs: dict[str, Proof]) -> None:
    """In the child: run the proofs named on the command line, print one JSON line for each, leave."""
    for name in sys.argv[1:]:
        try:
            outcome: dict[str, object] = {"result": proofs[name]()}
        except Exception:  # the parent reports whatever went wrong
            outcome = {"error": traceback.format_exc()}
        print(json.dumps({"name": name, **outcome}), flush=True)
    os._exit(0)  # an interpreter that failed leaves threads behind that would never end


def run(module: str, names: Iterable[str], *, seconds_each: float) -> dict[str, dict[str, object]]:
    """Outcome of every proof: ``{"result": ...}``, ``{"error": text}`` or ``{"hung": seconds}``."""
    outcomes: dict[str, dict[str, object]] = {}
    left = list(names)
    while left:
        for name, outcome in _one_child(module, left, seconds_each=seconds_each):
            outcomes[name] = outcome
            left.remove(name)
    return outcomes


def _one_child(module: str, names: list[str], *, seconds_each: float) -> list[tuple[str, dict[str, object]]]:
    environment = {
        **libtpu.environment(),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        # A chip that waits inside the interpreter holds a thread of XLA's pool, by default one for each core
        # or device; the others need more to get on with what lies before their kernel.
        "PJRT_NPROC": "64",
    }
    child = subprocess.Popen(
        [sys.executable, "-m", module, *names],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: queue.Queue[str | None] = queue.Queue()
    errors: list[str] = []
    assert child.stdout is not None and child.stderr is not None

    def read_lines() -> None:
        for line in child.stdout or ():
            lines.put(line)
        lines.put(None)

    def read_errors() -> None:
        errors.extend(child.stderr or ())

    readers = [threading.Thread(target=target, daemon=True) for target in (read_lines, read_errors)]
    for reader in readers:
        reader.start()
    outcomes: list[tuple[str, dict[str, object]]] = []
    try:
        while len(outcomes) < len(names):
            current = names[len(outcomes)]
            try:
                line = lines.get(timeout=seconds_each)
            except queue.Empty:
                outcomes.append((current, {"hung": seconds_each}))
                break
            if line is None:
                child.wait()
                readers[1].join()
                text = "".join(errors)[-4000:]
                outcomes.append((current, {"error": f"the process ended with {child.returncode}:\n{text}"}))
                break
            if not line.startswith("{"):
                continue  # the race detector prints what it finds
            outcome = json.loads(line)
            assert outcome.pop("name") == current
            outcomes.append((current, outcome))
    finally:
        child.kill()
        child.wait()
    return outcomes
