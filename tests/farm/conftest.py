"""A model and files for whole runs on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import models
from tests.cli.conftest import save_latent
from vaepar.jobs.farming import Farming
from vaepar.jobs.request import DecodeRequest, VideoSettings
from vaepar.latents import LatentRequest, LatentState


@pytest.fixture(scope="session")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("farm") / "wan"
    models.make_wan21().save_pretrained(folder)
    return folder


def make_latents(folder: Path, count: int, frames: int = 2, height: int = 6, width: int = 8) -> Path:
    """``count`` normalised Wan latents, each another one."""
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        latent = torch.randn((1, 16, frames, height, width), generator=generator)
        save_latent(folder / f"shot{number:03d}.safetensors", latent)
    return folder


def decode_request(
    files: Path, model: Path, out: Path, *, format_: str = "mp4", tile_size: int | None = 32, **farming: object
) -> DecodeRequest:
    return DecodeRequest(
        inputs=(str(files),),
        model=str(model),
        out=out,
        tile_size=tile_size,
        latent=LatentRequest(state=LatentState.NORM),
        video=VideoSettings(format=format_),
        farming=Farming(**farming),  # type: ignore[arg-type]
    )
