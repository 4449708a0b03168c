"""AutoencoderKLWan: Wan 2.1 (16 channels, 8x) and Wan 2.2 (48 channels, 16x with 2x2 patches, residual)."""

from __future__ import annotations

import logging
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify, unpatchify
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor

from vaepar.autoencoders.capability import AUTO_RULE, VaeCapability
from vaepar.autoencoders.causal import CausalTileMixin
from vaepar.autoencoders.feed import FrameFeed, MappedFeed
from vaepar.autoencoders.mixin import take_pretrained
from vaepar.autoencoders.selection import Selection
from vaepar.config import VaeParallelMode

logger = logging.getLogger(__name__)


class DistributedAutoencoderKLWan(AutoencoderKLWan, CausalTileMixin):
    """AutoencoderKLWan whose decode is shared among ranks.

    Latents [B, C, T, H, W]; pixels [B, 3, 1 + 4(T-1), ratio*H, ratio*W] in [-1, 1].
    """

    capability = VaeCapability(
        family="wan",
        base_class="AutoencoderKLWan",
        decode_modes=tuple(VaeParallelMode),
        encode_modes=tuple(VaeParallelMode),
        auto_rule=AUTO_RULE,
        forced_rule="a warning, and tile",
        latent_rank=5,
    )
    first_frame_arguments = {"first_chunk": True}  # noqa: RUF012  # read only

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As diffusers' ``from_pretrained``; the model joins ``group=``, or the default group of ranks."""
        return take_pretrained(super().from_pretrained, *args, **kwargs)

    def on_refused(self, selection: Selection) -> None:
        """A forced shard that cannot be had falls back to tile, with a warning on the first rank."""
        if self.distributed_executor.is_owner:
            logger.warning("%s; using tile", selection.refused)

    @property
    def patch_size(self) -> int:
        return int(self.config.patch_size or 1)

    @property
    def decoder_channels(self) -> int:
        return int(self.config.out_channels)

    def unpatchify(self, decoded: Tensor) -> Tensor:
        pixels: Tensor = unpatchify(decoded, patch_size=self.patch_size)
        return pixels

    def patchified(self, feed: FrameFeed) -> FrameFeed:
        patch = self.patch_size
        if patch == 1:
            return feed
        height, width = feed.shape[-2:]
        return MappedFeed(
            feed, lambda x: patchify(x, patch), feed.shape[1] * patch * patch, height // patch, width // patch
        )

    def finish_tiles(self, merged: Tensor) -> Tensor:
        return torch.clamp(self.unpatchify(merged), min=-1.0, max=1.0)

    def tiled_decode(self, z: Tensor, return_dict: bool = True) -> DecoderOutput | tuple[Tensor]:
        """Decode [B, C, T, H, W] in tiles: over the ranks when distributed, else as diffusers does."""
        if not self.is_distributed_enabled():
            return super().tiled_decode(z, return_dict=return_dict)
        return self.tiled_decode_distributed(z, return_dict)

    def _encode(self, x: Tensor) -> Tensor:
        return self.encode_moments(x, super()._encode)

    def tiled_encode(self, x: Tensor) -> Tensor:
        """Encode (patchified) pixels [B, C, T, H, W] in tiles, over the ranks when distributed: the moments."""
        if not self.is_distributed_enabled():
            moments: Tensor = super().tiled_encode(x)
            return moments
        return self.tiled_encode_distributed(x)
