"""What a VAE's ``config.json`` says, as far as latents care."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vaepar.errors import ModelError
from vaepar.text import listed, shown

VIDEO_FAMILIES = frozenset({"qwenimage", "wan"})
"""Families whose VAE takes [B, C, F, H, W]; the others take [B, C, H, W]."""

# The defaults of diffusers' AutoencoderKLWan; AutoencoderKLQwenImage has the same ones. A config.json written by an
# older diffusers may lack the keys, and the class then fills them in, so these must be filled in here too.
# fmt: off
_WAN_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)
_WAN_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)
# fmt: on


# Layers are built from these before any weight is compared with them; a mistyped number would be built for hours.
_LIMITS = {"num_res_blocks": 64, "layers_per_block": 64, "base_dim": 8192, "decoder_base_dim": 8192}


@dataclass(frozen=True, kw_only=True)
class VaeFacts:
    """The numbers of one VAE that give latents their meaning.

    Args:
        class_name: the diffusers class.
        family: ``kl``, ``flux2``, ``qwenimage`` or ``wan``.
        latent_channels: C of the VAE's input.
        spatial_ratio: pixels for each latent row or column.
        temporal_ratio: frames for each latent frame after the first; 1 for picture families.
        default_fps: frames per second when nothing else is said; None for picture families.
        scaling_factor, shift_factor: raw = norm / scaling_factor + shift_factor; None where the config has none.
        latents_mean, latents_std: one number a channel, or None.
        batch_norm_eps: epsilon beside the running variance (FLUX.2).
        pixel_channels: of pictures, 3 or 4.
        norm_patch: latents a side that are normalised together, so that normalised latents need a multiple of it.
        upcasts: float16 overflows in it, so that it must run in float32.
        layered: the VAE was trained for layers (4 colour channels), whose frames are not a film.
        config: the whole configuration.

    Raises:
        ModelError: for a configuration with numbers that cannot be.
    """

    class_name: str
    family: str
    latent_channels: int
    spatial_ratio: int
    temporal_ratio: int
    default_fps: int | None
    scaling_factor: float | None = None
    shift_factor: float | None = None
    latents_mean: tuple[float, ...] | None = None
    latents_std: tuple[float, ...] | None = None
    batch_norm_eps: float | None = None
    pixel_channels: int = 3
    norm_patch: int = 1
    upcasts: bool = False
    layered: bool = False
    config: Mapping[str, Any] = field(hash=False, repr=False)

    def __post_init__(self) -> None:
        if self.scaling_factor == 0:
            raise ModelError(f"{self.class_name}: scaling_factor is 0; a factor other than 0 is needed")
        for name, values in (("latents_mean", self.latents_mean), ("latents_std", self.latents_std)):
            if values is not None and len(values) != self.latent_channels:
                raise ModelError(
                    f"{self.class_name}: {name} has {len(values)} numbers for {self.latent_channels} latent channels;"
                    " one a channel is needed"
                )
        if self.latents_std is not None and 0 in self.latents_std:
            raise ModelError(f"{self.class_name}: latents_std holds a 0; each number must differ from 0")
        if (self.latents_mean is None) != (self.latents_std is None):
            raise ModelError(
                f"{self.class_name}: only one of latents_mean and latents_std is set; both or none is needed"
            )

    @classmethod
    def from_config(cls, class_name: str, config: Mapping[str, Any]) -> VaeFacts:
        """The facts of a VAE of that diffusers class (or of its ``Distributed...`` subclass).

        Keys that the configuration lacks get the defaults of the class; an explicit null stays "none".

        Raises:
            ModelError: for a class that is not known, listing those that are, or a value that cannot be.
        """
        for key, most in _LIMITS.items():
            if isinstance(value := config.get(key), int) and not 0 < value <= most:
                raise ModelError(f"{shown(class_name)}: {key} is {shown(value)}; 1 to {most} is possible")
        name = str(class_name).removeprefix("Distributed")
        if name not in _READERS:
            raise ModelError(f"VAE class '{shown(class_name)}' is not known; the classes are {', '.join(_READERS)}")
        return cls(class_name=name, config=dict(config), **_READERS[name](_Config(name, config)))

    @property
    def takes_frames(self) -> bool:
        """Whether the VAE's input has a frame axis."""
        return self.family in VIDEO_FAMILIES

    def pixel_shape(self, latent_shape: tuple[int, ...]) -> tuple[int, ...]:
        """[B, C, T, H, W] (T is 1 for pictures) of the pixels of a latent [B, C, H, W] or [B, C, T, H, W]."""
        frames = 1 + self.temporal_ratio * (latent_shape[2] - 1) if len(latent_shape) == 5 else 1
        height, width = (side * self.spatial_ratio for side in latent_shape[-2:])
        return latent_shape[0], self.pixel_channels, frames, height, width

    def constants(self) -> dict[str, Any]:
        """The normalisation's numbers, as a file's ``scaling`` metadata keeps them."""
        return {
            "scaling_factor": self.scaling_factor,
            "shift_factor": self.shift_factor,
            "latents_mean": None if self.latents_mean is None else list(self.latents_mean),
            "latents_std": None if self.latents_std is None else list(self.latents_std),
            "batch_norm_eps": self.batch_norm_eps,
        }


