"""Tiles of the image families: square tiles by overlap factor, one piece a tile."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from torch import Tensor

from vaepar.autoencoders.family import ShardStep
from vaepar.autoencoders.feed import FrameFeed
from vaepar.autoencoders.mixin import DistributedVaeMixin, check_pixels, require_rank
from vaepar.autoencoders.tiling import TilePlan, tile_tasks
from vaepar.errors import UsageError
from vaepar.parallel.executor import DistributedOperator, GridSpec, TileTask


class ImageTileMixin(DistributedVaeMixin):
    """What AutoencoderKL and AutoencoderKLFlux2 share: latents [B, C, H, W], pixels [B, 3, 8H, 8W] in [-1, 1]."""

    config: Any
    tile_latent_min_size: int
    tile_sample_min_size: int
    tile_overlap_factor: float

    @property
    def pixels_per_latent(self) -> int:
        """Pixels per latent along each axis."""
        return self.shard_ratio

    @property
    def doublings(self) -> int:
        return len(self.config.block_out_channels) - 1

    def tile_plan(self, z: Tensor) -> TilePlan:
        require_rank(z, 4, self.capability.base_class)
        tile = self.tile_latent_min_size
        stride = int(tile * (1 - self.tile_overlap_factor))
        return TilePlan(extent=_size(z), tile=(tile, tile), stride=(stride, stride), up=self.pixels_per_latent)

    def needs_tiling(self, z: Tensor) -> bool:
        require_rank(z, 4, self.capability.base_class)
        return self.use_tiling and max(z.shape[-1], z.shape[-2]) > self.tile_latent_min_size

    def tile_split(self, z: Tensor) -> tuple[list[TileTask], GridSpec]:
        plan, channels = self.tile_plan(z), int(self.config.out_channels)
        for _, rows, columns in plan.tiles():
            self._check_norms(rows.stop - rows.start, columns.stop - columns.start)
        return _cut(z, plan, channels)

    def decode_pieces(self, pieces: Iterable[Tensor]) -> Generator[Tensor]:
        for piece in pieces:
            yield self.decoder(piece if self.post_quant_conv is None else self.post_quant_conv(piece))

    def decode_direct(self, z: Tensor) -> Iterator[Tensor]:
        yield self._decode(z).sample  # type: ignore[attr-defined]  # diffusers' own

    def encode_tile_plan(self, x: Tensor) -> TilePlan:
        """The tiles of pixels [B, C, H, W]; results are on the latents' scale."""
        require_rank(x, 4, self.capability.base_class)
        tile = self.tile_sample_min_size
        stride = int(self.tile_latent_min_size * (1 - self.tile_overlap_factor)) * self.pixels_per_latent
        return TilePlan(extent=_size(x), tile=(tile, tile), stride=(stride, stride), down=self.pixels_per_latent)

    def needs_encode_tiling(self, shape: Sequence[int]) -> bool:
        return self.use_tiling and max(shape[-1], shape[-2]) > self.tile_sample_min_size

    def encode_tile_split(self, x: Tensor) -> tuple[list[TileTask], GridSpec]:
        """Cut pixels [B, C, H, W] into tile tasks whose results are moments [B, 2C', h, w]."""
        return _cut(x, self.encode_tile_plan(x), 2 * int(self.config.latent_channels))

    def encode_pieces(self, pieces: Iterable[Tensor]) -> Generator[Tensor]:
        for piece in pieces:
            moments = self.encoder(piece)
            yield moments if self.quant_conv is None else self.quant_conv(moments)

    def shard_decode_steps(self, shape: Sequence[int], frames_per_step: int) -> list[ShardStep]:
        """A picture is one step: pixels [B, 3, H, W]."""
        batch, _, height, width = shape
        channels, ratio = int(self.config.out_channels) // self.patch_size**2, self.shard_ratio
        return [ShardStep(0, 1, (batch, channels, height * ratio, width * ratio))]

    def shard_encode_steps(self, shape: Sequence[int], frames_per_step: int) -> list[ShardStep]:
        """A picture is one step: moments [B, 2C, h, w]."""
        batch, _, height, width = shape
        channels, ratio = 2 * int(self.config.latent_channels), self.shard_ratio
        return [ShardStep(0, 1, (batch, channels, height // ratio, width // ratio))]

    def shard_pixels(self, feed: FrameFeed) -> Tensor:
        return feed.frames(0, 1)[:, :, 0]

    def encode_direct(self, feed: FrameFeed) -> Iterator[Tensor]:
        yield self._encode(self.shard_pixels(feed))

    def _tiled_encode(self, x: Tensor) -> Tensor:
        """Encode pixels [B, 3, H, W] that do not fit one tile, over the ranks when distributed: the moments."""
        if self.is_distributed_enabled():
            return self._tiled_encode_distributed(x)
        plain: Any = super()
        moments: Tensor = plain._tiled_encode(x)
        return moments

    def tiled_encode(self, x: Tensor, return_dict: bool = True) -> AutoencoderKLOutput | tuple[Any]:
        """The same as a posterior; diffusers' own would go its own way past the tiles that ranks share."""
        posterior = DiagonalGaussianDistribution(self._tiled_encode(x))
        return AutoencoderKLOutput(latent_dist=posterior) if return_dict else (posterior,)

    def encode_operator(self, feed: FrameFeed) -> tuple[Tensor, DistributedOperator]:
        return self.shard_pixels(feed), self._encode_operator(self.encode_tile_split)

    @property
    def tile_pixels(self) -> tuple[int, int]:
        stride = int(self.tile_latent_min_size * (1 - self.tile_overlap_factor))
        return int(self.tile_sample_min_size), stride * self.pixels_per_latent

    def configure_tiles(self, tile_size: int, tile_stride: int) -> None:
        ratio = self.pixels_per_latent
        check_pixels(tile_size, tile_stride, ratio)
        self.use_tiling = True
        self.tile_sample_min_size = tile_size
        self.tile_latent_min_size = tile_size // ratio
        self.tile_overlap_factor = _overlap_factor(tile_size, tile_stride, ratio)

    def _check_norms(self, height: int, width: int) -> None:
        """A tile of one latent can be too small for GroupNorm, which needs more than one value per group."""
        mid_block: Any = self.decoder.mid_block
        norm = mid_block.resnets[0].norm1
        if height * width * (norm.num_channels // norm.num_groups) < 2:
            raise UsageError(
                f"the last tile would be {height}x{width} latents, too small for this VAE's group norm; "
                f"another tile size or stride avoids it"
            )


def _cut(x: Tensor, plan: TilePlan, channels: int) -> tuple[list[TileTask], GridSpec]:
    """The tiles of [B, C, H, W], whose results have so many channels."""
    return tile_tasks(
        plan,
        lambda rows, columns: x[:, :, rows, columns],
        lambda height, width: [(x.shape[0], channels, height, width)],
        dims=(2, 3),
    )


def _size(x: Tensor) -> tuple[int, int]:
    return x.shape[-2], x.shape[-1]


def _overlap_factor(tile: int, stride: int, ratio: int) -> float:
    """The overlap factor from which diffusers' own integer arithmetic gives exactly this tile and stride (pixels)."""
    exact = 1 - stride / tile
    for factor in (exact, math.nextafter(exact, 0.0), math.nextafter(exact, 1.0), exact - 1e-12, exact + 1e-12):
        if int(tile // ratio * (1 - factor)) == stride // ratio and int(tile * factor) == tile - stride:
            return max(factor, 0.0)
    # Rounding leaves no factor for both of diffusers' formulas; the first one is the one that this package uses.
    return 1 - (stride + ratio / 2) / tile
