"""AutoencoderKL: Stable Diffusion 1 to 3, SDXL, FLUX.1, Z-Image."""

from __future__ import annotations

from diffusers import AutoencoderKL

from vaepar.autoencoders.capability import AUTO_RULE, VaeCapability
from vaepar.autoencoders.image import ImageTileMixin
from vaepar.config import VaeParallelMode


class DistributedAutoencoderKL(ImageTileMixin, AutoencoderKL):
    """AutoencoderKL, shared among ranks. Latents [B, C, H, W], pixels [B, 3, 8H, 8W]."""

    capability = VaeCapability(
        family="kl",
        base_class="AutoencoderKL",
        decode_modes=tuple(VaeParallelMode),
        encode_modes=tuple(VaeParallelMode),
        auto_rule=AUTO_RULE,
        forced_rule="an error",
        latent_rank=4,
    )
