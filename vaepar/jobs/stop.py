"""A run that is asked to stop: signals become an exception at a place where all ranks can agree."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vaepar.errors import InterruptedRunError
from vaepar.launch import World

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

# A terminal's Ctrl-C reaches a rank twice, by itself and handed on by its launcher; what comes within this time of the
# first signal is taken for its echo and not for a second wish.
_ECHO_SECONDS = 1.0


class Stop:
    """Remembers the first stop signal; the second one ends the process at once.

    Args:
        grace: seconds from the first signal in which the current file may still be finished.
        tell: is told what the first signal leads to, at once and in a thread of its own: a signal may come in the
            middle of another message, and the next place where the run could speak may be a minute away.
    """

    def __init__(self, grace: float = 0.0, tell: Callable[[str], None] | None = None) -> None:
        self._grace, self._tell = grace, tell
        self._signal: int | None = None
        self._since = 0.0
        self._checked: float | None = None
        self._longest = 0.0
        # Only a launcher's end is a wish to stop: a command in the background outlives its shell.
        self._parent = os.getppid() if World.from_environment().launched else None

    @property
    def asked(self) -> bool:
        """Whether the run was asked to stop: no further file begins. A run whose launcher has died stops too."""
        if self._signal is None and self._parent not in (None, os.getppid()):
            self._remember(signal.SIGTERM)
        return self._signal is not None

    def begin(self) -> None:
        """A file begins, or a wait has ended: what passed before says nothing about the time between two checks."""
        self._checked, self._longest = None, 0.0

    def check(self) -> None:
        """Between two pieces of a file: raise :class:`InterruptedRunError` when the next one would outlast the grace.

        A piece is expected to take as long as the longest one of this file, because launchers end what is not gone
        when their own patience is over, and nothing can be cleaned up then.
        """
        now = time.monotonic()
        if self._checked is not None:
            self._longest = max(self._longest, now - self._checked)
        self._checked = now
        if self.asked and now + self._longest >= self._since + self._grace:
            self.refuse()

    def refuse(self) -> None:
        """Raise :class:`InterruptedRunError` when the run was asked to stop, whatever the grace."""
        if self.asked:
            name = signal.Signals(self._signal or signal.SIGTERM).name
            raise InterruptedRunError(f"stopped by {name}; run again to finish the rest")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM while the block runs. Only the main thread can; elsewhere nothing changes."""
        before: dict[signal.Signals, Any] = {}

        def heard(number: int, frame: FrameType | None) -> None:
            if self._signal is None:
                self._remember(number)
            elif time.monotonic() - self._since > _ECHO_SECONDS:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)

        try:
            for number in _SIGNALS:
                before[number] = signal.signal(number, heard)
        except ValueError:  # not the main thread
            before.clear()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _remember(self, number: int) -> None:
        self._since = time.monotonic()
        self._signal = number
        if self._tell is not None:
            text = (
                f"{signal.Signals(number).name}: the file under way has {self._grace:g} s to finish (--grace), else it "
                f"is dropped; a second signal ends at once"
            )
            threading.Thread(target=self._tell, args=(text,), name="vaepar-stop", daemon=True).start()
