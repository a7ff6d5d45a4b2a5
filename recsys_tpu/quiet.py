"""Silences notices of libraries that a user of this package can do nothing about."""

from __future__ import annotations

import logging
import warnings

_LOGGERS = {
    "torch.fx._symbolic_trace": "is_fx_tracing will return true",
    "root": "Sharding spec not found",
    "torchrec.distributed.utils": "caching params will be ignored",
    "torchrec.distributed.planner.types": "The topology was constructed directly",
    "torchrec.distributed.planner.storage_reservations": "There is a known issue with TorchRec's dense",
}
_WARNINGS = (
    r"`broadcast_buffers` is deprecated",
    r"HeuristicalStorageReservation is known",
    r"Please use DTensor instead",
    r"No complete tensor found in the group",  # torch.export.save, of weights on the CPU
    r"fbgemm::\w+: an autograd kernel was not registered",
)


def quiet_libraries() -> None:
    """Drop the known notices; everything else still shows."""
    for pattern in _WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    for name, start in _LOGGERS.items():
        logging.getLogger(name).addFilter(_Drop(start))


class _Drop(logging.Filter):
    def __init__(self, start: str) -> None:
        super().__init__()
        self._start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._start)
