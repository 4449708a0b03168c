"""The report of a run with several VAE groups: each group's rows go to the first rank, and come back to all."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from typing import Any

from vaepar.errors import RankLostError
from vaepar.jobs.groups import Grouping
from vaepar.jobs.queue import Board, open_board
from vaepar.jobs.report import GroupRow, Observer, Row, RunReport
from vaepar.parallel.group import RankGroup

_POLL_SECONDS = 0.1


class Ledger:
    """Keeps the rows of a run together.

    Args:
        world, group: all ranks, and those of this rank's VAE group.
        grouping: the groups.
        report: this rank's report; its rows are those of the plan, the same on every rank.
        observer: is told of each finished row; on the first rank of the world, of those of other groups too.
    """

    def __init__(
        self, world: RankGroup, group: RankGroup, grouping: Grouping, report: RunReport, observer: Observer
    ) -> None:
        self.board: Board = open_board(world, grouping)
        self._world, self._grouping, self._report, self._observer = world, grouping, report, observer
        self.number = grouping.of(world.rank)
        self._speaks_for_group = group.rank == 0
        self._first = world.rank == 0
        self._places = {id(row): place for place, row in enumerate(report.rows)}
        self._own = GroupRow(ranks=list(grouping.ranks(self.number)))

    def add(self, seconds: float, *, files: int = 0) -> None:
        """This group was busy for so long, and has begun so many files."""
        self._own.busy_seconds += seconds
        self._own.files += files

    def tell(self, row: Row) -> None:
        """A row of this group is final."""
        self._observer.finished(row)
        if self._speaks_for_group and not self._first:
            self.board.post({"kind": "row", "place": self._places[id(row)], "row": asdict(row)})

    def hear(self) -> None:
        """Take in what other groups have told. Only the first rank of the world has something to do."""
        if self._first:
            for news in self.board.fetch():
                self._take_in(news)

    def gather(self) -> None:
        """Wait for all groups; then every rank has the whole report. All ranks of the world call it.

        Raises:
            RankLostError: a rank of any group has vanished; the first rank has what the others had told until then.
        """
        self._own.busy_seconds = round(self._own.busy_seconds, 3)
        self._report.groups.append(self._own)
        if self._grouping.count == 1:
            return
        if self._speaks_for_group and not self._first:
            self.board.post({"kind": "end", "group": asdict(self._own), "interrupted": self._report.interrupted})
        try:
            self._wait_for_all()
        finally:
            self.hear()
        self._share()

    def _take_in(self, news: dict[str, Any]) -> None:
        if news["kind"] == "row":
            row = Row(**news["row"])
            self._report.rows[news["place"]] = row
            self._observer.finished(row)
            return
        self._report.groups.append(GroupRow(**news["group"]))
        self._report.interrupted = self._report.interrupted or news["interrupted"]

    def _wait_for_all(self) -> None:
        """Meet the ranks of all groups. The meeting waits in a thread, so that signals and news get through."""
        failed: list[Exception] = []

        def meet() -> None:
            try:
                self._world.gather_values(0)
            except Exception as error:
                failed.append(error)

        meeting = threading.Thread(target=meet, name="vaepar-meeting", daemon=True)
        meeting.start()
        while meeting.is_alive():
            meeting.join(_POLL_SECONDS)
            self.hear()
        for error in failed:
            raise error

    def _share(self) -> None:
        report = self._report
        report.groups.sort(key=lambda group: group.ranks)
        value = {
            "rows": [asdict(row) for row in report.rows],
            "groups": [asdict(group) for group in report.groups],
            "interrupted": report.interrupted,
        }
        try:
            told = json.loads(self._world.broadcast_text(json.dumps(value) if self._first else None))
        except RuntimeError as error:
            raise RankLostError(f"a rank has vanished: {' '.join(str(error).split())[:200]}") from error
        if not self._first:
            report.rows = [Row(**row) for row in told["rows"]]
            report.groups = [GroupRow(**group) for group in told["groups"]]
            report.interrupted = told["interrupted"]
