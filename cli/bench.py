"""``vaepar bench``: the parallel modes side by side, against one rank and stock diffusers."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

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
from vaepar.jobs.request import DTYPES

from .output import complain, console, human_bytes, safe, set_up_logging

if TYPE_CHECKING:
    from vaepar.jobs.bench_report import BenchReport, Row
    from vaepar.jobs.bench_statistics import Difference, Ratio

_MODES = ", ".join(mode.value for mode in VaeParallelMode)
_MODEL, _WHAT, _HOW, _OUT = "Model", "What is measured", "How", "Output"
_EVERY_SECONDS = 10.0


def command(
    ctx: typer.Context,
    model: str | None = typer.Option(
        None, "--model", "-m", help="Model folder, hub id, or 'demo' (instead of a family).", rich_help_panel=_MODEL
    ),
    family: str | None = typer.Option(
        None,
        "--family",
        help=f"A model with random weights: {', '.join(FAMILIES)} (default: {DEFAULT_FAMILY}).",
        rich_help_panel=_MODEL,
    ),
    scale: str | None = typer.Option(
        None, "--scale", help=f"Its size: {', '.join(SCALES)} (default: {DEFAULT_SCALE}).", rich_help_panel=_MODEL
    ),
    variant: str | None = typer.Option(None, "--variant", help="Weight variant, as in fp16.", rich_help_panel=_MODEL),
    no_download: bool = typer.Option(
        False, "--no-download", help="Use only what is on this machine.", rich_help_panel=_MODEL
    ),
    dtype: str = typer.Option("auto", "--dtype", help=f"One of {', '.join(DTYPES)}.", rich_help_panel=_MODEL),
    shape: list[str] = typer.Option(
        [],
        "--shape",
        help="Latents: HxW, TxHxW or BxCxTxHxW (BxCxHxW for pictures); a comma list, or given again.",
        show_default=False,
        rich_help_panel=_WHAT,
    ),
    modes: str = typer.Option("tile,auto", "--modes", help=f"A comma list of {_MODES}.", rich_help_panel=_WHAT),
    operation: str = typer.Option(
        "decode", "--operation", help=f"One of {', '.join(OPERATIONS)}.", rich_help_panel=_WHAT
    ),
    ranks: str | None = typer.Option(
        None,
        "--ranks",
        help="Processes to start here, or a comma list of numbers to compare (default: one for each GPU, else 1).",
        rich_help_panel=_WHAT,
    ),
    device: str = typer.Option("auto", "--device", help=f"One of {', '.join(launch.DEVICES)}.", rich_help_panel=_HOW),
    threads: int | None = typer.Option(
        None, "--threads", help="CPU threads of each rank (default: 1).", rich_help_panel=_HOW
    ),
    tile_size: int | None = typer.Option(
        None, "--tile-size", help="Side of a tile in pixels (default: the VAE's own).", rich_help_panel=_HOW
    ),
    tile_stride: int | None = typer.Option(
        None,
        "--tile-stride",
        help="Pixels between the starts of two tiles (default: three quarters of the tile size).",
        rich_help_panel=_HOW,
    ),
    frames_per_step: int | None = typer.Option(
        None, "--frames-per-step", help="Latent frames of one step of a spatial shard.", rich_help_panel=_HOW
    ),
    repeats: int = typer.Option(3, "--repeats", help="Measured passes of each case.", rich_help_panel=_HOW),
    warmup: int = typer.Option(1, "--warmup", help="Unmeasured passes before them.", rich_help_panel=_HOW),
    timeout: float = typer.Option(
        300, "--timeout", min=1, help="Seconds to wait for ranks that do not come.", rich_help_panel=_HOW
    ),
    json: Path | None = typer.Option(
        None, "--json", help="Write everything, each repeat too, as JSON.", rich_help_panel=_OUT
    ),
    plot: Path | None = typer.Option(
        None, "--plot", help="Draw speed-up and memory over ranks (.png).", rich_help_panel=_OUT
    ),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="No progress.", rich_help_panel=_OUT),
) -> None:
    """Measure how fast, how large and how exact the parallel modes are on this machine."""
    if device not in launch.DEVICES:
        raise UsageError(f"--device is '{device}'; it is one of {', '.join(launch.DEVICES)}")
    if plot is not None:
        _check_plot(plot)
    request = partial(
        BenchRequest,
        family=family,
        scale=scale,
        model=model,
        shapes=parse_shapes(shape),
        modes=parse_modes(modes),
        operation=operation,
        repeats=repeats,
        warmup=warmup,
        threads=threads,
        tile_size=tile_size,
        tile_stride=tile_stride,
        dtype=dtype,
        device=device,
        frames_per_step=frames_per_step,
        variant=variant,
        allow_download=not no_download,
        json=json,
        plot=plot,
    )
    counts = None if ranks is None else parse_ranks(ranks)
    request(ranks=counts or (1,))  # what is wrong with the flags is said before any rank starts
    ctx.obj.append(partial(_run, request, counts, timeout, quiet))


def _check_plot(path: Path) -> None:
    from vaepar.jobs.bench_plot import require_matplotlib

    if path.suffix.lower() != ".png":
        raise UsageError(f"--plot is '{safe(str(path)).plain}'; it is a file name that ends with .png")
    require_matplotlib()


def _run(make: partial[BenchRequest], counts: tuple[int, ...] | None, timeout: float, quiet: bool) -> int:
    world = launch.World.from_environment()
    speaks = world.rank == 0
    set_up_logging(verbose=False, quiet=quiet, speaks=speaks)
    most = launch.choose_ranks(None if counts is None else counts[-1], make.keywords["device"], world)
    request = make(ranks=counts or (most,))
    if most > 1 and not world.launched:
        launch.check_memory(most, _weight_bytes(request))
        return launch.start_ranks(sys.argv[1:], most)
    from vaepar.jobs.bench import SilentProgress, run_bench

    with launch.joined(world, request.device, timeout) as group:
        watching = _progress(quiet) if speaks else SilentProgress()
        try:
            report = run_bench(request, group, watching)
        finally:
            if (stop := getattr(watching, "stop", None)) is not None:
                stop()
        if speaks:
            _print(report)
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


def _progress(quiet: bool) -> Any:
    if quiet:
        from vaepar.jobs.bench import SilentProgress

        return SilentProgress()
    return _BarProgress() if sys.stderr.isatty() else _LineProgress()


def _print(report: BenchReport) -> None:
    """The tables, on standard output."""
    out = console(data=True)
    machine, settings, model = report.machine, report.settings, report.model
    gpus = f"; GPUs: {', '.join(machine['gpus'])}" if machine["gpus"] else ""
    lines = [
        f"{report.operation}: {model['class']} ({model['name']}), {model['dtype']}, {model['parameters']:,} parameters",
        f"machine: {machine['cpu']}, {machine['cores']} core(s), {human_bytes(machine['memory_bytes'])}, "
        f"torch {machine['torch']}, diffusers {machine['diffusers']}; {settings['threads_per_rank']} thread(s) a rank"
        + gpus,
        f"{settings['repeats']} repeat(s) of every case in turn, after {settings['warmup']} warm-up(s); "
        "median [min .. max]",
    ]
    for line in lines:
        out.print(safe(line), soft_wrap=True)
    for result in report.results:
        rows = result.rows()
        out.print()
        out.print(safe(f"latent {'x'.join(map(str, result.shape))}"), soft_wrap=True)
        out.print(_speed_table(rows))
        out.print()
        out.print(_cost_table(rows))
        for measured in result.cases:
            for note in measured.notes:
                out.print(safe(f"{measured.case.name}, {measured.case.ranks} rank(s): {note}"), soft_wrap=True)
    out.print()
    out.print(safe(_LEGEND), soft_wrap=True)
    for note in report.notes:
        out.print(safe(f"note: {note}"), soft_wrap=True)


_LEGEND = (
    "vs one rank: the same work on one rank. vs stock: diffusers tiled for tile, untiled for the rest; same threads: "
    "as many as all ranks have. memory: highest of a rank during a pass less the level before it (weights are not in "
    "it). messages and bytes: of all ranks; rounds: times that a rank waited for others. Differences of pixels in "
    "[-1, 1] from stock diffusers' untiled and serially tiled result."
)


def _speed_table(rows: list[Row]) -> Table:
    table = _table("case", "runs", "ranks", "threads", "seconds", "vs one rank", "efficiency")
    table.add_column("vs stock one thread", justify="right")
    table.add_column("vs stock same threads", justify="right")
    for row in rows:
        seconds = row.failed or "not measured"
        if row.latency is not None:
            seconds = f"{row.latency.median:.3f} [{row.latency.minimum:.3f} .. {row.latency.maximum:.3f}]"
        cells = (
            *_names(row),
            str(row.case.threads),
            seconds,
            _times(row.speed_up),
            "" if row.efficiency is None else f"{row.efficiency:.0%}",
            _times(row.stock_one_thread),
            _times(row.stock_same_threads),
        )
        table.add_row(*(safe(cell) for cell in cells))
    return table


def _cost_table(rows: list[Row]) -> Table:
    table = _table("case", "runs", "ranks", "memory", "vs one rank", "sent", "messages", "rounds")
    for name in ("max abs untiled", "PSNR untiled", "max abs tiled", "PSNR tiled"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = (
            *_names(row),
            "" if row.peak_bytes is None else human_bytes(row.peak_bytes),
            "" if row.peak_to_one_rank is None else f"{row.peak_to_one_rank:.2f}x",
            *((human_bytes(row.sent_bytes), str(row.messages), str(row.rounds)) if row.case.ranks > 1 else ("",) * 3),
            *_gap(row.to_untiled),
            *_gap(row.to_tiled),
        )
        table.add_row(*(safe(cell) for cell in cells))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("case", "runs") else "right", overflow="fold")
    return table


def _names(row: Row) -> tuple[str, str, str]:
    case = row.case
    return case.name, "diffusers" if case.is_stock else case.strategy, str(case.ranks)


def _times(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.value:.2f}x [{ratio.minimum:.2f} .. {ratio.maximum:.2f}]"


def _gap(difference: Difference | None) -> tuple[str, str]:
    if difference is None:
        return "", ""
    if difference.max_abs is None:
        return "not finite", ""
    if difference.max_abs == 0:
        return "0", "inf"
    return f"{difference.max_abs:.1e}", f"{difference.psnr_db:.1f} dB"
