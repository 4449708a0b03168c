"""Files for the readers, made by Pillow and ffmpeg directly, and everything that a source gives."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import numpy.typing as npt
import torch

from vaepar.media import FrameSource, PictureRules, find_media, open_source, parse_frames

Bytes = npt.NDArray[np.unsignedinteger[Any]]


def ffmpeg(*arguments: object, stdin: bytes = b"") -> None:
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-y", *map(str, arguments)]
    result = subprocess.run(command, input=stdin, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()


def make_video(path: Path, pixels_thwc: Bytes, *arguments: object, rate: object = 24) -> Path:
    """RGB frames [t, H, W, 3] (8 bits, or RGBA) through ffmpeg with these output arguments."""
    _, h, w, c = pixels_thwc.shape
    ffmpeg(
        "-f", "rawvideo", "-pixel_format", "rgba" if c == 4 else "rgb24", "-video_size", f"{w}x{h}",
        "-framerate", rate, "-i", "pipe:0", *arguments, f"file:{path.absolute()}", stdin=pixels_thwc.tobytes(),
    )  # fmt: skip
    return path


def greys(t: int, h: int = 16, w: int = 16) -> Bytes:
    """``t`` flat frames, each of its own grey, at least 8 apart up to 30 frames."""
    levels = (np.arange(t) * 8 + 8).astype(np.uint8)
    return np.broadcast_to(levels[:, None, None, None], (t, h, w, 3)).copy()


def opened(path: object, frames: str | None = None, **rules: Any) -> FrameSource:
    items = find_media([str(path)], frames=parse_frames(frames) if frames else None)
    assert len(items) == 1
    return open_source(items[0], PictureRules(**rules))


def read_all(source: FrameSource, chunk: int = 3) -> torch.Tensor:
    """Every frame [C, T, H, W]; the source is closed behind it."""
    chunks = []
    with source:
        while (frames := source.read(chunk)) is not None:
            assert 1 <= frames.shape[1] <= chunk
            chunks.append(frames)
        assert source.read(chunk) is None
    result = torch.cat(chunks, dim=1)
    assert tuple(result.shape) == (source.rules.channels, source.frames, source.height, source.width)
    assert result.dtype == torch.float32
    return result


def read_path(path: object, frames: str | None = None, **rules: Any) -> torch.Tensor:
    return read_all(opened(path, frames, **rules))


def as_bytes(frames: torch.Tensor) -> Bytes:
    """[C, T, H, W] in [-1, 1] as uint8 [T, H, W, C]."""
    return ((frames.double() + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0).numpy()


def levels(frames: torch.Tensor) -> list[int]:
    """The mean of every frame, 0 to 255."""
    return [round(float(frame.mean() + 1) * 127.5) for frame in frames.unbind(1)]


def one_line(error: BaseException, *words: str) -> str:
    """The message: one printable line that holds ``words``."""
    text = str(error)
    assert text.isprintable(), text
    assert len(text) < 900
    for word in words:
        assert word in text, text
    return text


def random_pixels(h: int, w: int, c: int = 3, dtype: type = np.uint8, seed: int = 0) -> Bytes:
    top = np.iinfo(dtype).max
    pixels: Bytes = np.random.default_rng(seed).integers(0, top + 1, (h, w, c)).astype(dtype)
    return pixels
