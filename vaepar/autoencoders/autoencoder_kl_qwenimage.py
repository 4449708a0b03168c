"""AutoencoderKLQwenImage: Qwen-Image and its layered and edit relatives."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor

from vaepar.autoencoders.capability import AUTO_RULE, VaeCapability
from vaepar.autoencoders.causal import CausalTileMixin
from vaepar.autoencoders.mixin import take_pretrained
from vaepar.config import VaeParallelMode


class DistributedAutoencoderKLQwenImage(AutoencoderKLQwenImage, CausalTileMixin):
    """AutoencoderKLQwenImage whose decode is shared among ranks.

    Latents [B, 16, T, H, W]; pixels [B, C, t, 8H, 8W], with C = ``input_channels`` of the config. As in diffusers, the
    direct path clamps to [-1, 1] and the tiled path does not.
    """

    capability = VaeCapability(
        family="qwenimage",
        base_class="AutoencoderKLQwenImage",
        decode_modes=tuple(VaeParallelMode),
        encode_modes=tuple(VaeParallelMode),
        auto_rule=AUTO_RULE,
        forced_rule="an error",
        latent_rank=5,
    )

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As diffusers' ``from_pretrained``; the model joins ``group=``, or the default group of ranks."""
        return take_pretrained(super().from_pretrained, *args, **kwargs)

    @property
    def decoder_channels(self) -> int:
        return int(self.config.input_channels)

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
