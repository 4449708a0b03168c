"""The models of a bench: an adapter with random or real weights, and the stock diffusers model with the same ones."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from vaepar.autoencoders import adapter_for
from vaepar.autoencoders.feed import TensorFeed
from vaepar.autoencoders.tiling import tile_settings
from vaepar.errors import UsageError
from vaepar.jobs.bench_presets import Preset
from vaepar.jobs.bench_request import BenchRequest, bind_shape
from vaepar.jobs.models import ModelSource, load_model, locate_model, settle_dtype
from vaepar.latents import VaeFacts
from vaepar.parallel.group import RankGroup

_SEED = 0
_DEFAULT_SHAPE = (64, 96)  # of a model that was named, when no shape was asked for


class BenchModel:
    """An adapter, its facts, and its stock twin.

    Args:
        request: what to build or load, its tiles and frames per step.
        group: the ranks of the run; all of them get the same weights. They make this inside an ``agreed`` block.

    Raises:
        ModelError: a named model cannot be loaded. UsageError: a shape, tile or dtype that does not fit the model.
    """

    def __init__(self, request: BenchRequest, group: RankGroup) -> None:
        self.note: str | None = None
        preset = request.preset
        if preset is None:
            source = _locate(request, group)
            self.facts = source.facts
            dtype, self.note = settle_dtype(request.dtype, source, group.device)
            self.adapter = load_model(source, dtype, group.device, group)
            self.name = request.model or ""
        else:
            self.facts = VaeFacts.from_config(preset.class_name, preset.config)
            dtype = _dtype_of_preset(request.dtype, group.device)
            self.adapter = random_model(adapter_for(preset.class_name), preset)
            place(self.adapter, dtype, group.device)
            self.name = f"{preset.family} {preset.scale}, random weights"
        self.dtype = dtype
        self.shapes = self._shapes(request, preset)
        self._configure(request)

    def stock(self) -> Any:
        """A model of the stock diffusers class with weights of its own, equal to the adapter's, and the same tiles."""
        base = getattr(diffusers, self.adapter.capability.base_class)
        config = {key: value for key, value in dict(self.adapter.config).items() if not key.startswith("_")}
        twin = base(**config)
        twin.load_state_dict(self.adapter.state_dict(), strict=True)
        for name, value in tile_settings(self.adapter).items():
            setattr(twin, name, value)
        place(twin, self.dtype, self.adapter.device)
        return twin.eval().requires_grad_(False)

    def latent(self, shape: tuple[int, ...]) -> Tensor:
        """A random latent in VAE space, the same on every rank."""
        generator = torch.Generator().manual_seed(_SEED)
        return torch.randn(shape, generator=generator).to(device=self.adapter.device, dtype=self.dtype)

    def pixels(self, shape: tuple[int, ...]) -> TensorFeed:
        """Random pictures or a film in [-1, 1] that is encoded to a latent of this shape, the same on every rank."""
        generator = torch.Generator().manual_seed(_SEED)
        x = torch.rand(self.facts.pixel_shape(shape), generator=generator) * 2 - 1
        return TensorFeed(x.to(device=self.adapter.device, dtype=self.dtype))

    def _shapes(self, request: BenchRequest, preset: Preset | None) -> tuple[tuple[int, ...], ...]:
        asked = request.shapes or ((preset.shape,) if preset else (_DEFAULT_SHAPE,))
        facts = self.facts
        return tuple(bind_shape(dims, facts.takes_frames, facts.latent_channels, facts.class_name) for dims in asked)

    def _configure(self, request: BenchRequest) -> None:
        tiles = request.tiles(self.facts.spatial_ratio)
        if tiles is None:
            self.adapter.enable_tiling()
        else:
            self.adapter.configure_tiles(*tiles)
        if request.frames_per_step is not None:
            if not self.facts.takes_frames:
                raise UsageError(
                    f"--frames-per-step was given, but {self.facts.class_name} takes pictures, which are a step"
                )
            self.adapter.frames_per_step = request.frames_per_step


def place(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Move a model. Not by diffusers' own ``to``, which warns of modules to keep in float32 although there are none."""
    nn.Module.to(model, device=device, dtype=dtype)


def random_model(cls: Any, preset: Preset) -> Any:
    """A model of a preset, in float32, with seeded random weights that keep its pixels inside [-1, 1].

    Gains and biases of norms are random too: ones and zeros would hide a norm that forgets them.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = cls(**preset.config)
    generator = torch.Generator().manual_seed(_SEED + 1)
    with torch.no_grad():
        for module in model.modules():
            gain = getattr(module, "gamma", None)  # the RMS norms of Wan and Qwen-Image
            if isinstance(module, nn.GroupNorm):
                gain = module.weight
                module.bias.copy_(0.2 * torch.randn(module.bias.shape, generator=generator))
            if isinstance(gain, nn.Parameter):
                gain.copy_(1 + 0.2 * torch.randn(gain.shape, generator=generator))
        model.decoder.conv_out.weight.mul_(preset.output_gain)
    return model.eval().requires_grad_(False)


def _locate(request: BenchRequest, group: RankGroup) -> ModelSource:
    """Rank 0 first: it alone may download; the others find the files where it found them."""
    source = None
    if group.rank == 0:
        source = locate_model(request.model or "", variant=request.variant, allow_download=request.allow_download)
    folder = group.broadcast_text(None if source is None else str(source.folder))
    return source or locate_model(folder, variant=request.variant, allow_download=False)


def _dtype_of_preset(asked: str, device: torch.device) -> torch.dtype:
    name = asked
    if asked == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    if name == "float16" and device.type == "cpu":
        raise UsageError("--dtype float16 was asked on a CPU, which has no fast half; float32 and bfloat16 work")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
