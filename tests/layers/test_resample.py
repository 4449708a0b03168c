"""Up- and down-sampling of a map that is cut among ranks, against diffusers' layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageResample
from diffusers.models.autoencoders.autoencoder_kl_wan import AvgDown3D, DupUp3D, WanResample
from diffusers.models.downsampling import Downsample2D
from diffusers.models.upsampling import Upsample2D

from tests.layers.shard import random_map, run_sharded, seeded, small_bands
from vaepar.layers.install import install_shards
from vaepar.parallel.shards import Axis, decode_layouts, encode_layouts

AXES: tuple[Axis, ...] = ("height", "width")
EXACT = {"atol": 1e-12, "rtol": 0}


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(
    "build", [lambda: Upsample2D(4, use_conv=True), lambda: WanResample(4, "upsample2d").resample], ids=["kl", "wan"]
)
def test_upsampling(build: Any, size: int, axis: Axis) -> None:
    layer = seeded(lambda: torch.nn.Sequential(build()))
    x = random_map(2, 4, 5, 5).float().double()  # Wan's upsampling rounds to float32
    expected = layer(x)
    install_shards(layer)
    torch.testing.assert_close(run_sharded(layer, [x], decode_layouts(5, size, 1), axis), expected, **EXACT)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("band", [1, 700, 2000])  # of one row, of some, of more than half of the map
def test_upsampling_in_bands(band: int, size: int, axis: Axis, monkeypatch: pytest.MonkeyPatch) -> None:
    small_bands(monkeypatch, band)
    layer = seeded(lambda: torch.nn.Sequential(Upsample2D(4, use_conv=True)), torch.float32)
    x = random_map(2, 4, 11, 10, dtype=torch.float32)
    expected = layer(x)
    install_shards(layer)
    layouts = decode_layouts(11 if axis == "height" else 10, size, 1)
    joined = run_sharded(layer, [x], layouts, axis)
    torch.testing.assert_close(joined, expected, atol=2e-6, rtol=0)  # 36 products, taps added up beforehand


def test_upsampling_in_bfloat16_sums_no_taps() -> None:
    layer = seeded(lambda: torch.nn.Sequential(Upsample2D(4, use_conv=True)), torch.bfloat16)
    x = random_map(1, 4, 6, 5).bfloat16()
    expected = layer(x)
    install_shards(layer)
    joined = run_sharded(layer, [x], decode_layouts(6, 2, 1), "height")
    torch.testing.assert_close(joined, expected, atol=2e-2, rtol=0)  # the same products, rounded to 8 bits


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize(("extent", "size"), [(10, 1), (11, 2), (10, 5)])
def test_downsampling(extent: int, size: int, padding: int, axis: Axis) -> None:
    layer = seeded(lambda: torch.nn.Sequential(Downsample2D(3, use_conv=True, padding=padding)))
    if padding and extent % 2:
        extent -= 1  # padded all around, an odd extent rounds up, which no encoder of these families does
    x = random_map(1, 3, *((extent, 8) if axis == "height" else (8, extent)))
    expected = layer(x)
    install_shards(layer)
    torch.testing.assert_close(run_sharded(layer, [x], encode_layouts(extent, size, 1), axis), expected, **EXACT)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("cls", [WanResample, QwenImageResample])
@pytest.mark.parametrize(("mode", "extent"), [("upsample3d", 6), ("downsample3d", 8)])
def test_resampling_in_time(mode: str, extent: int, cls: Any, axis: Axis) -> None:
    layer = seeded(lambda: torch.nn.Sequential(cls(4, mode)))
    x = random_map(1, 4, 9, extent, extent).float().double()

    def chunked(block: Any, own: Any) -> torch.Tensor:
        cache: list[Any] = [None]
        parts = [own[0][:, :, :1], own[0][:, :, 1:5], own[0][:, :, 5:]]
        return torch.cat([block[0](part, feat_cache=cache, feat_idx=[0]) for part in parts], 2)

    with torch.no_grad():
        expected = chunked(layer, [x])
    install_shards(layer)
    layouts = decode_layouts(extent, 3, 1) if mode == "upsample3d" else encode_layouts(extent, 3, 1)
    torch.testing.assert_close(run_sharded(layer, [x], layouts, axis, chunked), expected, **EXACT)


@pytest.mark.parametrize("axis", AXES)
def test_residual_shortcuts_are_local(axis: Axis) -> None:
    x = random_map(1, 4, 4, 8, 8)
    up, down = DupUp3D(4, 2, 2, 2), AvgDown3D(4, 8, 2, 2)
    assert torch.equal(run_sharded(up, [x], decode_layouts(8, 3, 1), axis), up(x))
    assert torch.equal(run_sharded(down, [x], encode_layouts(8, 3, 1), axis), down(x))
