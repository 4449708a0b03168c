"""From what was typed to pictures, sequences and videos, in the order that people expect.

What cannot be worked on becomes an item with a problem, so that the other items go on.
"""

from __future__ import annotations

import glob
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from vaepar.media.frame_range import FrameRange
from vaepar.text import quoted

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff")
VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".gif")

_PATTERN = re.compile(r"%(?:0(?P<digits>\d+))?d|(?P<hashes>#+)", re.ASCII)
_NUMBERED = re.compile(r"(?P<prefix>.*?)(?P<number>\d+)(?P<suffix>\.[^.]+)", re.ASCII | re.DOTALL)
_MOST_NAMED = 6

# What comes before the numbers and says nothing about the shot: every sequence would get the same output name.
_ANYBODYS = ("", "frame", "frames")


@dataclass(frozen=True, kw_only=True)
class MediaItem:
    """One picture, sequence or video.

    Args:
        kind: what it is.
        path: the file; for a sequence the folder or the pattern, as it was named.
        stem: a name for outputs, without a suffix.
        below: the folder, relative to the named one, in which a recursive search found it.
        files: of a sequence, the pictures in the order of their numbers.
        frames: of a video, the frames that are wanted (from 1); None: all.
        problem: one line that says why it cannot be worked on.
    """

    kind: Literal["still", "sequence", "video"]
    path: Path
    stem: str
    below: Path = Path()
    files: tuple[Path, ...] = ()
    frames: FrameRange | None = None
    problem: str | None = None


