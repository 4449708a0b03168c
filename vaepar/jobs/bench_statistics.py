"""The arithmetic of ``vaepar bench``: what is said about repeated measurements. Pure functions of numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PIXEL_RANGE = 2.0  # decoded pixels lie in [-1, 1]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Repeated values in five numbers: the median, the extremes, and the quartiles between them."""

    median: float
    minimum: float
    maximum: float
    lower_quartile: float
    upper_quartile: float


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio of medians, and the smallest and largest ratio of two values of the same repeat."""

    value: float
    minimum: float
    maximum: float


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far two results are apart.

    Args:
        max_abs: largest absolute difference of a pixel; None when a result holds NaN or infinity.
        psnr_db: peak signal-to-noise ratio, 10 log10(2^2 / mean squared difference), as the range of pixels is 2;
            None when the results are equal (it would be infinite) or not finite.
    """

    max_abs: float | None
    psnr_db: float | None


def summarise(values: Sequence[float]) -> Summary:
    """Median, extremes and quartiles (inclusive method) of at least one value."""
    if not values:
        raise ValueError("no values to summarise; at least one is needed")
    if len(values) == 1:
        lower = upper = values[0]
    else:
        lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Summary(
        median=statistics.median(values),
        minimum=min(values),
        maximum=max(values),
        lower_quartile=lower,
        upper_quartile=upper,
    )


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """The ratio of two medians. Values at the same place belong to one repeat, so what slowed both cancels out.

    Denominators are above 0.
    """
    pairs = [top / bottom for top, bottom in zip(numerators, denominators, strict=True)]
    value = statistics.median(numerators) / statistics.median(denominators)
    return Ratio(value=value, minimum=min(pairs), maximum=max(pairs))


def efficiency(speed_up: float, ranks: int) -> float:
    """The part of ``ranks`` ranks that a speed-up makes use of; 1 is ideal."""
    return speed_up / ranks


def imbalance(busy_seconds: Sequence[float]) -> float | None:
    """Largest through mean time that the ranks were busy; 1 is even, None when nothing was measured."""
    mean = statistics.fmean(busy_seconds) if busy_seconds else 0.0
    return max(busy_seconds) / mean if mean > 0 else None


def load_bound(workloads: Sequence[float]) -> float:
    """The most that ranks with these loads can gain over one rank that has them all."""
    return math.fsum(workloads) / max(workloads)


_ROWS = 64  # float64 of a whole picture would take more memory than the decode that is measured


def psnr(mean_square: float, value_range: float = PIXEL_RANGE) -> float | None:
    """Peak signal-to-noise ratio in dB; None for equal pictures."""
    return 10 * math.log10(value_range**2 / mean_square) if mean_square > 0 else None


def difference(result: Tensor, reference: Tensor) -> Difference:
    """How far two results of the same shape are apart, computed in float64, a part of the rows after another."""
    if result.shape != reference.shape:
        raise ValueError(f"results of shapes {tuple(result.shape)} and {tuple(reference.shape)} cannot be compared")
    largest, squares = 0.0, 0.0
    parts = -(-result.shape[-2] // _ROWS)
    for ours, theirs in zip(result.chunk(parts, -2), reference.chunk(parts, -2), strict=True):
        gap = ours.double() - theirs.double()
        largest = max(largest, float(gap.abs().max()))  # max() keeps the first of two when one is NaN
        squares += float(gap.square().sum())
    if not math.isfinite(squares):
        return Difference(max_abs=None, psnr_db=None)
    return Difference(max_abs=largest, psnr_db=psnr(squares / result.numel()))


__all__ = [
    "PIXEL_RANGE",
    "Difference",
    "Ratio",
    "Summary",
    "difference",
    "efficiency",
    "imbalance",
    "load_bound",
    "psnr",
    "ratio",
    "summarise",
]
