"""The outputs of one file while they are being written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vaepar.errors import UsageError
from vaepar.jobs.report import Row
from vaepar.text import shown


class Closing(Protocol):
    """An output under way: close makes it whole, abort leaves nothing of it."""

    def close(self) -> Any: ...

    def abort(self) -> None: ...


@dataclass
class Outputs:
    """The outputs of one file that were handed to their writers and are not yet known to be whole (owner only)."""

    row: Row
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    under_way: list[Closing] = field(default_factory=list)

    def close_all_but_last(self) -> None:
        """Wait for the outputs that were being written while a later one was made."""
        for earlier in self.under_way[:-1]:
            earlier.close()
        del self.under_way[:-1]

    def abort(self) -> None:
        for output in self.under_way:
            output.abort()


def make_folder(folder: Path) -> None:
    """Make the folder of the outputs. Raises :class:`UsageError` when that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the output folder {shown(folder)} cannot be made: {error.strerror or error}") from None
