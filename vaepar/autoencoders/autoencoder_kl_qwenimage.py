"""AutoencoderKLQwenImage: Qwen-Image and its layered and edit relatives."""

from __future__ import annotations

from diffusers import AutoencoderKLQwenImage

from vaepar.autoencoders.capability import AUTO_RULE, VaeCapability
from vaepar.autoencoders.causal import CausalTileMixin
from vaepar.config import VaeParallelMode


class DistributedAutoencoderKLQwenImage(CausalTileMixin, AutoencoderKLQwenImage):
    """AutoencoderKLQwenImage whose decode and encode are shared among ranks.

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

    @property
    def decoder_channels(self) -> int:
        return int(self.config.input_channels)
