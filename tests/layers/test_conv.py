"""Sharded convolutions against torch's and diffusers' own, in float64: only the order of sums may differ (1e-12)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from torch import Tensor, nn

from tests.layers.shard import random_map, run_sharded, seeded
from vaepar.errors import UnsupportedModeError, UsageError
from vaepar.layers.context import ShardContext, shard_active
from vaepar.layers.conv import ShardConv2d
from vaepar.layers.install import WanDistCausalConv3d, WanDistZeroPad2d
from vaepar.parallel.group import RankGroup, SoloGroup
from vaepar.parallel.loopback import run_loopback
from vaepar.parallel.shards import Axis, Window, decode_layouts, encode_layouts, halo_plan, split_rows

AXES: tuple[Axis, ...] = ("height", "width")
EXACT = {"atol": 1e-12, "rtol": 0}


def random_case(seed: int) -> dict[str, Any]:
    pick = random.Random(seed)
    kernel = (pick.randint(1, 7), pick.randint(1, 7))
    dilation = (pick.randint(1, 2), pick.randint(1, 2))
    padding = tuple(pick.randint(0, min(3, d * (k - 1))) for k, d in zip(kernel, dilation, strict=True))
    return {
        "kernel_size": kernel,
        "dilation": dilation,
        "padding": padding,
        "stride": (pick.randint(1, 2), pick.randint(1, 2)),
        "padding_mode": pick.choice(["zeros", "zeros", "replicate", "reflect"]),
        "groups": pick.choice([1, 2]),
        "bias": pick.random() < 0.7,
    }


@pytest.mark.parametrize("seed", range(40))
def test_conv2d_of_any_shape(seed: int) -> None:
    case = random_case(seed)
    pick = random.Random(1000 + seed)
    extents = [
        d * (k - 1) + 1 + pick.randint(0, 12) for k, d in zip(case["kernel_size"], case["dilation"], strict=True)
    ]
    axis = AXES[seed % 2]
    conv = seeded(lambda: ShardConv2d(4, 6, **case))
    x = random_map(pick.randint(1, 2), 4, *extents, seed=seed)
    expected = conv(x)
    out_extent = expected.shape[-2 if axis == "height" else -1]
    size = pick.randint(1, min(5, out_extent, extents[seed % 2]))
    joined = run_sharded(conv, [x], [split_rows(extents[seed % 2], size)], axis)
    torch.testing.assert_close(joined, expected, **EXACT)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(("extent", "size"), [(37, 2), (49, 3), (16, 4), (5, 5)])
@pytest.mark.parametrize("kernel", [3, 7])
def test_conv2d_of_size_same(kernel: int, extent: int, size: int, axis: Axis) -> None:
    # Shards of 16 rows and more compute while the halo travels, thinner ones wait for it.
    conv = seeded(lambda: ShardConv2d(3, 5, kernel, padding="same"))
    x = random_map(2, 3, *((extent, 9) if axis == "height" else (9, extent)))
    torch.testing.assert_close(run_sharded(conv, [x], [split_rows(extent, size)], axis), conv(x), **EXACT)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(("extent", "size"), [(16, 2), (23, 3), (10, 5), (40, 1)])
def test_strided_conv_after_padding_right_and_bottom(extent: int, size: int, axis: Axis) -> None:
    layer = seeded(lambda: nn.Sequential(WanDistZeroPad2d((0, 1, 0, 1)), ShardConv2d(3, 4, 3, stride=2)))
    x = random_map(1, 3, *((extent, 8) if axis == "height" else (8, extent)))
    torch.testing.assert_close(run_sharded(layer, [x], encode_layouts(extent, size, 1), axis), layer(x), **EXACT)


def test_padding_stands_at_the_edges_of_the_picture_only() -> None:
    layer = nn.Sequential(WanDistZeroPad2d((1, 1, 1, 1)), ShardConv2d(1, 1, 3, bias=False))
    layer[1].weight.data.fill_(1.0)
    counts = run_sharded(layer, [torch.ones(1, 1, 6, 4)], [split_rows(6, 3)], "height")
    expected = F.conv2d(torch.ones(1, 1, 6, 4), torch.ones(1, 1, 3, 3), padding=1)
    assert torch.equal(counts, expected)


def test_two_paddings_without_a_convolution_between_are_refused() -> None:
    pad = WanDistZeroPad2d(1)
    with shard_active(ShardContext(SoloGroup(), "height", [split_rows(4, 1)])), pytest.raises(UsageError, match="two"):
        pad(pad(torch.zeros(1, 1, 4, 4)))


def test_circular_padding_is_refused() -> None:
    conv = ShardConv2d(1, 1, 3, padding=1, padding_mode="circular")
    context = ShardContext(SoloGroup(), "height", [split_rows(4, 1)])
    with shard_active(context), pytest.raises(UnsupportedModeError, match="circular"):
        conv(torch.zeros(1, 1, 4, 4))


def test_a_map_of_another_shard_is_refused() -> None:
    def work(group: RankGroup) -> None:
        context = ShardContext(group, "height", decode_layouts(8, 2, 1))
        with shard_active(context):
            ShardConv2d(1, 1, 3, padding=1)(torch.zeros(1, 1, 5, 4))

    with pytest.raises(UsageError, match=r"5 rows of its own.*\[4, 8\]"):
        run_loopback(2, work)


CAUSAL = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": (3, 1, 1), "padding": (1, 0, 0)},
    {"kernel_size": 1},
    {"kernel_size": (1, 3, 3), "padding": (0, 1, 1)},
    {"kernel_size": (2, 5, 3), "padding": (0, 2, 1)},
]


def in_chunks(chunks: list[int], frames: int) -> Any:
    """Call a causal layer chunk by chunk as the models do, each time with the last frames before."""

    def call(conv: nn.Module, own: Any) -> Tensor:
        x, out, start = own[0], [], 0
        for chunk in chunks:
            before = x[:, :, max(0, start - frames) : start].clone() if start and frames else None
            out.append(conv(x[:, :, start : start + chunk], before))
            start += chunk
        return torch.cat(out, 2)

    return call


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("case", CAUSAL, ids=str)
@pytest.mark.parametrize(("size", "chunks"), [(1, [1, 2]), (2, [1, 1, 3]), (3, [1, 4, 2]), (5, [2, 1, 2])])
def test_causal_conv_in_chunks(case: dict[str, Any], size: int, chunks: list[int], axis: Axis) -> None:
    if case["kernel_size"] == (2, 5, 3) and size > 1:
        chunks = [5]  # it keeps no frames (its temporal padding is 0), so it cannot be cut in time
    conv = seeded(lambda: WanDistCausalConv3d(3, 4, **case))
    plain = seeded(lambda: WanCausalConv3d(3, 4, **case))
    call = in_chunks(chunks if case["kernel_size"] != (2, 5, 3) else [sum(chunks)], conv._padding[4])
    x = random_map(2, 3, sum(chunks), 7, 7)
    torch.testing.assert_close(run_sharded(conv, [x], [split_rows(7, size)], axis, call), plain(x), **EXACT)


def test_cached_frames_are_not_sent_again() -> None:
    x = random_map(1, 3, 9, 6, 5, dtype=torch.float32)
    conv = seeded(lambda: WanDistCausalConv3d(3, 4, 3, padding=1), torch.float32)
    layout = split_rows(6, 2)
    row = 3 * 9 * 5 * 4  # channels, frames, width, bytes: each frame's border row goes once

    def work(group: RankGroup) -> tuple[int, int]:
        context = ShardContext(group, "height", [layout])
        own = x.narrow(-2, layout.bounds[group.rank], 3)
        with torch.no_grad(), shard_active(context):
            in_chunks([1, 4, 4], 2)(conv, [own])
        plan = halo_plan(layout, layout, Window(3, before=1, after=1), group.rank)
        assert group.traffic.bytes == row * plan.sent_rows
        return group.traffic.messages, group.traffic.rounds

    assert run_loopback(2, work) == [(3, 3), (3, 3)]


def test_a_cache_of_another_request_is_refused() -> None:
    conv = WanDistCausalConv3d(1, 1, 3, padding=1)

    def work(group: RankGroup) -> None:
        with shard_active(ShardContext(group, "height", [split_rows(4, 2)])):
            conv(torch.zeros(1, 1, 1, 2, 4), torch.zeros(1, 1, 2, 2, 4))

    with pytest.raises(UsageError, match="another request"):
        run_loopback(2, work)
