"""Small random models of every family, plain and distributed, and what they are given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests import models
from vaepar.autoencoders import (
    DistributedAutoencoderKL,
    DistributedAutoencoderKLFlux2,
    DistributedAutoencoderKLQwenImage,
    DistributedAutoencoderKLWan,
)

FAMILIES: dict[str, tuple[Any, Any, int, int]] = {
    # name: factory, adapter, latent channels, pixels per latent
    "kl": (models.make_kl, DistributedAutoencoderKL, 4, 8),
    "flux2": (models.make_flux2, DistributedAutoencoderKLFlux2, 32, 8),
    "qwenimage": (models.make_qwenimage, DistributedAutoencoderKLQwenImage, 16, 8),
    "wan21": (models.make_wan21, DistributedAutoencoderKLWan, 16, 8),
    "wan22": (models.make_wan22, DistributedAutoencoderKLWan, 48, 16),
}

# The plain diffusers model and the adapter of each family; both have the same weights.
MAKERS: dict[str, Callable[..., Any]] = {family: make for family, (make, *_) in FAMILIES.items()}
ADAPTERS: dict[str, Callable[..., Any]] = {
    family: partial(make, cls=adapter) for family, (make, adapter, *_) in FAMILIES.items()
}
VIDEO = ("qwenimage", "wan21", "wan22")


def latent(family: str, height: int, width: int, frames: int = 1, batch: int = 1, seed: int = 0) -> Tensor:
    channels = FAMILIES[family][2]
    shape = (batch, channels, *([frames] if family in VIDEO else []), height, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain_and_distributed(family: str, tile: int, stride: int) -> tuple[Any, Any]:
    """The plain diffusers model with tiles set by its own attributes, and the adapter with the same weights."""
    factory, adapter, _, ratio = FAMILIES[family]
    plain, distributed = factory(), factory(cls=adapter)
    distributed.configure_tiles(tile * ratio, stride * ratio)
    if family not in VIDEO:
        plain.use_tiling = True
        plain.tile_latent_min_size, plain.tile_sample_min_size = tile, tile * ratio
        plain.tile_overlap_factor = 1 - stride / tile
    else:
        plain.enable_tiling(tile * ratio, tile * ratio, stride * ratio, stride * ratio)
    return plain, distributed


def pixels(family: str, height: int, width: int, frames: int = 1, batch: int = 1) -> Tensor:
    """Pixels in [-1, 1], sizes in latents."""
    ratio = FAMILIES[family][3]
    shape: tuple[int, ...] = (batch, 3, height * ratio, width * ratio)
    if family in VIDEO:
        shape = (batch, 3, frames, *shape[2:])
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
