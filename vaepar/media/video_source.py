"""Videos as frames: streamed from ffmpeg, colours by the file's own tags, at a constant rate, exactly counted."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np

from vaepar.errors import InputError
from vaepar.media.decoder import DecoderProcess, input_arguments
from vaepar.media.fitting import FramePlan, Pixels, plan_frames, plan_size, settle_channels, transparency_error
from vaepar.media.frame_range import FrameRange
from vaepar.media.frame_rate import constant_rate, resampled_rate
from vaepar.media.source import FrameSource, PictureRules
from vaepar.media.video_probe import TIMING_OPTIONS, VideoFacts, probe, scan, timing_filters
from vaepar.text import quoted

# ffmpeg's words for a matrix in a file (and of its zscale filter) -> its scale filter's words.
_MATRICES = {
    "bt709": "bt709", "smpte170m": "smpte170m", "bt470bg": "bt470", "fcc": "fcc", "smpte240m": "smpte240m",
    "bt2020nc": "bt2020",
}  # fmt: skip
_HDR = ("smpte2084", "arib-std-b67")
_ACCURATE = "flags=bicubic+accurate_rnd+full_chroma_int+full_chroma_inp"


class VideoSource(FrameSource):
    """One video file. It is decoded once when it is opened, to count and check it, and a second time while it is read.

    Args:
        path: the file.
        rules: what the VAE takes.
        frames: numbers of the frames that are wanted, from 1; None: all.

    Raises:
        InputError: not a video that is read, cut short, or it does not fit the rules.
    """

    def __init__(self, path: Path, rules: PictureRules, frames: FrameRange | None = None) -> None:
        facts = probe(path, rules.max_pixels)
        name = quoted(path)
        size = plan_size(name, facts.height, facts.width, rules)
        filters, colour_notes = colour_filters(facts)
        count, fps, rate, time_notes = _timing(facts, rules, frames)
        plan, fps, range_notes = _chosen(name, count, fps, rules, frames)
        super().__init__(name, size, plan, rules, fps)
        self._notes.update(dict.fromkeys((*facts.notes, *colour_notes, *time_notes, *range_notes)))
        self._wanted = iter(frames if frames is not None else range(1, count + 1))
        self._at = 0
        self._count = count
        self._channels = 4 if facts.alpha else 3
        self._dtype = np.dtype("<u2" if facts.depth > 8 else "u1")
        self._shape = (facts.height, facts.width, self._channels)
        pix_fmt = {(3, 1): "rgb24", (4, 1): "rgba", (3, 2): "rgb48le", (4, 2): "rgba64le"}
        graph = ",".join((*timing_filters(rate), *filters, f"format={pix_fmt[self._channels, self._dtype.itemsize]}"))
        arguments = (
            *facts.options, *input_arguments(path, rules.max_pixels), "-map", "0:V:0", "-vf", graph,
            *TIMING_OPTIONS, "-c:v", "rawvideo", "-f", "rawvideo",
        )  # fmt: skip
        self._decoder = DecoderProcess(arguments, name, int(np.prod(self._shape)) * self._dtype.itemsize)

    @property
    def pid(self) -> int:
        """The process of ffmpeg."""
        return self._decoder.pid

    def _next(self) -> Pixels:
        wanted = next(self._wanted)
        while True:
            self._at += 1
            data = self._decoder.frame(self._at, self._count)
            if self._at == wanted:
                break
        pixels = np.frombuffer(data, self._dtype).reshape(self._shape)
        settled, note = settle_channels(pixels, self.rules, f"{self.name} at frame {wanted}")
        if note:
            self._notes[note] = None
        return settled

    def close(self) -> None:
        super().close()
        self._decoder.dispose()


def colour_filters(facts: VideoFacts) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """ffmpeg's filters from the file's colours to full-range RGB in BT.709 primaries, and what was decided.

    Raises:
        InputError: high dynamic range, which needs a choice of tone mapping, or a matrix that is not known.
    """
    name = quoted(facts.path)
    if facts.transfer in _HDR:
        raise InputError(
            f"{name} has high dynamic range ({facts.transfer}); standard range is read: tone-map it to BT.709 first"
        )
    if facts.rgb:
        return (), ()
    matrix, notes = facts.matrix, []
    if matrix == "unknown":
        hd = max(facts.height, facts.width) >= 1280 or min(facts.height, facts.width) > 576
        matrix, taken = ("bt709", "BT.709") if hd else ("smpte170m", "BT.601")
        notes.append(f"no colour matrix is tagged; {taken} was taken for {facts.width}x{facts.height}, as players do")
    if matrix not in _MATRICES:
        raise InputError(
            f"{name} has the colour matrix {matrix}; BT.601, BT.709, BT.2020, FCC, SMPTE 240M and RGB are read"
        )
    wide, deep = facts.primaries == "bt2020", facts.depth > 8
    span = "pc" if facts.full_range else "tv"
    if not wide and not deep:
        return (f"scale=in_color_matrix={_MATRICES[matrix]}:in_range={span}:out_range=pc:{_ACCURATE}",), tuple(notes)
    # Not scale: from more than 8 bits it makes white 255/256 of full, and it keeps the primaries.
    convert = f"zscale=matrixin={matrix}:rangein={span}:matrix=gbr:range=pc:filter=bicubic"
    if wide:
        convert += ":primariesin=bt2020:primaries=bt709:transferin=bt709:transfer=bt709"
        notes.append("BT.2020 colours were converted to BT.709 primaries")
    return (convert, f"format=gbr{'a' if facts.alpha else ''}p{'16le' if deep else ''}"), tuple(notes)


def _timing(
    facts: VideoFacts, rules: PictureRules, frames: FrameRange | None
) -> tuple[int, Fraction | None, Fraction | None, tuple[str, ...]]:
    """Frame count, frame rate, the rate to resample to (None: as stored) and notes."""
    if frames is not None and next(iter(frames)) < 1:
        raise InputError(f"{quoted(facts.path)} was asked for frames {frames}; frames of a video count from 1")
    look_at_alpha = facts.alpha and rules.alpha == "refuse" and rules.channels == 3
    limit = frames.last if frames is not None else None
    times = scan(facts, limit, look_at_alpha)
    if times.transparent is not None:
        raise transparency_error(quoted(facts.path), f" at frame {times.transparent}")
    stored = len(times.ticks)
    fps = constant_rate(times, facts.nominal, own_clock=facts.gif)
    if fps is not None or stored == 1:
        return stored, fps, None, ()
    rate = resampled_rate(times, facts.nominal)
    count = len(scan(facts, limit, False, rate).ticks)
    return count, rate, rate, (f"the times between frames vary; read at a constant {rate} frames a second",)


def _chosen(
    name: str, count: int, fps: Fraction | None, rules: PictureRules, frames: FrameRange | None
) -> tuple[FramePlan, Fraction | None, tuple[str, ...]]:
    """The frames that are read, their rate, and notes."""
    if frames is None:
        return plan_frames(name, count, rules), fps, ()
    if frames.last > count:
        raise InputError(f"{name} was asked for frames {frames}; it has frames 1 to {count}")
    plan = plan_frames(name, len(frames), rules)
    step = frames.step
    if step is None:
        return plan, fps, (f"frames {frames} are not evenly apart; the frame rate was kept",)
    if step == 1 or fps is None:
        return plan, fps, ()
    return plan, fps / step, (f"one frame of every {step} was read: the rate is {fps / step} instead of {fps}",)
