"""Tiles of the causal video families: every tile keeps its temporal cache and all tiles walk through time."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vaepar.autoencoders.family import ShardStep
from vaepar.autoencoders.feed import FrameFeed, MappedFeed, TensorFeed, TilePieces, shape_of
from vaepar.autoencoders.mixin import DistributedVaeMixin, check_pixels, require_rank
from vaepar.autoencoders.tiling import TilePlan, tile_tasks
from vaepar.errors import UsageError
from vaepar.parallel.executor import DistributedOperator, GridSpec, TileTask

_CHUNK = 4  # pixel frames that the models encode at a time after the first, whatever their temporal ratio


class CausalTileMixin(DistributedVaeMixin):
    """What the Wan and Qwen-Image VAEs share: latents [B, C, T, H, W], one latent frame a step.

    Pixels are [B, 3, t, ratio*H, ratio*W]; the first latent frame gives one pixel frame, each further one
    ``temporal_ratio`` frames.
    """

    config: Any
    quant_conv: nn.Module
    post_quant_conv: nn.Module
    spatial_compression_ratio: int
    tile_sample_min_height: int
    tile_sample_min_width: int
    tile_sample_stride_height: int
    tile_sample_stride_width: int
    temperal_upsample: list[bool]
    _cached_conv_counts: dict[str, int]

    #: Arguments of the decoder's forward for the first latent frame, beside the caches.
    first_frame_arguments: dict[str, Any] = {}  # noqa: RUF012  # read only; a family sets its own

    @property
    def pixels_per_latent(self) -> int:
        return int(self.spatial_compression_ratio)

    @property
    def doublings(self) -> int:
        return len(self.config.dim_mult) - 1

    @property
    def decoder_channels(self) -> int:
        """Channels of the decoder's output, before patches are unfolded."""
        return 3

    @property
    def temporal_ratio(self) -> int:
        """Pixel frames for each latent frame after the first."""
        return int(2 ** sum(bool(up) for up in self.temperal_upsample))

    def tile_plan(self, z: Tensor) -> TilePlan:
        require_rank(z, 5, self.capability.base_class)
        ratio = self.spatial_compression_ratio
        for name in ("min_height", "min_width", "stride_height", "stride_width"):
            pixels = int(getattr(self, f"tile_sample_{name}"))
            if pixels % ratio:
                raise UsageError(f"tile_sample_{name} is {pixels} pixels; this VAE takes multiples of {ratio} pixels")
        return TilePlan(
            extent=(z.shape[3], z.shape[4]),
            tile=(int(self.tile_sample_min_height) // ratio, int(self.tile_sample_min_width) // ratio),
            stride=(int(self.tile_sample_stride_height) // ratio, int(self.tile_sample_stride_width) // ratio),
            up=ratio,
            down=self.patch_size,
        )

    def needs_tiling(self, z: Tensor) -> bool:
        require_rank(z, 5, self.capability.base_class)
        ratio = self.spatial_compression_ratio
        return self.use_tiling and (
            z.shape[-1] > self.tile_sample_min_width // ratio or z.shape[-2] > self.tile_sample_min_height // ratio
        )

    def tile_split(self, z: Tensor) -> tuple[list[TileTask], GridSpec]:
        plan = self.tile_plan(z)
        frames = z.shape[2]
        if frames < 1:
            raise UsageError("a latent of zero frames cannot be decoded")
        counts = [self._pixel_frames(k, k + 1) for k in range(frames)]
        return tile_tasks(
            plan,
            lambda rows, columns: [z[:, :, k : k + 1, rows, columns] for k in range(frames)],
            lambda *size: [(z.shape[0], self.decoder_channels, count, *size) for count in counts],
            dims=(3, 4),
            frames=frames,
            steps=frames,
        )

    def decode_pieces(self, pieces: Iterable[Tensor]) -> Generator[Tensor]:
        return self._walk(self.post_quant_conv(piece) for piece in pieces)

    def decode_direct(self, z: Tensor) -> Iterator[Tensor]:
        x = self.post_quant_conv(z)
        for chunk in self._walk(x[:, :, k : k + 1] for k in range(z.shape[2])):
            yield self.finish_untiled(chunk)

    def finish_untiled(self, decoded: Tensor) -> Tensor:
        return torch.clamp(self.unpatchify(decoded), min=-1.0, max=1.0)

    def unpatchify(self, decoded: Tensor) -> Tensor:
        """Unfold patches from channels to pixels, where the family has them."""
        return decoded

    def encode_tile_plan(self, height: int, width: int) -> TilePlan:
        """The tiles of (patchified) pixels. As in diffusers, the tile sizes are not divided by the patch size."""
        return TilePlan(
            extent=(height, width),
            tile=(int(self.tile_sample_min_height), int(self.tile_sample_min_width)),
            stride=(int(self.tile_sample_stride_height), int(self.tile_sample_stride_width)),
            down=self.spatial_compression_ratio // self.patch_size,
        )

    def needs_encode_tiling(self, shape: Sequence[int]) -> bool:
        return self.use_tiling and (shape[-1] > self.tile_sample_min_width or shape[-2] > self.tile_sample_min_height)

    def encode_tile_split(self, x: Tensor) -> tuple[list[TileTask], GridSpec]:
        """Cut (patchified) pixels [B, C, T, H, W] into tile tasks whose results are moments [B, 2C', t, h, w]."""
        require_rank(x, 5, self.capability.base_class)
        return self._split_feed(TensorFeed(x))

    def encode_pieces(self, pieces: Iterable[Tensor]) -> Generator[Tensor]:
        cache: list[Any] = [None] * self._cached_conv_counts["encoder"]
        try:
            for piece in pieces:
                yield self.quant_conv(self.encoder(piece, feat_cache=cache, feat_idx=[0]))
        finally:
            cache.clear()  # the traceback of a failure keeps this frame

    def shard_decode_steps(self, shape: Sequence[int], frames_per_step: int) -> list[ShardStep]:
        batch, _, frames, height, width = shape
        channels, ratio = self.decoder_channels // self.patch_size**2, self.shard_ratio
        return [
            ShardStep(start, stop, (batch, channels, self._pixel_frames(start, stop), height * ratio, width * ratio))
            for start, stop in _latent_steps(frames, frames_per_step)
        ]

    def shard_encode_steps(self, shape: Sequence[int], frames_per_step: int) -> list[ShardStep]:
        batch, _, frames, height, width = shape
        channels, ratio = 2 * int(self.config.z_dim), self.shard_ratio
        return [
            ShardStep(start, stop, (batch, channels, self._moment_frames(start, stop), height // ratio, width // ratio))
            for start, stop in self._encode_bounds(frames, frames_per_step)
        ]

    def tiled_encode(self, x: Tensor) -> Tensor:
        """Encode (patchified) pixels [B, C, T, H, W] in tiles, over the ranks when distributed: the moments."""
        if self.is_distributed_enabled():
            return self._tiled_encode_distributed(x)
        plain: Any = super()
        moments: Tensor = plain.tiled_encode(x)
        return moments

    def encode_direct(self, feed: FrameFeed) -> Iterator[Tensor]:
        feed = self.patchified(feed)
        return self.encode_pieces(TilePieces(feed, self._encode_bounds(feed.shape[2]), slice(None), slice(None)))

    def encode_operator(self, feed: FrameFeed) -> tuple[Tensor, DistributedOperator]:
        feed = self.patchified(feed)
        return shape_of(feed), self._encode_operator(lambda _: self._split_feed(feed))

    def patchified(self, feed: FrameFeed) -> FrameFeed:
        """The feed as the encoder takes it."""
        patch = self.patch_size
        if patch == 1:
            return feed
        height, width = feed.shape[-2:]
        return MappedFeed(feed, self.patchify, feed.shape[1] * patch * patch, height // patch, width // patch)

    def _split_feed(self, feed: FrameFeed) -> tuple[list[TileTask], GridSpec]:
        batch, _, frames, height, width = feed.shape
        plan, bounds = self.encode_tile_plan(height, width), self._encode_bounds(frames)
        channels = 2 * int(self.config.z_dim)
        return tile_tasks(
            plan,
            lambda rows, columns: TilePieces(feed, bounds, rows, columns),
            lambda *size: [(batch, channels, self._moment_frames(start, stop), *size) for start, stop in bounds],
            dims=(3, 4),
            frames=bounds[-1][1],
            steps=len(bounds),
        )

    def _encode_bounds(self, frames: int, frames_per_step: int = 1) -> list[tuple[int, int]]:
        """First and last (exclusive) pixel frame of each step: the first frame alone, then four for a latent frame.

        Frames that fill no chunk of four are left out, as in diffusers.
        """
        if frames < 1:
            raise UsageError("a film of zero frames cannot be encoded")
        steps = _latent_steps(_latent_frames(frames), frames_per_step)
        return [(0, 1) if start == 0 else (_CHUNK * (start - 1) + 1, _CHUNK * (stop - 1) + 1) for start, stop in steps]

    def _moment_frames(self, start: int, stop: int) -> int:
        """Latent frames that the encoder makes of pixel frames ``start`` to ``stop - 1``: 4 at a time, 1 at first."""
        return 1 if start == 0 else (stop - start) // _CHUNK * max(1, _CHUNK // self.temporal_ratio)

    def _pixel_frames(self, start: int, stop: int) -> int:
        """Pixel frames that the decoder makes of latent frames ``start`` to ``stop - 1``, a step of its own."""
        return 1 if start == 0 else self.temporal_ratio * (stop - start)

    @property
    def tile_pixels(self) -> tuple[int, int]:
        return int(self.tile_sample_min_height), int(self.tile_sample_stride_height)

    def configure_tiles(self, tile_size: int, tile_stride: int) -> None:
        check_pixels(tile_size, tile_stride, self.spatial_compression_ratio)
        self.use_tiling = True
        self.tile_sample_min_height = self.tile_sample_min_width = tile_size
        self.tile_sample_stride_height = self.tile_sample_stride_width = tile_stride

    def _walk(self, frames: Iterable[Tensor]) -> Generator[Tensor]:
        """Run the decoder over latent frames in time order, with a temporal cache of this walk's own."""
        cache: list[Any] = [None] * self._cached_conv_counts["decoder"]
        try:
            for k, frame in enumerate(frames):
                extra = self.first_frame_arguments if k == 0 else {}
                yield self.decoder(frame, feat_cache=cache, feat_idx=[0], **extra)
        finally:
            cache.clear()  # the traceback of a failure keeps this frame


def _latent_steps(frames: int, frames_per_step: int) -> list[tuple[int, int]]:
    """The latent frames of each step: the first alone, because the models treat it apart, then as many as asked."""
    later = range(1, frames, frames_per_step)
    return [(0, 1), *((start, min(start + frames_per_step, frames)) for start in later)]


def _latent_frames(frames: int) -> int:
    """Latent frames of so many pixel frames."""
    return 1 + (frames - 1) // _CHUNK
