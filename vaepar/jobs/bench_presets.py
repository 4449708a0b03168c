"""Which models ``vaepar bench`` can make up: each family's topology at three scales, read from ``configs/bench``.

Loads no torch, so that a mistyped name ends before any rank starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from vaepar.errors import UsageError
from vaepar.text import shown

FAMILIES = ("kl", "flux2", "qwenimage", "wan", "wan22")
SCALES = ("tiny", "small", "real")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model with random weights.

    Args:
        family, scale: names, of :data:`FAMILIES` and :data:`SCALES`. ``tiny`` runs in milliseconds; ``small`` has the
            depth of the released checkpoints at a fraction of their widths; ``real`` is their configuration.
        class_name: the diffusers class.
        config: arguments of that class.
        shape: the latent that is decoded when none is asked for.
        tile_size, tile_stride: pixels; None where the class takes them from ``config``.
        output_gain: factor on the last convolution, which keeps random weights' pixels inside [-1, 1], where no clamp
            hides a difference.
        parameters: how many numbers the model has.
    """

    family: str
    scale: str
    class_name: str
    config: Mapping[str, Any]
    shape: tuple[int, ...]
    tile_size: int | None
    tile_stride: int | None
    output_gain: float
    parameters: int


def load_preset(family: str, scale: str) -> Preset:
    """The preset of a family at a scale. Raises :class:`UsageError` that lists the names there are."""
    for flag, name, names in (("--family", family, FAMILIES), ("--scale", scale, SCALES)):
        if name not in names:
            raise UsageError(f"{flag} is '{shown(name)}'; it is one of {', '.join(names)}")
    data = json.loads(files("vaepar.configs").joinpath("bench", f"{family}.json").read_text(encoding="utf-8"))
    own = data["scales"][scale]
    return Preset(
        family=family,
        scale=scale,
        class_name=data["class"],
        config=data["common"] | own["config"],
        shape=tuple(int(n) for n in own["shape"].split("x")),
        tile_size=own.get("tile_size"),
        tile_stride=own.get("tile_stride"),
        output_gain=data["output_gain"],
        parameters=own["parameters"],
    )


__all__ = ["FAMILIES", "SCALES", "Preset", "load_preset"]
