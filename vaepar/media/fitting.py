"""Sizes, frame counts, channels and ranges: from what a file holds to what a VAE takes.

Letters of shapes: H and W pixels, C channels. Pixels are uint8 or uint16, whose whole range is black to white.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from vaepar.errors import InputError

if TYPE_CHECKING:
    import torch

    from vaepar.media.source import PictureRules

Pixels = npt.NDArray[np.unsignedinteger[Any]]
"""uint8 or uint16, [H, W, C]."""


@dataclass(frozen=True, kw_only=True)
class SizePlan:
    """From ``original`` (height, width) to ``height`` x ``width`` by ``fit``."""

    original: tuple[int, int]
    height: int
    width: int
    fit: Literal["none", "crop", "pad", "resize"]
    notes: tuple[str, ...] = ()

    def apply(self, pixels_hwc: Pixels) -> Pixels:
        """The picture [H, W, C] in the planned size."""
        h, w = self.original
        if self.fit == "crop":
            top, left = (h - self.height) // 2, (w - self.width) // 2
            return pixels_hwc[top : top + self.height, left : left + self.width]
        if self.fit == "pad":
            return np.pad(pixels_hwc, ((0, self.height - h), (0, self.width - w), (0, 0)), mode="edge")
        return _resized(pixels_hwc, self.height, self.width) if self.fit == "resize" else pixels_hwc


@dataclass(frozen=True, kw_only=True)
class FramePlan:
    """Of ``available`` frames, ``read`` are read; ``total`` come out, the last one repeated if that is more."""

    available: int
    read: int
    total: int
    notes: tuple[str, ...] = ()


def plan_size(name: str, height: int, width: int, rules: PictureRules) -> SizePlan:
    """How a picture of ``height`` x ``width`` becomes one that the VAE takes.

    Raises:
        InputError: the size does not divide and ``rules.fit`` says error, or cropping would leave nothing.
    """
    if height * width > rules.max_pixels:
        raise oversize_error(name, height, width, rules)
    low = tuple(n // m * m for n, m in zip((height, width), rules.multiple, strict=True))
    high = tuple(-(-n // m) * m for n, m in zip((height, width), rules.multiple, strict=True))
    if low == (height, width):
        return SizePlan(original=low, height=height, width=width, fit="none")
    steps = f"{rules.multiple[1]}x{rules.multiple[0]}"
    needs = f"{name} is {width}x{height} (width x height); the VAE needs multiples of {steps}"
    if rules.fit == "error" or (rules.fit == "crop" and 0 in low):
        below = "nothing below" if 0 in low else f"{low[1]}x{low[0]} below (--fit crop)"
        raise InputError(f"{needs}: the nearest are {below} and {high[1]}x{high[0]} above (--fit pad), or --fit resize")
    if rules.fit == "resize":
        target = tuple(_nearest(n, m) for n, m in zip((height, width), rules.multiple, strict=True))
    else:
        target = low if rules.fit == "crop" else high
    if target[0] * target[1] > rules.max_pixels:
        raise oversize_error(name, target[0], target[1], rules)
    done = {"crop": "cropped around the centre", "pad": "padded at bottom and right", "resize": "resized"}[rules.fit]
    note = f"{width}x{height} was {done} to {target[1]}x{target[0]}"
    return SizePlan(original=(height, width), height=target[0], width=target[1], fit=rules.fit, notes=(note,))


def oversize_error(name: str, height: int, width: int, rules: PictureRules) -> InputError:
    """The error for a picture beyond ``rules.max_pixels``."""
    return InputError(
        f"{name} says it is {width}x{height}, {height * width / 1e6:.1f} megapixels; "
        f"at most {rules.max_pixels / 1e6:.1f} are read (--max-pixels)"
    )


def plan_frames(name: str, available: int, rules: PictureRules) -> FramePlan:
    """How many frames are read and come out.

    Raises:
        InputError: the count is not ``frames_step * k + 1`` and ``rules.frames_fit`` says error.
    """
    step = rules.frames_step
    if step is None or (available - 1) % step == 0:
        return FramePlan(available=available, read=available, total=available)
    low = (available - 1) // step * step + 1
    high = low + step
    if rules.frames_fit == "error":
        raise InputError(
            f"{name} has {available} frames; the VAE takes {step}k+1: the nearest are {low} (--frames-fit trim) "
            f"and {high} (--frames-fit pad)"
        )
    if rules.frames_fit == "trim":
        note = f"the last {available - low} of {available} frames were left out"
        return FramePlan(available=available, read=low, total=low, notes=(note,))
    note = f"the last frame was repeated {high - available} times behind {available} frames"
    return FramePlan(available=available, read=available, total=high, notes=(note,))


def settle_channels(pixels_hwc: Pixels, rules: PictureRules, name: str) -> tuple[Pixels, str | None]:
    """From grey, grey + alpha, RGB or RGBA [H, W, 1..4] to the VAE's channels, and a note on what was decided.

    Raises:
        InputError: there is transparency and ``rules`` do not say what becomes of it.
    """
    c = pixels_hwc.shape[2]
    colour = pixels_hwc[..., : 1 if c < 3 else 3]
    alpha = pixels_hwc[..., -1:] if c in (2, 4) else None
    note: str | None = None
    if alpha is not None and rules.channels == 4 and rules.alpha in ("keep", "refuse"):
        return np.concatenate((_rgb(colour), alpha), axis=2), None
    if alpha is not None:
        colour, note = _without_alpha(colour, alpha, rules, name)
    if rules.channels == 3:
        return _rgb(colour), note
    opaque = np.full_like(colour[..., :1], _top(colour))
    return np.concatenate((_rgb(colour), opaque), axis=2), note or "the VAE's fourth channel was filled as opaque"


def transparency_error(name: str, where: str) -> InputError:
    """The error for transparency that nobody decided on."""
    return InputError(f"{name} is transparent{where}; the VAE has 3 channels: say --alpha drop, white or black")


def to_range(pixels_hwc: Pixels) -> torch.Tensor:
    """Pixels [H, W, C] as float32 [C, H, W] in [-1, 1], by the very steps of diffusers' VaeImageProcessor."""
    import torch

    unit = np.ascontiguousarray(pixels_hwc.transpose(2, 0, 1)).astype(np.float32)
    unit /= np.float32(_top(pixels_hwc))
    return torch.from_numpy(unit).mul_(2.0).sub_(1.0)


