"""Ranks that are started again meet each other, not those that died; who does not come is named."""

from __future__ import annotations

import os
import sys
import threading

import pytest
from torch.distributed import HashStore

from vaepar.errors import RankLostError
from vaepar.launch import _batch_scheduling
from vaepar.parallel.torch_group import _agree_on_name


def meet_all(store: HashStore, size: int) -> list[str]:
    names: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: names.__setitem__(rank, _agree_on_name(store, rank, size, 30)))
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [names[rank] for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_start_has_a_name_of_its_own(size: int) -> None:
    store = HashStore()
    starts = [meet_all(store, size) for _ in range(3)]
    assert all(len(set(names)) == 1 for names in starts)
    assert len({names[0] for names in starts}) == 3


def test_a_dead_rank_is_not_taken_for_the_new_one() -> None:
    """It has said hello before it died; the new one comes late, and both still agree."""
    store = HashStore()
    store.set("vaepar/hello/1", "from the one that died")
    with pytest.raises(RankLostError, match=r"rank\(s\) 1 did not come within 0.2 seconds"):
        _agree_on_name(store, 0, 2, 0.2)
    first, second = meet_all(store, 2)
    assert first == second


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(RankLostError, match=r"rank\(s\) 1, 2 did not come"):
        _agree_on_name(HashStore(), 0, 3, 0.1)
    with pytest.raises(RankLostError, match="rank 0 did not come"):
        _agree_on_name(HashStore(), 1, 2, 0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policy")
def test_threads_that_a_rank_makes_do_not_interrupt_it() -> None:
    policies: list[int] = []
    with _batch_scheduling():
        thread = threading.Thread(target=lambda: policies.append(os.sched_getscheduler(0)))
        thread.start()
        thread.join()
        with _batch_scheduling():  # already chosen: left as it is
            pass
        policies.append(os.sched_getscheduler(0))
    assert policies == [os.SCHED_BATCH, os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
