"""Standard streams that may go away: a closed pipe, a full disk behind ``2>log``, or none at all."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from vaepar.errors import OutputError


def guard_streams() -> None:
    """Let this process go on when nobody reads its messages, and say in one line when its data cannot be written.

    Messages are for people: work for hours must not be lost with them. Data was asked for, so its loss is an error.
    """
    sys.stderr = _Guarded(sys.stderr, sys.__stderr__, needed=False)
    sys.stdout = _Guarded(sys.stdout, sys.__stdout__, needed=True)


class _Guarded(io.TextIOBase):
    """A text stream that is flushed with each write, so that what cannot be written is known at once.

    Args:
        inner: the stream; None when the process has none.
        bottom: the one that Python flushes when the process ends.
        needed: raise :class:`OutputError` when it cannot be written; else drop what comes.
    """

    def __init__(self, inner: TextIO | None, bottom: TextIO | None, *, needed: bool) -> None:
        self._inner, self._bottom, self._needed = inner, bottom, needed
        self._reason = "it is closed"

    def write(self, text: str) -> int:
        if self._inner is None:
            if self._needed:
                raise OutputError(f"standard output cannot be written: {self._reason}")
            return len(text)
        try:
            self._inner.write(text)
            self._inner.flush()
        except (OSError, ValueError) as error:
            self._give_up()
            self._reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            if self._needed:
                raise OutputError(f"standard output cannot be written: {self._reason}") from None
        return len(text)

    def flush(self) -> None:
        """Everything is flushed already."""

    def isatty(self) -> bool:
        return self._inner is not None and self._inner.isatty()

    def fileno(self) -> int:
        if self._inner is None:
            raise OSError("the stream is closed")
        return self._inner.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # io declares an attribute
        return getattr(self._inner, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return getattr(self._inner, "errors", None)

    @property
    def buffer(self) -> io.BufferedIOBase:
        """The bytes below, as ``click`` looks for them."""
        inner = self._inner
        if inner is None:
            return io.BytesIO()
        return inner.buffer  # type: ignore[return-value]  # typed as BinaryIO

    def _give_up(self) -> None:
        """Send what is left in buffers nowhere, or Python would complain about it when it ends."""
        self._inner = None
        try:
            if self._bottom is not None:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._bottom.fileno())
                os.close(nowhere)
        except (OSError, ValueError):
            return
