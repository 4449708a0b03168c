"""Speaking to people: errors and tables on standard error; standard output is for data."""

from __future__ import annotations

import logging
import shutil
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vaepar.jobs.report import Row, RunReport
from vaepar.text import shown

_PLAIN_WIDTH = 200  # lines of a log are not cut to a terminal's width
_LONGEST = 4000  # characters of one line


def console(*, data: bool = False) -> Console:
    """A console on standard error (standard output for ``data``), wide where it is no terminal.

    File names are never read as markup.
    """
    terminal = (sys.stdout if data else sys.stderr).isatty()
    width = None if terminal else max(_PLAIN_WIDTH, shutil.get_terminal_size().columns)
    return Console(stderr=not data, markup=False, highlight=False, emoji=False, width=width)


def safe(text: str) -> Text:
    """Text for a terminal: control characters of names and metadata are written out, not obeyed."""
    return Text(shown(text, _LONGEST))


def complain(message: str) -> None:
    """One line on standard error."""
    console().print(safe(f"vaepar: {message}"), soft_wrap=True)


class _LogLine(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        complain(f"{record.levelname.lower()}: {record.getMessage()}")


def set_up_logging(*, verbose: bool, quiet: bool, speaks: bool) -> None:
    """Send the package's own log lines to standard error; ranks that do not speak keep to errors."""
    logger = logging.getLogger("vaepar")
    logger.handlers = [_LogLine()]
    logger.propagate = False
    level = logging.ERROR if quiet or not speaks else logging.INFO if verbose else logging.WARNING
    logger.setLevel(level)


def human_bytes(count: float) -> str:
    """``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def outcome(row: Row) -> str:
    """One line for one file."""
    if row.status == "failed":
        return f"failed: {row.error}"
    others = len(row.outputs) - 1
    where = f"{row.outputs[0]} and {others} more" if others > 0 else "".join(row.outputs) or "no outputs"
    if row.status == "skipped":
        there = (
            "are there already (--overwrite replaces them)"
            if others > 0
            else "is there already (--overwrite replaces it)"
        )
        return f"skipped: {row.path}: {where} {there}"
    if row.status in ("dropped", "not tried"):
        return f"{row.status}: {row.path}"
    each = f"{row.items} x " if row.items > 1 else ""
    frames = f"{each}{row.frames} frame{'' if row.frames == 1 else 's'} of {row.width}x{row.height}"
    return f"ok: {row.path} -> {where} ({frames}, {row.mode}, {row.seconds:.2f} s)"


def closing_table(report: RunReport) -> None:
    """What happened to each file, and the totals."""
    table = Table(title=None, box=None, pad_edge=False)
    for name in ("file", "status", "size", "frames", "mode", "seconds", "peak memory per rank"):
        table.add_column(name, justify="right" if name in ("frames", "seconds") else "left", overflow="fold")
    for row in report.rows:
        worked = row.status == "ok"
        size = "" if row.width is None else f"{row.width}x{row.height}"
        peaks = ", ".join(human_bytes(peak) for peak in row.peak_bytes)
        texts = (row.path, row.status, size, str(row.frames or ""), (row.mode or "") if worked else "")
        seconds = f"{row.seconds:.2f}" if row.seconds is not None else ""
        table.add_row(*(safe(text) for text in (*texts, seconds, peaks if worked else "")))
    out = console()
    out.print(table)
    if len(report.groups) > 1:
        for group in report.groups:
            ranks = (
                f"rank {group.ranks[0]}" if len(group.ranks) == 1 else f"ranks {group.ranks[0]} to {group.ranks[-1]}"
            )
            out.print(Text(f"{ranks}: {group.files} file(s), busy for {group.busy_seconds:.1f} s"), soft_wrap=True)
    counts = ", ".join(f"{count} {status}" for status, count in sorted(report.counts.items()))
    out.print(
        Text(
            f"{counts or 'nothing to do'}; {report.ranks} rank(s), {report.device}, {report.dtype or 'no model loaded'}"
        ),
        Text(f"in {report.seconds:.1f} s"),
        soft_wrap=True,
    )


def print_plan(report: RunReport) -> None:
    """What a run would do, on standard output."""
    table = Table(title=None, box=None, pad_edge=False)
    for name in ("file", "status", "layout", "state", "size", "frames", "mode", "memory per rank", "output"):
        table.add_column(name, overflow="fold")
    for row in report.rows:
        plan = row.plan or {}
        size = "" if row.width is None else f"{row.width}x{row.height}"
        memory = plan.get("estimated_bytes_per_rank")
        outputs = plan.get("outputs", row.outputs)
        texts = [row.path, row.status, plan.get("layout", ""), plan.get("state", ""), size, str(row.frames or "")]
        texts += [plan.get("mode", ""), "" if memory is None else f"about {human_bytes(memory)}"]
        table.add_row(*(safe(text) for text in (*texts, row.error or ", ".join(outputs))))
    out = console(data=True)
    out.print(table)
    ranks = [group.ranks for group in report.groups]
    out.print(Text(f"{report.ranks} rank(s) in {len(ranks)} group(s): {ranks}; {report.dtype}; nothing was done"))
