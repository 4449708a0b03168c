"""Norm, activation and convolution in bands of rows: the numbers of the whole map, in less memory."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from tests.layers.shard import random_map, run_sharded, seeded, small_bands
from tests.memory import PeakBytes
from vaepar.layers.bands import _BAND_BYTES, convolve_in_bands, goes_in_bands
from vaepar.layers.context import ShardContext, active_shard, shard_active
from vaepar.layers.conv import ShardConv2d
from vaepar.layers.inputs import channels_last
from vaepar.layers.install import install_shards
from vaepar.layers.kernels import Result
from vaepar.layers.norm import ShardGroupNorm
from vaepar.parallel.group import RankGroup, SoloGroup
from vaepar.parallel.loopback import run_loopback
from vaepar.parallel.shards import Axis, split_rows

AXES: tuple[Axis, ...] = ("height", "width")


class Joined(nn.Module):
    """A norm and a convolution that are called in bands."""

    def __init__(self, channels: int, out: int, kernel: int = 3, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        padding = dilation * (kernel - 1) // 2
        self.norm = ShardGroupNorm(2, channels, eps=1e-6)
        self.conv = ShardConv2d(channels, out, kernel, padding=padding, dilation=dilation, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        context = active_shard()
        if context is None:
            plain: Tensor = self.conv(nn.functional.silu(self.norm(x)))
            return plain
        return convolve_in_bands(context, self.norm, self.conv, channels_last(x)).clone()


def joined(channels: int, out: int, kernel: int = 3, dilation: int = 1, groups: int = 1) -> Joined:
    layer: Joined = seeded(lambda: Joined(channels, out, kernel, dilation, groups), torch.float32)
    layer.norm.weight.data.copy_(random_map(channels, seed=1))
    layer.norm.bias.data.copy_(random_map(channels, seed=2))
    return layer


@pytest.mark.parametrize("seed", range(60))
def test_bands_give_the_whole_map(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any kernel, dilation, groups, batch, ranks, also where a band or a shard is thinner than the halo.

    The sums are the same, in another order: up to 392 products of float32, whose step is 1.2e-7.
    """
    draw = random.Random(seed)
    kernel, groups = draw.choice([(1, 2), (3, 1), (3, 2), (5, 1), (7, 1)])
    channels, out, axis = 2 * draw.randint(1, 4), 2 * draw.randint(1, 4), draw.choice(AXES)
    layer = joined(channels, out, kernel, draw.randint(1, 2), groups)
    x = random_map(draw.randint(1, 2), channels, 40, draw.randint(4, 17), dtype=torch.float32, seed=seed)
    x = x if axis == "width" else x.narrow(2, 0, draw.randint(30, 40))
    size = draw.randint(1, 3 if axis == "height" else 4)
    small_bands(monkeypatch, draw.choice([1, 500, 1000]))
    with torch.no_grad():
        expected = layer(x)
    sharded = run_sharded(layer, [x], [split_rows(x.shape[-2 if axis == "height" else -1], size)], axis)
    assert (sharded - expected).abs().max() <= 3e-6 * expected.abs().max()


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_result_may_stand_where_the_input_stood(ranks: int, axis: Axis, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is added to it made band by band, as the shortcut of a block."""
    small_bands(monkeypatch)
    layer, x = joined(8, 8), random_map(2, 8, 24, 20, dtype=torch.float32)
    shortcut = random_map(2, 8, 24, 20, seed=3, dtype=torch.float32)
    with torch.no_grad():
        expected = layer(x) + shortcut

    def call(layer: nn.Module, own: Sequence[Tensor]) -> Tensor:
        context, memory, added = active_shard(), channels_last(own[0].clone()), own[1]
        assert context is not None
        assert isinstance(layer, Joined)

        def fill(images: slice, rows: slice, part: Tensor) -> None:
            part.copy_(added[images, :, rows])

        with context.result_open(Result(memory, adds=True, fill=fill)):
            out = convolve_in_bands(context, layer.norm, layer.conv, memory)
        assert out.data_ptr() == memory.data_ptr()
        return out

    layouts = [split_rows(x.shape[-2 if axis == "height" else -1], ranks)]
    sharded = run_sharded(layer, [x, shortcut], layouts, axis, call)
    assert (sharded - expected).abs().max() <= 3e-6 * expected.abs().max()


def test_bands_take_one_round_and_a_band_of_memory() -> None:
    layer, x = joined(8, 8), random_map(1, 8, 1024, 2048, dtype=torch.float32)

    def work(group: RankGroup) -> tuple[int, int, int]:
        context = ShardContext(group, "width", [split_rows(2048, 2)])
        own = channels_last(x.narrow(3, 1024 * group.rank, 1024))
        assert goes_in_bands(context, layer.conv, own)
        with torch.no_grad(), PeakBytes() as counted:
            convolve_in_bands(context, layer.norm, layer.conv, own)
        return group.traffic.rounds, group.traffic.messages, counted.peak

    map_bytes = x.nbytes // 2
    for rounds, messages, peak in run_loopback(2, work):
        assert (rounds, messages) == (1, 1)
        assert peak <= map_bytes + 1.1 * _BAND_BYTES  # the result, a band, and edges of a column


@pytest.mark.parametrize(
    ("conv", "bands"),
    [
        (ShardConv2d(8, 8, 3, padding=1), True),
        (ShardConv2d(8, 8, 3, padding=(1, 0)), False),  # narrower than its input
        (ShardConv2d(8, 8, 3, padding=1, stride=2), False),
        (ShardConv2d(8, 8, 3, padding=1, padding_mode="reflect"), False),  # rows at the edges are gathered anew
        (ShardConv2d(8, 8, 4, padding="same"), False),  # pads more on one side, which the kernel cannot
    ],
)
def test_which_convolutions_go_in_bands(conv: ShardConv2d, bands: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    context, x = ShardContext(SoloGroup(), "height", [split_rows(32, 1)]), torch.zeros(1, 8, 32, 8)
    assert not goes_in_bands(context, conv, x)  # one band would hold it all
    small_bands(monkeypatch)
    assert goes_in_bands(context, conv, x) == bands


def test_what_does_not_go_in_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN sums float32 alone; a hook may want to see the norm's result."""
    small_bands(monkeypatch)
    layouts = [split_rows(32, 1)]
    context, x = ShardContext(SoloGroup(), "height", layouts), torch.zeros(1, 8, 32, 8)
    conv = ShardConv2d(8, 8, 3, padding=1)
    assert goes_in_bands(context, conv, x)
    assert not goes_in_bands(context, conv, x.double())
    assert not goes_in_bands(ShardContext(SoloGroup(), "height", layouts, overwrites=False), conv, x)
    assert not goes_in_bands(context, conv.double(), x)


def test_two_blocks_in_a_row_whatever_the_shortcut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one must not find the first one's result in the memory that it takes for its own."""
    small_bands(monkeypatch)
    for shortcut in (None, nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Sequential(nn.Conv2d(8, 8, 1))):
        blocks = seeded(lambda: nn.ModuleList([block(), block()]), torch.float32)
        blocks[0].conv_shortcut = None if shortcut is None else shortcut
        x = random_map(2, 8, 24, 20, dtype=torch.float32)
        with torch.no_grad():
            expected = blocks[1](blocks[0](x, None), None)
        install_shards(blocks)
        for context in (torch.no_grad(), torch.inference_mode()):
            with context, shard_active(ShardContext(SoloGroup(), "height", [split_rows(24, 1)])):
                out = blocks[1](blocks[0](x.clone(), None), None)
            torch.testing.assert_close(out, expected, atol=5e-6, rtol=0)


def block() -> ResnetBlock2D:
    return ResnetBlock2D(in_channels=8, out_channels=8, temb_channels=None, groups=2, eps=1e-6)


def test_a_block_holds_its_input_a_map_and_a_band() -> None:
    layer = seeded(block, torch.float32)
    install_shards(layer)
    layer.sums_in_place = True
    x = channels_last(random_map(1, 8, 2048, 1024, dtype=torch.float32))
    with shard_active(ShardContext(SoloGroup(), "height", [split_rows(2048, 1)])), PeakBytes() as counted:
        out = layer(x, None)
    assert out.data_ptr() == x.data_ptr()
    assert counted.peak <= x.nbytes + 1.1 * _BAND_BYTES
