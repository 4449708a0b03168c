"""When the memory does not hold a file: what is tried next, and how the model is set back afterwards."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from vaepar.autoencoders.selection import DIRECT
from vaepar.autoencoders.tiling import tile_settings
from vaepar.config import VaeParallelMode

# A tile of fewer latents is mostly overlap and border; what does not fit then will not fit at all.
_LEAST_TILE_LATENTS = 8


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How a file is worked on, as far as that decides about memory.

    Args:
        mode: parallel mode.
        frames_per_step: latent frames of one step of a spatial shard.
        tile, stride: pixels.
    """

    mode: VaeParallelMode
    frames_per_step: int
    tile: int
    stride: int

    def smaller(self, used: str | None, ranks: int, ratio: int, extent: int | None) -> Effort | None:
        """The next effort that needs less memory; None when there is none.

        Fewer frames a step change no pixel; a shard gives the untiled picture; tiles come after that, because their
        seams are blended, and smaller tiles last, because they blend more.

        Args:
            used: the strategy that ran out of memory (``direct``, ``tile`` or a spatial mode); None when unknown.
            ranks: that share the file.
            ratio: pixels for each latent.
            extent: the longer side of the picture in pixels; None when unknown.
        """
        sharded = used not in (None, DIRECT, VaeParallelMode.TILE.value)
        if sharded and self.frames_per_step > 1:
            return replace(self, frames_per_step=self.frames_per_step // 2)
        if used == DIRECT and extent is not None and extent // ratio >= ranks > 1:
            # Only what is larger than a tile is shared at all; with tiles of one latent everything is.
            return replace(self, mode=VaeParallelMode.AUTO, tile=ratio, stride=ratio)
        whole = extent or self.tile
        tile = self.tile if sharded and ratio < self.tile < whole else min(self.tile, whole) // 2 // ratio * ratio
        if sharded and self.tile == ratio:
            tile = whole // 2 // ratio * ratio
        if tile < _LEAST_TILE_LATENTS * ratio:
            return None
        return replace(self, mode=VaeParallelMode.TILE, tile=tile, stride=max(ratio, tile * 3 // 4 // ratio * ratio))

    def words(self) -> str:
        if self.mode is VaeParallelMode.TILE:
            return f"tiles of {self.tile} pixels"
        return f"a spatial shard, {self.frames_per_step} latent frame(s) a step"

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Effort:
        values = json.loads(text)
        return cls(**values | {"mode": VaeParallelMode.parse(values["mode"])})


def effort_of(vae: Any) -> Effort:
    """The effort that an adapter is set to."""
    tile, stride = vae.tile_pixels
    return Effort(mode=vae.parallel_mode, frames_per_step=vae.frames_per_step, tile=tile, stride=stride)


@contextmanager
def kept_settings(vae: Any, ranks: int) -> Iterator[None]:
    """Set tiles, mode and steps of the adapter back when the block ends: the next file begins as asked for."""
    before = tile_settings(vae)
    mode, frames = vae.parallel_mode, vae.frames_per_step
    try:
        yield
    finally:
        if effort_of(vae).mode is not mode:
            vae.set_parallel_size(ranks, mode=mode)
        vae.frames_per_step = frames
        for name, value in before.items():
            setattr(vae, name, value)


def apply_effort(vae: Any, effort: Effort, ranks: int) -> None:
    """Set the adapter, and give back what the failed attempt has left to the collector or the GPU's cache."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    vae.configure_tiles(effort.tile, effort.stride)
    vae.frames_per_step = effort.frames_per_step
    vae.set_parallel_size(ranks, mode=effort.mode)
