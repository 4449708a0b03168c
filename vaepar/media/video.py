"""Video by ffmpeg: H.264 and H.265 in MP4, lossless FFV1 in Matroska, with right and declared colours."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from vaepar.atomic import commit_file, create_temp_file
from vaepar.errors import OutputError
from vaepar.media.ffmpeg import EncoderProcess, check_encodes, count_packets
from vaepar.media.png import METADATA_KEY, metadata_json, refuse_existing
from vaepar.media.sink import Target, TargetSink
from vaepar.text import quoted

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from vaepar.media.formats import OutputFormat

_MAX_DEFAULT_THREADS = 8  # x264 gains little beyond and holds one more frame per thread
_LOOKAHEAD = 16  # frames that x264 holds back; its 20 to 60 would let a clip's length show in the memory for longer
_LONG_LOOKAHEAD_PRESETS = ("faster", "fast", "medium", "slow", "slower", "veryslow", "placebo")
_MUXERS = {"mp4": "mp4", "ffv1": "matroska"}


class VideoSink(TargetSink):
    """One video file, encoded by an ffmpeg process while frames come."""

    def __init__(self, target: Target) -> None:
        check_size(target)
        arguments = input_arguments(target) + encoder_arguments(target.format)
        name = f"{target.format.codec} {target.format.pix_fmt} at {target.width}x{target.height}"
        check_encodes(arguments, target.height * target.width * target.channels[0], name)
        super().__init__(target, create_temp_file(target.path))
        try:
            self._encoder = self._start()
        except BaseException:
            self._temp.unlink(missing_ok=True)
            raise

    def _start(self) -> EncoderProcess:
        target = self.target
        metadata = _ffmetadata(metadata_json(target.metadata)) if target.metadata else None
        arguments = list(input_arguments(target))
        if metadata is not None:
            arguments += ["-f", "ffmetadata", "-i", "{metadata}", "-map_metadata", "1"]
        arguments += ["-map", "0:v:0", *encoder_arguments(target.format), *_muxer_arguments(target.format)]
        # An absolute path behind the protocol's name: "-x.mp4", "a:b.mp4" and "%d.mp4" are plain names then.
        arguments += ["-y", f"file:{self._temp.absolute()}"]
        return EncoderProcess(tuple(arguments), quoted(target.path), metadata)

    def _append(self, pixels: npt.NDArray[np.uint8]) -> None:
        import numpy as np

        for frame in pixels:
            self._encoder.feed(np.ascontiguousarray(frame).data.cast("B"))

    def _commit(self) -> None:
        self._encoder.finish()
        name = quoted(self.target.path)
        count = count_packets(self._temp.absolute(), name)
        if count != self._written:
            raise OutputError(f"{name} was given {self._written} frames and holds {count}; it is not kept")
        if self._cancelled.is_set():
            raise OutputError(f"{name} was aborted")
        refuse_existing(self.target)
        commit_file(self._temp, self.target.path)

    def cancel(self) -> None:
        super().cancel()
        self._encoder.kill()

    def _release(self) -> None:
        self._encoder.dispose()


def check_size(target: Target) -> None:
    """Raise :class:`OutputError` if the chroma subsampling cannot hold the size: frames are never resized."""
    step_h, step_w = target.format.size_step
    if target.height % step_h or target.width % step_w:
        raise OutputError(
            f"{quoted(target.path)} is {target.width}x{target.height}; {target.format.pix_fmt} needs an even "
            f"{'width and height' if step_h == 2 else 'width'}: ask for pix_fmt yuv444p, which takes any size"
        )


def input_arguments(target: Target) -> tuple[str, ...]:
    """Raw full-range RGB frames from ``pipe:0`` at an exact rate."""
    return (
        "-f", "rawvideo", "-pixel_format", "rgba" if target.channels == (4,) else "rgb24",
        "-video_size", f"{target.width}x{target.height}", "-framerate", str(target.format.fps),
        "-color_range", "pc", "-colorspace", "rgb", "-color_primaries", "bt709", "-color_trc", "bt709",
        "-i", "pipe:0",
    )  # fmt: skip


def encoder_arguments(fmt: OutputFormat) -> tuple[str, ...]:
    """Colour conversion, colour tags and encoder.

    The tags are set on the frames (``setparams``): given as output options only, primaries and transfer are lost.
    """
    threads = fmt.threads or min(_MAX_DEFAULT_THREADS, _usable_cores())
    common = ("-fps_mode", "passthrough", "-threads", str(threads), "-c:v", str(fmt.codec))
    if fmt.kind == "ffv1":
        tags = "setparams=range=pc:colorspace=gbr:color_primaries=bt709:color_trc=iec61966-2-1"
        graph = f"format={fmt.pix_fmt},{tags}"
        return ("-vf", graph, *common, "-level", "3", "-slicecrc", "1")
    tags = "setparams=range=tv:colorspace=bt709:color_primaries=bt709:color_trc=bt709"
    scale = "scale=in_range=pc:out_color_matrix=bt709:out_range=tv:flags=bicubic+accurate_rnd+full_chroma_int"
    graph = f"{scale},format={fmt.pix_fmt},{tags}"
    rate: tuple[str, ...] = ("-crf", str(fmt.crf), "-preset", str(fmt.preset))
    if fmt.codec == "libx264" and fmt.preset in _LONG_LOOKAHEAD_PRESETS:
        rate += ("-rc-lookahead", str(_LOOKAHEAD))
    if fmt.codec == "libx265":
        # x265 ignores -threads and takes every core, and writes to stderr whatever -loglevel says; Apple's players
        # know H.265 in MP4 by the tag hvc1 only.
        options = f"log-level=error:pools={threads}:frame-threads={min(threads, 4)}"
        return ("-vf", graph, *common, *rate, "-x265-params", options, "-tag:v", "hvc1")
    return ("-vf", graph, *common, *rate)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _muxer_arguments(fmt: OutputFormat) -> tuple[str, ...]:
    # bitexact: the same frames give the same bytes, without the version of ffmpeg.
    plain = ("-fflags", "+bitexact", "-flags:v", "+bitexact", "-f", _MUXERS[fmt.kind])
    return (*plain, "-movflags", "+faststart+use_metadata_tags") if fmt.kind == "mp4" else plain


def _ffmetadata(text: str) -> bytes:
    """One tag in ffmpeg's metadata format (its ``=``, ``;``, ``#``, backslash and newline are escaped)."""
    escaped = re.sub(r"([=;#\\\n])", r"\\\1", text)
    return f";FFMETADATA1\n{METADATA_KEY}={escaped}\n".encode("ascii")
