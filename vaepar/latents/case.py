"""One resolution under way: what is known, what was decided, and how to refuse or ask."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import NoReturn

from vaepar.errors import AmbiguousInputError
from vaepar.latents.contract import LatentHeader, LatentRequest
from vaepar.latents.safetensors_header import refuse
from vaepar.latents.vae_facts import VaeFacts
from vaepar.text import shown

_log = logging.getLogger(__name__)


@dataclass
class Case:
    """One resolution under way."""

    header: LatentHeader
    vae: VaeFacts
    request: LatentRequest
    decisions: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return shown(self.header.path)

    def say(self, line: str) -> None:
        self.decisions.append(line)

    def warn(self, line: str) -> None:
        self.decisions.append(line)
        _log.warning("%s: %s", self.name, line)

    def refuse(self, problem: str) -> NoReturn:
        refuse(self.header.path, problem)

    def ask(self, problem: str) -> NoReturn:
        raise AmbiguousInputError(f"{self.name}: {problem}")


def count(case: Case, key: str) -> int | None:
    text = case.header.metadata.get(key)
    if text is None:
        return None
    if len(text) <= 9 and text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    problem = f"metadata {key} is '{shown(text, 40)}', not a whole number of 1 or more"
    if case.header.producer == "vaepar":
        case.refuse(f"has broken metadata: {problem}")
    case.warn(f"{problem}; it is not used")
    return None


def pair(case: Case, first: str, second: str) -> tuple[int, int] | None:
    values = count(case, first), count(case, second)
    return None if values[0] is None or values[1] is None else (values[0], values[1])


def wxh(size: tuple[int, int]) -> str:
    return f"{size[1]}x{size[0]}"
