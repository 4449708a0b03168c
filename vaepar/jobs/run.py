"""A run over many files, whatever is done with each: plan, load once, file after file, report.

Rank 0 of the world plans, speaks and reports. The ranks are divided into VAE groups; each group takes file after file
from a common queue, its first rank (the owner) writes, and what one of its ranks cannot do, all of them record as that
file's failure and go on with the next.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from vaepar.autoencoders import VaeCapability, adapter_for
from vaepar.autoencoders.mixin import check_pixels
from vaepar.autoencoders.tiling import tile_settings
from vaepar.config import VaeParallelMode
from vaepar.errors import (
    DeviceMemoryError,
    DiskFullError,
    InterruptedRunError,
    ModelError,
    OutputError,
    RankLostError,
    VaeparError,
)
from vaepar.jobs.budget import Budget, memory_for_a_rank
from vaepar.jobs.groups import Grouping, check_size, choose_grouping, join_group, local_size
from vaepar.jobs.ledger import Ledger
from vaepar.jobs.memory import peak_bytes, reset_peak
from vaepar.jobs.models import ModelSource, load_model, locate_model, settle_dtype
from vaepar.jobs.outputs import Outputs, make_folder
from vaepar.jobs.plan import Task, fail, tasks_from_text, tasks_to_text
from vaepar.jobs.report import GroupRow, Observer, Row, RunReport, check_report, write_report
from vaepar.jobs.request import BatchRequest
from vaepar.jobs.retreat import Effort, apply_effort, effort_of, kept_settings
from vaepar.jobs.stop import Stop
from vaepar.latents import VaeFacts
from vaepar.parallel.agreement import agree_on, agreed
from vaepar.parallel.group import RankGroup
from vaepar.text import shown

logger = logging.getLogger(__name__)


class BatchRun(ABC):
    """One run of one operation; subclasses say what a file is planned as and what is done with it.

    ``world`` is all ranks; ``group`` those that share a latent, which is the world until the plan has divided it.
    """

    operation: str

    def __init__(self, request: BatchRequest, group: RankGroup, observer: Observer) -> None:
        self.request, self.world, self.group, self.observer = request, group, group, observer
        self.leads = group.rank == 0
        self.is_owner = self.leads
        self.stop = Stop(request.farming.grace, observer.note if self.leads else None)
        self.source: ModelSource
        self.dtype: torch.dtype
        self.ledger: Ledger
        self.vae: Any = None
        self._retreats: list[str] = []
        self._under_way: list[Row] = []  # of files that this rank has begun
        self._live: list[Outputs] = []  # of files that are not settled; nothing of them is left after a lost rank
        self.full = False  # a disk without space: the next file would fail alike, after as much work
        self.report = RunReport(
            operation=self.operation, model=request.model, ranks=group.size, device=group.device.type
        )

    @abstractmethod
    def check_support(self, capability: VaeCapability) -> None:
        """Raise when the family's adapter cannot do what was asked."""

    def check_facts(self, vae: VaeFacts) -> None:
        """Raise :class:`UsageError` for what was asked and no file can have with this VAE."""
        return

    @abstractmethod
    def plan(self, vae: VaeFacts) -> list[Task]:
        """The tasks, in the order of the inputs, without opening more than headers. Called on rank 0."""

    @abstractmethod
    def work(self, task: Task, outputs: Outputs) -> None:
        """Do one file on all ranks, inside an agreed block; append what is being written to ``outputs``."""

    def run(self) -> RunReport:
        """Do all files; every rank gets a report with the same outcomes.

        Raises:
            ModelError, UsageError: when the run cannot begin. RankLostError: when a rank has died; the report file is
                written nevertheless, with what is known.
        """
        started = time.monotonic()
        try:
            with self.stop.listening():
                self._run()
        except BaseException as error:
            self.report.ended_by = getattr(error, "exit_code", 1)
            for row in self.report.rows:
                if row.status not in ("ok", "skipped"):
                    row.outputs = []
                if row.status == "not tried" and any(row is begun for begun in self._under_way):
                    row.status, row.error, row.exit_code = "dropped", str(error), self.report.ended_by
            with contextlib.suppress(OutputError):  # what ended the run is what must be told
                self._write_report(started)
            raise
        with agreed(self.world, "report"):
            self._write_report(started)
        return self.report

    def _write_report(self, started: float) -> None:
        self.report.seconds = time.monotonic() - started
        if self.request.report is not None and self.leads and self.report.rows:
            write_report(self.request.report, self.report)

    def _run(self) -> None:
        self.source = self._locate()
        tasks, grouping = self._plan()
        self.report.rows = [task.row for task in tasks]
        if self.request.farming.dry_run is not None:
            self._describe_plan(tasks, grouping)
            return
        due = [task for task in tasks if task.is_due]
        self.observer.planned(len(tasks), self.world.size)
        for task in tasks:
            if not task.is_due:
                self.observer.finished(task.row)
        if not due:
            return
        self.group = join_group(self.world, grouping)
        self.is_owner = self.group.rank == 0
        self.ledger = Ledger(self.world, self.group, grouping, self.report, self.observer)
        if grouping.count > 1:
            self.observer.note(f"{grouping.count} groups of {grouping.size} rank(s): {grouping.reason}")
            # Longest first, so that no group ends long after the others.
            due.sort(key=lambda task: -task.row.cost)
        self._load()
        self._do_all(due)
        self.ledger.gather()
        for row in self.report.rows:
            if row.status == "not tried":
                self.observer.finished(row)
        if self.report.interrupted:
            self.observer.note("the run was stopped before its end; the same command again finishes the rest")
        elif self.full:
            self.observer.note("no space is left, so the files after it were not tried")

    def _locate(self) -> ModelSource:
        """Rank 0 first: it may download, and the others of its machine find the files in its cache."""
        request = self.request
        with agreed(self.world, "model"):
            source = self._prepare() if self.leads else None
            folder = self.world.broadcast_text(None if source is None else str(source.folder))
            if source is not None:
                return source
            try:
                return locate_model(folder, variant=request.variant, allow_download=False)
            except ModelError:  # another machine, which has files of its own
                return locate_model(request.model, variant=request.variant, allow_download=request.allow_download)

    def _prepare(self) -> ModelSource:
        request = self.request
        farming = request.farming
        check_size(farming, farming.dry_run or self.world.size, farming.dry_run or local_size(self.world))
        source = locate_model(
            request.model,
            variant=request.variant,
            allow_download=request.allow_download,
            need_weights=farming.dry_run is None,
        )
        self.check_support(adapter_for(source.facts.class_name).capability)
        self.check_facts(source.facts)
        tiles = request.tiles(source.facts.spatial_ratio)
        if tiles is not None:
            check_pixels(*tiles, source.facts.spatial_ratio)
        if farming.dry_run is None:
            make_folder(request.out)
        if request.report is not None:
            check_report("--report", request.report)
        return source

    def _plan(self) -> tuple[list[Task], Grouping]:
        with agreed(self.world, "plan"):
            self.dtype, note = settle_dtype(self.request.dtype, self.source, self.group.device)
            if note is not None:
                self.observer.note(note)
            tasks = self.plan(self.source.facts) if self.leads else []
            text = self.world.broadcast_text(tasks_to_text(tasks) if self.leads else None)
            sizes = self.world.broadcast_text(json.dumps(asdict(self._group(tasks))) if self.leads else None)
            return tasks if self.leads else tasks_from_text(text), Grouping(**json.loads(sizes))

    def _group(self, tasks: Sequence[Task]) -> Grouping:
        farming = self.request.farming
        due = [task for task in tasks if task.is_due]
        budget = Budget(self.operation, self.request, self.source.facts, self.dtype, self.group.device.type)
        local = farming.dry_run or local_size(self.world)
        return choose_grouping(
            farming,
            farming.dry_run or self.world.size,
            local,
            len(due),
            fits=lambda size: budget.holds(due, size, memory_for_a_rank(self.group.device, local)),
            shares=self.request.mode not in (VaeParallelMode.TILE, VaeParallelMode.AUTO),
        )

    def _describe_plan(self, tasks: Sequence[Task], grouping: Grouping) -> None:
        """What a real run would do, in the rows and groups of the report."""
        budget = Budget(self.operation, self.request, self.source.facts, self.dtype, self.request.farming.dry_device)
        self.report.dry_run = True
        self.report.ranks = grouping.size * grouping.count
        self.report.dtype = str(self.dtype).removeprefix("torch.")
        self.report.groups = [GroupRow(ranks=list(grouping.ranks(group))) for group in range(grouping.count)]
        self.observer.note(f"{grouping.count} group(s) of {grouping.size} rank(s): {grouping.reason}")
        for task in tasks:
            if task.is_due:
                task.row.plan = self.outlook(task) | budget.outlook(task, grouping.size)
                task.row.status = "due"
                task.row.mode, task.row.mode_reason = task.row.plan.get("mode"), task.row.plan.get("mode_reason")

    def outlook(self, task: Task) -> dict[str, Any]:
        """What a dry run tells of a task beyond its row, as plain values. Subclasses know more."""
        return {}

    def _load(self) -> None:
        with agreed(self.world, "model"):
            digest = self.source.digest()
            agree_on(self.world, "models", f"{self.source.facts.class_name} {digest} {self.source.facts.constants()}")
            self.vae = load_model(self.source, self.dtype, self.group.device, self.group)
            tiles = self.request.tiles(self.source.facts.spatial_ratio)
            if tiles is not None:
                self.vae.configure_tiles(*tiles)
            else:
                self.vae.enable_tiling()
            self.vae.set_parallel_size(self.group.size, mode=self.request.mode)
            self.report.dtype = str(self.dtype).removeprefix("torch.")
            self.report.model_sha256 = digest
            logger.info(
                "%s in %s, %s, sha256 %s",
                self.source.facts.class_name,
                shown(self.source.folder),
                self.report.dtype,
                digest,
            )
            logger.info("tiles: %s", tile_settings(self.vae))

    def _do_all(self, tasks: Sequence[Task]) -> None:
        """File after file; each one's writers finish while the next one is worked on."""
        writing: Outputs | None = None
        try:
            while (task := self._next(tasks)) is not None:
                current = self._do_one(task)
                if writing is not None:
                    self._finish(writing)
                writing = current
            if writing is not None:
                self._finish(writing)
        finally:
            for outputs in self._live:
                outputs.abort()

    def _next(self, tasks: Sequence[Task]) -> Task | None:
        """The next file of the queue, on all ranks of the group; None when there is none or the run was stopped."""
        if self.report.interrupted or self.full:
            if self.is_owner:
                self.ledger.board.halt()
            return None
        self.ledger.hear()
        try:
            with agreed(self.group, "the queue of files"):
                board = self.ledger.board
                taken = None
                if self.is_owner:
                    taken = "" if board.halted() else str(board.take())
                text = self.group.broadcast_text(taken)
                if text and int(text) < len(tasks):  # a wish to stop that finds nothing left to do changes nothing
                    self.stop.refuse()
        except InterruptedRunError:
            self.report.interrupted = True
            return self._next(tasks)
        return tasks[int(text)] if text and int(text) < len(tasks) else None

    def _do_one(self, task: Task) -> Outputs | None:
        """Work on one file. None when it failed (then its row says so and nothing is left of it)."""
        row, started = task.row, time.monotonic()
        row.group = self.ledger.number
        self._under_way.append(row)
        self._retreats = []
        reset_peak(self.group.device)
        self.stop.begin()
        outputs: Outputs | None = None
        try:
            with kept_settings(self.vae, self.group.size):
                while outputs is None:
                    outputs = self._attempt(task)
        except InterruptedRunError:
            self.report.interrupted = True
            row.status, row.outputs = "dropped", []
            self.ledger.tell(row)
            return None
        except RankLostError:
            raise
        except VaeparError as error:
            self._fail(row, error)
            return None
        finally:
            seconds = time.monotonic() - started
            self.ledger.add(seconds, files=1)
        outputs.seconds = seconds
        row.notes.extend(outputs.notes)
        logger.info("%s: %s: %s", shown(row.path), row.mode, row.mode_reason)
        row.peak_bytes = self.group.gather_values(peak_bytes(self.group.device))
        return outputs

    def _attempt(self, task: Task) -> Outputs | None:
        """Work on one file with the adapter's present settings; None when it shall be tried again with smaller ones."""
        outputs = Outputs(task.row)
        self._live = [other for other in self._live if other.under_way] + [outputs]
        effort: Effort | None
        try:
            with agreed(self.group, f"{self.operation} of {shown(task.path)}"):
                try:
                    self.work(task, outputs)
                except BaseException:
                    outputs.abort()
                    raise
            outputs.notes = self._retreats
            return outputs
        except DeviceMemoryError:
            outputs.abort()
            effort = self._smaller(task.row)
            if effort is None:
                raise
        except VaeparError:
            outputs.abort()
            raise
        # Outside of the block above, which keeps alive what filled the memory.
        apply_effort(self.vae, effort, self.group.size)
        return None

    def _smaller(self, row: Row) -> Effort | None:
        """The next smaller effort for a file that did not fit the memory, the same on all ranks of its group."""
        if not self.request.farming.retreat:
            return None
        sides = (row.width, row.height)
        extent = None if None in sides else max(side or 0 for side in sides)
        with agreed(self.group, "retreat"):
            found = effort_of(self.vae).smaller(row.mode, self.group.size, self.source.facts.spatial_ratio, extent)
            text = self.group.broadcast_text("" if found is None else found.to_text())
        if not text:
            return None
        effort = Effort.from_text(text)
        note = f"out of memory in {row.mode or 'reading'}: tried again with {effort.words()}"
        self._retreats.append(note)
        self.observer.note(f"{row.path}: {note}")
        return effort

    def _finish(self, outputs: Outputs) -> None:
        """Wait until a file's outputs are whole, and record what came of it on every rank."""
        row, started = outputs.row, time.monotonic()
        try:
            with agreed(self.group, f"writing of {shown(row.path)}"):
                for output in outputs.under_way:
                    output.close()
        except RankLostError:
            raise
        except VaeparError as error:
            outputs.abort()
            self._fail(row, error)
            return
        finally:
            waited = time.monotonic() - started
            self.ledger.add(waited)
        outputs.under_way.clear()
        row.status = "ok"
        row.seconds = round(outputs.seconds + waited, 4)
        self.ledger.tell(row)

    def _fail(self, row: Row, error: VaeparError) -> None:
        self.full = self.full or isinstance(error, DiskFullError)
        message = str(error)
        fail(row, message if shown(row.path) in message else f"{shown(row.path)}: {message}", error.exit_code)
        self.ledger.tell(row)
