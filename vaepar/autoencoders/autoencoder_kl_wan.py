"""AutoencoderKLWan: Wan 2.1 (16 channels, 8x) and Wan 2.2 (48 channels, 16x with 2x2 patches, residual)."""

from __future__ import annotations

import logging

from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify, unpatchify
from torch import Tensor

from vaepar.autoencoders.capability import AUTO_RULE, VaeCapability
from vaepar.autoencoders.causal import CausalTileMixin
from vaepar.autoencoders.selection import Selection
from vaepar.config import VaeParallelMode

logger = logging.getLogger(__name__)


class DistributedAutoencoderKLWan(CausalTileMixin, AutoencoderKLWan):
    """AutoencoderKLWan whose decode and encode are shared among ranks.

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

    def on_refused(self, selection: Selection) -> None:
        """A forced shard that cannot be had falls back to tile, with a warning on the first rank."""
        if self.distributed_executor.is_owner:
            logger.warning("%s; using tile", selection.refused)

    @property
    def patch_size(self) -> int:
        return int(self.config.patch_size or 1)

    @property
    def pixel_multiple(self) -> int:
        """Wan 2.2's residual shortcuts fold rows two by two at every halving and can leave none over."""
        return self.shard_ratio if self.config.is_residual else self.patch_size

    @property
    def decoder_channels(self) -> int:
        return int(self.config.out_channels)

    def unpatchify(self, decoded: Tensor) -> Tensor:
        pixels: Tensor = unpatchify(decoded, patch_size=self.patch_size)
        return pixels

    def patchify(self, pixels: Tensor) -> Tensor:
        folded: Tensor = patchify(pixels, patch_size=self.patch_size)
        return folded

    def finish_tiles(self, merged: Tensor) -> Tensor:
        return self.finish_untiled(merged)
