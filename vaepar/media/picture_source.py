"""Pictures as frames: one, or a sequence of files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from vaepar.errors import InputError, UsageError
from vaepar.media.fitting import Pixels, plan_frames, plan_size, settle_channels
from vaepar.media.formats import parse_fps
from vaepar.media.picture import picture_size, read_picture
from vaepar.media.png import MANIFEST
from vaepar.media.source import FrameSource, PictureRules
from vaepar.text import quoted


class PictureSource(FrameSource):
    """Picture files of one size as frames, in the order given.

    The first picture is read and the headers of all others are checked when it is opened, so that most of what can be
    wrong shows before the first frame is worked on. Memory: one picture and what :meth:`read` returns.

    Args:
        name: what messages call the whole, quoted.
        files: one or more.
        rules: what the VAE takes.

    Raises:
        InputError: a file cannot be read, has another size than the first, or does not fit the rules.
    """

    def __init__(self, name: str, files: Sequence[Path], rules: PictureRules) -> None:
        self._files = tuple(files)
        self._at = 0
        picture_notes: dict[str, None] = {}
        self._first: Pixels | None = _settled(self._files[0], rules, picture_notes)
        height, width = self._first.shape[:2]
        size = plan_size(name, height, width, rules)
        for file in self._files[1:]:
            _check_size(file, picture_size(file, rules), (height, width), self._files[0])
        plan = plan_frames(name, len(self._files), rules)
        super().__init__(name, size, plan, rules, manifest_fps(self._files))
        self._notes.update(picture_notes)

    def _next(self) -> Pixels:
        file, self._at = self._files[self._at], self._at + 1
        pixels, self._first = self._first, None
        if pixels is None:
            pixels = _settled(file, self.rules, self._notes)
        h, w = pixels.shape[:2]
        _check_size(file, (h, w), self.original_size, self._files[0])
        return pixels

    def close(self) -> None:
        super().close()
        self._first = None


def manifest_fps(files: Sequence[Path]) -> Fraction | None:
    """The frame rate of a sequence that this library wrote, by its manifest; None for other files."""
    if len(files) < 2:
        return None
    try:
        manifest = json.loads((files[0].parent / MANIFEST).read_bytes())
        return parse_fps(manifest["fps"])
    except (OSError, ValueError, KeyError, TypeError, UsageError, RecursionError):
        return None


def _settled(file: Path, rules: PictureRules, notes: dict[str, None]) -> Pixels:
    picture = read_picture(file, rules)
    pixels, note = settle_channels(picture.pixels, rules, quoted(file))
    notes.update(dict.fromkeys((*picture.notes, *([note] if note else []))))
    return pixels


def _check_size(file: Path, found: tuple[int, int], wanted: tuple[int, int], first: Path) -> None:
    if found != wanted:
        raise InputError(
            f"{quoted(file)} is {found[1]}x{found[0]}; the sequence began with {wanted[1]}x{wanted[0]} "
            f"({quoted(first.name)}), and all its pictures must have one size"
        )
