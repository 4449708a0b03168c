"""What an output shall be, as one value that is valid if it exists."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

from vaepar.errors import UsageError

Kind = Literal["png", "png-sequence", "mp4", "ffv1"]

MAX_FPS = 1000
MAX_FPS_TERM = 1_001_000  # ffmpeg parses a rate into terms up to this; beyond it would round in silence

_NTSC = {"23.976": 24, "23.98": 24, "29.97": 30, "47.952": 48, "59.94": 60, "119.88": 120}
_SUFFIXES: dict[Kind, str] = {"png": ".png", "png-sequence": "", "mp4": ".mp4", "ffv1": ".mkv"}
_YUV = ("yuv420p", "yuv422p", "yuv444p", "yuv420p10le", "yuv422p10le", "yuv444p10le")
_PRESETS = (
    "ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow", "slower", "veryslow", "placebo",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Codec:
    kind: Kind
    pix_fmts: tuple[str, ...]  # the first is the default
    crf: tuple[int, int, int] | None  # lowest, highest, default
    preset: str | None


PNG_LEVEL = 1
"""The usual zlib level of PNG."""

CODECS: dict[str, _Codec] = {
    "libx264": _Codec(kind="mp4", pix_fmts=_YUV, crf=(0, 51, 19), preset="medium"),
    "libx265": _Codec(kind="mp4", pix_fmts=_YUV, crf=(0, 51, 20), preset="medium"),
    "ffv1": _Codec(kind="ffv1", pix_fmts=("bgr0", "bgra"), crf=None, preset=None),
}


_LONGEST_FPS = 40  # characters


def parse_fps(text: str) -> Fraction:
    """A frame rate as people write it: ``16``, ``24000/1001``, ``12.5``; ``23.976`` and its kin mean N*1000/1001.

    Raises:
        UsageError: not a number, not above 0, or too fine to be kept exactly.
    """
    try:
        if len(text) > _LONGEST_FPS or "e" in text.lower():  # 1e400000000 would be computed for hours
            raise ValueError(text)
        fps = Fraction(_NTSC[text] * 1000, 1001) if text in _NTSC else Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"fps is {text[:60]!r}; it is a number above 0, as in 16, 24000/1001 or 23.976") from None
    return _checked_fps(fps)


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    """How frames are written. Fields left None take the codec's default; those that ``kind`` lacks are refused.

    Args:
        kind: ``png`` (one frame), ``png-sequence`` (a folder), ``mp4`` or ``ffv1`` (lossless, in .mkv).
        fps: frames per second, exact; needed for video, noted in the manifest of a sequence, refused for ``png``.
        codec: ``libx264`` (default) or ``libx265`` for mp4; ``ffv1`` for ffv1.
        crf: constant rate factor of mp4, 0 (lossless) to 51.
        pix_fmt: pixel format in the video; mp4: ``yuv420p`` (default), ``yuv444p``, ...; ffv1: ``bgr0``, ``bgra``.
        preset: speed against size of mp4, ``ultrafast`` to ``placebo``.
        png_level: zlib level of PNG, 0 to 9.
        threads: threads of the video encoder; None: the cores this process may use, at most 8.
        allow_nonfinite: write NaN and infinity as 0 with a warning instead of raising NonFiniteError.

    Raises:
        UsageError: a value or a combination that cannot be.
    """

    kind: Kind
    fps: Fraction | None = None
    codec: str | None = None
    crf: int | None = None
    pix_fmt: str | None = None
    preset: str | None = None
    png_level: int | None = None
    threads: int | None = None
    allow_nonfinite: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UsageError(f"output kind {self.kind!r} does not exist; the kinds are {', '.join(get_args(Kind))}")
        if self.fps is not None:
            self._set("fps", _checked_fps(self.fps))
        if self.is_video:
            self._check_video()
        else:
            self._check_picture()

    @property
    def is_video(self) -> bool:
        """Whether ffmpeg writes it."""
        return self.kind in ("mp4", "ffv1")

    @property
    def suffix(self) -> str:
        """The end of the output's name; empty for a sequence, which is a folder."""
        return _SUFFIXES[self.kind]

    @property
    def size_step(self) -> tuple[int, int]:
        """What height and width must divide by: (height, width)."""
        pix_fmt = self.pix_fmt or ""
        return (2 if "420" in pix_fmt else 1, 1 if "444" in pix_fmt or not pix_fmt.startswith("yuv") else 2)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_picture(self) -> None:
        for name in ("codec", "crf", "pix_fmt", "preset", "threads"):
            if getattr(self, name) is not None:
                raise UsageError(f"{name} is {getattr(self, name)!r}; {self.kind} has none, only video has")
        if self.kind == "png" and self.fps is not None:
            raise UsageError(f"fps is {self.fps}; one picture (png) has none, only video and png-sequence have")
        self._set("png_level", _whole("png_level", PNG_LEVEL if self.png_level is None else self.png_level, 0, 9))

    def _check_video(self) -> None:
        if self.png_level is not None:
            raise UsageError(f"png_level is {self.png_level!r}; {self.kind} has none, only png and png-sequence have")
        if self.fps is None:
            raise UsageError(f"fps is not given; {self.kind} needs one")
        names = [name for name, codec in CODECS.items() if codec.kind == self.kind]
        codec = _choice("codec", self.codec, names, self.kind)
        facts = CODECS[codec]
        self._set("codec", codec)
        self._set("pix_fmt", _choice("pix_fmt", self.pix_fmt, facts.pix_fmts, codec))
        if facts.crf is None or facts.preset is None:
            for name in ("crf", "preset"):
                if getattr(self, name) is not None:
                    raise UsageError(f"{name} is {getattr(self, name)!r}; {codec} is lossless and has none")
        else:
            low, high, default = facts.crf
            self._set("crf", _whole("crf", default if self.crf is None else self.crf, low, high))
            self._set("preset", _choice("preset", self.preset or facts.preset, _PRESETS, codec))
        if self.threads is not None:
            _whole("threads", self.threads, 1, 128)


def _choice(name: str, value: str | None, allowed: tuple[str, ...] | list[str], owner: str) -> str:
    if value is None:
        return allowed[0]
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}; {owner} takes {', '.join(allowed)}")
    return value


def _whole(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name} is {value!r}; it is a whole number from {low} to {high}")
    return value


def _checked_fps(fps: object) -> Fraction:
    if isinstance(fps, bool) or not isinstance(fps, (Fraction, int)):
        raise UsageError(f"fps is {fps!r}; it is an exact number of frames per second, such as Fraction(24000, 1001)")
    exact = Fraction(fps)
    if not 0 < exact <= MAX_FPS:
        raise UsageError(f"fps is {exact}; it is above 0 and at most {MAX_FPS}")
    if max(exact.numerator, exact.denominator) > MAX_FPS_TERM:
        raise UsageError(f"fps is {exact}; numerator and denominator are at most {MAX_FPS_TERM}, to be kept exactly")
    return exact
