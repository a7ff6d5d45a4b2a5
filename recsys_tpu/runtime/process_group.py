"""The default process group of a run: one process or many, on any device."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from recsys_tpu.runtime.rendezvous import agent_store, own_store
from recsys_tpu.runtime.settings import DeviceKind

_BACKENDS: dict[DeviceKind, str] = {
    "cpu": "cpu:gloo",
    "tpu": "cpu:gloo,tpu:tpu_dist",
    "tpu-emulated": "cpu:gloo,tpu:gloo_staged",
}


@dataclass(frozen=True)
class Ranks:
    """This process's place in the run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> Ranks:
        """What torchrun says, or a world of one.

        Raises:
            ValueError: torchrun's variables contradict each other or are incomplete.
        """
        world_size = _integer("WORLD_SIZE", 1)
        ranks = cls(
            rank=_integer("RANK", 0),
            world_size=world_size,
            local_rank=_integer("LOCAL_RANK", _integer("RANK", 0)),
            local_world_size=_integer("LOCAL_WORLD_SIZE", world_size),
        )
        if world_size > 1 and not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise ValueError(
                f"WORLD_SIZE is {world_size} but RANK, MASTER_ADDR or MASTER_PORT is not set: "
                "start the run with torchrun, or unset WORLD_SIZE for a single process"
            )
        if not 0 <= ranks.rank < world_size:
            raise ValueError(f"RANK is {ranks.rank}, outside a world of {world_size}")
        return ranks


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name} is {text!r}; expected a whole number") from None


def start(kind: DeviceKind, ranks: Ranks, *, timeout_s: float) -> dist.ProcessGroup:
    """Join (or, alone, make) the default process group.

    A single process uses an in-memory store and the loopback interface: it opens no port to the network.

    Raises:
        RuntimeError: a default process group exists already.
    """
    if dist.is_initialized():
        raise RuntimeError("torch.distributed is initialised already: close the earlier Runtime first")
    if kind == "tpu-emulated":
        from recsys_tpu.emulation.process_group import register

        register()
    if ranks.local_world_size == ranks.world_size and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # torch's record of the last collectives, from which a failure is explained (runtime/peers.py)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "16")
    dist.init_process_group(
        _BACKENDS[kind],
        store=_store(ranks, timeout_s),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    group = dist.group.WORLD
    assert group is not None
    return group


def _store(ranks: Ranks, timeout_s: float) -> dist.Store:
    if ranks.world_size == 1:
        return dist.HashStore()
    place = (ranks.rank, ranks.world_size, timeout_s)
    return agent_store(*place) or own_store(*place)


def new_host_group(ranks: list[int] | None = None) -> dist.ProcessGroup:
    """A gloo group of its own for `ranks` (default: all), with the timeout of the run's default group.

    Collective.  torch's own default for a new group, 30 minutes, would hide a hung rank for that long.
    """
    world = dist.group.WORLD
    assert world is not None
    timeout = world._get_backend(torch.device("cpu")).options._timeout
    group = dist.new_group(ranks, backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group
