"""Videos as frames: streamed from ffmpeg, colours by the file's own tags, at a constant rate, exactly counted."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np

from vaepar.errors import InputError
from vaepar.media.atomic import shown
from vaepar.media.decoder import DecoderProcess, input_arguments
from vaepar.media.fitting import FramePlan, Pixels, plan_frames, plan_size, settle_channels, transparency_error
from vaepar.media.frame_range import FrameRange
from vaepar.media.frame_rate import constant_rate, resampled_rate
from vaepar.media.source import FrameSource, PictureRules
from vaepar.media.video_probe import VideoFacts, probe, scan, timing_arguments

# ffmpeg's words for a matrix in a file -> its scale filter's words.
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
        name = shown(path)
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
        graph = ",".join((*filters, f"format={pix_fmt[self._channels, self._dtype.itemsize]}"))
        arguments = (
            *facts.options, *input_arguments(path, rules.max_pixels), "-map", "0:V:0", "-vf", graph,
            *timing_arguments(rate), "-c:v", "rawvideo", "-f", "rawvideo",
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
    name = shown(facts.path)
    if facts.transfer in _HDR:
        raise InputError(
            f"{name} has high dynamic range ({facts.transfer}); standard range is read: tone-map it to BT.709 first"
        )
    if facts.rgb:
        return (), ()
    notes = []
    matrix = _MATRICES.get(facts.matrix)
    if facts.matrix == "unknown":
        matrix = (
            "bt709" if max(facts.height, facts.width) >= 1280 or min(facts.height, facts.width) > 576 else "smpte170m"
        )
        taken = "BT.709" if matrix == "bt709" else "BT.601"
        notes.append(f"no colour matrix is tagged; {taken} was taken for {facts.width}x{facts.height}, as players do")
    if matrix is None:
        raise InputError(
            f"{name} has the colour matrix {facts.matrix}; BT.601, BT.709, BT.2020, FCC, SMPTE 240M and RGB are read"
        )
    scale = f"scale=in_color_matrix={matrix}:in_range={'pc' if facts.full_range else 'tv'}:out_range=pc:{_ACCURATE}"
    if facts.primaries != "bt2020":
        return (scale,), tuple(notes)
    notes.append("BT.2020 colours were converted to BT.709 primaries")
    wide = "gbrap16le" if facts.alpha else "gbrp16le"
    tags = "setparams=colorspace=gbr:color_primaries=bt2020:color_trc=bt709:range=pc"
    return (scale, f"format={wide}", tags, "zscale=primaries=709:transfer=709:matrix=gbr:range=full"), tuple(notes)


def _timing(
    facts: VideoFacts, rules: PictureRules, frames: FrameRange | None
) -> tuple[int, Fraction | None, Fraction | None, tuple[str, ...]]:
    """Frame count, frame rate, the rate to resample to (None: as stored) and notes."""
    look_at_alpha = facts.alpha and rules.alpha == "refuse" and rules.channels == 3
    limit = frames.last if frames is not None else None
    times = scan(facts, limit, look_at_alpha)
    if times.transparent is not None:
        raise transparency_error(shown(facts.path), f" at frame {times.transparent}")
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
    if frames.last > count or next(iter(frames)) < 1:
        raise InputError(f"{name} was asked for frames {frames}; it has frames 1 to {count}")
    plan = plan_frames(name, len(frames), rules)
    step = frames.step
    if step is None:
        return plan, fps, (f"frames {frames} are not evenly apart; the frame rate was kept",)
    if step == 1 or fps is None:
        return plan, fps, ()
    return plan, fps / step, (f"every {step}th frame was read: the rate is {fps / step} instead of {fps}",)
