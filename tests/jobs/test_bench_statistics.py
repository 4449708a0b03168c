"""The bench's arithmetic: against NumPy and scikit-image where they know the answer, by hand where nobody does."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from skimage.metrics import peak_signal_noise_ratio

from vaepar.jobs.bench_statistics import (
    difference,
    efficiency,
    imbalance,
    load_bound,
    psnr,
    ratio,
    summarise,
)

times = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20)


@given(times)
def test_a_summary_is_that_of_numpy(values: list[float]) -> None:
    found = summarise(values)
    wanted = [float(np.quantile(values, q)) for q in (0.0, 0.25, 0.5, 0.75, 1.0)]
    got = [found.minimum, found.lower_quartile, found.median, found.upper_quartile, found.maximum]
    assert got == pytest.approx(wanted, rel=1e-12)


def test_a_summary_needs_a_value() -> None:
    with pytest.raises(ValueError, match="at least one"):
        summarise([])


def test_a_ratio_pairs_the_repeats() -> None:
    # The machine was twice as slow in the second repeat: the medians differ by it, the pairs do not.
    found = ratio([4.0, 8.0, 4.0], [2.0, 4.0, 2.0])
    assert (found.value, found.minimum, found.maximum) == (2.0, 2.0, 2.0)
    found = ratio([4.0, 5.0], [2.0, 1.0])
    assert (found.value, found.minimum, found.maximum) == (3.0, 2.0, 5.0)


def test_a_ratio_refuses_unequal_numbers_of_repeats() -> None:
    with pytest.raises(ValueError):
        ratio([1.0, 2.0], [1.0])


@given(times)
def test_a_ratio_to_itself_is_one(values: list[float]) -> None:
    found = ratio(values, values)
    assert (found.value, found.minimum, found.maximum) == (1.0, 1.0, 1.0)


def test_efficiency_imbalance_and_bound() -> None:
    assert efficiency(1.5, 2) == 0.75
    assert imbalance([1.0, 3.0]) == 1.5
    assert imbalance([2.0, 2.0]) == 1.0
    assert imbalance([]) is None
    assert imbalance([0.0, 0.0]) is None
    assert load_bound([7.0, 7.0]) == 2.0
    assert load_bound([6.0, 2.0]) == pytest.approx(4 / 3)


@pytest.mark.parametrize("shape", [(2, 3, 7, 5), (1, 3, 4, 6, 5)])
def test_a_difference_is_that_of_scikit_image(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(shape, generator=generator) * 2 - 1
    b = (a + 0.01 * torch.randn(shape, generator=generator)).clamp(-1, 1)
    found = difference(a, b)
    assert found.max_abs == float((a.double() - b.double()).abs().max())
    wanted = peak_signal_noise_ratio(a.double().numpy(), b.double().numpy(), data_range=2)
    assert found.psnr_db == pytest.approx(wanted, rel=1e-9)


def test_equal_and_broken_results() -> None:
    a = torch.ones(2, 3, 4, 4)
    equal = difference(a, a.clone())
    assert (equal.max_abs, equal.psnr_db) == (0.0, None)
    for bad in (math.nan, math.inf):
        b = a.clone()
        b[1, 2, 3, 3] = bad
        assert difference(a, b) == difference(b, a)
        assert (difference(a, b).max_abs, difference(a, b).psnr_db) == (None, None)
    with pytest.raises(ValueError, match="cannot be compared"):
        difference(a, a[:1])


def test_psnr_by_hand() -> None:
    assert psnr(4.0) == 0.0
    assert psnr(0.04) == pytest.approx(20.0)
    assert psnr(0.01, value_range=1.0) == pytest.approx(20.0)
    assert psnr(0.0) is None
