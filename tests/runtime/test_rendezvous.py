"""Ranks agree on a name that no earlier start had, whatever earlier starts left in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch.distributed as dist

from recsys_tpu.runtime.rendezvous import _loopback_socket, agree, own_store


def _start(store: dist.Store, world_size: int, timeout_s: float = 20.0) -> str:
    with ThreadPoolExecutor(world_size) as threads:
        ranks = [threads.submit(agree, store, rank, world_size, timeout_s) for rank in range(world_size)]
        (name,) = {rank.result() for rank in ranks}
    return name


def test_each_start_has_a_name_of_its_own_at_any_number_of_ranks():
    store = dist.HashStore()
    names = [_start(store, world_size) for world_size in (2, 2, 4, 1, 3, 3)]
    assert len(set(names)) == len(names)


def test_a_start_whose_rank_died_on_the_way_leaves_nothing_behind():
    store = dist.HashStore()
    with pytest.raises(TimeoutError, match="rank 1: not all of 2 ranks started within 0 s"):
        agree(store, 1, 2, 0.3)
    with pytest.raises(TimeoutError, match="rank 0"):  # it reads the word of the rank that is gone
        agree(store, 0, 2, 0.3)
    assert _start(store, 2)


def test_a_late_rank_is_waited_for():
    store = dist.HashStore()
    _start(store, 2)  # the words of this start must not be taken for those of the next
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(agree, store, 0, 2, 20.0)
        assert not first.done()
        assert agree(store, 1, 2, 20.0) == first.result()


def _listening() -> set[tuple[str, int]]:
    sockets = psutil.Process().net_connections("tcp")
    return {(s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN}


def test_a_run_on_one_host_listens_on_loopback_only(monkeypatch: pytest.MonkeyPatch):
    """torch's own store would listen on every interface, whatever its address is."""
    with _loopback_socket("127.0.0.1", 0) as probe:  # type: ignore[union-attr]
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(port))
    before = _listening()
    with ThreadPoolExecutor(2) as threads:
        first, second = (threads.submit(own_store, rank, 2, 20.0) for rank in range(2))
        first.result().set("key", "value")
        assert second.result().get("key") == b"value"
    new = _listening() - before
    assert {port for _, port in new} == {port}
    assert {address for address, _ in new} <= {"127.0.0.1", "::1"}


def test_an_address_that_other_hosts_reach_is_left_to_torch():
    assert _loopback_socket("192.0.2.1", 1) is None
