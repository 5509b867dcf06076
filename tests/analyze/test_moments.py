"""Are the statistics those that a direct computation gives, for every dtype, for NaN and infinities and for nothing?"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from ranktape.analyze.numerics.histograms.histogram import Histogram, count_values
from ranktape.analyze.numerics.histograms.moments import statistics_of, statistics_of_histogram
from ranktape.storage.format.dtypes import DTYPES
from ranktape.storage.format.statistics import STATISTICS, Statistics, exponent_of, merge_statistics

Array: TypeAlias = np.ndarray[Any, Any]


def exact(array: Array) -> dict[str, float]:
    """The sums, in whole numbers and fractions: slow, and without any rounding before the end."""
    wide = np.abs(array.astype(np.complex128)) if array.dtype.kind == "c" else array.astype(np.float64)
    values = [Fraction(float(value)) for value in wide.reshape(-1) if math.isfinite(value)]
    count = len(values)
    unit = Fraction(2) ** exponent_of(float(max(map(abs, values))))
    mean = sum(values) / count
    return {
        "num_elements": array.size,
        "num_finite": count,
        "sum": float(sum(values) / unit),
        **{f"moment_{power}": float(sum(((value - mean) / unit) ** power for value in values)) for power in (2, 3, 4)},
        "sum_magnitudes": float(sum(map(abs, values)) / unit),
        "minimum": float(min(values)),
        "maximum": float(max(values)),
        "absmax": float(max(map(abs, values))),
    }


def drawn(dtype: str, count: int, *, mean: float = 0.0, deviation: float = 1.0) -> Array:
    row = DTYPES[dtype]
    values = np.random.default_rng(0).normal(mean, deviation, count)
    if row.is_complex:
        return (values + 1j * values[::-1]).astype(row.numpy_dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        return (values if row.is_floating else np.abs(10 * values)).astype(row.numpy_dtype)


def assert_close(found: Statistics, expected: dict[str, float]) -> None:
    count, spread = expected["num_finite"], math.sqrt(expected["moment_2"] / expected["num_finite"])
    for name in STATISTICS:
        # What cancels in a sum is as uncertain as the sum of its magnitudes, which is this large.
        power = int(name[-1]) if name.startswith("moment") else 1
        scale = count * spread**power if power > 1 else expected["sum_magnitudes"]
        assert getattr(found, name) == pytest.approx(expected[name], rel=1e-12, abs=1e-12 * scale), name


def test_every_dtype_gives_the_exact_sums() -> None:
    for dtype, count in itertools.product(DTYPES, [1, 2, 7, 700]):
        array = drawn(dtype, count)
        wanted = exact(array)
        assert_close(statistics_of(array), wanted)
        # Repeated, as fractions take their time.
        wanted |= {name: 100 * wanted[name] for name in STATISTICS[:7]}
        assert_close(statistics_of(np.tile(array, 100)), wanted)


def test_nothing_is_lost_where_the_mean_is_large() -> None:
    array = drawn("float64", 100_000, mean=1e6, deviation=1e-3)
    found = statistics_of(array)
    assert found.std == pytest.approx(float(array.std()), rel=1e-7)
    by_powers = float((array**2).mean() - array.mean() ** 2)
    assert abs(by_powers - 1e-6) > 1e-6, "sums of powers would have done, too"


def test_what_follows_is_what_numpy_says() -> None:
    array = np.random.default_rng(1).gamma(2.0, size=200_000).astype(np.float32)
    wide = array.astype(np.float64)
    found = statistics_of(array)
    centred = wide - wide.mean()
    assert found.mean == pytest.approx(wide.mean(), rel=1e-12)
    assert found.mean_magnitude == pytest.approx(np.abs(wide).mean(), rel=1e-12)
    assert found.variance == pytest.approx(wide.var(), rel=1e-11)
    assert found.std == pytest.approx(wide.std(), rel=1e-11)
    assert found.rms == pytest.approx(math.sqrt((wide**2).mean()), rel=1e-11)
    assert found.norm == pytest.approx(np.linalg.norm(wide), rel=1e-11)
    assert found.skewness == pytest.approx((centred**3).mean() / wide.std() ** 3, rel=1e-9)
    assert found.kurtosis == pytest.approx((centred**4).mean() / wide.std() ** 4, rel=1e-9)
    assert found.skewness == pytest.approx(math.sqrt(2), abs=0.05)
    assert found.kurtosis == pytest.approx(6, abs=0.5)


def test_nan_and_infinities_are_elements_and_nothing_else() -> None:
    for dtype in (np.float32, np.float16, DTYPES["bfloat16"].numpy_dtype, np.float64):
        array = np.array([1, np.nan, 2, np.inf, 3, -np.inf, -0.0], dtype=dtype)
        for repeated in (array, np.tile(array, 10_000)):
            found = statistics_of(repeated)
            assert found.num_elements == repeated.size
            assert found.num_finite == 4 * repeated.size // 7
            assert (found.mean, found.minimum, found.maximum) == (1.5, 0.0, 3.0)


def test_where_nothing_is_finite_there_is_no_mean() -> None:
    for array in [np.empty((0, 3)), np.full(5, np.nan), np.array(np.inf, dtype=np.float32)]:
        found = statistics_of(array)
        assert (found.num_elements, found.num_finite, found.sum, found.moment_2) == (array.size, 0, 0.0, 0.0)
        assert (found.minimum, found.maximum, found.absmax) == (None, None, None)
        assert (found.mean, found.variance, found.std, found.rms, found.skewness, found.kurtosis) == (None,) * 6
        assert found.norm == 0.0
        assert Statistics.from_vector(found.to_vector()) == found


@pytest.mark.parametrize("count", [1, 3, 100_000])
@pytest.mark.parametrize("value", [0.0, -0.0, 0.1, -3e38])
def test_equal_values_have_no_deviation(value: float, count: int) -> None:
    for dtype in (np.float32, np.float64):
        found = statistics_of(np.full(count, value, dtype=dtype))
        assert (found.variance, found.std, found.skewness, found.kurtosis) == (0.0, 0.0, None, None)
        assert found.mean == pytest.approx(value)
        assert found.rms == pytest.approx(abs(value))


def test_the_largest_float64_are_known() -> None:
    found = statistics_of(np.array([1e308, -1e308, 1e308, np.inf, 5.0]))
    assert (found.maximum, found.num_finite) == (1e308, 4)
    assert found.mean == pytest.approx(0.25e308)
    assert found.std == pytest.approx(math.sqrt(11) * 0.25e308)
    assert found.variance is None
    assert Statistics.from_vector(found.to_vector()) == found
    assert statistics_of(np.array([3e38, -3e38], dtype=np.float32)).kurtosis == pytest.approx(1.0)


@given(
    array=npst.arrays(np.float64, st.integers(1, 200), elements=st.floats(-1e6, 1e6)),
    cuts=st.lists(st.integers(0, 200), max_size=5),
)
def test_statistics_of_parts_give_those_of_the_whole(array: Array, cuts: list[int]) -> None:
    parts = [statistics_of(part) for part in np.split(array, sorted(min(cut, array.size) for cut in cuts))]
    whole, merged = exact(array), merge_statistics(parts)
    scale = max(math.ldexp(whole["absmax"], -merged.exponent), 1e-300)
    for name in STATISTICS:
        power = int(name[-1]) if name.startswith("moment") else 1
        assert getattr(merged, name) == pytest.approx(whole[name], rel=1e-9, abs=1e-12 * array.size * scale**power)
    assert merge_statistics([]) == statistics_of(np.empty(0))
    assert parts[0].merge(statistics_of(np.empty(0))) == parts[0]


def test_a_histogram_gives_the_statistics_of_what_it_counted() -> None:
    array = drawn("bfloat16", 100_000, mean=3)
    array[:3] = [np.nan, np.inf, -np.inf]
    assert_close(statistics_of_histogram(count_values(array)), exact(array[:3000]) | vars_of(array))
    empty = Histogram(dtype=array.dtype, counts=np.zeros(1 << 16, dtype=np.int64))
    assert statistics_of_histogram(empty) == statistics_of(np.empty(0))


def vars_of(array: Array) -> dict[str, float]:
    """The statistics by another way: the values themselves, in blocks."""
    found = statistics_of(array.astype(np.float32))
    return {name: getattr(found, name) for name in STATISTICS}


def test_layout_and_shape_do_not_matter() -> None:
    array = drawn("float32", 24).reshape(2, 3, 4)
    assert statistics_of(array.transpose(2, 0, 1)).moment_4 == pytest.approx(statistics_of(array).moment_4)
    assert statistics_of(np.array(2.0)).mean == 2.0
    assert statistics_of(array[:, ::2]).num_elements == 16


def test_sums_that_were_stored_undivided_are_divided() -> None:
    for factor in [2.0**-400, 2.0**200]:
        values = np.array([1.0, 5.0, -2.0])
        plain, scaled = statistics_of(values), statistics_of(values * factor)
        vector = plain.to_vector()
        for name, power in {"sum": 1, "moment_2": 2, "moment_3": 3, "moment_4": 4, "sum_magnitudes": 1}.items():
            vector[STATISTICS.index(name)] *= factor**power if factor > 1 or power < 3 else 0
        vector[-3:] *= factor
        read = Statistics.from_vector(vector)
        assert (read.mean, read.std, read.norm) == (scaled.mean, scaled.std, scaled.norm)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("offset", [0, 3])
def test_at_the_ends_of_float64_every_figure_is_right(offset: int, parts: int) -> None:
    for exponent in range(-1070, 1020, 7):
        array = np.ldexp(np.array([1.0, -0.5, 0.25, 0.75]) + offset, exponent)
        found = merge_statistics([statistics_of(part) for part in (*np.split(array, parts), np.array([np.nan]))])
        exact = [Fraction(value) / Fraction(2) ** exponent for value in array.tolist()]
        mean = sum(exact) / len(exact)
        second, third, fourth = (float(sum((one - mean) ** power for one in exact) / len(exact)) for power in (2, 3, 4))
        figures = {
            "std": math.ldexp(math.sqrt(second), exponent),
            "skewness": third / second**1.5,
            "kurtosis": fourth / second**2,
        }
        for name, expected in figures.items():
            # Subnormal figures have fewer digits.
            assert getattr(found, name) == pytest.approx(expected, rel=1e-9, abs=5e-324), (exponent, name)
