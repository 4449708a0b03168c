#!/usr/bin/env python
"""Encodes the two sample latents that the package ships beside the demo VAE.

    pip install --no-deps scikit-image
    python scripts/make_demo_latents.py --out vaepar/demo

`picture.safetensors` is the whole of a picture that the VAE was not trained on, `clip.safetensors` a camera that
travels over and zooms into another one. Both are normalised, in vaepar's own format; the precision of fp16 is far
beyond what this VAE keeps.
"""

import argparse
import math
from fractions import Fraction
from pathlib import Path

import torch
from demo_data import HELD_OUT_PICTURES, load_picture, moving_crop, to_signed
from diffusers import AutoencoderKLWan
from torch import Tensor

from vaepar.demo import demo_vae_folder
from vaepar.jobs.models import locate_model
from vaepar.latents import LatentLayout, LatentRecord, LatentState, VaeFacts, write_latent
from vaepar.latents import from_vae_output as to_latent

CLIP_FRAMES = 49
CLIP_SIZE = (256, 384)
CLIP_FPS = 16


def sample_picture() -> Tensor:
    """[1, 3, 1, 400, 600] in [-1, 1]: the first held-out picture as it is."""
    return to_signed(load_picture(*HELD_OUT_PICTURES[0]))[None, :, None]


def sample_clip() -> Tensor:
    """[1, 3, 49, 256, 384] in [-1, 1]: from the whole of the second held-out picture towards the face in it."""
    picture = to_signed(load_picture(*HELD_OUT_PICTURES[1]))
    rows, columns = picture.shape[1:]
    boxes = []
    for index in range(CLIP_FRAMES):
        # Starts and stops at rest, as a camera does.
        way = 0.5 - 0.5 * math.cos(math.pi * index / (CLIP_FRAMES - 1))
        zoom = 1.12 - 0.37 * way
        boxes.append((rows * (0.5 - 0.04 * way), columns * (0.5 + 0.02 * way), zoom))
    return moving_crop(picture, boxes, CLIP_SIZE)[None]


def encode(model: AutoencoderKLWan, pixels: Tensor, vae: VaeFacts) -> Tensor:
    """The normalised mode of the posterior, [1, 16, f, h, w], in fp16."""
    with torch.no_grad():
        raw = model.encode(pixels).latent_dist.mode()
    return to_latent(raw, vae, layout=LatentLayout.BCFHW, state=LatentState.NORM).half()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for picture.safetensors and clip.safetensors")
    out: Path = parser.parse_args().out
    model = AutoencoderKLWan.from_pretrained(demo_vae_folder(), torch_dtype=torch.float32).eval()
    vae = VaeFacts.from_config("AutoencoderKLWan", model.config)
    digest = locate_model("demo").digest()
    samples = {"picture": (sample_picture(), HELD_OUT_PICTURES[0]), "clip": (sample_clip(), HELD_OUT_PICTURES[1])}
    for name, (pixels, (package, source)) in samples.items():
        frames, height, width = pixels.shape[2:]
        record = LatentRecord(
            vae=vae,
            layout=LatentLayout.BCFHW,
            state=LatentState.NORM,
            height=height,
            width=width,
            num_frames=frames,
            fps=Fraction(CLIP_FPS) if frames > 1 else None,
            vae_id="demo",
            vae_sha256=digest,
            posterior="mode",
            source=f"{package}/{source}",
        )
        write_latent(out / f"{name}.safetensors", encode(model, pixels, vae), record)
        print(f"{name}: {frames} frames of {width}x{height}")


if __name__ == "__main__":
    main()
