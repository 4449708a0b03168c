"""The progress of a run, in the dialects of people, terminals, programs and farms."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from vaepar.errors import OutputError
from vaepar.jobs.report import Observer, Row, RunReport, Silent

from .output import complain, console, outcome, safe

DIALECTS = ("auto", "rich", "plain", "json", "openjd", "none")
_EVERY_SECONDS = 10.0  # farms take a silent process for a hung one
_EVENT_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How progress is told: one of :data:`DIALECTS`, and whether ``rows`` go to standard output as JSON."""

    name: str = "auto"
    rows: bool = False

    def settled(self) -> str:
        """The dialect that ``auto`` stands for here: that of the farm, bars on a terminal, else lines."""
        if self.name != "auto":
            return self.name
        if "OPENJD_SESSION_WORKING_DIR" in os.environ and not self.rows:
            return "openjd"
        return "rich" if sys.stderr.isatty() else "plain"


def observer(dialect: Dialect, *, quiet: bool) -> Observer:
    """The observer of the rank that speaks. ``quiet`` leaves failures, and what machines read."""
    name = dialect.settled()
    if quiet and name in ("rich", "plain", "none"):
        chosen: Observer = QuietObserver()
    else:
        chosen = {
            "rich": RichObserver,
            "plain": PlainObserver,
            "json": JsonObserver,
            "openjd": OpenJdObserver,
            "none": QuietObserver,
        }[name]()
    return RowPrinter(chosen) if dialect.rows else chosen


def print_rows(report: RunReport) -> None:
    """All rows and the summary, as ``--json`` prints them."""
    for row in report.rows:
        _data({"event": "file", **asdict(row)})
    print_summary(report)


def print_summary(report: RunReport) -> None:
    """The last line of ``--json``: what was common to all files."""
    _data({"event": "run"} | {key: value for key, value in report.to_json().items() if key != "files"})


class QuietObserver(Silent):
    """Says failures only."""

    def finished(self, row: Row) -> None:
        if row.status == "failed":
            complain(f"error: {row.error}")


class PlainObserver(Silent):
    """A line for each file, and one at least every ten seconds within a file."""

    def __init__(self) -> None:
        self._console = console()
        self._files = self._done = self._frames = self._of = 0
        self._path = ""
        self._said = time.monotonic()

    def planned(self, files: int, ranks: int) -> None:
        self._files = files
        self._say(f"{files} file{'s' if files != 1 else ''} on {ranks} rank{'s' if ranks != 1 else ''}")

    def note(self, text: str) -> None:
        self._say(text)

    def started(self, path: str, frames: int) -> None:
        self._path, self._frames, self._of = path, 0, frames

    def advanced(self, frames: int) -> None:
        self._frames += frames
        if time.monotonic() - self._said >= _EVERY_SECONDS:
            self._say(f"[{self._done + 1}/{self._files}] {self._path}: {self._frames}/{self._of} frames")

    def finished(self, row: Row) -> None:
        self._done += 1
        for note in row.notes if row.status == "ok" else ():
            self._say(f"{row.path}: {note}")
        self._say(f"[{self._done}/{self._files}] {outcome(row)}")

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        self._console.print(safe(text), soft_wrap=True)


class RichObserver(Silent):
    """Bars for files and frames; what became of each file stays above them."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[extra]}", markup=False),
            console=console(),
            transient=True,
        )
        self._file_bar: TaskID | None = None
        self._frame_bar: TaskID | None = None

    def planned(self, files: int, ranks: int) -> None:
        self._progress.start()
        self._file_bar = self._progress.add_task("files", total=files, extra=f"{ranks} rank(s)")
        self._frame_bar = self._progress.add_task("frames", total=None, extra="")

    def note(self, text: str) -> None:
        self._progress.console.print(safe(text), soft_wrap=True)

    def started(self, path: str, frames: int) -> None:
        if self._frame_bar is not None:
            self._progress.reset(self._frame_bar, total=frames, extra=safe(path).plain)

    def advanced(self, frames: int) -> None:
        if self._frame_bar is not None:
            self._progress.advance(self._frame_bar, frames)

    def finished(self, row: Row) -> None:
        if self._file_bar is not None:
            self._progress.advance(self._file_bar)
        for note in row.notes if row.status == "ok" else ():
            self.note(f"{row.path}: {note}")
        if row.status in ("ok", "failed"):
            self.note(outcome(row))

    def stop(self) -> None:
        self._progress.stop()


class JsonObserver(Silent):
    """One JSON object an event on standard error."""

    def __init__(self) -> None:
        self._said = 0.0
        self._frames = self._of = 0
        self._path = ""

    def planned(self, files: int, ranks: int) -> None:
        self._event("planned", files=files, ranks=ranks)

    def note(self, text: str) -> None:
        self._event("note", text=text)

    def started(self, path: str, frames: int) -> None:
        self._path, self._frames, self._of = path, 0, frames
        self._event("started", path=path, frames=frames)

    def advanced(self, frames: int) -> None:
        self._frames += frames
        if time.monotonic() - self._said >= _EVENT_SECONDS:
            self._event("frames", path=self._path, done=self._frames, frames=self._of)

    def finished(self, row: Row) -> None:
        self._event("file", **asdict(row))

    def _event(self, event: str, **values: Any) -> None:
        self._said = time.monotonic()
        sys.stderr.write(json.dumps({"event": event, **values}) + "\n")
        sys.stderr.flush()


class OpenJdObserver(PlainObserver):
    """Open Job Description: progress, status and failures as lines on standard output; details on standard error."""

    _furthest = 0.0

    def planned(self, files: int, ranks: int) -> None:
        super().planned(files, ranks)
        self._tell("openjd_status", f"{files} file(s) on {ranks} rank(s)")
        self._tell("openjd_progress", "0")

    def advanced(self, frames: int) -> None:
        super().advanced(frames)
        part = self._frames / self._of if self._of else 0.0
        self._progress(self._done + min(part, 1.0))

    def finished(self, row: Row) -> None:
        super().finished(row)
        self._tell("openjd_status", f"{self._done} of {self._files} file(s)")
        if row.status == "failed":
            self._tell("openjd_fail", str(row.error))
        self._progress(self._done)

    def _progress(self, files: float) -> None:
        # The next file begins while the last one is still being written; progress never goes back for that.
        self._furthest = max(self._furthest, 100 * files / max(self._files, 1))
        self._tell("openjd_progress", f"{self._furthest:.1f}")

    def _tell(self, kind: str, text: str) -> None:
        sys.stdout.write(f"{kind}: {safe(text).plain}\n")
        sys.stdout.flush()  # the runner reads a pipe, and shows progress as it comes


class RowPrinter:
    """Prints each finished file as JSON on standard output; what is told goes on to another observer."""

    def __init__(self, inner: Observer) -> None:
        self._inner = inner
        self.planned: Callable[[int, int], None] = inner.planned
        self.note: Callable[[str], None] = inner.note
        self.started: Callable[[str, int], None] = inner.started
        self.advanced: Callable[[int], None] = inner.advanced
        self.stop: Callable[[], None] = inner.stop

    def finished(self, row: Row) -> None:
        _data({"event": "file", **asdict(row)})
        self._inner.finished(row)


def _data(value: dict[str, Any]) -> None:
    try:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()
    except (OSError, OutputError) as error:
        # Whoever read has gone (`| head`) or its disk is full; the files that are decoded must not suffer from it.
        complain(f"warning: standard output takes no more ({error}); nothing more is printed there")
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # for the rest of the process
