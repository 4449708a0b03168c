"""What happened to each file, for people and for machines."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from vaepar import __version__
from vaepar.atomic import create_temp_file, discard, write_whole
from vaepar.errors import InterruptedRunError, OutputError, UsageError
from vaepar.text import shown

Status = Literal["ok", "skipped", "failed", "dropped", "not tried", "due"]


@dataclass(kw_only=True)
class Row:
    """The outcome of one file.

    Args:
        path: the input.
        status: ``ok``, ``skipped`` (its outputs were there), ``failed``, ``dropped`` (the run ended meanwhile) or
            ``not tried`` (the run ended before); in a dry run ``due`` (it would be worked on).
        outputs: files (or sequence folders) that are there now.
        error, exit_code: of a failed file, and of one that a lost rank left unfinished.
        mode, mode_reason: the parallel mode that was really used, and why.
        width, height, frames, fps: of the outputs.
        seconds: wall time from reading to the last write.
        peak_bytes: highest memory use of each rank while it was worked on (resident on CPUs, allocated on GPUs).
        notes: what was decided about the file.
        items: pictures or films in the file.
        group: the VAE group that worked on it.
        plan: of a dry run: layout, state, outputs, mode and estimated memory; None after a real one.
    """

    path: str
    status: Status = "not tried"
    outputs: list[str] = field(default_factory=list)
    error: str | None = None
    exit_code: int = 0
    mode: str | None = None
    mode_reason: str | None = None
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    fps: float | None = None
    seconds: float | None = None
    peak_bytes: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    items: int = 1
    group: int = 0
    plan: dict[str, Any] | None = None

    @property
    def cost(self) -> int:
        """How much work the file is, in pixels; 0 while its size is not known."""
        return (self.width or 0) * (self.height or 0) * (self.frames or 1) * self.items


@dataclass(kw_only=True)
class GroupRow:
    """What one VAE group did.

    Args:
        ranks: of the world.
        files: that it worked on.
        busy_seconds: wall time that it spent on them, without waiting for other groups and without loading.
    """

    ranks: list[int]
    files: int = 0
    busy_seconds: float = 0.0


class Observer(Protocol):
    """Who is told about the progress of a run. Only rank 0 has one that speaks."""

    def planned(self, files: int, ranks: int) -> None: ...
    def note(self, text: str) -> None: ...
    def started(self, path: str, frames: int) -> None: ...
    def advanced(self, frames: int) -> None: ...
    def finished(self, row: Row) -> None: ...
    def stop(self) -> None: ...


class Silent:
    """The observer of the ranks that do not speak."""

    def planned(self, files: int, ranks: int) -> None:
        return None

    def note(self, text: str) -> None:
        return None

    def started(self, path: str, frames: int) -> None:
        return None

    def advanced(self, frames: int) -> None:
        return None

    def finished(self, row: Row) -> None:
        return None

    def stop(self) -> None:
        return None


@dataclass(kw_only=True)
class RunReport:
    """A whole run: its rows and what was common to them."""

    operation: str
    model: str
    model_sha256: str | None = None
    ranks: int = 1
    device: str = "cpu"
    dtype: str | None = None
    seconds: float = 0.0
    interrupted: bool = False
    ended_by: int | None = None
    rows: list[Row] = field(default_factory=list)
    groups: list[GroupRow] = field(default_factory=list)
    dry_run: bool = False

    @property
    def exit_code(self) -> int:
        """That of the error that ended the run, if one did. Else 0: all is done; 75: something was left undone; the
        common code when every file failed alike; 3."""
        if self.ended_by is not None:
            return self.ended_by
        failed = [row for row in self.rows if row.status == "failed"]
        unfinished = not self.dry_run and any(row.status in ("dropped", "not tried") for row in self.rows)
        if self.interrupted or (unfinished and not failed):
            return InterruptedRunError.exit_code
        if not failed:
            return 0
        codes = {row.exit_code for row in failed}
        worked = any(row.status in ("ok", "skipped", "due") for row in self.rows)
        return codes.pop() if len(codes) == 1 and not worked else 3

    @property
    def counts(self) -> Mapping[str, int]:
        return Counter(row.status for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "vaepar": __version__,
            "operation": self.operation,
            "model": self.model,
            "model_sha256": self.model_sha256,
            "ranks": self.ranks,
            "device": self.device,
            "dtype": self.dtype,
            "seconds": round(self.seconds, 3),
            "interrupted": self.interrupted,
            "exit_code": self.exit_code,
            "counts": dict(self.counts),
            "dry_run": self.dry_run,
            "groups": [asdict(group) for group in self.groups],
            "files": [asdict(row) for row in self.rows],
        }


_OTHERS_SUFFIXES = (".png", ".mp4", ".mkv", ".safetensors", ".latent")


def check_report(flag: str, path: Path) -> None:
    """Raise :class:`UsageError` when a report could not be written there, before hours of work end without one."""
    if path.suffix.lower() in _OTHERS_SUFFIXES:
        raise UsageError(f"{flag} {shown(path)} has the name of a picture, video or latent; a report's ends with .json")
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise UsageError(f"{flag} {shown(path)} is no regular file; it is a file that is written or replaced")
        if path.exists() and not _is_report(path):
            raise UsageError(f"{flag} {shown(path)} is there and is no report; only a report is replaced")
        path.parent.mkdir(parents=True, exist_ok=True)
        discard(create_temp_file(path))
    except OSError as error:
        raise UsageError(f"{flag} {shown(path)} cannot be written: {error.strerror or error}") from None
    except OutputError as error:
        raise UsageError(f"{flag}: {error}") from None


def _is_report(path: Path) -> bool:
    """Whether a file is empty or begins as the reports of this package do; other programs' JSON does not."""
    with path.open("rb") as file:
        begin = file.read(64)
    return not begin or re.match(rb'\s*\{\s*"vaepar"\s*:', begin) is not None


def write_report(path: Path, report: RunReport) -> None:
    """Write the report whole or not at all. Raises :class:`OutputError`."""
    write_whole(path, (json.dumps(report.to_json(), indent=2) + "\n").encode())
