"""From what was typed to the list of files and the names of their outputs."""

from __future__ import annotations

import glob
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vaepar.errors import InputError, UsageError
from vaepar.jobs.farming import Shard
from vaepar.launch import World
from vaepar.media.find import natural_key
from vaepar.text import shown

SUFFIXES = (".safetensors", ".latent")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One input file and where its output goes.

    Args:
        path: the file, as it was named.
        out_base: path of the output without its suffix; None when there is a ``problem``.
        problem: one line that says why the file cannot be worked on.
        exit_code: of that problem: 4 for an input that is not there, 2 for names that clash.
    """

    path: Path
    out_base: Path | None = None
    problem: str | None = None
    exit_code: int = InputError.exit_code


def find_sources(inputs: Sequence[str], out: Path, name: str = "{stem}", recursive: bool = False) -> tuple[Source, ...]:
    """The files that ``inputs`` name, each once, in the order given (folders and patterns in the order of names).

    What cannot be worked on (nothing there, an empty folder, two files that would get one output) becomes a source
    with a problem, so that the other files go on.

    Args:
        inputs: files, folders, patterns with ``*``, ``?`` or ``[``.
        out: folder of the outputs.
        name: template of an output's name, see :class:`DecodeRequest`.
        recursive: take files in sub-folders too; the tree below a folder is kept below ``out``.
    """
    found: dict[Path, Source] = {}
    for text in inputs:
        try:
            for path, folder in _expand(text, recursive):
                if path in found:
                    continue
                if folder is _NOTHING:
                    found[path] = Source(path=path, problem=_missing(text))
                else:
                    base = _base(path, folder, out, name, len(found))
                    if not base.name or base == out:
                        found[path] = Source(path=path, problem=f"{shown(path)}: --name gives it no name")
                        continue
                    found[path] = Source(path=path, out_base=base)
        except (OSError, ValueError) as error:  # a name too long, no right to look; ValueError: a null byte
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            found[Path(text)] = Source(path=Path(text), problem=f"{shown(text)}: cannot be looked at: {reason}")
    return tuple(apart(found.values()))


def may_replace(path: Path, overwrite: bool) -> bool:
    """Whether an output that is there is to be made again: as asked, but never what this very run has made.

    Ranks that are started again after one was killed plan anew; what they had finished is newer than their launcher.
    """
    world = World.from_environment()
    begun = world.begun
    if not overwrite or begun is None or not world.restarts:
        return overwrite
    try:
        return path.stat().st_mtime < begun
    except OSError:
        return True


def shard_of(sources: Sequence[Source], shard: Shard | None) -> list[Source]:
    """The parts i to j of n: the sources whose place in the sorted list of paths leaves such a rest. All for None.

    Cut after all outputs are named, so that parts agree on names and clashes; their order of inputs does not matter.
    """
    if shard is None:
        return list(sources)
    first, last, count = shard
    ranked = sorted(sources, key=lambda source: os.fsencode(source.path))
    mine = {id(source) for place, source in enumerate(ranked) if first <= place % count <= last}
    return [source for source in sources if id(source) in mine]


_NOTHING = Path()


def _expand(text: str, recursive: bool) -> Iterable[tuple[Path, Path | None]]:
    """Paths of one input with the folder below which the tree is kept, if any; ``_NOTHING`` marks a failure."""
    path = Path(text)
    if path.is_dir():
        pattern = "**/*" if recursive else "*"
        files = sorted((p for p in path.glob(pattern) if _is_latent(p, path)), key=lambda p: natural_key(str(p)))
        return [(p, path if recursive else None) for p in files] or [(path, _NOTHING)]
    if path.exists() or not glob.has_magic(text):
        return [(path, None if path.exists() else _NOTHING)]
    matches = [Path(p) for p in sorted(glob.glob(text, recursive=True), key=natural_key)]  # noqa: PTH207  # Path has no absolute glob
    return [(p, None) for p in matches if p.is_file()] or [(path, _NOTHING)]


def _is_latent(path: Path, top: Path) -> bool:
    """Whether a file found in a folder is one to decode; hidden files and folders (``._x`` of macOS) are not.

    A link to nothing is: that it cannot be read is told.
    """
    hidden = any(part.startswith(".") for part in path.relative_to(top).parts)
    there = path.is_file() or (path.is_symlink() and not path.exists())
    return not hidden and path.suffix.lower() in SUFFIXES and there


def _missing(text: str) -> str:
    path = Path(text)
    if path.is_dir():
        return f"{shown(text)}: the folder holds no file ending in {' or '.join(SUFFIXES)}"
    if glob.has_magic(text):
        return f"{shown(text)}: no file matches this pattern"
    return f"{shown(text)}: no such file or folder"


def _base(path: Path, folder: Path | None, out: Path, name: str, index: int) -> Path:
    try:
        parent = path.resolve().parent.name
    except (OSError, RuntimeError):  # a link that leads back to itself
        parent = path.absolute().parent.name
    below = path.parent.relative_to(folder) if folder is not None else Path()
    return out / below / name.format(stem=path.stem, parent=parent, index=f"{index:05d}")


def apart(sources: Iterable[Source]) -> Iterable[Source]:
    """Give a problem to every source that shares its output with another one: no order of inputs decides who wins."""
    by_base: dict[Path, list[Source]] = defaultdict(list)
    sources = list(sources)
    for source in sources:
        if source.out_base is not None:
            by_base[source.out_base].append(source)
    for source in sources:
        rivals = [s for s in by_base.get(source.out_base or _NOTHING, []) if s is not source]
        if source.out_base is None or not rivals:
            yield source
            continue
        yield Source(
            path=source.path,
            exit_code=UsageError.exit_code,
            problem=f"{shown(source.path)}: would get the same output {shown(source.out_base)} as "
            f"{shown(rivals[0].path)}; give another --name, such as '{{parent}}_{{stem}}'",
        )
