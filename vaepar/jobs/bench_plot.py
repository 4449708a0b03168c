"""A picture of a bench: speed-up and memory over the number of ranks. Needs matplotlib, an extra of the package."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vaepar.atomic import write_whole
from vaepar.errors import UsageError
from vaepar.jobs.bench_plan import alone_of
from vaepar.jobs.bench_report import BenchReport, BenchRow, ShapeResult

_WIDTH, _HEIGHT, _DPI = 10.0, 4.0, 120


def require_matplotlib() -> None:
    """Raise :class:`UsageError` when the library is missing, before anything is measured."""
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed; pip install 'vaepar[plot]' brings it")


def curves(result: ShapeResult, modes: Sequence[str]) -> dict[str, list[BenchRow]]:
    """The measured rows of each mode by number of ranks. They begin with the one-rank row that does the same work as
    those of several ranks: ``auto`` on one rank may do other work."""
    rows = [row for row in result.rows() if row.latency is not None]
    found: dict[str, list[BenchRow]] = {}
    for mode in modes:
        own = sorted((row for row in rows if row.case.name == mode), key=lambda row: row.case.ranks)
        shared = [row for row in own if row.case.ranks > 1]
        if shared:
            alone = alone_of(shared[-1].case, [row.case for row in rows])
            own = [row for row in rows if row.case == alone] + shared
        if own:
            found[mode] = own
    return found


def write_plot(path: Path, report: BenchReport) -> None:
    """Write the picture as PNG, whole or not at all: a line of two panels for each latent.

    Raises:
        UsageError: matplotlib is missing. OutputError: the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT * len(report.results)), dpi=_DPI, layout="constrained")
    panels = figure.subplots(len(report.results), 2, squeeze=False)
    for result, (speed, memory) in zip(report.results, panels, strict=True):
        _draw(result, report.settings["modes"], speed, memory, sorted({1, *report.settings["ranks"]}))
    machine = report.machine
    figure.suptitle(f"{report.model['name']}, {report.model['dtype']}, {machine['cpu']}, {machine['cores']} core(s)")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_whole(path, picture.getvalue())


def _draw(result: ShapeResult, modes: Sequence[str], speed: Any, memory: Any, counts: list[int]) -> None:
    title = "x".join(map(str, result.shape))
    speed.plot(counts, counts, linestyle="--", color="grey", label="ideal")
    for name, rows in curves(result, modes).items():
        with_ratio = [(row.case.ranks, row.speed_up) for row in rows if row.speed_up is not None]
        values = [ratio.value for _, ratio in with_ratio]
        spread = [
            [ratio.value - min(ratio.value, ratio.minimum) for _, ratio in with_ratio],
            [max(ratio.value, ratio.maximum) - ratio.value for _, ratio in with_ratio],
        ]
        speed.errorbar([ranks for ranks, _ in with_ratio], values, yerr=spread, marker="o", capsize=3, label=name)
        peaks = [(row.case.ranks, row.peak_bytes / 2**20) for row in rows if row.peak_bytes is not None]
        (line,) = memory.plot([ranks for ranks, _ in peaks], [peak for _, peak in peaks], marker="o", label=name)
        for start in (peak for ranks, peak in peaks if ranks == 1):
            ideal = [start / count for count in counts]
            memory.plot(counts, ideal, linestyle="--", color=line.get_color(), alpha=0.6, label=f"{name}, ideal")
    for panel, label in ((speed, "times as fast as one rank"), (memory, "peak activation memory of a rank, MiB")):
        panel.set(title=title, xlabel="ranks", ylabel=label, xticks=counts, ylim=(0, None))
        panel.grid(alpha=0.3)
        panel.legend()


__all__ = ["curves", "require_matplotlib", "write_plot"]
