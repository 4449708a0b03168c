"""What a video is, asked of ffmpeg before any frame is read: its first frame's facts, and every frame's time.

The second question decodes the whole video once. That is cheap beside a VAE, and only then are the number of frames,
the rate and the wholeness of the file known rather than believed (an index may promise what was cut off).
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from vaepar.errors import InputError
from vaepar.media.decoder import Answer, ask, check_plain_file, input_arguments, reader_exe
from vaepar.text import quoted

_FRAME = re.compile(r"fmt:(\w+) .*?sar:(\d+)/(\d+) s:(\d+)x(\d+) i:(\w)")
_COLOUR = re.compile(r"color_range:(\S+) color_space:(\S+) color_primaries:(\S+) color_trc:(\S+)")
_RATE = re.compile(r"config in time_base: \d+/\d+, frame_rate: (\d+)/(\d+)")
_ROTATION = re.compile(r"display ?matrix: rotation of (-?[\d.]+) degrees", re.IGNORECASE)
_ALPHA_MODE = re.compile(r"^\[info\]\s+alpha_mode\s*: 1\s*$", re.MULTILINE | re.IGNORECASE)
_ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
_PACKED_RGB = re.compile(r"(?:0|a|x2)?(?:rgb|bgr|gbr)|abgr|argb|pal8")


@dataclass(frozen=True, kw_only=True)
class VideoFacts:
    """The first frame, as it comes out of the decoder (rotation obeyed).

    Args:
        height, width: pixels.
        depth: bits of the deepest channel.
        alpha, rgb: what the pixel format holds.
        full_range: black and white are the ends of the range; None: not tagged.
        matrix, primaries, transfer: colour tags in ffmpeg's words, ``unknown`` where there is none.
        nominal: ffmpeg's guess at the frame rate, None if it has none.
        seconds: the duration that the header claims, None if it claims none.
        gif: the container is GIF, whose ticks are the exact times.
        options: input options that every later call needs.
        notes: what was found that a user should know.
    """

    path: Path
    height: int
    width: int
    depth: int
    alpha: bool
    rgb: bool
    full_range: bool | None
    matrix: str
    primaries: str
    transfer: str
    nominal: Fraction | None
    seconds: Fraction | None
    gif: bool
    options: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FrameTimes:
    """When frames are shown: ``ticks`` since the first one, in units of ``tick`` seconds, and the last one's duration.

    ``transparent`` is the number of the first frame that is not opaque (from 1), None if there is none or nobody asked.
    """

    ticks: tuple[int, ...]
    tick: Fraction
    last_duration: int
    transparent: int | None


def probe(path: Path, max_pixels: int) -> VideoFacts:
    """The facts of a video's first frame.

    Raises:
        InputError: not there, empty, not a video that is read, without a picture, or larger than ``max_pixels``.
    """
    name = quoted(path)
    check_plain_file(path, "a video file")
    answer = _first_frame(path, max_pixels, ())
    options = _alpha_options(answer)
    if options:
        answer = _first_frame(path, max_pixels, options)
    lines = [line for line in answer.log.splitlines() if line.startswith("[Parsed_showinfo_")]
    frame, colour, rate = (next(filter(None, map(pattern.search, lines)), None) for pattern in (_FRAME, _COLOUR, _RATE))
    if answer.code != 0 or frame is None or colour is None:
        raise InputError(_unreadable(name, answer, max_pixels))
    depth, channels = _pixel_format(frame[1])
    return VideoFacts(
        path=path,
        height=int(frame[5]),
        width=int(frame[4]),
        depth=depth,
        alpha=channels in (2, 4),
        rgb=_PACKED_RGB.match(frame[1]) is not None or colour[2] == "gbr",
        full_range={"pc": True, "tv": False}.get(colour[1], True if frame[1].startswith("yuvj") else None),
        matrix=colour[2],
        primaries=colour[3],
        transfer=colour[4],
        nominal=Fraction(int(rate[1]), int(rate[2])) if rate and int(rate[1]) and int(rate[2]) else None,
        seconds=_duration(answer.log),
        gif=re.search(r"^\[info\] Input #0, gif, from", answer.log, re.MULTILINE) is not None,
        options=options,
        notes=_notes(answer, frame),
    )


def scan(facts: VideoFacts, limit: int | None, find_transparent: bool, rate: Fraction | None = None) -> FrameTimes:
    """Decode the video (its first ``limit`` frames) once and give the frames' times.

    Args:
        find_transparent: look at the alpha channel instead of the colours.
        rate: as frames of this constant rate, with frames repeated and left out by ffmpeg; None: as stored.

    Raises:
        InputError: cut short or broken anywhere in what was decoded, no frame, or frames of different sizes.
    """
    name = quoted(facts.path)
    filters = (*(("alphaextract", "format=gray") if find_transparent else ()), *timing_filters(rate), "null")
    answer = ask(
        (
            *facts.options, *input_arguments(facts.path, 2**31 - 1), "-map", "0:V:0",
            "-vf", ",".join(filters), *TIMING_OPTIONS, *(("-frames:v", str(limit)) if limit else ()),
            "-noautoscale", "-c:v", "rawvideo", "-f", "framecrc", "pipe:1",
        ),
        name, timeout=None,
    )  # fmt: skip
    if answer.failed:
        raise InputError(f"{name} is cut short or broken: {answer.reason}; a whole file is needed")
    return _parse_times(answer.stdout.decode("ascii", "replace"), name, facts if find_transparent else None)


def timing_filters(rate: Fraction | None) -> tuple[str, ...]:
    """Filters that show at every step of a constant rate the frame that is nearest in time, from the first one on.

    ffmpeg's ``-fps_mode cfr`` would do as well for players, but lets frames drift by more than one step.
    """
    if rate is None:
        return ()
    return ("setpts=PTS-STARTPTS", f"fps=fps={rate.numerator}/{rate.denominator}:start_time=0:round=near")


TIMING_OPTIONS = ("-fps_mode", "passthrough", "-enc_time_base", "filter")
"""Output options: every frame as it leaves the filters, none repeated or left out, in its own clock."""


def _first_frame(path: Path, max_pixels: int, options: tuple[str, ...]) -> Answer:
    arguments = (
        *options, *input_arguments(path, max_pixels), "-map", "0:V:0", "-vf", "showinfo=checksum=0",
        "-frames:v", "1", "-f", "null", "-",
    )  # fmt: skip
    return ask(arguments, quoted(path), level="info")


def _duration(log: str) -> Fraction | None:
    found = re.search(r"Duration: (\d+):(\d+):(\d+\.\d+)", log)
    if found is None:
        return None
    return int(found[1]) * 3600 + int(found[2]) * 60 + Fraction(found[3])


def _alpha_options(answer: Answer) -> tuple[str, ...]:
    """ffmpeg's own decoders of VP8 and VP9 leave the alpha channel out without a word; libvpx decodes it."""
    codec = re.search(r"Stream #0:\d+.*: Video: (\w+)", answer.log)
    if _ALPHA_MODE.search(answer.log) and codec and codec[1] in _ALPHA_DECODERS:
        return ("-c:v", _ALPHA_DECODERS[codec[1]])
    return ()


