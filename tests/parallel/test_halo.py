"""Rows between ranks: right rows, right ranks, nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from vaepar.parallel.group import RankGroup
from vaepar.parallel.halo import BufferPool, HaloExchange, gather_beside_halo, gather_parts
from vaepar.parallel.loopback import run_loopback
from vaepar.parallel.shards import Window, halo_plan, split_rows


@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize("shape", [(2, 3, 11, 11), (2, 3, 4, 11, 11)])
@pytest.mark.parametrize(("size", "kernel"), [(2, 3), (3, 7), (8, 7), (5, 1)])
def test_exchange_brings_exactly_the_rows_of_the_plan(size: int, kernel: int, shape: Sequence[int], dim: int) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    layout = split_rows(11, size)
    window = Window(kernel, before=kernel // 2, after=kernel // 2)

    def work(group: RankGroup) -> tuple[int, int, int]:
        plan = halo_plan(layout, layout, window, group.rank)
        own = whole.narrow(dim, plan.own[0], plan.own[1] - plan.own[0])
        pieces = HaloExchange(group, plan, own, dim, BufferPool()).finish()
        assert [start for start, _ in pieces] == [receive.start for receive in plan.receives]
        for (start, piece), receive in zip(pieces, plan.receives, strict=True):
            assert torch.equal(piece, whole.narrow(dim, start, receive.rows))
        traffic = group.traffic
        assert traffic.messages == len(plan.sends)
        assert traffic.bytes == plan.sent_rows * (whole.numel() // 11) * 4
        return traffic.messages, traffic.bytes, traffic.rounds

    sent = run_loopback(size, work)
    assert all(rounds == (0 if kernel == 1 else 1) for _, _, rounds in sent)


@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "kernel"), [(2, 3), (3, 7), (8, 7), (5, 1)])
def test_parts_travel_beside_the_rows(size: int, kernel: int, dtype: torch.dtype, dim: int) -> None:
    """One message to each peer in one round, those that need no rows among them."""
    whole = torch.randn((2, 3, 11, 11), generator=torch.Generator().manual_seed(0)).to(dtype)
    parts = torch.randn((size, 2, 2, 3), dtype=torch.promote_types(dtype, torch.float32))
    layout = split_rows(11, size)
    window = Window(kernel, before=kernel // 2, after=kernel // 2)

    def work(group: RankGroup) -> None:
        plan = halo_plan(layout, layout, window, group.rank)
        own, pool = whole.narrow(dim, plan.own[0], plan.own[1] - plan.own[0]), BufferPool()
        for _ in range(2):  # buffers are used again
            gathered, pieces = gather_beside_halo(group, layout, parts[group.rank], plan, own, dim, pool)
        assert all(torch.equal(got, part) for got, part in zip(gathered, parts, strict=True))
        assert [start for start, _ in pieces] == [receive.start for receive in plan.receives]
        for (start, piece), receive in zip(pieces, plan.receives, strict=True):
            assert torch.equal(piece, whole.narrow(dim, start, receive.rows))
        traffic = group.traffic
        assert (traffic.messages, traffic.rounds) == (2 * (size - 1), 2)
        rows = plan.sent_rows * (whole.numel() // 11) * whole.element_size()
        assert traffic.bytes == 2 * (rows + (size - 1) * parts[0].nbytes)

    run_loopback(size, work)


def test_ranks_beyond_the_layout_take_no_part() -> None:
    layout = split_rows(2, 4)

    def work(group: RankGroup) -> Tensor | None:
        if group.rank >= layout.ranks:
            return None
        plan = halo_plan(layout, layout, Window(3, before=1, after=1), group.rank)
        own = torch.full((1, 1, 1, 2), float(group.rank))
        return HaloExchange(group, plan, own, -2, BufferPool()).finish()[0][1]

    results = run_loopback(4, work)
    assert results[0] is not None
    assert results[1] is not None
    assert float(results[0].mean()) == 1.0
    assert float(results[1].mean()) == 0.0
    assert results[2:] == [None, None]


def test_buffers_are_used_again_and_given_back() -> None:
    pool = BufferPool()
    like = torch.zeros(1)
    first = pool.take("a", (2, 3), like)
    assert pool.take("a", (2, 3), like) is first
    assert pool.take("b", (2, 3), like) is not first
    assert pool.take("a", (2, 3), like.double()) is not first
    pool.clear()
    assert not pool.buffers


def test_the_scratch_buffer_grows_and_is_one() -> None:
    pool, like = BufferPool(), torch.zeros(1)
    small = pool.scratch((2, 3), like)
    large = pool.scratch((4, 5), like)
    assert large.shape == (4, 5)
    assert pool.in_scratch(large)
    assert not pool.in_scratch(small)
    assert pool.scratch((3, 2), like).data_ptr() == large.data_ptr()
    assert pool.scratch((3, 2), like.double()).dtype == torch.float64
    pool.clear()
    assert not pool.in_scratch(large)


def test_gather_of_unequal_parts() -> None:
    layout = split_rows(13, 2)  # 7 + 6: a collective for equal shapes breaks here
    whole = torch.arange(26.0).view(13, 2)

    def work(group: RankGroup) -> Tensor:
        own = whole[slice(*layout.interval(group.rank))]
        return torch.cat(gather_parts(group, layout, own, [(layout.length(r), 2) for r in range(2)]))

    assert all(torch.equal(result, whole) for result in run_loopback(2, work))
