"""Runs a function on several ranks (processes that join a Runtime), and brings its results back.

Each rank is a fresh interpreter, because a device must be activated before torch is imported:
`python -m tests.sharding.ranks DEVICE FUNCTION FOLDER` with torchrun's environment.
"""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TIMEOUT_S = 580
REPOSITORY = Path(__file__).parents[2]


def on_ranks(
    function: str,
    world: int,
    device: str,
    *args: Any,
    host_size: int | None = None,
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """`function(runtime, *args)` on each rank; results in the order of the ranks.

    function: "module:name", imported by each rank after its device is activated.
    host_size: ranks that TorchRec takes to be on one host; all, when None.
    Fails with the output of the first rank that fails.
    """
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        (folder / "args").write_bytes(pickle.dumps(args))
        port = str(_free_port())
        local = host_size or world
        processes = [_start(rank, world, local, port, device, function, folder) for rank in range(world)]
        try:
            _wait(processes, folder, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world)]


def _start(
    rank: int, world: int, local: int, port: str, device: str, function: str, folder: Path
) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(local),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    # The test session's own device choice must not reach the ranks.
    for name in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "TPU_LIBRARY_PATH"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "tests.sharding.ranks", device, function, str(folder)]
    with (folder / f"log{rank}").open("wb") as log:
        return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
        if failed or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    codes = [process.poll() for process in processes]
    if any(codes) or None in codes:
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        first = failed[0] if failed else codes.index(None)
        log = (folder / f"log{first}").read_text(errors="replace")
        raise AssertionError(f"rank {first} of {len(codes)} ended with {codes[first]}:\n{log[-6000:]}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _main(device: Any, function: str, folder: Path) -> None:
    from recsys_tpu.runtime import activation

    activation.activate(device)
    import torch
    import torch.distributed as dist

    from recsys_tpu.runtime import Runtime, RuntimeConfig

    torch.set_num_threads(1)
    module, name = function.split(":")
    with Runtime.start(RuntimeConfig(device=device, compile_timeout_s=TIMEOUT_S)) as runtime:
        args = pickle.loads((folder / "args").read_bytes())
        value = getattr(importlib.import_module(module), name)(runtime, *args)
        dist.barrier()
        (folder / f"result{runtime.rank}").write_bytes(pickle.dumps(value))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
