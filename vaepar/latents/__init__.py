"""Latent files: what they mean, in and out.

``read_header`` -> ``resolve`` -> ``read_latent`` -> ``to_vae_input`` -> ``vae.decode``; and back by
``from_vae_output`` and ``write_latent``. Importing this room loads no torch; reading a tensor does.
"""

from vaepar.latents.contract import LatentFacts, LatentHeader, LatentLayout, LatentRequest, LatentState, VaeFacts
from vaepar.latents.header import read_header
from vaepar.latents.resolve import resolve
from vaepar.latents.tensors import count_nonfinite, from_vae_output, read_latent, to_vae_input
from vaepar.latents.writer import LatentRecord, write_comfyui, write_latent, write_musubi

__all__ = [
    "LatentFacts",
    "LatentHeader",
    "LatentLayout",
    "LatentRecord",
    "LatentRequest",
    "LatentState",
    "VaeFacts",
    "count_nonfinite",
    "from_vae_output",
    "read_header",
    "read_latent",
    "resolve",
    "to_vae_input",
    "write_comfyui",
    "write_latent",
    "write_musubi",
]
