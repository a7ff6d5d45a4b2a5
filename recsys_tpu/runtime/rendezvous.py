"""The key-value store through which the ranks of a run find each other: fresh at every start, and not public.

torchrun keeps one store for all restarts, and torch puts the addresses of a process group into it under the
same keys each time.  A restarted rank can read the address of a rank that is dead, and the restart fails
("Connection refused") or hangs.  No variable tells all ranks which start they belong to: agents count their
own restarts.  So the ranks agree on a name for this start, and use the store below it.

Without torchrun's store rank 0 keeps one.  torch would listen on every interface of the host; where the
address of the run is a loopback address, so is that of the socket here.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_POLL_S = 0.05


def agent_store(rank: int, world_size: int, timeout_s: float) -> dist.Store | None:
    """The store of torchrun's agent below a name of this start; None where rank 0 keeps a store of its own.

    Raises:
        TimeoutError: not all ranks of this start came.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
    return dist.PrefixStore(f"start/{agree(store, rank, world_size, timeout_s)}", store)


def own_store(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """A store that rank 0 keeps at MASTER_ADDR, MASTER_PORT.

    Raises:
        OSError: the port is taken.
        RuntimeError: rank 0 cannot be reached.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = _loopback_socket(address, port) if rank == 0 else None
    return dist.TCPStore(
        address,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _loopback_socket(address: str, port: int) -> socket.socket | None:
    """A socket that listens at a loopback address, or None for an address that other hosts can reach."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if not ipaddress.ip_address(place[0]).is_loopback:
        return None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(place)
    listener.listen()
    return listener


def agree(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> str:
    """One name on all ranks, and another one than that of any start before; collective.

    Keys of earlier starts may be in the store.  Each rank says a word of its own; rank 0 makes a name for
    the words that it reads and says both; a rank says yes to a name that was made with its word of now; when
    all have said yes to the same name, rank 0 closes the agreement.

    Raises:
        TimeoutError: a rank did not take part.
    """
    until = time.monotonic() + timeout_s
    word = uuid.uuid4().hex
    store.set(f"word/{rank}", word)
    proposal: dict[str, list[str]] = {}
    while True:
        if rank == 0:
            words = [_read(store, f"word/{other}") for other in range(world_size)]
            if list(proposal.values()) != [words]:
                proposal = {uuid.uuid4().hex: words}
                store.set("proposal", json.dumps(proposal))
        else:
            proposal = json.loads(_read(store, "proposal") or "{}")
        for name, words in proposal.items():
            if len(words) == world_size and words[rank] == word:
                store.set(f"yes/{rank}", name)
                if rank == 0 and all(_read(store, f"yes/{r}") == name for r in range(world_size)):
                    store.set("agreed", name)
                if _read(store, "agreed") == name:
                    return name
        if time.monotonic() > until:
            raise TimeoutError(f"rank {rank}: not all of {world_size} ranks started within {timeout_s:.0f} s")
        time.sleep(_POLL_S)


def _read(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
