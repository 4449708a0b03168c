"""AutoencoderKL: Stable Diffusion 1 to 3, SDXL, FLUX.1, Z-Image."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from torch import Tensor

from vaepar.autoencoders.capability import AUTO_RULE, VaeCapability
from vaepar.autoencoders.image import ImageTileMixin
from vaepar.autoencoders.mixin import take_pretrained
from vaepar.config import VaeParallelMode


class DistributedAutoencoderKL(AutoencoderKL, ImageTileMixin):
    """AutoencoderKL whose decode is shared among ranks. Latents [B, C, H, W], pixels [B, 3, 8H, 8W]."""

    capability = VaeCapability(
        family="kl",
        base_class="AutoencoderKL",
        decode_modes=tuple(VaeParallelMode),
        encode_modes=tuple(VaeParallelMode),
        auto_rule=AUTO_RULE,
        forced_rule="an error",
        latent_rank=4,
    )

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As diffusers' ``from_pretrained``; the model joins ``group=``, or the default group of ranks."""
        return take_pretrained(super().from_pretrained, *args, **kwargs)

    def tiled_decode(self, z: Tensor, return_dict: bool = True) -> DecoderOutput | tuple[Tensor]:
        """Decode [B, C, H, W] in tiles: over the ranks when distributed, else as diffusers does."""
        if not self.is_distributed_enabled():
            return super().tiled_decode(z, return_dict=return_dict)
        return self.tiled_decode_distributed(z, return_dict)

    def _encode(self, x: Tensor) -> Tensor:
        return self.encode_moments(x, super()._encode)

    def _tiled_encode(self, x: Tensor) -> Tensor:
        """Encode pixels [B, 3, H, W] in tiles, over the ranks when distributed: the moments."""
        if not self.is_distributed_enabled():
            moments: Tensor = super()._tiled_encode(x)
            return moments
        return self.tiled_encode_distributed(x)

    def tiled_encode(self, x: Tensor, return_dict: bool = True) -> AutoencoderKLOutput | tuple[Any]:
        """As :meth:`_tiled_encode`, as a posterior."""
        posterior = DiagonalGaussianDistribution(self._tiled_encode(x))
        return AutoencoderKLOutput(latent_dist=posterior) if return_dict else (posterior,)
