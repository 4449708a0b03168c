"""AutoencoderKLFlux2: FLUX.2."""

from __future__ import annotations

from diffusers import AutoencoderKLFlux2

from vaepar.autoencoders.capability import AUTO_RULE, VaeCapability
from vaepar.autoencoders.image import ImageTileMixin
from vaepar.config import VaeParallelMode


class DistributedAutoencoderKLFlux2(ImageTileMixin, AutoencoderKLFlux2):
    """AutoencoderKLFlux2, shared among ranks. Latents [B, 32, H, W], pixels [B, 3, 8H, 8W]."""

    capability = VaeCapability(
        family="flux2",
        base_class="AutoencoderKLFlux2",
        decode_modes=tuple(VaeParallelMode),
        encode_modes=tuple(VaeParallelMode),
        auto_rule=AUTO_RULE,
        forced_rule="an error",
        latent_rank=4,
    )
