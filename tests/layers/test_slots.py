"""Norms that write where the next convolution reads: the same numbers, in fewer maps, whatever stands in the block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResidualBlock
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from tests.layers.shard import random_map, run_sharded, seeded, small_bands
from tests.memory import PeakBytes
from vaepar.layers.context import ShardContext, Slot, shard_active
from vaepar.layers.inputs import channels_last
from vaepar.layers.install import install_shards
from vaepar.layers.kernels import Result
from vaepar.parallel.group import RankGroup, SoloGroup
from vaepar.parallel.loopback import run_loopback
from vaepar.parallel.shards import split_rows

_CHANNELS = 16


class Wrapped(nn.Module):
    """A layer as adapters of weights wrap it: it is called, and its class is not the layer's."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any) -> Any:
        return self.layer(*args)


class Same(nn.Module):
    """In a norm's place, and what it gives is its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Doubled(nn.Module):
    """In a norm's place, and it knows nothing of slots."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def image_block(out: int = _CHANNELS) -> Any:
    return ResnetBlock2D(in_channels=_CHANNELS, out_channels=out, temb_channels=None, groups=4, eps=1e-6)


def video_block(out: int = _CHANNELS) -> Any:
    return WanResidualBlock(_CHANNELS, out)


def call_image(block: nn.Module, own: Sequence[Tensor]) -> Tensor:
    return torch.cat([block(x.clone(), None) for x in own])


def call_video(block: nn.Module, own: Sequence[Tensor]) -> Tensor:
    """The steps of a decode: each finds the frames of the one before it in the cache."""
    cache: list[Any] = [None, None]
    return torch.cat([block(x.clone(), cache, [0]) for x in own], 2)


