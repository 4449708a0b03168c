"""The VAEs of diffusers as models that several ranks run together. Importing this loads torch and diffusers."""

from vaepar.autoencoders.autoencoder_kl import DistributedAutoencoderKL
from vaepar.autoencoders.autoencoder_kl_flux2 import DistributedAutoencoderKLFlux2
from vaepar.autoencoders.autoencoder_kl_qwenimage import DistributedAutoencoderKLQwenImage
from vaepar.autoencoders.autoencoder_kl_wan import DistributedAutoencoderKLWan
from vaepar.autoencoders.capability import VaeCapability
from vaepar.autoencoders.distribute import distribute
from vaepar.autoencoders.mixin import DistributedVaeMixin
from vaepar.autoencoders.registry import adapter_for, capabilities

__all__ = [
    "DistributedAutoencoderKL",
    "DistributedAutoencoderKLFlux2",
    "DistributedAutoencoderKLQwenImage",
    "DistributedAutoencoderKLWan",
    "DistributedVaeMixin",
    "VaeCapability",
    "adapter_for",
    "capabilities",
    "distribute",
]
