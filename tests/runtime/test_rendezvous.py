"""Ranks agree on a name that no earlier start had, whatever earlier starts left in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from recsys_tpu.runtime.rendezvous import agree


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
