"""A run that is asked to stop: signals become an exception at a place where all ranks can agree."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vaepar.errors import InterruptedRunError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Remembers the first stop signal; the second one ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def check(self) -> None:
        """Raise :class:`InterruptedRunError` when the run was asked to stop."""
        if self.signal is not None:
            raise InterruptedRunError(f"stopped by {signal.Signals(self.signal).name}")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM while the block runs. Only the main thread can; elsewhere nothing changes."""
        before: dict[signal.Signals, Any] = {}

        def remember(number: int, frame: FrameType | None) -> None:
            self.signal = number
            for each in _SIGNALS:
                signal.signal(each, signal.SIG_DFL)

        try:
            for number in _SIGNALS:
                before[number] = signal.signal(number, remember)
        except ValueError:  # not the main thread
            before.clear()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
