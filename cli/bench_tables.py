"""The tables of ``vaepar bench``."""

from __future__ import annotations

from rich.table import Table

from vaepar.jobs.bench_report import BenchReport, BenchRow
from vaepar.jobs.bench_statistics import Difference, Ratio

from .output import console, human_bytes, safe


def print_report(report: BenchReport) -> None:
    """Print a bench to standard output: two tables for each latent, and what to know about them."""
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
    "it); estimate: what a plan expects of it. messages and bytes: of all ranks; rounds: times that a "
    "rank waited for others. Differences of pixels in [-1, 1] (encode: of the posterior's means and log variances) "
    "from stock diffusers' untiled and serially tiled result."
)


def _speed_table(rows: list[BenchRow]) -> Table:
    table = _table("case", "ranks x threads", "seconds", "vs one rank", "efficiency")
    table.add_column("vs stock one thread", justify="right")
    table.add_column("vs stock same threads", justify="right")
    for row in rows:
        seconds = row.failed or "not measured"
        if row.latency is not None:
            seconds = f"{row.latency.median:.3f} [{row.latency.minimum:.3f} .. {row.latency.maximum:.3f}]"
        cells = (
            *_names(row),
            seconds,
            _times(row.speed_up),
            "" if row.efficiency is None else f"{row.efficiency:.0%}",
            "" if row.stock_one_thread is None else f"{row.stock_one_thread.value:.2f}x",
            "" if row.stock_same_threads is None else f"{row.stock_same_threads.value:.2f}x",
        )
        table.add_row(*(safe(cell) for cell in cells))
    return table


def _cost_table(rows: list[BenchRow]) -> Table:
    table = _table(
        "case", "ranks x threads", "memory", "estimate", "vs one rank", "vs stock", "sent", "messages", "rounds"
    )
    for name in ("max abs untiled", "PSNR untiled", "max abs tiled", "PSNR tiled"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = (
            *_names(row),
            *("" if size is None else human_bytes(size) for size in (row.peak_bytes, row.estimated_bytes)),
            *("" if part is None else f"{part:.2f}x" for part in (row.peak_to_one_rank, row.peak_to_stock)),
            *((human_bytes(row.sent_bytes), str(row.messages), str(row.rounds)) if row.case.ranks > 1 else ("",) * 3),
            *_gap(row.to_untiled),
            *_gap(row.to_tiled),
        )
        table.add_row(*(safe(cell) for cell in cells))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name == "case" else "right", no_wrap=name == "case")
    return table


def _names(row: BenchRow) -> tuple[str, str]:
    case = row.case
    name = case.name if case.is_stock or case.name == case.strategy else f"{case.name}: {case.strategy}"
    return name, f"{case.ranks} x {case.threads}"


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