def find_media(
    inputs: Sequence[str | os.PathLike[str]],
    *,
    recursive: bool = False,
    frames: FrameRange | None = None,
    sequences: bool = True,
) -> tuple[MediaItem, ...]:
    """The items that ``inputs`` name, each once, in the order given; folders and patterns in natural order (2 < 10).

    A name that exists is that file, whatever characters it has. Else ``shot.%04d.png`` and ``shot.####.png`` (at least
    so many digits; ``%d``: without zeros before it; a single ``#``: any digits) are a sequence, and ``*``, ``?``, ``[``
    a pattern of single files. A sequence without ``frames`` has no gap. Hidden files are passed over in folders.

    Args:
        inputs: files, folders, patterns.
        recursive: look into sub-folders too.
        frames: the wanted numbers of sequences, and frames of videos (from 1). A single picture has none: a problem.
        sequences: a folder whose pictures are all numbered in one way (and more than one) is one sequence; False: every
            picture in a folder is a still of its own, as a VAE for pictures takes them.
    """
    found: dict[Path, MediaItem] = {}
    for named in inputs:
        for item in _expand(os.fspath(named), recursive, frames, sequences):
            found.setdefault(item.path, item)
    return tuple(found.values())


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts numbers inside names by their value: ``a2`` before ``a10``."""
    pieces = re.split(r"(\d+)", text, flags=re.ASCII)
    return tuple((1, int(p), p) if i % 2 else (0, 0, p) for i, p in enumerate(pieces))


def _expand(text: str, recursive: bool, frames: FrameRange | None, sequences: bool) -> Iterable[MediaItem]:
    path = Path(text)
    try:
        if path.is_dir():
            return list(_folder(path, recursive, frames, sequences)) or [_problem(path, _no_media(path))]
        if path.exists():
            return [_file(path, frames)]
        if _PATTERN.search(path.name):
            return [_pattern(path, frames)]
        if not glob.has_magic(text):
            return [_problem(path, f"{quoted(text)}: no such file or folder")]
        matches = [Path(match) for match in sorted(glob.glob(text, recursive=True), key=natural_key)]  # noqa: PTH207
        items = [_file(match, frames) for match in matches if _is_media(match)]
        for match in matches:
            items.extend(_folder(match, recursive, frames, sequences) if match.is_dir() else ())
        return items or [_problem(path, f"{quoted(text)}: no {_MEDIA} matches this pattern")]
    except (OSError, ValueError) as exc:  # ValueError: a null byte in the name
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        return [_problem(path, f"{quoted(text)}: cannot be looked at: {reason}")]


def _folder(top: Path, recursive: bool, frames: FrameRange | None, sequences: bool) -> Iterator[MediaItem]:
    folders = [top]
    while folders:
        folder = folders.pop(0)
        entries = sorted((e for e in folder.iterdir() if not e.name.startswith(".")), key=lambda e: natural_key(e.name))
        below = folder.relative_to(top)
        yield from (replace(i, below=below) for i in _in_folder(folder, entries, frames, sequences))
        if recursive:  # not through links, which may lead back up
            folders[:0] = [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]


def _in_folder(folder: Path, entries: list[Path], frames: FrameRange | None, sequences: bool) -> Iterator[MediaItem]:
    media = [entry for entry in entries if _is_media(entry)]
    pictures = [entry for entry in media if entry.suffix.lower() in PICTURE_SUFFIXES]
    groups: dict[tuple[str, str] | None, list[tuple[int, Path]]] = defaultdict(list)
    for picture in pictures:
        match = _NUMBERED.fullmatch(picture.name)
        key = (match["prefix"], match["suffix"]) if match else None
        groups[key].append((int(match["number"]) if match else 0, picture))
    if sequences and len(pictures) > 1 and len(groups) == 1 and None not in groups:
        numbered = next(iter(groups.values()))
        yield _sequence(folder, folder.resolve().name or "sequence", numbered, frames)
        media = [entry for entry in media if entry.suffix.lower() in VIDEO_SUFFIXES]
    for entry in media:
        yield _file(entry, frames)


def _file(path: Path, frames: FrameRange | None) -> MediaItem:
    suffix = path.suffix.lower()
    if suffix in VIDEO_SUFFIXES:
        return MediaItem(kind="video", path=path, stem=path.stem, frames=frames)
    if suffix not in PICTURE_SUFFIXES:
        return _problem(path, f"{quoted(path)}: {quoted(path.suffix)} is no {_MEDIA}")
    if frames is not None:
        return _problem(path, f"{quoted(path)}: frames {frames} are asked for, and a single picture has none")
    return MediaItem(kind="still", path=path, stem=path.stem)


def _pattern(path: Path, frames: FrameRange | None) -> MediaItem:
    match = _PATTERN.search(path.name)
    if match is None or _PATTERN.search(path.name, match.end()):
        return _problem(path, f"{quoted(path)}: a sequence has one place for its number, like %04d or ####")
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        return _problem(path, f"{quoted(path)}: {quoted(path.suffix)} is no picture; {', '.join(PICTURE_SUFFIXES)} are")
    if not path.parent.is_dir():
        return _problem(path, f"{quoted(path)}: folder {quoted(path.parent)} does not exist")
    digits = int(match["digits"] or 1) if match["hashes"] is None else len(match["hashes"])
    head, tail = path.name[: match.start()], path.name[match.end() :]
    number = re.compile(re.escape(head) + rf"(\d{{{digits},}})" + re.escape(tail), re.ASCII | re.DOTALL)
    numbered = []
    for entry in path.parent.iterdir():
        found = number.fullmatch(entry.name)
        # A number that fills more than its digits has no zeros before it: 00010 is not %04d.
        if found and (match["hashes"] == "#" or len(found[1]) == digits or found[1][0] != "0"):
            numbered.append((int(found[1]), entry))
    stem = head.rstrip("._- ")
    if stem.lower() in _ANYBODYS:
        stem = path.parent.resolve().name or stem or "sequence"
    return _sequence(path, stem, numbered, frames)


def _sequence(path: Path, stem: str, numbered: list[tuple[int, Path]], frames: FrameRange | None) -> MediaItem:
    by_number: dict[int, Path] = {}
    for number, file in sorted(numbered, key=lambda pair: (pair[0], pair[1].name)):
        if number in by_number:
            names = f"{quoted(by_number[number].name)} and {quoted(file.name)}"
            return _problem(path, f"{quoted(path)}: frame {number} is there twice, as {names}")
        by_number[number] = file
    if not by_number:
        return _problem(path, f"{quoted(path)}: no picture has such a name")
    low, high = min(by_number), max(by_number)
    missing = []
    for wanted in frames if frames is not None else range(low, high + 1):
        if wanted not in by_number:
            missing.append(wanted)
            if len(missing) > _MOST_NAMED:
                break
    if missing:
        more = " and more" if len(missing) > _MOST_NAMED else ""
        listed = ", ".join(map(str, missing[:_MOST_NAMED])) + more
        there = f"{len(by_number)} frames from {low} to {high} are there"
        return _problem(path, f"{quoted(path)}: frame {listed} of the sequence is missing; {there}")
    files = tuple(by_number[n] for n in frames) if frames is not None else tuple(by_number.values())
    return MediaItem(kind="sequence", path=path, stem=stem, files=files)


_MEDIA = f"picture ({', '.join(PICTURE_SUFFIXES)}) or video ({', '.join(VIDEO_SUFFIXES)})"


def _no_media(path: Path) -> str:
    return f"{quoted(path)}: the folder holds no {_MEDIA}"


def _problem(path: Path, text: str) -> MediaItem:
    return MediaItem(kind="still", path=path, stem=path.stem, problem=text)


def _is_media(path: Path) -> bool:
    """Whether a file is one to encode. A link to nothing is: that it cannot be read is told."""
    there = path.is_file() or (path.is_symlink() and not path.exists())
    return path.suffix.lower() in PICTURE_SUFFIXES + VIDEO_SUFFIXES and there
