"""Which adapter decodes the checkpoints of which diffusers class."""

from __future__ import annotations

from typing import Any

from vaepar.autoencoders.autoencoder_kl import DistributedAutoencoderKL
from vaepar.autoencoders.autoencoder_kl_flux2 import DistributedAutoencoderKLFlux2
from vaepar.autoencoders.autoencoder_kl_qwenimage import DistributedAutoencoderKLQwenImage
from vaepar.autoencoders.autoencoder_kl_wan import DistributedAutoencoderKLWan
from vaepar.autoencoders.capability import VaeCapability
from vaepar.errors import ModelError

_ADAPTERS: dict[str, Any] = {
    adapter.capability.base_class: adapter
    for adapter in (
        DistributedAutoencoderKL,
        DistributedAutoencoderKLFlux2,
        DistributedAutoencoderKLQwenImage,
        DistributedAutoencoderKLWan,
    )
}


def adapter_for(class_name: str) -> Any:
    """The adapter class for a diffusers class name. Raises :class:`ModelError` that lists the supported ones."""
    adapter = _ADAPTERS.get(class_name.removeprefix("Distributed"))
    if adapter is None:
        raise ModelError(f"VAE class '{class_name}' is not supported; the supported classes are {', '.join(_ADAPTERS)}")
    return adapter


def capabilities() -> tuple[VaeCapability, ...]:
    """The declared capabilities of all adapters."""
    return tuple(adapter.capability for adapter in _ADAPTERS.values())
