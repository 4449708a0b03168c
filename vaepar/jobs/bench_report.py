"""The result of a bench: raw measurements, and the rows that are read off them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vaepar import __version__
from vaepar.atomic import create_temp_file, discard, output_error, write_whole
from vaepar.jobs.bench_plan import Case, alone_of, stock_of
from vaepar.jobs.bench_statistics import Difference, Ratio, Summary, efficiency, imbalance, ratio, summarise

SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured pass of one case. Lists have a place for each rank of the run.

    Args:
        repeat: which repeat it belongs to.
        seconds: wall time of the pass on the slowest rank.
        rank_seconds: wall time on each rank; 0 where it slept.
        rank_cpu_seconds: processor time of each rank's process, asleep or not.
        peak_bytes: highest memory of each rank during the pass less its level before; None where it is not measured.
        sent_bytes, messages, rounds: what each rank sent, and how often it waited for others.
    """

    repeat: int
    seconds: float
    rank_seconds: list[float]
    rank_cpu_seconds: list[float]
    peak_bytes: list[int | None]
    sent_bytes: list[int]
    messages: list[int]
    rounds: list[int]


@dataclass(kw_only=True)
class CaseResult:
    """All that was measured of one case.

    Args:
        to_untiled, to_tiled: how far its picture is from stock diffusers' untiled and serially tiled one.
        estimated_bytes: what a plan would expect the peak to be; None for stock diffusers.
        failed: why there are no (more) measurements, in one line.
        notes: what explains the figures.
    """

    case: Case
    estimated_bytes: int | None = None
    samples: list[Sample] = field(default_factory=list)
    to_untiled: Difference | None = None
    to_tiled: Difference | None = None
    failed: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [sample.seconds for sample in self.samples]

    @property
    def peak_bytes(self) -> int | None:
        """The highest peak of any rank in any repeat."""
        peaks = [peak for sample in self.samples for peak in sample.peak_bytes if peak is not None]
        return max(peaks, default=None)


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """What is said about one case.

    Args:
        latency: seconds of one pass.
        speed_up: over one rank that does the same work; ``efficiency`` is its part of the number of ranks.
        stock_one_thread, stock_same_threads: speed-up over stock diffusers (tiled for tile, else untiled) with one
            thread, and with as many threads as all ranks have together.
        peak_bytes: highest activation memory of a rank; ``peak_to_one_rank`` is its ratio to that of one rank that
            does the same work, ``peak_to_stock`` to that of stock diffusers with one thread.
        estimated_bytes: what a plan would expect that peak to be.
        sent_bytes, messages: of all ranks in one pass; ``rounds``: of the rank that waited most often.
        imbalance: busy time of the busiest rank through the mean.
    """

    case: Case
    latency: Summary | None = None
    speed_up: Ratio | None = None
    efficiency: float | None = None
    stock_one_thread: Ratio | None = None
    stock_same_threads: Ratio | None = None
    peak_bytes: int | None = None
    peak_to_one_rank: float | None = None
    peak_to_stock: float | None = None
    estimated_bytes: int | None = None
    sent_bytes: int = 0
    messages: int = 0
    rounds: int = 0
    imbalance: float | None = None
    to_untiled: Difference | None = None
    to_tiled: Difference | None = None
    failed: str | None = None


@dataclass(kw_only=True)
class ShapeResult:
    """One latent, [B, C, H, W] or [B, C, T, H, W], and all its cases."""

    shape: tuple[int, ...]
    cases: list[CaseResult] = field(default_factory=list)

    def rows(self) -> list[BenchRow]:
        return [_row(result, self.cases) for result in self.cases]


@dataclass(kw_only=True)
class BenchReport:
    """A whole bench.

    Args:
        machine, model, settings: what was measured, on what and how, as plain values.
        notes: what to know before reading the figures.
    """

    operation: str
    machine: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    results: list[ShapeResult] = field(default_factory=list)

    def idle_share(self) -> float | None:
        """The part of a core that a sleeping rank used during the measured passes; None when no rank ever slept."""
        used = slept = 0.0
        for result in self.results:
            for measured in result.cases:
                for sample in measured.samples:
                    idle = sample.rank_cpu_seconds[measured.case.ranks :]
                    used += sum(idle)
                    slept += len(idle) * sample.seconds
        return used / slept if slept > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values: each repeat raw, and the rows. Keys only change together with ``schema``."""
        return {
            "vaepar": __version__,
            "schema": SCHEMA,
            "operation": self.operation,
            "machine": self.machine,
            "model": self.model,
            "settings": self.settings,
            "notes": self.notes,
            "results": [
                {
                    "shape": list(result.shape),
                    "cases": [
                        asdict(row)
                        | {"samples": [asdict(sample) for sample in measured.samples], "notes": measured.notes}
                        for row, measured in zip(result.rows(), result.cases, strict=True)
                    ],
                }
                for result in self.results
            ],
        }


def write_json(path: Path, report: BenchReport) -> None:
    """Write a report whole or not at all. Raises :class:`OutputError`."""
    text = json.dumps(report.to_json(), indent=2, allow_nan=False) + "\n"
    write_whole(path, text.encode())


def probe(path: Path) -> None:
    """Raise :class:`OutputError` when a file cannot be written there: better before a long run than after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise output_error(error, path, "write") from error
    discard(create_temp_file(path))


def _row(result: CaseResult, results: Sequence[CaseResult]) -> BenchRow:
    case = result.case
    if not result.samples:
        return BenchRow(case=case, to_untiled=result.to_untiled, to_tiled=result.to_tiled, failed=result.failed)
    cases = [other.case for other in results]
    alone = None if case.is_stock else _find(alone_of(case, cases), results)
    speed_up = _ratio(alone, result)
    stock = _find(stock_of(case, cases, 1), results)
    total_threads = case.ranks * case.threads
    first = result.samples[0]
    return BenchRow(
        case=case,
        latency=summarise(result.seconds),
        speed_up=speed_up,
        efficiency=None if speed_up is None else efficiency(speed_up.value, case.ranks),
        stock_one_thread=_ratio(stock, result),
        stock_same_threads=_ratio(_find(stock_of(case, cases, total_threads), results), result),
        peak_bytes=result.peak_bytes,
        peak_to_one_rank=_peak_ratio(result, alone),
        peak_to_stock=_peak_ratio(result, stock),
        estimated_bytes=result.estimated_bytes,
        sent_bytes=sum(first.sent_bytes),
        messages=sum(first.messages),
        rounds=max(first.rounds),
        imbalance=imbalance(first.rank_cpu_seconds[: case.ranks]),
        to_untiled=result.to_untiled,
        to_tiled=result.to_tiled,
        failed=result.failed,
    )


def _find(case: Case | None, results: Sequence[CaseResult]) -> CaseResult | None:
    return next((result for result in results if result.case == case), None)


def _ratio(slower: CaseResult | None, faster: CaseResult) -> Ratio | None:
    if slower is None or len(slower.samples) != len(faster.samples):
        return None
    return ratio(slower.seconds, faster.seconds)


def _peak_ratio(result: CaseResult, other: CaseResult | None) -> float | None:
    ours, theirs = result.peak_bytes, None if other is None else other.peak_bytes
    return ours / theirs if ours is not None and theirs else None


__all__ = ["SCHEMA", "BenchReport", "BenchRow", "CaseResult", "Sample", "ShapeResult", "probe", "write_json"]
