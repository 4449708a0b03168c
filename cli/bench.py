"""``vaepar bench``: the parallel modes side by side, against one rank and stock diffusers."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from vaepar import launch
from vaepar.config import VaeParallelMode
from vaepar.errors import UsageError
from vaepar.jobs.bench_presets import FAMILIES, SCALES
from vaepar.jobs.bench_request import (
    DEFAULT_FAMILY,
    DEFAULT_SCALE,
    OPERATIONS,
    BenchRequest,
    parse_modes,
    parse_ranks,
    parse_shapes,
)

from . import options
from .options import MODEL, OUTPUT, PARALLEL
from .output import complain, console, safe, set_up_logging
from .start import Start

if TYPE_CHECKING:
    from vaepar.jobs.bench import Progress

_MODE_NAMES = ", ".join(mode.value for mode in VaeParallelMode)
_MEASURED = "What is measured"
_EVERY_SECONDS = 10.0

# Not the shared option: its environment variable would contradict --family.
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Model folder, hub id, or 'demo', not a family.", rich_help_panel=MODEL),
]
Family = Annotated[
    str | None,
    typer.Option(
        help=f"A model with random weights: {', '.join(FAMILIES)} (default: {DEFAULT_FAMILY}).", rich_help_panel=MODEL
    ),
]
Scale = Annotated[
    str | None,
    typer.Option(help=f"Its size: {', '.join(SCALES)} (default: {DEFAULT_SCALE}).", rich_help_panel=MODEL),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        help="Latents: HxW, TxHxW or BxCxTxHxW (BxCxHxW for pictures); a comma list, or given again.",
        rich_help_panel=_MEASURED,
    ),
]
Modes = Annotated[str, typer.Option(help=f"A comma list of {_MODE_NAMES}.", rich_help_panel=_MEASURED)]
Operation = Annotated[str, typer.Option(help=f"One of {', '.join(OPERATIONS)}.", rich_help_panel=_MEASURED)]
Ranks = Annotated[
    str | None,
    typer.Option(
        help="Processes to start here, or a comma list of numbers to compare (default: one for each GPU, else 1).",
        rich_help_panel=_MEASURED,
    ),
]
Baselines = Annotated[
    bool,
    typer.Option("--baselines/--no-baselines", help="Measure stock diffusers beside them.", rich_help_panel=_MEASURED),
]
Repeats = Annotated[int, typer.Option(help="Measured passes of each case.", rich_help_panel=_MEASURED)]
Warmup = Annotated[int, typer.Option(help="Unmeasured passes before them.", rich_help_panel=_MEASURED)]
Threads = Annotated[int | None, typer.Option(help="CPU threads of a rank (default: 1).", rich_help_panel=PARALLEL)]
FramesPerStep = Annotated[
    int | None, typer.Option(help="Latent frames of one step of a spatial shard.", rich_help_panel=PARALLEL)
]
Json = Annotated[
    Path | None, typer.Option("--json", help="Write everything, each repeat too, as JSON.", rich_help_panel=OUTPUT)
]
Plot = Annotated[Path | None, typer.Option(help="Draw speed-up and memory over ranks (.png).", rich_help_panel=OUTPUT)]


def command(
    ctx: typer.Context,
    model: Model = None,
    family: Family = None,
    scale: Scale = None,
    shape: Shapes = None,
    modes: Modes = "tile,auto",
    operation: Operation = "decode",
    baselines: Baselines = True,
    ranks: Ranks = None,
    repeats: Repeats = 3,
    warmup: Warmup = 1,
    threads: Threads = None,
    device: options.Device = "auto",
    timeout: options.Timeout = 300,
    tile_size: options.TileSize = None,
    tile_stride: options.TileStride = None,
    frames_per_step: FramesPerStep = None,
    dtype: options.Dtype = "auto",
    variant: options.Variant = None,
    no_download: options.NoDownload = False,
    json: Json = None,
    plot: Plot = None,
    quiet: options.Quiet = False,
) -> None:
    """Measure how fast, how large and how exact the parallel modes are on this machine."""
    if plot is not None:
        _check_plot(plot)
    make = partial(
        BenchRequest,
        model=model,
        family=family,
        scale=scale,
        shapes=parse_shapes(shape or []),
        modes=parse_modes(modes),
        operation=operation,
        baselines=baselines,
        repeats=repeats,
        warmup=warmup,
        threads=threads,
        tile_size=tile_size,
        tile_stride=tile_stride,
        frames_per_step=frames_per_step,
        dtype=dtype,
        variant=variant,
        allow_download=not no_download,
        json=json,
        plot=plot,
    )
    counts = None if ranks is None else parse_ranks(ranks)
    where = Start(ranks=None if counts is None else counts[-1], device=device, timeout=timeout)
    make(ranks=counts or (1,))  # what is wrong with the flags is said before any rank starts
    ctx.obj.append(lambda arguments: _run(make, counts, where, arguments, quiet=quiet))


def _check_plot(path: Path) -> None:
    from vaepar.jobs.bench_plot import require_matplotlib

    if path.suffix.lower() != ".png":
        raise UsageError(f"--plot is '{safe(str(path)).plain}'; it is a file name that ends with .png")
    require_matplotlib()


def _run(
    make: partial[BenchRequest], counts: tuple[int, ...] | None, where: Start, arguments: Sequence[str], *, quiet: bool
) -> int:
    world = launch.World.from_environment()
    speaks = world.rank == 0
    set_up_logging(verbose=False, quiet=quiet, speaks=speaks)
    most = launch.choose_ranks(where.ranks, where.device, world)
    request = make(ranks=counts or (most,))
    if most > 1 and not world.launched:
        launch.check_memory(most, _weight_bytes(request))
        return launch.start_ranks(arguments, most)
    from vaepar.jobs.bench import SilentProgress, run_bench

    from .bench_tables import print_report  # loads torch, as the bench itself

    with launch.joined(world, where.device, where.timeout) as group:
        watching = SilentProgress() if quiet or not speaks else _progress()
        try:
            report = run_bench(request, group, watching)
        finally:
            watching.stop()
        if speaks:
            print_report(report)
        group.gather_values(0)  # a launcher stops all ranks when the first one ends with an error: leave together
    return 0


def _weight_bytes(request: BenchRequest) -> int:
    if request.preset is not None:
        return 4 * request.preset.parameters
    from vaepar.jobs.models import locate_model

    source = locate_model(request.model or "", variant=request.variant, allow_download=request.allow_download)
    return source.weight_bytes


class _BarProgress:
    def __init__(self) -> None:
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console(),
            transient=True,
        )

    def begin(self, passes: int) -> None:
        self._bar.start()
        self._task = self._bar.add_task("bench", total=passes)
        self._done = -1

    def step(self, text: str) -> None:
        self._done += 1
        self._bar.update(self._task, completed=self._done, description=text)

    def stop(self) -> None:
        self._bar.stop()


class _LineProgress:
    """A line now and then: farms take a silent process for a hung one."""

    def begin(self, passes: int) -> None:
        self._passes, self._done, self._said = passes, 0, -_EVERY_SECONDS

    def step(self, text: str) -> None:
        self._done += 1
        if time.monotonic() - self._said >= _EVERY_SECONDS:
            self._said = time.monotonic()
            complain(f"[{self._done}/{self._passes}] {text}")

    def stop(self) -> None:
        return None


def _progress() -> Progress:
    return _BarProgress() if sys.stderr.isatty() else _LineProgress()
