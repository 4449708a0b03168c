"""Pixels from the VAE's range to bytes, once, in float32, rounded."""

from __future__ import annotations

import logging
import math
import mmap
from typing import TYPE_CHECKING

from vaepar.errors import NonFiniteError, UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

logger = logging.getLogger(__name__)


def quantise(frames: torch.Tensor, *, allow_nonfinite: bool = False, name: str = "frames") -> npt.NDArray[np.uint8]:
    """Frames of a VAE as bytes on the host.

    The formula is that of diffusers' VaeImageProcessor and VideoProcessor (``denormalize``, then ``numpy_to_pil``):
    ``round(clamp(x * 0.5 + 0.5, 0, 1) * 255)``, halves to even. All of it in float32 whatever the frames' dtype:
    the range conversion in bfloat16 would round a second time and band smooth gradients.

    Args:
        frames: [C, t, H, W] with C 3 (RGB) or 4 (RGBA), any floating dtype, any device, range [-1, 1]; values outside
            are clamped.
        allow_nonfinite: write NaN and infinity as 0 with a warning instead of raising.
        name: what the messages call these frames.

    Returns:
        uint8, [t, H, W, C], contiguous.

    Raises:
        UsageError: another shape or dtype.
        NonFiniteError: NaN or infinity in any pixel; the message has the count.
    """
    import torch

    check_frames(frames, name)
    with torch.no_grad():
        c, t, h, w = frames.shape
        result = _mapped((t, h, w, c))
        total = _convert(frames, result)
        # A sum is finite only if every value is: one read of the data, no mask. Overflow can only raise a false alarm.
        if not bool(torch.isfinite(total)):
            bad = _count_nonfinite_pixels(frames)
            if bad:
                count = f"{bad} of {frames[0].numel()} pixels of {name} are NaN or infinite"
                if not allow_nonfinite:
                    raise NonFiniteError(f"{count}; only finite pixels are written, unless allow-nonfinite is given")
                logger.warning("%s; they are written as 0", count)
                _convert(frames, result, nonfinite_to_black=True)
        return result


def check_frames(frames: torch.Tensor, name: str = "frames") -> None:
    """Raise :class:`UsageError` unless ``frames`` is [3 or 4, t, H, W], none of them 0, of a floating dtype."""
    shape = tuple(frames.shape)
    if len(shape) != 4 or shape[0] not in (3, 4) or 0 in shape:
        raise UsageError(f"{name} have the shape {shape}; pixels are [C, t, H, W] with C 3 or 4 and nothing empty")
    if not frames.is_floating_point():
        raise UsageError(f"{name} are {frames.dtype}; pixels are floating point in the range [-1, 1]")


def _mapped(shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """An array in memory of its own, given back to the system as soon as the array is gone.

    Chunks of bytes wait in a queue while the much larger chunks of floats come and go. On one heap they would lie
    between those and keep it from shrinking: measured, the writer then took 20 % more for 81 frames than for 17.
    """
    import numpy as np

    return np.frombuffer(mmap.mmap(-1, math.prod(shape)), dtype=np.uint8).reshape(shape)


def _convert(
    frames: torch.Tensor, into_thwc: npt.NDArray[np.uint8], *, nonfinite_to_black: bool = False
) -> torch.Tensor:
    """Fill ``into_thwc`` with the bytes of ``frames`` and give the float32 sum of all values, on the frames' device.

    Frame by frame through one buffer: the float32 copy stays the size of a frame, in cache, instead of a chunk's.
    """
    import torch

    c, t, h, w = frames.shape
    host = torch.from_numpy(into_thwc)
    pixels = host if frames.device.type == "cpu" else torch.empty_like(host, device=frames.device)
    total = torch.zeros((), dtype=torch.float32, device=frames.device)
    frame_chw = torch.empty((c, h, w), dtype=torch.float32, device=frames.device)
    for i in range(t):
        frame_chw.copy_(frames[:, i])
        if nonfinite_to_black:
            frame_chw.masked_fill_(~torch.isfinite(frame_chw), -1.0)
        total += frame_chw.sum()
        frame_chw.mul_(0.5).add_(0.5).clamp_(0, 1).mul_(255).round_()
        pixels[i].copy_(frame_chw.permute(1, 2, 0))
    if pixels is not host:
        host.copy_(pixels)
    return total


def _count_nonfinite_pixels(frames: torch.Tensor) -> int:
    """How many of the t * H * W pixels hold NaN or infinity in any channel."""
    import torch

    bad = 0
    for i in range(frames.shape[1]):
        frame_chw = frames[:, i]
        # The short float8 types have no isfinite; float64 has, and must not overflow to infinity here.
        wide_chw = frame_chw if frame_chw.dtype == torch.float64 else frame_chw.to(torch.float32)
        bad += int((~torch.isfinite(wide_chw)).any(dim=0).sum())
    return bad
