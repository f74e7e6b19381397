"""The t-interval against scipy's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from glocal.paper.student import interval, quantile, within


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 6, 9, 24, 25, 101])
def test_distribution_and_quantiles(freedom: int) -> None:
    for t in (0.0, 0.3, 1.0, 2.5, 40.0):
        assert within(t, freedom) == pytest.approx(1 - 2 * stats.t.sf(t, freedom), abs=1e-12)
    for level in (0.5, 0.9, 0.95, 0.999):
        assert quantile(level, freedom) == pytest.approx(stats.t.ppf((1 + level) / 2, freedom), rel=1e-9)


def test_interval_of_a_mean() -> None:
    values = np.random.default_rng(0).normal(3, 2, 5).tolist()
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert interval(values) == pytest.approx(tuple(expected))
    assert all(map(math.isnan, interval([1.0])))
