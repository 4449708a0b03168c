"""From a checked request to a run on the right number of ranks: the same for every operation over files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vaepar import launch
from vaepar.errors import UsageError
from vaepar.jobs.report import Observer, RunReport, Silent
from vaepar.jobs.request import BatchRequest

from .output import closing_table, observer, set_up_logging

if TYPE_CHECKING:
    from vaepar.parallel.group import RankGroup

Run = Callable[[BatchRequest, "RankGroup", Observer], RunReport]


@dataclass(frozen=True, kw_only=True)
class Talk:
    """How much is said."""

    verbose: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.verbose and self.quiet:
            raise UsageError("--verbose and --quiet were both given; one of them at most")


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where and on how many ranks a run takes place."""

    ranks: int | None = None
    device: str = "auto"
    timeout: float = 300

    def __post_init__(self) -> None:
        if self.device not in launch.DEVICES:
            raise UsageError(f"--device is '{self.device}'; it is one of {', '.join(launch.DEVICES)}")


def start(request: BatchRequest, where: Start, talk: Talk, load_run: Callable[[], Run]) -> int:
    """Run a request and give its exit code: on the ranks of a launcher, on new ranks, or in this process.

    Args:
        request: what to do.
        where: ranks and device.
        talk: how much is said.
        load_run: imports the operation; called only where it runs, because it loads torch.
    """
    world = launch.World.from_environment()
    speaks = world.rank == 0
    set_up_logging(verbose=talk.verbose, quiet=talk.quiet, speaks=speaks)
    count = launch.choose_ranks(where.ranks, where.device, world)
    if count > 1 and not world.launched:
        from vaepar.jobs.models import locate_model

        source = locate_model(request.model, variant=request.variant, allow_download=request.allow_download)
        launch.check_memory(count, source.weight_bytes)
        return launch.start_ranks(sys.argv[1:], count)
    run = load_run()
    with launch.joined(world, where.device, where.timeout) as group:
        watching = observer(quiet=talk.quiet) if speaks else Silent()
        try:
            report = run(request, group, watching)
        finally:
            watching.stop()
        if speaks and not talk.quiet:
            closing_table(report)
        group.gather_values(0)  # a launcher stops all ranks when the first one ends with an error: leave together
    return report.exit_code
