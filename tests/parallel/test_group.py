"""What a group of ranks can tell about itself."""

from __future__ import annotations

import pytest

from vaepar.errors import PeerFailedError
from vaepar.parallel.group import RankGroup, SoloGroup
from vaepar.parallel.loopback import run_loopback


def test_one_rank_is_equal_to_itself() -> None:
    assert SoloGroup().all_equal(7, 1)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_are_equal_or_not(size: int) -> None:
    def work(group: RankGroup) -> list[bool]:
        same = [group.all_equal(2**40, size), group.all_equal(2**40 + (group.rank == size - 1), size)]
        others = group.all_equal(group.rank == size - 1, size - 1) if group.rank < size - 1 else True
        return [*same, others]

    assert run_loopback(size, work) == [[True, False, True]] * size


def test_whoever_waits_for_a_failed_rank_is_woken() -> None:
    def work(group: RankGroup) -> None:
        if group.rank == 1:
            group.raise_alarm()
            return
        with pytest.raises(PeerFailedError):
            group.all_equal(1, 2)

    run_loopback(2, work)
