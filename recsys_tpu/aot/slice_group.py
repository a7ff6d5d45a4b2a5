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
from recsys_tpu.aot.tables import Slice
from recsys_tpu.chips import devices_of
from recsys_tpu.emulation import EmulationError
from recsys_tpu.sharding.planner.topology import parse_topology


@contextmanager
def slice_group(size: int) -> Iterator[dist.ProcessGroup]:
    """The default process group of a slice of `size` devices, as rank 0 sees it.

    The process must have called ``emulation.activate(slice_size=size)``.

    Raises:
        EmulationError: no device is emulated, or torch.distributed is in use.
    """
    with _slice(size) as (world, _):
        yield world


@contextmanager
def slice_of(topology: str, *, grouped: bool = True) -> Iterator[Slice]:
    """The ranks of a topology such as ``v6e:2x4``, with the row groups that the planner gives it: its hosts.

    Args:
        grouped: whether process groups are made of the row groups.

    Raises:
        PlanInputError: no such slice.
        EmulationError: see `slice_group`.
    """
    size, row_group = devices_of(topology), parse_topology(topology).host_ranks
    with _slice(size) as (world, store):
        within = across = None
        if grouped and row_group < size:
            starts, places = range(0, size, row_group), range(row_group)
            within = store.divide([list(range(first, first + row_group)) for first in starts])
            across = store.divide([list(range(place, size, row_group)) for place in places])
        yield Slice(world, within or world, across, ranks=size, row_group=row_group)


@contextmanager
def _slice(size: int) -> Iterator[tuple[dist.ProcessGroup, _SliceStore]]:
    if not emulation.is_active():
        raise EmulationError(f"call recsys_tpu.emulation.activate(slice_size={size}) first")
    if dist.is_initialized():
        raise EmulationError("torch.distributed is initialised already: lower sharded programs without it")
    store = _SliceStore(size)  # held here: the group keeps only its C++ half alive
    dist.init_process_group(
        "tpu:tpu_dist", store=store, rank=0, world_size=size, timeout=timedelta(seconds=30)
    )
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD, store
    finally:
        dist.destroy_process_group()


class _SliceStore(dist.Store):
    """A store in which every other rank has already published its device and its place in its groups.

    The entries are those that torch_tpu 0.2.0 writes.  Under ``<prefix>node:<rank>``, for the world, the key
    ``world_topo:<rank>`` with ``<device>,0,0,0,0,0,-1,cpu``; for the n-th division of the world in groups,
    ``pg_sub:<n>:<rank>`` with ``<rank>,<rank in its group>:<world>//<number of the group>//tpu/``.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._entries: dict[str, bytes] = {}
        self._divisions: list[list[list[int]]] = []

    def divide(self, groups: list[list[int]]) -> dist.ProcessGroup:
        """Make the groups, which every rank is in one of; returns that of rank 0."""
        self._divisions.append(groups)
        made = [dist.new_group(ranks) for ranks in groups]
        return made[0]

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._entries[key] = value
        if key.endswith(":node:0"):
            prefix, (name, published) = key.removesuffix("node:0"), _published(value)
            for rank in range(1, self._size):
                own_name = f"{name.rpartition(':')[0]}:{rank}"
                self._entries[f"{prefix}node:{rank}"] = _entry(own_name, self._by(rank, name, published))
            self._entries[f"{prefix}count"] = str(self._size).encode()

    def _by(self, rank: int, name: str, published: str) -> str:
        """What `rank` publishes where rank 0 publishes `published`."""
        if name.startswith("world_topo:"):
            return f"{rank},{published.partition(',')[2]}"
        groups = self._divisions[int(name.split(":")[1])]
        number, ranks = next((n, ranks) for n, ranks in enumerate(groups) if rank in ranks)
        world, first, device = published.partition(":")[2].split("//")
        return f"{rank},{ranks.index(rank)}:{world}//{int(first) + number}//{device}"

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


def _published(text: bytes) -> tuple[str, str]:
    """(key, value) of an entry ``<length>:<length of key>:<key><value>``."""
    _, _, pair = text.decode().partition(":")
    length, _, rest = pair.partition(":")
    return rest[: int(length)], rest[int(length) :]


def _entry(key: str, value: str) -> bytes:
    pair = f"{len(key)}:{key}{value}"
    return f"{len(pair)}:{pair}".encode()
