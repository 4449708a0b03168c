"""Lists of inputs: from files and from standard input, one a line or separated by NUL."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vaepar.errors import InputError, UsageError
from vaepar.launch import World
from vaepar.text import shown

STDIN = "-"

# Standard input can be read once, by one process: who starts ranks reads it, and hands its content on in this file.
_HANDED_ON = "VAEPAR_STDIN_LIST"
_stdin_was_read = False


def expand_inputs(named: Sequence[str], lists: Sequence[str], *, null: bool = False) -> tuple[str, ...]:
    """All inputs: ``@FILE`` and ``-`` among those named become their content; then the lists.

    Entries of a list are taken as they are: no list in a list. Only the first rank plans, so on other ranks the lists
    are not read and stand for themselves.

    Args:
        named: inputs as typed.
        lists: files with inputs, or ``-``.
        null: entries end with NUL instead of a line's end.

    Raises:
        InputError: a list that cannot be read. UsageError: ``null`` without a list.
    """
    if null and not lists and not any(_is_list(text) for text in named):
        raise UsageError("--null (-0) was given without a list; it goes with --list, - or @FILE")
    found: list[str] = []
    for text in named:
        if _is_list(text):
            found.extend(_entries(text.removeprefix("@"), null))
        else:
            found.append(text)
    for text in lists:
        found.extend(_entries(text, null))
    return tuple(found)


@contextmanager
def stdin_for_ranks(inputs: Sequence[str]) -> Iterator[None]:
    """While the block runs, ranks that are started find what standard input held, if this process has read it.

    Args:
        inputs: all inputs, of which those from standard input are a part; the ranks take each file once.
    """
    if not _stdin_was_read:
        yield
        return
    with tempfile.NamedTemporaryFile(prefix="vaepar-list-") as file:
        file.write(b"".join(os.fsencode(text) + b"\0" for text in inputs))
        file.flush()
        os.environ[_HANDED_ON] = file.name
        try:
            yield
        finally:
            del os.environ[_HANDED_ON]


def _is_list(text: str) -> bool:
    return text == STDIN or (text.startswith("@") and len(text) > 1)


def _read_stdin() -> bytes:
    global _stdin_was_read  # there is one standard input, and it is read once
    _stdin_was_read = True
    return sys.stdin.buffer.read()


def _entries(name: str, null: bool) -> list[str]:
    if World.from_environment().rank:
        return [name]
    handed_on = os.environ.get(_HANDED_ON)
    try:
        if name == STDIN and handed_on is not None:
            content, null = Path(handed_on).read_bytes(), True
        else:
            content = _read_stdin() if name == STDIN else Path(name).read_bytes()
    except OSError as error:
        raise InputError(f"the list {shown(name)} cannot be read: {error.strerror or error}") from None
    entries = content.split(b"\0") if null else content.splitlines()
    return [os.fsdecode(entry) for entry in entries if entry.strip()]
