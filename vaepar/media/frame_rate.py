"""The one frame rate behind a list of frame times, exact, or the constant rate that serves them best."""

from __future__ import annotations

import statistics
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING

from vaepar.media.formats import MAX_FPS, MAX_FPS_TERM

if TYPE_CHECKING:
    from vaepar.media.video_probe import FrameTimes

_COMMON = tuple(Fraction(n) for n in range(1, 241)) + tuple(
    Fraction(n * 1000, 1001) for n in (24, 30, 48, 60, 120, 240)
)
_FINE_TICK = Fraction(1, 2000)  # coarser clocks (Matroska's milliseconds) round 23.976 frames a second
_HIGHEST_RESAMPLED = 120
_MOST_REPEATS = 10


def constant_rate(times: FrameTimes, nominal: Fraction | None, own_clock: bool) -> Fraction | None:
    """Frames per second, if all frames are as far apart as the clock can tell; else None.

    Args:
        nominal: the container's word, preferred where the clock is too coarse to tell two rates apart.
        own_clock: the format counts time in its ticks (GIF), so equal distances are the exact rate.
    """
    ticks = times.ticks if len(times.ticks) > 1 else (0, times.last_duration)
    if ticks[-1] <= 0:
        return _usable(nominal)
    mean = Fraction(len(ticks) - 1) / (ticks[-1] * times.tick)
    distances = {b - a for a, b in pairwise(ticks)}
    if len(distances) == 1 and (own_clock or times.tick < _FINE_TICK):
        return _usable(mean)
    candidates = [nominal, min(_COMMON, key=lambda fps: abs(fps - mean)), mean if len(distances) == 1 else None]
    for fps in candidates:
        if fps is not None and _follows(ticks, times.tick, fps):
            return _usable(fps)
    return None


def resampled_rate(times: FrameTimes, nominal: Fraction | None) -> Fraction:
    """The constant rate at which frames of varying distance are read.

    The highest common rate, at which every frame keeps its time, where that is a sane one (GIF); else the usual
    distance of two frames, so that motion stays as it was recorded; else the average.
    """
    distances = [b - a for a, b in pairwise(times.ticks) if b > a]
    if not distances:
        return _usable(nominal) or Fraction(25)
    mean = Fraction(len(times.ticks) - 1) / (times.ticks[-1] * times.tick)
    common = 1 / (reduce(gcd, distances) * times.tick)
    if common <= min(Fraction(_HIGHEST_RESAMPLED), mean * _MOST_REPEATS):
        return _usable(common) or mean.limit_denominator(1001)
    usual = 1 / (Fraction(statistics.median_low(distances)) * times.tick)
    nearest = min(_COMMON, key=lambda fps: abs(fps - usual))
    if usual <= _HIGHEST_RESAMPLED * Fraction(101, 100) and usual <= mean * _MOST_REPEATS:
        return nearest if abs(nearest - usual) * 50 <= usual else usual.limit_denominator(1001)
    return max(Fraction(1, 1001), min(mean, Fraction(MAX_FPS)).limit_denominator(1001))


def _follows(ticks: tuple[int, ...], tick: Fraction, fps: Fraction) -> bool:
    """Whether frame i is shown within one tick of ``i / fps``."""
    distance = 1 / (fps * tick)
    num, den = distance.numerator, distance.denominator
    return all(abs(t * den - i * num) <= den for i, t in enumerate(ticks))


def _usable(fps: Fraction | None) -> Fraction | None:
    """``fps`` as one that an output can have exactly."""
    if fps is None or not 0 < fps <= MAX_FPS:
        return None
    return fps if max(fps.numerator, fps.denominator) <= MAX_FPS_TERM else fps.limit_denominator(1001)
