"""Latent files of every producer, and broken ones, made by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.models import make_flux2, make_kl, make_qwenimage, make_wan21, make_wan22
from vaepar.latents import LatentFacts, LatentRequest, VaeFacts, read_header, resolve

KL = VaeFacts.from_config("AutoencoderKL", {"block_out_channels": [1] * 4, "latent_channels": 4})
FLUX1 = VaeFacts.from_config(
    "AutoencoderKL",
    {"block_out_channels": [1] * 4, "latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159},
)
FLUX2 = VaeFacts.from_config("AutoencoderKLFlux2", {})
QWEN = VaeFacts.from_config("AutoencoderKLQwenImage", {})
WAN = VaeFacts.from_config("AutoencoderKLWan", {})
MODELS = (make_kl, make_flux2, make_qwenimage, make_wan21, make_wan22)


def facts_of(vae: Any) -> VaeFacts:
    """The facts of a real model, from its own configuration."""
    return VaeFacts.from_config(type(vae).__name__, dict(vae.config))


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def save(path: Path, tensor: torch.Tensor, key: str = "latents", **metadata: str) -> Path:
    save_file({key: tensor}, str(path), metadata=metadata or None)
    return path


def save_comfyui(path: Path, tensor: torch.Tensor, *, version: bool = True, **metadata: str) -> Path:
    """As ComfyUI's SaveLatent node writes it."""
    tensors = {"latent_tensor": tensor}
    if version:
        tensors["latent_format_version_0"] = torch.tensor([])
    save_file(tensors, str(path), metadata=metadata or None)
    return path


def resolved(path: Path, vae: VaeFacts, **request: Any) -> LatentFacts:
    return resolve(read_header(path), vae, LatentRequest(**request))


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def assemble(header: Mapping[str, Any] | bytes, body: bytes = b"", length: int | None = None) -> bytes:
    """The bytes of a safetensors file, with whatever lies are asked for."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + body
