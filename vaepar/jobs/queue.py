"""What the VAE groups of a run share: who takes which file, what became of it, and whether to go on."""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vaepar.errors import RankLostError
from vaepar.jobs.groups import Grouping
from vaepar.parallel.group import RankGroup
from vaepar.parallel.torch_group import TorchGroup

News = dict[str, Any]
_runs = itertools.count()  # every rank begins its runs in the same order, so equal numbers name equal runs


class Board(ABC):
    """Numbers are given out once among all groups; news go from each group to the first rank of the world."""

    @abstractmethod
    def take(self) -> int:
        """The next number of the queue: 0, 1, 2 and so on, each once among all groups."""

    @abstractmethod
    def halt(self) -> None:
        """Let no group take another file."""

    @abstractmethod
    def halted(self) -> bool:
        """Whether a group has called :meth:`halt`."""

    @abstractmethod
    def post(self, news: News) -> None:
        """Tell the first rank of the world; what is told is JSON."""

    @abstractmethod
    def fetch(self) -> list[News]:
        """News that have come since the last call, those of one group in their order. First rank of the world only."""


class LocalBoard(Board):
    """The board of a run with one group: nobody else to ask."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._halted = False
        self._news: list[News] = []

    def take(self) -> int:
        return next(self._next)

    def halt(self) -> None:
        self._halted = True

    def halted(self) -> bool:
        return self._halted

    def post(self, news: News) -> None:
        self._news.append(news)

    def fetch(self) -> list[News]:
        news, self._news = self._news, []
        return news


class StoreBoard(Board):
    """A board in the store through which the ranks met. Each call is one short request to whoever hosts the store.

    Args:
        world: all ranks.
        grouping: the groups.
        name: the same on all ranks, another one for each run.

    The methods raise :class:`RankLostError` when the store's host is gone.
    """

    def __init__(self, world: TorchGroup, grouping: Grouping, name: str) -> None:
        self._store = world.store
        self._name = name
        self._group = grouping.of(world.rank)
        self._posted = 0
        self._fetched = [0] * grouping.count

    def take(self) -> int:
        with _store_errors():
            return int(self._store.add(f"{self._name}/next", 1)) - 1

    def halt(self) -> None:
        with _store_errors():
            self._store.set(f"{self._name}/halt", "1")

    def halted(self) -> bool:
        with _store_errors():
            return bool(self._store.check([f"{self._name}/halt"]))

    def post(self, news: News) -> None:
        with _store_errors():
            self._store.set(self._key(self._group, self._posted), json.dumps(news))
        self._posted += 1

    def fetch(self) -> list[News]:
        return [news for group in range(len(self._fetched)) for news in self._from(group)]

    def _from(self, group: int) -> Iterator[News]:
        with _store_errors():
            while self._store.check([key := self._key(group, self._fetched[group])]):
                self._fetched[group] += 1
                text = self._store.get(key)
                self._store.delete_key(key)  # else the host's memory would grow with the number of files
                yield json.loads(text)

    def _key(self, group: int, number: int) -> str:
        return f"{self._name}/news/{group}/{number}"


def open_board(world: RankGroup, grouping: Grouping) -> Board:
    """The board of a run; all ranks of the world call it, in the same order as their other runs."""
    number = next(_runs)
    if grouping.count == 1 or not isinstance(world, TorchGroup):
        return LocalBoard()
    return StoreBoard(world, grouping, f"vaepar/run/{number}")


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        words = " ".join(str(error).split())[:200]
        raise RankLostError(f"the store that the ranks share is gone: {words}") from error
