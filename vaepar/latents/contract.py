"""What a saved latent means: layout x state, as data. No torch here, so that plans and help texts stay cheap.

Letters of the axes, here and in the whole room: B items, C latent channels, F latent frames, H W latent rows and
columns; Q = 4 C channels of a 2x2 patch, P R rows and columns of patches (H / 2, W / 2), N = P R tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

from vaepar.errors import UsageError
from vaepar.latents.vae_facts import VaeFacts
from vaepar.text import listed, shown

__all__ = [
    "FAMILY_LAYOUTS",
    "LAYOUT_AXES",
    "LatentFacts",
    "LatentHeader",
    "LatentLayout",
    "LatentRequest",
    "LatentState",
    "VaeFacts",
]


class LatentLayout(StrEnum):
    """The order of a stored tensor's axes."""

    BCHW = "bchw"
    BCFHW = "bcfhw"
    CHW = "chw"
    CFHW = "cfhw"
    PACKED_2X2 = "packed2x2"
    """Tokens of 2x2 patches, [B, N, 4C], row-major (FLUX.1, Qwen-Image)."""
    GRID128 = "grid128"
    """A grid of 2x2 patches, [B, 4C, H/2, W/2] (FLUX.2; 4C = 128)."""
    CGRID128 = "cgrid128"
    """The same without the batch axis, [4C, H/2, W/2]."""
    TOKENS128 = "tokens128"
    """That grid as row-major tokens, [B, N, 4C] (FLUX.2)."""


class LatentState(StrEnum):
    """The scale of the numbers."""

    RAW = "raw"
    """What ``vae.decode`` takes and ``vae.encode`` gives."""
    NORM = "norm"
    """The transformer's space: shifted and scaled to a deviation near 1."""


LAYOUT_AXES: Mapping[LatentLayout, str] = {
    LatentLayout.BCHW: "BCHW",
    LatentLayout.BCFHW: "BCFHW",
    LatentLayout.CHW: "CHW",
    LatentLayout.CFHW: "CFHW",
    LatentLayout.PACKED_2X2: "BNQ",
    LatentLayout.GRID128: "BQPR",
    LatentLayout.CGRID128: "QPR",
    LatentLayout.TOKENS128: "BNQ",
}

FAMILY_LAYOUTS: Mapping[str, tuple[LatentLayout, ...]] = {
    "kl": (LatentLayout.BCHW, LatentLayout.CHW, LatentLayout.PACKED_2X2),
    "flux2": (
        LatentLayout.BCHW,
        LatentLayout.CHW,
        LatentLayout.GRID128,
        LatentLayout.CGRID128,
        LatentLayout.TOKENS128,
    ),
    "qwenimage": (
        LatentLayout.BCFHW,
        LatentLayout.BCHW,
        LatentLayout.CFHW,
        LatentLayout.CHW,
        LatentLayout.PACKED_2X2,
    ),
    "wan": (LatentLayout.BCFHW, LatentLayout.BCHW, LatentLayout.CFHW, LatentLayout.CHW),
}

_E = TypeVar("_E", bound=StrEnum)


def _member(kind: type[_E], value: str | None, flag: str) -> _E | None:
    if value is None:
        return None
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(member.value for member in kind)
        raise UsageError(f"{flag} is '{shown(value)}'; it is one of {allowed}") from None


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True, kw_only=True)
class LatentHeader:
    """What the header of one latent file says. No tensor was read.

    Args:
        path: the file.
        key: name of the latent tensor in it.
        shape: its axes as stored.
        dtype: its dtype in safetensors' spelling: ``F64``, ``F32``, ``F16`` or ``BF16``.
        metadata: the file's own strings (untrusted: use :func:`vaepar.text.shown` to print them).
        producer: ``vaepar``, ``comfyui``, ``musubi`` or ``plain``, by the keys and the metadata.
        other_keys: names of the further tensors in the file.
        file_bytes: size of the file.
        header_digest: SHA-256 of the header's bytes, hexadecimal. Ranks compare it to know that they hold one file.
    """

    path: Path
    key: str
    shape: tuple[int, ...]
    dtype: str
    metadata: Mapping[str, str] = field(hash=False)
    producer: str
    other_keys: tuple[str, ...] = ()
    file_bytes: int
    header_digest: str


@dataclass(frozen=True, kw_only=True)
class LatentRequest:
    """What the user said about a file; None where the file shall speak for itself.

    Args:
        state: a :class:`LatentState` or its name (``--state``).
        layout: a :class:`LatentLayout` or its name (``--layout``).
        size: (height, width) of the picture in pixels (``--size WxH``).
        trim_latent_frames: leading latent frames to drop (the reference pictures of Wan-VACE).

    Raises:
        UsageError: for a name or number that cannot be.
    """

    state: LatentState | None = None
    layout: LatentLayout | None = None
    size: tuple[int, int] | None = None
    trim_latent_frames: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", _member(LatentState, self.state, "--state"))
        object.__setattr__(self, "layout", _member(LatentLayout, self.layout, "--layout"))
        if self.size is not None and (len(self.size) != 2 or not all(_whole(n, 1) for n in self.size)):
            raise UsageError(f"--size is {listed(self.size)}; it is WxH in whole pixels, 1 or more each")
        if not _whole(self.trim_latent_frames, 0):
            raise UsageError(f"--trim-latent-frames is {self.trim_latent_frames!r}; it is a whole number, 0 or more")


@dataclass(frozen=True, kw_only=True)
class LatentFacts:
    """The settled meaning of one latent file.

    Args:
        header: the file's header.
        family: the VAE family that it was settled for.
        layout, state: order of the axes and scale of the numbers, as stored.
        batch: items in the file; each becomes an output of its own.
        height, width: size of the decoded picture in pixels.
        num_frames: decoded frames (1 for a still).
        latent_shape: the VAE's input, [B, C, H, W] or [B, C, F, H, W], after trimming.
        trim_latent_frames: leading latent frames that are dropped.
        prescale: factor for the stored numbers, applied in float32 before anything else (old ComfyUI files).
        fps: frames per second that the file names, else the family's default; None for pictures.
        original_size: (height, width) before an encoder padded the picture, if the file names it.
        original_frames: frames before an encoder padded the film, if the file names it.
        seed, prompt: as the file's metadata have them (untrusted, like the metadata).
        decisions: one printable line for each thing that was decided, and why.
    """

    header: LatentHeader
    family: str
    layout: LatentLayout
    state: LatentState
    batch: int
    height: int
    width: int
    num_frames: int
    latent_shape: tuple[int, ...]
    trim_latent_frames: int = 0
    prescale: float | None = None
    fps: Fraction | None = None
    original_size: tuple[int, int] | None = None
    original_frames: int | None = None
    seed: str | None = None
    prompt: str | None = None
    decisions: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The facts as plain values, for ``inspect --json`` and reports."""
        return {
            "path": str(self.header.path),
            "key": self.header.key,
            "shape": list(self.header.shape),
            "dtype": self.header.dtype,
            "producer": self.header.producer,
            "family": self.family,
            "layout": self.layout.value,
            "state": self.state.value,
            "batch": self.batch,
            "height": self.height,
            "width": self.width,
            "num_frames": self.num_frames,
            "latent_shape": list(self.latent_shape),
            "trim_latent_frames": self.trim_latent_frames,
            "prescale": self.prescale,
            "original_size": None if self.original_size is None else list(self.original_size),
            "fps": None if self.fps is None else float(self.fps),
            "original_frames": self.original_frames,
            "seed": self.seed,
            "prompt": self.prompt,
            "header_digest": self.header.header_digest,
            "decisions": list(self.decisions),
        }
