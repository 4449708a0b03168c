"""Ranks that are started again meet each other, not those that died; who does not come is named."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from torch.distributed import HashStore

from tests.farm.ranks import apart
from vaepar.errors import RankLostError
from vaepar.launch import World, joined
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


def policies_of_a_rank(before: int) -> list[set[int]]:
    """Scheduling of gloo's threads while a rank is joined, of its own thread then, and of that afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    where = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(where, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.sched_setscheduler(0, before, os.sched_param(0))
    with joined(World.from_environment(), "cpu"):
        threads = [task for task in Path("/proc/self/task").iterdir() if "gloo" in (task / "comm").read_text()]
        passing = {os.sched_getscheduler(int(task.name)) for task in threads}
        own = {os.sched_getscheduler(0)}
    return [passing, own, {os.sched_getscheduler(0)}]


@pytest.mark.processes
def test_ranks_on_cpus_are_batch_work() -> None:
    """Unless somebody has chosen otherwise."""
    batch, usual, idle = {os.SCHED_BATCH}, {os.SCHED_OTHER}, {os.SCHED_IDLE}
    assert apart(policies_of_a_rank, os.SCHED_OTHER) == [batch, batch, usual]
    assert apart(policies_of_a_rank, os.SCHED_IDLE) == [idle, idle, idle]
