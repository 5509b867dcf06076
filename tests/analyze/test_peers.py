"""Medians, MADs, trends and slopes of many groups at once are those that scipy finds one by one."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]  # it has no types
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktape.analyze.findings.survey import binades, codes_of, deviations_of, medians_of, robust_z, sizes_of
from ranktape.analyze.findings.thresholds import NORMAL_MAD
from ranktape.analyze.questions.trend import kendall_z, sen_slope

PAIRS = st.lists(st.tuples(st.integers(0, 3), st.floats(-50, 50, width=32)), min_size=1, max_size=30)


@settings(max_examples=40, deadline=None)
@given(PAIRS)
def test_deviations_are_those_of_scipy(pairs: list[tuple[int, float]]) -> None:
    groups = np.array([group for group, _ in pairs])
    values = np.array([value for _, value in pairs], dtype=np.float64)
    apart, mads = deviations_of(groups, values)
    scores = robust_z(apart, mads, floor=0.25)
    for group in set(groups.tolist()):
        mine = groups == group
        own = values[mine]
        mad = scipy.stats.median_abs_deviation(own)
        assert mads[mine] == pytest.approx(np.full(own.size, mad))
        expected = (own - np.median(own)) / (NORMAL_MAD * max(0.25, mad))
        assert scores[mine] == pytest.approx(expected)
        assert (sizes_of(groups)[mine] == own.size).all()


def test_the_factor_is_that_of_a_normal_distribution() -> None:
    assert pytest.approx(1 / scipy.stats.norm.ppf(0.75), abs=1e-4) == NORMAL_MAD


def test_nothing_has_no_peers() -> None:
    assert medians_of(np.zeros(0, dtype=np.int64), np.zeros(0)).size == 0


def test_codes_tell_rows_apart() -> None:
    first = np.array(["a", "b", "a", "a"], dtype=object)
    second = np.array([1.0, 1.0, np.nan, np.nan])
    assert codes_of(first, second).tolist() == [0, 2, 1, 1]


def test_binades_of_what_has_none() -> None:
    assert binades(np.array([8.0, 0.25, 0, -1, np.inf, np.nan])).tolist()[:2] == [3, -2]
    assert np.isnan(binades(np.array([0, -1, np.inf, np.nan]))).all()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-10, 10, width=32), min_size=3, max_size=12, unique=True))
def test_trends_are_those_of_scipy(values: list[float]) -> None:
    times, array = np.arange(len(values)) * 10, np.array(values, dtype=np.float64)
    assert sen_slope(times, array) == pytest.approx(scipy.stats.theilslopes(array, times)[0])
    tau = scipy.stats.kendalltau(times, array).statistic
    assert np.sign(kendall_z(array)) in {0, np.sign(tau)}
    count = len(values)
    total = tau * count * (count - 1) / 2
    spread = (count * (count - 1) * (2 * count + 5) / 18) ** 0.5
    assert abs(kendall_z(array)) == pytest.approx(max(0.0, abs(total) - 1) / spread)
