"""What one rank did, for programs: `<run>/logs/rank_00003.jsonl`, one JSON object a line and an event."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from recsys_tpu.redaction import redact, redact_values


class RankLog:
    """Appends events; every line is written at once, so that the last ones of a killed rank are there.

    Every line has `time` (seconds since the epoch), `rank`, `hostname`, `pid`, `level` and `event`.  Secrets
    in texts are hidden.  Warnings of Python's logging become events too.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        folder = directory / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank_{rank:05}.jsonl"
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()
        self._common = {"rank": rank, "hostname": socket.gethostname(), "pid": os.getpid()}
        self._handler = _ToEvents(self)
        logging.getLogger().addHandler(self._handler)

    def event(self, kind: str, /, *, level: str = "info", **values: Any) -> None:
        """One line; values are JSON's, or are written as text. May be called from any thread."""
        line = {"time": time.time(), **self._common, "level": level, "event": kind, **values}
        text = json.dumps(redact_values(line), default=lambda value: redact(str(value)))
        with self._lock:
            if not self._file.closed:
                self._file.write(text + "\n")

    def close(self) -> None:
        logging.getLogger().removeHandler(self._handler)
        with self._lock:
            self._file.close()


class _ToEvents(logging.Handler):
    def __init__(self, log: RankLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.event(
            "log", level=record.levelname.lower(), logger=record.name, message=record.getMessage()
        )