def _unreadable(name: str, answer: Answer, max_pixels: int) -> str:
    kinds = re.findall(r"Stream #0:\d+.*?: (Audio|Video|Subtitle|Data)", answer.log)
    if "matches no streams" in answer.log:
        found = " and ".join(sorted({kind.lower() for kind in kinds}))
        if not found:
            return f"{name} holds no stream at all; it is cut short, or no video"
        return f"{name} holds no video, only {found.replace('video', 'a cover picture')}; a video stream is needed"
    if re.search(r"[Pp]icture size \d+x\d+ (?:is invalid|exceeds)|max_pixels", answer.log):
        return (
            f"{name} has frames of more than {max_pixels / 1e6:.1f} megapixels, the most that are read (--max-pixels)"
        )
    return f"{name} cannot be read as a video (MP4, MOV, WebM, MKV, GIF): {answer.reason}"


def _notes(answer: Answer, frame: re.Match[str]) -> tuple[str, ...]:
    notes = []
    rotation = _ROTATION.search(answer.log)
    if rotation and float(rotation[1]):
        notes.append(f"the file's rotation of {float(rotation[1]):g} degrees was obeyed")
    if frame[2] != frame[3] and "0" not in (frame[2], frame[3]):
        notes.append(f"pixels are {frame[2]}:{frame[3]}, not square; they were read as stored")
    if frame[6] in "TB":
        notes.append("the video is interlaced; it was not deinterlaced")
    if len(re.findall(r"Stream #0:\d+.*?: Video", answer.log.split("Stream mapping:")[0])) > 1:
        notes.append("the file holds several video streams; the first was read")
    return tuple(notes)


@lru_cache(maxsize=1)
def _pixel_formats(exe: str) -> dict[str, tuple[int, int]]:
    """Name -> (bits of the deepest channel, channels), by ffmpeg's own table."""
    table = {}
    for line in ask(("-pix_fmts",), "the list of pixel formats").stdout.decode("ascii", "replace").splitlines():
        fields = line.split()
        if len(fields) == 5 and fields[2].isdecimal() and re.fullmatch(r"\d+(?:-\d+)*", fields[4]):
            table[fields[1]] = (max(map(int, fields[4].split("-"))), int(fields[2]))
    return table


def _pixel_format(name: str) -> tuple[int, int]:
    return _pixel_formats(reader_exe()).get(name, (8, 3))


def _parse_times(text: str, name: str, opaque: VideoFacts | None) -> FrameTimes:
    tick, starts, duration = Fraction(1), [], 0
    size: int | None = None
    full = zlib.adler32(b"\xff" * (opaque.height * opaque.width), 0) if opaque else None
    transparent: int | None = None
    for line in text.splitlines():
        if line.startswith("#tb 0:"):
            tick = Fraction(line.removeprefix("#tb 0:").strip())
        if line.startswith("#") or not line.strip():
            continue
        _, _, pts, duration_text, size_text, checksum = (field.strip() for field in line.split(",")[:6])
        starts.append(int(pts))
        duration = int(duration_text)
        if size is not None and int(size_text) != size:
            raise InputError(f"{name} changes its frame size at frame {len(starts)}; all frames must have one size")
        size = int(size_text)
        if full is not None and transparent is None and int(checksum, 16) != full:
            transparent = len(starts)
    if not starts:
        raise InputError(f"{name} holds no frame; a video has at least one")
    return FrameTimes(
        ticks=tuple(t - starts[0] for t in starts), tick=tick, last_duration=duration, transparent=transparent
    )
