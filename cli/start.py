"""From a checked request to a run on the right number of ranks: the same for every operation over files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vaepar import launch
from vaepar.errors import UsageError
from vaepar.jobs.report import Observer, RunReport, Silent
from vaepar.jobs.request import BatchRequest

from .output import closing_table, print_plan, set_up_logging
from .progress import Dialect, observer, print_rows, print_summary

logger = logging.getLogger("vaepar.cli")

_LONGEST_TIMEOUT = 7 * 24 * 3600

# The second argument is the group of ranks that ``launch.joined`` gives.
Run = Callable[[BatchRequest, Any, Observer], RunReport]


@dataclass(frozen=True, kw_only=True)
class Talk:
    """How much is said, and what is to be said before anything else."""

    verbose: bool = False
    quiet: bool = False
    dialect: Dialect = field(default_factory=Dialect)
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.verbose and self.quiet:
            raise UsageError("--verbose and --quiet were both given; one of them at most")


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where and on how many ranks a run takes place."""

    ranks: int | None = None
    device: str = "auto"
    timeout: float = 300
    max_restarts: int = 0
    dry_run: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.timeout <= _LONGEST_TIMEOUT:
            raise UsageError(f"--timeout is {self.timeout:g}; it is a number of seconds from 1 to {_LONGEST_TIMEOUT}")
        if self.device not in launch.DEVICES:
            raise UsageError(f"--device is '{self.device}'; it is one of {', '.join(launch.DEVICES)}")


def start(
    request: BatchRequest, where: Start, talk: Talk, load_run: Callable[[], Run], arguments: Sequence[str]
) -> int:
    """Run a request and give its exit code: on the ranks of a launcher, on new ranks, or in this process.

    Args:
        request: what to do.
        where: ranks and device.
        talk: how much is said.
        load_run: imports the operation; called only where it runs, because it loads torch.
        arguments: the command line, for ranks that are started.
    """
    world = launch.World.from_environment()
    set_up_logging(verbose=talk.verbose, quiet=talk.quiet, speaks=world.rank == 0)
    if not world.ours:  # ranks that this package starts have been preceded by their launcher, which said it
        for remark in talk.remarks:
            logger.warning("%s", remark)
    if where.dry_run:
        return _plan(request, where, talk, load_run()) if world.rank == 0 else 0
    count = launch.choose_ranks(where.ranks, where.device, world)
    if where.max_restarts and world.launched and not world.ours:
        raise UsageError(
            f"--max-restarts {where.max_restarts} goes with --ranks; under a launcher it is that one's option"
        )
    if not world.launched and (count > 1 or where.max_restarts):
        return _start_ranks(request, count, where, arguments)
    with launch.joined(world, where.device, where.timeout) as group:
        report = _run(request, group, talk, load_run())
        group.gather_values(0)  # a launcher stops all ranks when the first one ends with an error: leave together
    return report.exit_code


def _plan(request: BatchRequest, where: Start, talk: Talk, run: Run) -> int:
    """A dry run: in this process alone, for the ranks that there would be. Needs no GPU and no weights."""
    world = launch.World.from_environment()
    count = launch.choose_ranks(where.ranks, "cpu" if where.ranks is not None else where.device, world)
    farming = replace(request.farming, dry_run=count, dry_device="cuda" if where.device == "cuda" else "cpu")
    with launch.joined(launch.World(), "cpu", where.timeout) as group:
        report = run(replace(request, farming=farming), group, observer(talk.dialect, quiet=talk.quiet))
    if talk.dialect.rows:
        print_rows(report)
    else:
        print_plan(report)
    return report.exit_code


def _start_ranks(request: BatchRequest, count: int, where: Start, arguments: Sequence[str]) -> int:
    from vaepar.jobs.lists import stdin_for_ranks
    from vaepar.jobs.models import locate_model

    source = locate_model(request.model, variant=request.variant, allow_download=request.allow_download)
    launch.check_memory(count, source.weight_bytes)
    with stdin_for_ranks(request.inputs):
        return launch.start_ranks(arguments, count, max_restarts=where.max_restarts)


def _run(request: BatchRequest, group: Any, talk: Talk, run: Run) -> RunReport:
    speaks = group.rank == 0
    watching = observer(talk.dialect, quiet=talk.quiet) if speaks else Silent()
    try:
        report = run(request, group, watching)
    finally:
        watching.stop()
    if speaks and talk.dialect.rows:
        print_summary(report)
    if speaks and not talk.quiet and talk.dialect.settled() in ("rich", "plain", "openjd"):
        closing_table(report)
    return report
