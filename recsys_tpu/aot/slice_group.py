"""torch_tpu's own process group for a whole slice, set up by one process.

Lowering a program with collectives needs the group that they name, not its other members.  When the group
is made, each rank publishes to the store which device it owns and waits for the others; here the store
answers for them.  Only rank 0 of the slice exists, so nothing can be executed on the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from recsys_tpu import emulation
from recsys_tpu.emulation import EmulationError


@contextmanager
def slice_group(size: int) -> Iterator[dist.ProcessGroup]:
    """The default process group of a slice of `size` devices, as rank 0 sees it.

    The process must have called ``emulation.activate(slice_size=size)``.

    Raises:
        EmulationError: no device is emulated, or torch.distributed is in use.
    """
    if not emulation.is_active():
        raise EmulationError(f"call recsys_tpu.emulation.activate(slice_size={size}) first")
    if dist.is_initialized():
        raise EmulationError("torch.distributed is initialised already: lower sharded programs without it")
    dist.init_process_group(
        "tpu:tpu_dist", store=_SliceStore(size), rank=0, world_size=size, timeout=timedelta(seconds=30)
    )
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class _SliceStore(dist.Store):
    """A store in which every other rank has already published its device.

    The entries are those that torch_tpu 0.2.0 writes: under ``<prefix>node:<n>`` the pair
    ``world_topo:<rank>`` and ``<device>,0,0,0,0,0,-1,cpu``, each preceded by its length.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._entries: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._entries[key] = value
        if key.endswith(":node:0"):
            prefix = key.removesuffix("node:0")
            for rank in range(1, self._size):
                self._entries[f"{prefix}node:{rank}"] = _published_device(rank)
            self._entries[f"{prefix}count"] = str(self._size).encode()

    def get(self, key: str) -> bytes:
        return self._entries[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._entries[key] for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        total = int(self._entries.get(key, b"0")) + value
        self._entries[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        return all(key in self._entries for key in keys)

    def wait(self, keys: list[str], *_: object) -> None:
        missing = [key for key in keys if key not in self._entries]
        if missing:
            raise EmulationError(f"torch_tpu waits for {missing}, which no rank of an emulated slice writes")

    def has_extended_api(self) -> bool:
        return True


def _published_device(rank: int) -> bytes:
    name = f"world_topo:{rank}"
    pair = f"{len(name)}:{name}{rank},0,0,0,0,0,-1,cpu"
    return f"{len(pair)}:{pair}".encode()
