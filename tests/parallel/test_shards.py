"""The arithmetic of shards against brute force over single rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vaepar.autoencoders.selection import longer_axis
from vaepar.errors import UsageError
from vaepar.parallel.shards import (
    HaloPlan,
    Layout,
    Window,
    decode_layouts,
    eligible_axes,
    encode_layouts,
    halo_plan,
    split_rows,
)


@pytest.mark.parametrize(
    ("extent", "size", "shares"),
    [
        (60, 8, [8, 8, 8, 8, 7, 7, 7, 7]),
        (12, 8, [2, 2, 2, 2, 1, 1, 1, 1]),  # equal shares of ceil(12 / 8) rows would leave two ranks with none
        (13, 2, [7, 6]),
        (44, 8, [6, 6, 6, 6, 5, 5, 5, 5]),
        (5, 5, [1] * 5),
        (3, 8, [1] * 3),
        (1, 1, [1]),
    ],
)
def test_split_rows(extent: int, size: int, shares: list[int]) -> None:
    layout = split_rows(extent, size)
    assert [layout.length(rank) for rank in range(layout.ranks)] == shares
    assert layout.extent == extent


@given(st.integers(1, 500), st.integers(1, 40))
def test_split_rows_is_even_and_whole(extent: int, size: int) -> None:
    layout = split_rows(extent, size)
    shares = [layout.length(rank) for rank in range(layout.ranks)]
    assert sum(shares) == extent
    assert shares == sorted(shares, reverse=True)
    assert shares[0] - shares[-1] <= 1
    assert layout.ranks == min(extent, size)


@pytest.mark.parametrize(("extent", "size"), [(0, 2), (4, 0), (-1, 1)])
def test_split_rows_refuses_nothing(extent: int, size: int) -> None:
    with pytest.raises(UsageError, match=f"{extent} rows among {size} ranks"):
        split_rows(extent, size)


@pytest.mark.parametrize("bounds", [(), (0,), (1, 2), (0, 2, 2), (0, 3, 1)])
def test_layout_is_valid_if_it_exists(bounds: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="shard bounds"):
        Layout(bounds)


def test_decode_layouts_double() -> None:
    layouts = decode_layouts(5, 2, 3)
    assert [layout.bounds for layout in layouts] == [(0, 3, 5), (0, 6, 10), (0, 12, 20), (0, 24, 40)]


def test_encode_layouts_round_down_and_keep_the_rest_on_the_last_rank() -> None:
    layouts = encode_layouts(101, 3, 3)  # 101 pixels are 12 latent rows, as diffusers rounds
    assert [layout.bounds for layout in layouts] == [
        (0, 32, 64, 101),
        (0, 16, 32, 50),
        (0, 8, 16, 25),
        (0, 4, 8, 12),
    ]


def test_encode_layouts_refuse_less_than_a_latent_row() -> None:
    with pytest.raises(UsageError, match="it needs 8 rows"):
        encode_layouts(7, 2, 3)


@given(st.integers(1, 200), st.integers(1, 9), st.integers(0, 4))
def test_encode_layouts_halve_within_a_rank(extent: int, size: int, halvings: int) -> None:
    if extent >> halvings == 0:
        return
    layouts = encode_layouts(extent, size, halvings)
    for large, small in pairwise(layouts):
        assert small.extent == large.extent // 2
        assert large.bounds[:-1] == tuple(2 * bound for bound in small.bounds[:-1])


@st.composite
def operations(draw: st.DrawFn) -> tuple[Layout, Layout, Window]:
    kernel, dilation = draw(st.integers(1, 7)), draw(st.integers(1, 2))
    reach = dilation * (kernel - 1) + 1
    mode = draw(st.sampled_from(["zeros", "replicate", "reflect"]))
    extent = draw(st.integers(reach, 40))  # reflect padding must be smaller than the map
    before, after = draw(st.integers(0, reach - 1)), draw(st.integers(0, reach - 1))
    window = Window(kernel, draw(st.integers(1, 2)), dilation, before, after, mode)
    target = split_rows(window.out_extent(extent), draw(st.integers(1, 8)))
    source = split_rows(extent, target.ranks)
    if source.ranks != target.ranks:
        target = split_rows(target.extent, source.ranks)
    return source, target, window


def rows_read(target: Layout, window: Window, rank: int, extent: int) -> set[int]:
    """The real rows that the outputs of ``rank`` read, one by one."""
    rows = set()
    for output in range(*target.interval(rank)):
        for tap in range(window.kernel):
            row = output * window.stride - window.before + tap * window.dilation
            if window.mode == "replicate":
                row = min(max(row, 0), extent - 1)
            elif window.mode == "reflect":
                row = -row if row < 0 else row
                row = 2 * (extent - 1) - row if row >= extent else row
            if 0 <= row < extent:
                rows.add(row)
    return rows


@given(operations())
def test_plan_is_what_brute_force_finds(operation: tuple[Layout, Layout, Window]) -> None:
    source, target, window = operation
    plans = [halo_plan(source, target, window, rank) for rank in range(target.ranks)]
    for rank, plan in enumerate(plans):
        rows = rows_read(target, window, rank, source.extent)
        assert min(rows) >= plan.start
        assert max(rows) < plan.stop
        if window.dilation == 1 and window.kernel >= window.stride:
            assert (plan.start, plan.stop) == (min(rows), max(rows) + 1)
        have = set(range(*plan.own))
        for receive in plan.receives:
            new = set(range(receive.start, receive.stop))
            assert new <= set(range(*source.interval(receive.peer)))
            assert not new & have  # nothing arrives twice, and nothing that the rank owns
            have |= new
        assert set(range(plan.start, plan.stop)) <= have
        assert rows <= have


@given(operations())
def test_what_is_sent_is_what_is_received_and_needed(operation: tuple[Layout, Layout, Window]) -> None:
    source, target, window = operation
    plans = [halo_plan(source, target, window, rank) for rank in range(target.ranks)]
    sent = {(rank, send.peer, send.start, send.stop) for rank, plan in enumerate(plans) for send in plan.sends}
    received = {(got.peer, rank, got.start, got.stop) for rank, plan in enumerate(plans) for got in plan.receives}
    assert sent == received
    for _, peer, start, stop in sent:
        assert plans[peer].start <= start < stop <= plans[peer].stop


def test_thin_shards_reach_ranks_two_away() -> None:
    layout = split_rows(5, 5)
    plan = halo_plan(layout, layout, Window(7, before=3, after=3), 2)
    assert [receive.peer for receive in plan.receives] == [0, 1, 3, 4]
    assert (plan.before, plan.after) == (1, 1)


def test_a_strided_window_needs_its_right_neighbour_only() -> None:
    large, small = encode_layouts(32, 2, 1)
    window = Window(3, stride=2, after=1)
    first, last = (halo_plan(large, small, window, rank) for rank in (0, 1))
    assert [(r.peer, r.rows) for r in first.receives] == [(1, 1)]
    assert first.sends == ()
    assert last.receives == ()
    assert last.after == 1


def test_a_kernel_of_one_row_is_local() -> None:
    layout = split_rows(9, 4)
    for rank in range(4):
        plan = halo_plan(layout, layout, Window(1), rank)
        assert (plan.start, plan.stop) == plan.own
        assert not plan.sends
        assert not plan.receives


def test_plans_are_shared_values() -> None:
    layout = split_rows(9, 4)
    plan = halo_plan(layout, layout, Window(3, before=1, after=1), 1)
    assert plan is halo_plan(split_rows(9, 4), layout, Window(3, before=1, after=1), 1)
    assert isinstance(plan, HaloPlan)


def test_reflect_padding_must_be_smaller_than_the_map() -> None:
    layout = split_rows(2, 1)
    with pytest.raises(UsageError, match="reflect padding"):
        halo_plan(layout, Layout((0, 4)), Window(3, before=2, after=2, mode="reflect"), 0)


@pytest.mark.parametrize(
    ("height", "width", "size", "axis"),
    [
        (60, 104, 4, "width"),
        (104, 60, 4, "height"),
        (64, 64, 4, "width"),
        (2, 2, 4, None),
        (8, 3, 4, "height"),
        (3, 4, 4, "width"),
        (5, 7, 1, "width"),
    ],
)
def test_auto_takes_the_longer_axis_that_covers_every_rank(height: int, width: int, size: int, axis: str) -> None:
    assert longer_axis(height, width, size) == axis


def test_eligible_axes() -> None:
    assert eligible_axes((("height", 3), ("width", 8)), 4) == ("width",)
    assert eligible_axes((("height", 4), ("width", 8)), 4) == ("height", "width")
