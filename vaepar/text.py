"""Words from files, made safe to print. Everything may import this module; it imports nothing of ours."""

from __future__ import annotations

import os
from collections.abc import Iterable


def shown(value: object, limit: int = 160) -> str:
    """``str(value)`` on one printable line.

    Names, keys and metadata come from strangers: a newline would break the one-line rule of the messages, and an
    escape sequence would reach the terminal. Whatever does not print is written as a backslash escape, and text
    beyond ``limit`` characters is cut (the end of a path says more than its start, so the middle goes).
    """
    text = str(value)
    if len(text) > limit:
        text = f"{text[: limit // 2]}...{text[-(limit // 2) :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def quoted(path: os.PathLike[str] | str) -> str:
    """A path in quotes, control characters and broken unicode escaped."""
    return repr(os.fspath(path))


def listed(values: Iterable[object], most: int = 8) -> str:
    """The values, separated by commas; at most ``most`` of them, with a count of the rest."""
    items = [shown(value, 60) for value in values]
    rest = len(items) - most
    return ", ".join(items[:most]) + (f" and {rest} more" if rest > 0 else "")


def shape_text(shape: Iterable[int]) -> str:
    """``[1, 16, 32, 32]``."""
    return "[" + ", ".join(shown(n, 24) for n in shape) + "]"
