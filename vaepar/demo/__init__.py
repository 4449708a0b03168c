"""The demo VAE and two latents for it: what ``--model demo`` and the first run need, without any network."""

from pathlib import Path

__all__ = ["demo_latents", "demo_vae_folder"]

_FOLDER = Path(__file__).resolve().parent


def demo_vae_folder() -> Path:
    """The folder of the demo VAE: ``config.json`` and fp16 weights of an ``AutoencoderKLWan``.

    16 latent channels, 8x in space, 4x in time; ``README.md`` beside it says what it reaches.
    """
    return _FOLDER / "vae"


def demo_latents() -> tuple[Path, ...]:
    """The sample latents of that VAE, normalised: a still of 600x400 and a clip of 49 frames of 384x256."""
    return _FOLDER / "picture.safetensors", _FOLDER / "clip.safetensors"
