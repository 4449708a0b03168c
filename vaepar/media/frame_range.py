"""Which frames are wanted, in the notation of render farms: ``1-100x2,120``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from vaepar.errors import UsageError
from vaepar.text import quoted

_PART = re.compile(r"(?P<first>\d{1,9})(?:-(?P<last>\d{1,9})(?:x(?P<step>\d{1,9}))?)?", re.ASCII)
_ALLOWED = "frames are numbers and ranges, ascending, as in 1-100, 1-100x2 (every second) or 1-10,20"


@dataclass(frozen=True)
class FrameRange:
    """Frame numbers, ascending, each once.

    For a sequence they are the numbers in the file names; for a video they count from 1.

    Args:
        parts: ranges of numbers, not empty, each beginning behind the end of the one before.

    Raises:
        UsageError: nothing, a negative number, or numbers that do not ascend.
    """

    parts: tuple[range, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise UsageError(f"no frames are asked for; {_ALLOWED}")
        previous = -1
        for part in self.parts:
            if not part or part.step < 1 or part.start <= previous:
                raise UsageError(f"frames {self} do not ascend at {_part_text(part)}; {_ALLOWED}")
            previous = part[-1]

    def __iter__(self) -> Iterator[int]:
        for part in self.parts:
            yield from part

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __str__(self) -> str:
        return ",".join(_part_text(part) for part in self.parts)

    @property
    def last(self) -> int:
        """The highest number."""
        return self.parts[-1][-1]

    @property
    def step(self) -> int | None:
        """The distance between all neighbours; 1 for a single frame, None if it differs."""
        numbers = iter(self)
        previous = next(numbers)
        step: int | None = None
        for number in numbers:
            if step is not None and number - previous != step:
                return None
            step, previous = number - previous, number
        return step or 1


def parse_frames(text: str) -> FrameRange:
    """A frame range as farms write it, a part of fileseq's notation: ``a``, ``a-b``, ``a-bxN``, joined by commas.

    Raises:
        UsageError: anything else; ``a-b:N`` gets a hint, since it means different things in different tools.
    """
    parts = []
    for piece in text.replace(" ", "").split(","):
        match = _PART.fullmatch(piece)
        if match is None:
            raise UsageError(f"frames are {quoted(text)}; {_hint(piece)}{_ALLOWED}")
        first = int(match["first"])
        last = first if match["last"] is None else int(match["last"])
        step = 1 if match["step"] is None else int(match["step"])
        if last < first or step < 1:
            raise UsageError(f"frames are {quoted(text)}; {quoted(piece)} holds no frame; {_ALLOWED}")
        parts.append(range(first, last + 1, step))
    return FrameRange(tuple(parts))


def _hint(piece: str) -> str:
    span, colon, step = piece.partition(":")
    if colon and step.isdecimal() and _PART.fullmatch(span):
        return f"for one frame of every {step} write {span}x{step}, not {piece}; "
    return ""


def _part_text(part: range) -> str:
    if len(part) == 1:
        return str(part.start)
    return f"{part.start}-{part.stop - 1}" + (f"x{part.step}" if part.step != 1 else "")