def _without_alpha(colour: Pixels, alpha: Pixels, rules: PictureRules, name: str) -> tuple[Pixels, str]:
    top = _top(alpha)
    if rules.alpha in ("refuse", "keep"):
        if int(alpha.min()) != top:
            raise transparency_error(name, "")
        return colour, "the alpha channel is opaque everywhere and was left out"
    if rules.alpha == "drop":
        return colour, "the alpha channel was dropped; hidden colours are visible"
    # Whole numbers, rounded half up: what an 8-bit compositor gives, and exact where alpha is 0 or full.
    ground = top if rules.alpha == "white" else 0
    weight = alpha.astype(np.uint64)
    mixed = (colour * weight + ground * (top - weight) + top // 2) // top
    return mixed.astype(colour.dtype), f"transparency was laid over {rules.alpha}"


def _rgb(colour: Pixels) -> Pixels:
    return np.repeat(colour, 3, axis=2) if colour.shape[2] == 1 else colour


def _top(pixels: Pixels) -> int:
    return int(np.iinfo(pixels.dtype).max)


def _nearest(n: int, multiple: int) -> int:
    return max(1, (2 * n + multiple) // (2 * multiple)) * multiple


def _resized(pixels_hwc: Pixels, height: int, width: int) -> Pixels:
    """Lanczos by Pillow; 8 bits as diffusers does it, 16 bits in float32 a channel, since Pillow has no such mode."""
    from PIL import Image

    size, lanczos = (width, height), Image.Resampling.LANCZOS
    if pixels_hwc.dtype == np.uint8:
        # Pillow weights RGBA by alpha, so that hidden colours do not bleed.
        return np.asarray(Image.fromarray(np.ascontiguousarray(pixels_hwc)).resize(size, lanczos))
    wide = pixels_hwc.astype(np.float32)
    if wide.shape[2] == 4:
        wide[..., :3] *= wide[..., 3:] / np.float32(65535)
    planes = [
        np.asarray(Image.fromarray(np.ascontiguousarray(p)).resize(size, lanczos)) for p in np.moveaxis(wide, 2, 0)
    ]
    out = np.stack(planes, axis=2)
    if out.shape[2] == 4:
        out[..., :3] /= np.maximum(out[..., 3:] / np.float32(65535), np.float32(1 / 65535))
    deep: Pixels = np.rint(np.clip(out, 0, 65535)).astype(np.uint16)
    return deep
