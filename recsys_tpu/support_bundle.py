"""A support bundle: what someone needs who is to find out why a run went wrong, and no secrets.

    python -m recsys_tpu.doctor --bundle out.tar.gz --run runs/dlrm

In it: the doctor's findings, the versions of all packages, the machine, the environment variables that decide
how a run works (by name, see `redaction`), and of the run its config, its plan, the ends of every rank's log
and of metrics.jsonl, its last metrics, and the names and sizes of its other files.  No data, no weights.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from recsys_tpu.errors import UserError
from recsys_tpu.redaction import redact, told_environment

LAST_BYTES = 1_000_000
_WHOLE = ("config.yaml", "plan.yaml", "metrics.prom")
_ENDS = ("metrics.jsonl", "logs/*.jsonl")


def write_bundle(output: Path, findings: Iterable[Mapping[str, Any]], run: Path | None) -> list[str]:
    """Write ``output``, a tar.gz; returns the names of the files in it.

    Raises:
        UserError: `run` is no folder of a run, or `output` cannot be written.
    """
    if run is not None and not (run / "config.yaml").is_file():
        raise UserError(
            f"{run}: not the folder of a run (it has no config.yaml); give <run.output_dir>/<run.name>"
        )
    texts = {
        "doctor.json": json.dumps(list(findings), indent=1),
        "versions.txt": "\n".join(_packages()) + "\n",
        "machine.json": json.dumps(_machine(), indent=1),
        "environment.json": json.dumps(told_environment(os.environ), indent=1),
    }
    if run is not None:
        texts |= {f"run/{name}": text for name, text in _of_run(run).items()}
    try:
        with tarfile.open(output, "w:gz") as archive:
            for name, text in texts.items():
                content = redact(text).encode()
                member = tarfile.TarInfo(f"support/{name}")
                member.size, member.mtime = len(content), int(time.time())
                archive.addfile(member, io.BytesIO(content))
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror})") from error
    return list(texts)


def _packages() -> list[str]:
    names = {
        f"{package.metadata['Name']}=={package.version}" for package in importlib.metadata.distributions()
    }
    return sorted(names, key=str.lower)


def _machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "python": sys.version,
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_available_bytes": psutil.virtual_memory().available,
    }


def _of_run(run: Path) -> dict[str, str]:
    texts = {name: _end(run / name) for name in _WHOLE if (run / name).is_file()}
    for pattern in _ENDS:
        texts |= {str(path.relative_to(run)): _end(path) for path in sorted(run.glob(pattern))}
    files = sorted(path for path in run.rglob("*") if path.is_file())
    texts["files.txt"] = "".join(f"{path.stat().st_size:>14,}  {path.relative_to(run)}\n" for path in files)
    return texts


def _end(path: Path) -> str:
    """The last `LAST_BYTES` of a file, from the first whole line on."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LAST_BYTES))
        content = file.read()
    if size > LAST_BYTES:
        content = content.partition(b"\n")[2]
    return content.decode("utf-8", "replace")
