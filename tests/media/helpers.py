"""Real files read back by means that share nothing with the writer but the ffmpeg binary."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import numpy.typing as npt
import torch

from vaepar.media import OutputFormat, open_sink

Pixels = npt.NDArray[np.uint8]
ROOT = Path(__file__).parents[2]
REAL_FFMPEG = imageio_ffmpeg.get_ffmpeg_exe()  # before any test puts another in its place


def mp4(**settings: Any) -> OutputFormat:
    return OutputFormat(**{"kind": "mp4", "fps": Fraction(16), **settings})


def ffv1(**settings: Any) -> OutputFormat:
    return OutputFormat(**{"kind": "ffv1", "fps": Fraction(16), **settings})


PNG = OutputFormat(kind="png")
SEQUENCE = OutputFormat(kind="png-sequence")
EVERY_FORMAT = [PNG, SEQUENCE, mp4(), mp4(codec="libx265"), ffv1()]


def format_id(fmt: OutputFormat) -> str:
    return f"{fmt.kind}-{fmt.codec}" if fmt.codec else fmt.kind


def from_bytes(pixels_thwc: Pixels) -> torch.Tensor:
    """The frames [C, t, H, W] in [-1, 1] whose bytes are these."""
    return torch.from_numpy(pixels_thwc.astype(np.float32) / 127.5 - 1).permute(3, 0, 1, 2)


def random_bytes(t: int, h: int, w: int, c: int = 3, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (t, h, w, c), dtype=np.uint8)


def write(path: Path, fmt: OutputFormat, pixels: Pixels, *, chunk: int = 4, overwrite: bool = False,
          metadata: dict[str, str] | None = None) -> tuple[Path, ...]:  # fmt: skip
    t, h, w, _ = pixels.shape
    frames = from_bytes(pixels)
    with open_sink(path, fmt, height=h, width=w, frames=t, metadata=metadata or {}, overwrite=overwrite) as sink:
        for start in range(0, t, chunk):
            sink.write(frames[:, start : start + chunk])
        return sink.close()


def read_video(path: Path, *, filters: str | None = None) -> Pixels:
    """All frames [t, H, W, 3] of a video; without ``filters`` by what its own tags say.

    With ffmpeg's accurate conversion: its fast one truncates, which would be the reader's error, not the file's.
    """
    _, width, height = stream_facts(path)
    result = subprocess.run(
        [REAL_FFMPEG, "-v", "error", "-i", f"file:{path.absolute()}",
         *(["-vf", filters] if filters else []), "-sws_flags", "bicubic+accurate_rnd+full_chroma_int",
         "-fps_mode", "passthrough", "-f", "rawvideo", "-pix_fmt", "rgb24", "-"],
        capture_output=True, check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert not result.stderr, result.stderr
    return np.frombuffer(result.stdout, np.uint8).reshape(-1, height, width, 3)


def read_tag(path: Path) -> str | None:
    """The tag ``vaepar`` of a video, as ffmpeg exports it."""
    command = [REAL_FFMPEG, "-v", "error", "-i", f"file:{path.absolute()}", "-f", "ffmetadata", "-"]
    text = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=True).stdout.decode()
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.lower() == "vaepar":
            return re.sub(r"\\(.)", r"\1", value)
    return None


def described(path: Path) -> str:
    """What ``ffmpeg -i`` says about a file."""
    command = [REAL_FFMPEG, "-hide_banner", "-i", f"file:{path.absolute()}"]
    return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False).stderr.decode()


def stream_facts(path: Path) -> tuple[str, int, int]:
    """The line of the video stream, its width and its height."""
    line = next(line for line in described(path).splitlines() if "Video:" in line)
    match = re.search(r", (\d+)x(\d+)", line)
    assert match is not None, line
    return line, int(match[1]), int(match[2])


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def run_python(code: str, *arguments: object, **environment: str) -> Any:
    """Run ``code`` in a fresh interpreter; its last line of output is JSON."""
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True, cwd=ROOT, env={**os.environ, **environment}, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr.decode()
    return json.loads(result.stdout.decode().splitlines()[-1])


def fake_ffmpeg(path: Path, script: str) -> Path:
    """A shell script in ffmpeg's place; ``$REAL`` in it is the real one."""
    path.write_text(f"#!/bin/sh\nREAL='{REAL_FFMPEG}'\n{script}\n")
    path.chmod(0o755)
    return path
