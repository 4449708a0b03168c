"""PNG pictures and sequences of them, by Pillow."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vaepar.atomic import commit_file, commit_folder, create_temp_file, create_temp_folder, sync_file
from vaepar.errors import OutputError
from vaepar.media.sink import Target, TargetSink
from vaepar.text import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt

METADATA_KEY = "vaepar"
"""Name of the PNG text chunk (and of the video tag) that holds the metadata as JSON."""

MANIFEST = "manifest.json"
_MANIFEST_FORMAT = "vaepar.sequence/1"
_FRAME_NAME = re.compile(r"frame_\d{5,}\.png")


def metadata_json(metadata: Mapping[str, str]) -> str:
    """The metadata as one line of ASCII JSON, so that no control character or broken unicode enters a file."""
    return json.dumps(dict(metadata), ensure_ascii=True, separators=(",", ":"))


class PngSink(TargetSink):
    """One picture in one PNG file."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, create_temp_file(target.path))

    def _append(self, pixels: npt.NDArray[np.uint8]) -> None:
        self._check_single(self._written + pixels.shape[0])
        _save_png(self._temp, pixels[0], _level(self.target), self.target.metadata)

    def _check_single(self, count: int) -> None:
        if count > 1:
            raise OutputError(f"{quoted(self.target.path)} got {count} frames; a png holds one, a png-sequence many")

    def _commit(self) -> None:
        refuse_existing(self.target)
        commit_file(self._temp, self.target.path)


class PngSequenceSink(TargetSink):
    """A folder of ``frame_00001.png``, ... and, written last, ``manifest.json`` that lists them with their sizes."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, create_temp_folder(target.path))
        self._entries: list[dict[str, Any]] = []

    def _append(self, pixels: npt.NDArray[np.uint8]) -> None:
        for frame in pixels:
            if self._cancelled.is_set():
                raise OutputError(f"{quoted(self.target.path)} was aborted")
            file = self._temp / f"frame_{len(self._entries) + 1:05d}.png"
            _save_png(file, frame, _level(self.target), {})
            self._entries.append({"name": file.name, "bytes": file.stat().st_size})

    def _commit(self) -> None:
        target = self.target
        manifest = {
            "format": _MANIFEST_FORMAT,
            "height": target.height,
            "width": target.width,
            "fps": None if target.format.fps is None else str(target.format.fps),
            "metadata": dict(target.metadata),
            "frames": self._entries,
        }
        file = self._temp / MANIFEST
        with file.open("x", encoding="ascii") as out:
            json.dump(manifest, out, ensure_ascii=True, indent=1)
            out.write("\n")
        sync_file(file)
        refuse_existing(target)
        commit_folder(self._temp, target.path)


def is_complete_sequence(folder: Path) -> bool:
    """Whether ``folder`` has a manifest and every frame that it lists, of the size that it lists."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        frames = manifest["frames"]
        if manifest["format"] != _MANIFEST_FORMAT or not frames:
            return False
        return all(
            _FRAME_NAME.fullmatch(frame["name"]) and (folder / frame["name"]).lstat().st_size == frame["bytes"]
            for frame in frames
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def refuse_existing(target: Target) -> None:
    """Raise OutputError if the output's name is taken by what may not be replaced.

    Never replaced: a whole output without ``overwrite``; a folder where a file is due and the other way round; a
    folder that holds anything but our frames, since replacing it would delete what somebody else put there.
    """
    path = target.path
    if not os.path.lexists(path):
        return
    if target.format.kind != "png-sequence":
        if path.is_dir():
            raise OutputError(f"{quoted(path)} is a folder; a {target.format.kind} is written as a file")
        if not target.overwrite and is_complete_file(path):
            raise OutputError(f"{quoted(path)} exists; it is replaced only if overwriting is asked for")
        return
    if path.is_symlink() or not path.is_dir():
        raise OutputError(f"{quoted(path)} is not a plain folder; a png-sequence is written as a folder")
    foreign = [entry.name for entry in path.iterdir() if entry.name != MANIFEST and not _is_frame(entry)]
    if foreign:
        raise OutputError(
            f"{quoted(path)} holds {quoted(foreign[0])}, not a frame of ours; such a folder is not replaced"
        )
    if not target.overwrite and is_complete_sequence(path):
        raise OutputError(f"{quoted(path)} exists; it is replaced only if overwriting is asked for")


def is_complete_file(path: Path) -> bool:
    """Whether ``path`` is a file with content: names appear only by renaming, so such a file is whole."""
    try:
        return path.is_file() and path.stat().st_size > 0
    except OSError:
        return False


def _is_frame(entry: Path) -> bool:
    return _FRAME_NAME.fullmatch(entry.name) is not None and entry.is_file()


def _level(target: Target) -> int:
    return 1 if target.format.png_level is None else target.format.png_level


def _save_png(file: Path, pixels_hwc: npt.NDArray[np.uint8], level: int, metadata: Mapping[str, str]) -> None:
    from PIL import Image, PngImagePlugin

    info = PngImagePlugin.PngInfo()
    if metadata:
        info.add_text(METADATA_KEY, metadata_json(metadata))
    with file.open("wb") as out:
        Image.fromarray(pixels_hwc).save(out, format="PNG", compress_level=level, pnginfo=info)
        out.flush()
        os.fsync(out.fileno())
