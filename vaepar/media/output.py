"""From a path and a format to a sink, and whether an output is there already."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vaepar.atomic import output_error
from vaepar.errors import OutputError, UsageError
from vaepar.media.formats import OutputFormat
from vaepar.media.png import PngSequenceSink, PngSink, is_complete_file, is_complete_sequence, refuse_existing
from vaepar.media.sink import FrameSink, Target
from vaepar.media.video import VideoSink
from vaepar.text import quoted


def open_sink(
    path: Path,
    fmt: OutputFormat,
    *,
    height: int,
    width: int,
    frames: int | None,
    metadata: Mapping[str, str],
    overwrite: bool,
) -> FrameSink:
    """A sink for one output; everything that can be checked before the first frame is checked here.

    That is: name and suffix, the folder takes files, nothing of that name would be lost, the size fits the pixel
    format, ffmpeg runs and encodes this very size with these settings. Frames are never resized.

    Args:
        path: the file, or for ``png-sequence`` the folder; its parent exists.
        fmt: how to write.
        height, width: of every frame, pixels.
        frames: how many frames come; fewer or more is an error then. None: as many as come, at least 1.
        metadata: written as JSON, in the PNG text chunk or the video tag ``vaepar``, or the sequence's manifest.
        overwrite: replace a whole output of that name. An incomplete one (empty file, sequence without its manifest)
            is replaced in any case.

    Raises:
        UsageError: suffix, size, frames or metadata that cannot be.
        OutputError: it cannot be written there or so.
    """
    target = Target(
        path=Path(path),
        format=fmt,
        height=height,
        width=width,
        frames=frames,
        metadata=dict(metadata),
        overwrite=overwrite,
    )
    _check_name(target)
    try:
        refuse_existing(target)
    except OSError as exc:
        raise output_error(exc, target.path, "replace") from exc
    if fmt.kind == "png":
        if frames not in (None, 1):
            raise UsageError(f"{quoted(path)} is promised {frames} frames; a png holds one, a png-sequence many")
        return PngSink(target)
    if fmt.kind == "png-sequence":
        return PngSequenceSink(target)
    return VideoSink(target)


def is_complete(path: Path, fmt: OutputFormat) -> bool:
    """Whether the output exists and is whole.

    A file: there and not empty, since names appear only by renaming. A sequence: its manifest, which is written last,
    lists frames that are all there with the sizes it says.
    """
    return is_complete_sequence(path) if fmt.kind == "png-sequence" else is_complete_file(path)


def _check_name(target: Target) -> None:
    path, suffix = target.path, target.format.suffix
    if not path.name or path.name == ".." or "\0" in str(path):
        raise UsageError(f"output {quoted(path)} has no name that a file can have")
    if path.suffix.lower() != suffix and suffix:
        raise UsageError(f"output {quoted(path)} is written as {target.format.kind}; its name ends in {suffix}")
    if not path.parent.is_dir():
        found = "is not a folder" if path.parent.exists() else "does not exist"
        raise OutputError(f"cannot write {quoted(path)}: folder {quoted(path.parent)} {found}")
    try:
        path.lstat()
    except FileNotFoundError:
        return
    except OSError as exc:  # a name that is too long would else be found out when all is decoded
        raise output_error(exc, path, "write") from exc