def steps_of(video: bool, size: int, dtype: torch.dtype) -> list[Tensor]:
    if not video:
        return [random_map(2, _CHANNELS, size, size - 2, dtype=dtype)]
    shapes = [(1, _CHANNELS, frames, size, size - 2) for frames in (1, 4, 1, 2, 3)]
    return [random_map(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def untouched(block: Any) -> None:
    return None


def norms_are_wrapped(block: Any) -> None:
    block.norm1, block.norm2 = Wrapped(block.norm1), Wrapped(block.norm2)


def convolutions_are_wrapped(block: Any) -> None:
    block.conv1, block.conv2 = Wrapped(block.conv1), Wrapped(block.conv2)


def norms_are_foreign(block: Any) -> None:
    block.norm1 = block.norm2 = Doubled()


def there_is_no_first_norm(block: Any) -> None:
    block.norm1 = Same()


def there_are_no_norms(block: Any) -> None:
    block.norm1, block.norm2 = nn.Identity(), nn.Identity()


def activations_give_views(block: Any) -> None:
    block.nonlinearity.register_forward_hook(lambda module, args, out: out.view_as(out))


def activations_give_new_maps(block: Any) -> None:
    block.nonlinearity.register_forward_hook(lambda module, args, out: out + 1)


def norms_have_hooks(block: Any) -> None:
    block.norm2.register_forward_hook(lambda module, args, out: out + 1)


def convolutions_have_hooks(block: Any) -> None:
    block.conv2.register_forward_hook(lambda module, args, out: out + 1)


def activation_is_another(block: Any) -> None:
    block.nonlinearity = nn.GELU()


def dropout_takes_all(block: Any) -> None:
    block.dropout = nn.Dropout(1.0)  # in training, as it is made


def dropout_is_another(block: Any) -> None:
    block.dropout = Doubled()


def norm_has_its_own_forward(block: Any) -> None:
    block.norm2.forward = lambda x: x


def convolution_has_its_own_forward(block: Any) -> None:
    plain = block.conv2.forward
    block.conv2.forward = lambda *args: plain(args[0].clone(), *args[1:]) + 1


CHANGES = [
    dropout_takes_all,
    dropout_is_another,
    norm_has_its_own_forward,
    convolution_has_its_own_forward,
    untouched,
    norms_are_wrapped,
    convolutions_are_wrapped,
    norms_are_foreign,
    there_is_no_first_norm,
    there_are_no_norms,
    activations_give_views,
    activations_give_new_maps,
    norms_have_hooks,
    convolutions_have_hooks,
    activation_is_another,
]


@pytest.mark.parametrize("axis", ["height", "width"])
@pytest.mark.parametrize(
    ("ranks", "size"), [(1, 11), (3, 11), (2, 36)]
)  # without slots, from 16 rows on, halos are awaited late
@pytest.mark.parametrize("out", [_CHANNELS, 24])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("video", "bands", "dtype", "tolerance"),
    [
        (False, False, torch.float64, 1e-12),
        (False, False, torch.float32, 3e-6),
        (False, True, torch.float32, 3e-6),
        (True, False, torch.float64, 1e-12),
        (True, False, torch.float32, 3e-6),
    ],
)
def test_a_block_is_the_plain_block(
    video: bool,
    bands: bool,
    change: Callable[[Any], None],
    out: int,
    ranks: int,
    size: int,
    axis: Any,
    dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums are taken in another order, so not equality: 432 products each in float32, whose step is 1.2e-7."""
    if bands:
        small_bands(monkeypatch)
    build, call = (video_block, call_video) if video else (image_block, call_image)
    maps = steps_of(video, size, dtype)
    plain, block = (seeded(lambda: build(out), dtype) for _ in range(2))
    block.sums_in_place = change is untouched  # as in a loop of diffusers'; what others do is not known
    with torch.no_grad():
        for parameter, own in zip(plain.parameters(), block.parameters(), strict=True):
            own.copy_(parameter.copy_(torch.rand_like(parameter)))  # gammas of ones and zeros would hide a mix-up
    install_shards(block)
    change(plain)
    change(block)
    with torch.no_grad():
        expected = call(plain, maps)
    layout = split_rows(maps[0].shape[-2 if axis == "height" else -1], ranks)
    joined = run_sharded(block, maps, [layout], axis, call)
    assert (joined - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(("video", "maps"), [(False, 2.1), (True, 2.9)])
def test_a_block_makes_two_maps_beside_its_input(video: bool, maps: float) -> None:
    """What the convolution reads and what it writes; of a film also two frames more to read and two caches of two."""
    block = seeded(video_block if video else image_block, torch.float32)
    install_shards(block)
    block.sums_in_place = True  # as in a loop of diffusers'
    shape = (1, _CHANNELS, 8, 32, 32) if video else (1, _CHANNELS, 64, 64)
    x = channels_last(random_map(*shape, dtype=torch.float32))
    cache: list[Any] = [torch.zeros_like(x[:, :, :2]) for _ in range(2)] if video else []
    with shard_active(ShardContext(SoloGroup(), "height", [split_rows(x.shape[-2], 1)])), PeakBytes() as counted:
        out = block(x, cache, [0]) if video else block(x, None)
    assert counted.peak <= maps * x.numel() * x.element_size()
    assert out.data_ptr() == x.data_ptr()  # the caller's map, which it holds on to anyway


def test_what_is_open_is_closed() -> None:
    context = ShardContext(SoloGroup(), "height", [split_rows(4, 1)])
    memory = torch.zeros(1, 2, 4, 4)
    context.open_slot(Slot(memory, memory))
    assert context.place_for(memory.shape, memory) is memory
    assert context.place_for((1, 2, 4, 5), memory) is None
    assert context.place_for(memory.shape, memory.double()) is None
    assert context.take_slot(memory.clone()) is None
    assert context.take_slot(memory) is None
    context.open_slot(Slot(memory, memory))
    with context.result_open(Result(memory)):
        context.clear()
        assert context.take_result() is None
    assert context.place_for(memory.shape, memory) is None


@pytest.mark.parametrize(
    ("conv", "slotted"),
    [
        (nn.Conv2d(2, 2, 3, padding=1), True),
        (nn.Conv2d(2, 2, 1), True),
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), False),  # its rows are gathered anew
        (nn.Conv2d(2, 2, 1, stride=4), False),  # it skips rows that a peer's halo may need
    ],
)
def test_which_convolutions_have_a_slot(conv: nn.Conv2d, slotted: bool) -> None:
    install_shards(conv)

    def work(group: RankGroup) -> bool:
        context = ShardContext(group, "height", [split_rows(16, 2)])
        return conv.slot(context, torch.zeros(1, 2, 8, 8)) is not None  # type: ignore[operator]

    assert run_loopback(2, work) == [slotted] * 2


def test_a_wide_shortcut_leaves_nothing_open() -> None:
    """A later 1x1 convolution of that shape would take it, and its result be written over."""
    block = seeded(lambda: image_block(24), torch.float32)
    block.conv_shortcut = nn.Conv2d(_CHANNELS, 24, 3, padding=1)
    install_shards(block)
    x = channels_last(random_map(1, _CHANNELS, 8, 8, dtype=torch.float32))
    context = ShardContext(SoloGroup(), "height", [split_rows(8, 1)])
    with shard_active(context):
        block(x, None)
    assert context.take_result() is None