class _Config:
    """Checked access to the values of a ``config.json``."""

    def __init__(self, class_name: str, config: Mapping[str, Any]) -> None:
        self._name = class_name
        self._config = config

    def _bad(self, key: str, value: object, wanted: str) -> ModelError:
        return ModelError(f"{self._name}: {key} is {shown(repr(value))}; {wanted} is needed")

    def number(self, key: str, default: float | None) -> float | None:
        value = self._config.get(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._bad(key, value, "a finite number or null")
        return float(value)

    def count(self, key: str, default: int) -> int:
        value = self._config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 20:
            raise self._bad(key, value, "a whole number, 1 or more")
        return value

    def items(self, key: str, default: tuple[Any, ...]) -> tuple[Any, ...]:
        value = self._config.get(key, default)
        if not isinstance(value, list | tuple) or not 1 <= len(value) <= 64:
            raise self._bad(key, value, "a list")
        return tuple(value)

    def numbers(self, key: str, default: tuple[float, ...] | None) -> tuple[float, ...] | None:
        value = self._config.get(key, default)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise self._bad(key, value, "a list of numbers or null")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int | float) or not math.isfinite(item):
                raise self._bad(key, value, "a list of finite numbers or null")
        return tuple(float(item) for item in value)

    def given(self, key: str, default: Any = None) -> Any:
        return self._config.get(key, default)


def _kl(config: _Config) -> dict[str, Any]:
    return {
        "family": "kl",
        "latent_channels": config.count("latent_channels", 4),
        "spatial_ratio": 2 ** (len(config.items("block_out_channels", (64,))) - 1),
        "temporal_ratio": 1,
        "default_fps": None,
        "scaling_factor": config.number("scaling_factor", 0.18215),
        "shift_factor": config.number("shift_factor", None),
        "pixel_channels": config.count("in_channels", 3),
        "upcasts": config.given("force_upcast") in (None, True),
        "latents_mean": config.numbers("latents_mean", None),
        "latents_std": config.numbers("latents_std", None),
    }


def _flux2(config: _Config) -> dict[str, Any]:
    patch = config.items("patch_size", (2, 2))
    if patch != (2, 2):
        raise ModelError(f"AutoencoderKLFlux2: patch_size is {listed(patch)}; 2, 2 is the one that is known")
    return {
        "family": "flux2",
        "latent_channels": config.count("latent_channels", 32),
        "spatial_ratio": 2 ** (len(config.items("block_out_channels", (128, 256, 512, 512))) - 1),
        "temporal_ratio": 1,
        "default_fps": None,
        "batch_norm_eps": config.number("batch_norm_eps", 1e-4),
        "pixel_channels": config.count("in_channels", 3),
        "norm_patch": patch[0],
    }


def _causal(config: _Config) -> dict[str, Any]:
    """What the two causal video classes share; the ratios follow from the layers, as in the decoder itself."""
    config.number("dropout", 0.0)  # unused when decoding, and NaN would fail every file
    return {
        "latent_channels": config.count("z_dim", 16),
        "spatial_ratio": 2 ** (len(config.items("dim_mult", (1, 2, 4, 4))) - 1),
        "temporal_ratio": 2 ** sum(map(bool, config.items("temperal_downsample", (False, True, True)))),
        "latents_mean": config.numbers("latents_mean", _WAN_MEAN),
        "latents_std": config.numbers("latents_std", _WAN_STD),
    }


def _qwenimage(config: _Config) -> dict[str, Any]:
    return {
        **_causal(config),
        "family": "qwenimage",
        "default_fps": None,
        "pixel_channels": config.count("input_channels", 3),
        "layered": config.count("input_channels", 3) == 4,
    }


def _wan(config: _Config) -> dict[str, Any]:
    facts = _causal(config)
    patch = 1 if config.given("patch_size") is None else config.count("patch_size", 1)
    facts["spatial_ratio"] *= patch
    facts["pixel_channels"] = config.count("in_channels", 3) // patch**2
    for key, made in (("scale_factor_spatial", "spatial_ratio"), ("scale_factor_temporal", "temporal_ratio")):
        said = config.given(key, facts[made])
        if said != facts[made]:
            raise ModelError(
                f"AutoencoderKLWan: {key} is {shown(repr(said))}; the layers of this configuration make {facts[made]}"
            )
    # Wan 2.2's residual VAE belongs to the 24 fps model; every model with the 2.1 VAE makes 16 fps.
    return {**facts, "family": "wan", "default_fps": 24 if config.given("is_residual") else 16}


_READERS: Mapping[str, Callable[[_Config], dict[str, Any]]] = {
    "AutoencoderKL": _kl,
    "AutoencoderKLFlux2": _flux2,
    "AutoencoderKLQwenImage": _qwenimage,
    "AutoencoderKLWan": _wan,
}
