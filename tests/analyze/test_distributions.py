"""Are bins, fits, occupancies and distances those that numpy and scipy compute from the raw tensors?"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.spatial.distance  # type: ignore[import-untyped]  # it has no types
import scipy.stats  # type: ignore[import-untyped]  # it has no types

from ranktape.analyze.engine.digests import digests, merge_digests
from ranktape.analyze.numerics.digest import MAX_RANK_ERROR, SUMMARY_CELLS, Digest
from ranktape.analyze.numerics.distributions import (
    NARROW_FORMATS,
    aligned_exponent,
    binades,
    count_between,
    distance,
    fit_normal,
    format_range,
    linear_bins,
    log2_bins,
)
from ranktape.analyze.numerics.formats import FORMATS, round_to
from ranktape.analyze.numerics.histograms.moments import statistics_of
from tests.analyze.every_tensor import COMPLEX, REAL, Array, digest_of_array, every, filled, numbers_of, stored

EVERY = pytest.mark.parametrize("dtype", REAL + COMPLEX)
EVERY_REAL = pytest.mark.parametrize("dtype", REAL)


def finite_of(array: Array) -> Array:
    numbers = numbers_of(array)
    return numbers[np.isfinite(numbers)]


@EVERY_REAL
@pytest.mark.parametrize("num_bins", [1, 7, 64])
def test_linear_bins_are_those_of_numpy(dtype: str, num_bins: int) -> None:
    for array, digest in every(dtype):
        assert_linear_bins(array, digest, num_bins=num_bins)


def assert_linear_bins(array: Array, digest: Digest, *, num_bins: int) -> None:
    bins, values = linear_bins(digest, num_bins), finite_of(array)
    if not values.size:
        assert bins.edges.size == bins.counts.size == bins.density().size == 0
        return
    counts, edges = np.histogram(values, bins=bins.edges)
    assert bins.counts.tolist() == counts.tolist()
    assert bins.num_negative.tolist() == np.histogram(values[values < 0], bins=bins.edges)[0].tolist()
    assert bins.num_values == values.size
    assert np.allclose(bins.density(), np.histogram(values, bins=edges, density=True)[0], rtol=1e-12, atol=0)
    assert np.allclose(bins.relative_density().max(), 1)
    if values.min() < values.max():
        assert np.allclose(bins.edges, np.histogram_bin_edges(values, bins=num_bins), rtol=1e-12)


@EVERY
@pytest.mark.parametrize("per_binade", [1, 5])
def test_binades_are_those_of_frexp(dtype: str, per_binade: int) -> None:
    for array, digest in every(dtype):
        assert_binades(array, digest, per_binade=per_binade)


def assert_binades(array: Array, digest: Digest, *, per_binade: int) -> None:
    bins, values = log2_bins(digest, per_binade), finite_of(array)
    magnitudes = np.abs(values[values != 0])
    exponents = np.frexp(magnitudes)[1] - 1
    first, last = (exponents.min(), exponents.max()) if exponents.size else (0, -1)
    expected = [int((exponents == exponent).sum()) for exponent in range(first, last + 1)]
    assert bins.counts.reshape(-1, per_binade).sum(axis=1).tolist() == expected
    assert bins.num_negative.sum() == (values < 0).sum()
    assert bins.edges[::per_binade].tolist() == [math.ldexp(1, e) for e in range(first, last + 2)] * bool(expected)
    assert (bins.density() * bins.widths).sum() == pytest.approx(1 if expected else 0)
    assert digest.is_exact
    if expected:
        assert bins.counts.tolist() == np.histogram(magnitudes, bins=bins.edges)[0].tolist()


def test_several_tensors_in_the_same_bins() -> None:
    array = np.array([-2, -1, 0, 1, 2, 3, np.nan, np.inf], dtype=np.float16)
    bins = count_between(digest_of_array(array), np.array([-1.0, 0.0, 2.0]))
    assert bins.counts.tolist() == [1, 3]


def test_bins_of_a_constant_hold_it() -> None:
    for value in [0.0, 5e-324, -3.0, 1e20, 1.7976931348623157e308]:
        digest = digest_of_array(np.full(5, value))
        bins = linear_bins(digest, 8)
        assert bins.num_values == 5
        assert np.isfinite(bins.edges).all()
        assert np.isfinite(bins.density()).all()
        assert (np.diff(bins.edges) > 0).all()


def test_ends_beyond_each_other_by_more_than_any_number() -> None:
    digest = digest_of_array(np.array([-1.5, 1.5, 0.25]))
    bins = linear_bins(digest, 4, low=-1.7e308, high=1.7e308)
    assert np.isfinite(bins.edges).all()
    assert bins.counts.tolist() == [0, 1, 2, 0]


MANY = 250_000

DISTRIBUTIONS: dict[str, Callable[[np.random.Generator], Array]] = {
    "normal": lambda rng: rng.standard_normal(MANY),
    "norm weights": lambda rng: 1 + 0.02 * rng.standard_normal(MANY),
    "far offset": lambda rng: 1e6 + rng.standard_normal(MANY),
    "two offsets": lambda rng: rng.choice([-3e4, 5.0], MANY) + 1e-3 * rng.standard_normal(MANY),
    "heavy tails": lambda rng: rng.standard_cauchy(MANY),
    "outlier at an offset": lambda rng: np.append(1 + 1e-3 * rng.standard_normal(MANY - 1), 1e30),
    "mixed scales": lambda rng: rng.standard_normal(MANY) * 10.0 ** rng.integers(-30, 30, MANY),
    "half zeros": lambda rng: np.maximum(rng.standard_normal(MANY), 0),
    "discrete": lambda rng: rng.integers(0, 40, MANY) / 7,
    "uniform": lambda rng: rng.random(MANY) - 0.3,
}
"""Of each so many values that a digest cannot keep them all."""


@functools.cache
def of_many(name: str, dtype: str) -> tuple[Array, Digest, Digest]:
    """Many values, their digest, and the one that is merged of seven unequal parts of them."""
    with np.errstate(over="ignore"):
        array = DISTRIBUTIONS[name](np.random.default_rng(1)).astype(dtype)
    *parts, whole = digests_from_columns([*np.split(array, [10, 500, 40_000, 90_000, 90_001, 200_000]), array])
    return array.astype(np.float64), whole, merge_digests(parts)


@pytest.mark.parametrize("name", list(DISTRIBUTIONS))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_of_many_wide_values_ranks_are_within_the_bound(name: str, dtype: str) -> None:
    values, *found = of_many(name, dtype)
    ascending = np.sort(values)
    numbers = np.concatenate([ascending, np.nextafter(ascending, -np.inf)])
    ranks = np.searchsorted(ascending, numbers, side="right") / values.size
    for digest in found:
        # All were kept only of the discrete one, and of what float32 has so few numbers for.
        assert digest.is_exact == (np.unique(values).size <= 2 * SUMMARY_CELLS)
        assert digest.counts.sum() == values.size
        assert np.isin(digest.values, ascending).all()
        assert (digest.values[0], digest.values[-1]) == (ascending[0], ascending[-1])
        ends = np.append(0, np.cumsum(digest.counts))
        known = ends[np.searchsorted(digest.values, numbers, side="right")] / values.size
        assert np.abs(known - ranks).max() <= MAX_RANK_ERROR
        for percent in (0.1, 1, 50, 99, 99.9):
            (quantile,) = digest.quantiles([percent / 100])
            assert quantile == pytest.approx(np.quantile(values, percent / 100, method="inverted_cdf"), rel=2.0**-8)


@pytest.mark.parametrize("name", list(DISTRIBUTIONS))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_of_many_wide_values_bins_and_fits_are_scipys(name: str, dtype: str) -> None:
    values, *found = of_many(name, dtype)
    normal = scipy.stats.norm(values.mean(), values.std())
    for digest in found:
        bins = linear_bins(digest, 64)
        expected = np.histogram(values, bins=bins.edges)[0]
        # At each edge so many values may be on its other side.
        assert np.abs(np.cumsum(bins.counts) - np.cumsum(expected)).max() <= MAX_RANK_ERROR * values.size
        fit = fit_normal(digest, num_points=19)
        assert fit.ks_distance == pytest.approx(scipy.stats.kstest(values, normal.cdf).statistic, abs=MAX_RANK_ERROR)
        points = np.quantile(values, fit.probabilities, method="inverted_cdf")
        if name != "mixed scales":
            assert fit.observed == pytest.approx(points, rel=2.0**-8, abs=2.0**-8 * values.std())
            assert fit.qq_correlation == pytest.approx(np.corrcoef(fit.theoretical, points)[0, 1], abs=1e-3)
        distances = distance(digest, found[0])
        assert (distances.kolmogorov_smirnov or 0.0) <= MAX_RANK_ERROR
        assert (distances.total_variation, bool(distances.differ)) == (0, False)


@EVERY
def test_occupancy_adds_up(dtype: str) -> None:
    for array, digest in every(dtype):
        assert_occupancy(array, digest)


def assert_occupancy(array: Array, digest: Digest) -> None:
    occupied, values = log2_bins(digest), finite_of(array)
    exponents = np.frexp(np.abs(values[values != 0]))[1] - 1
    powers, power_counts = np.unique(exponents, return_counts=True)
    expected = dict(zip(powers.tolist(), power_counts.tolist(), strict=True))
    found = dict(zip(binades(occupied).tolist(), occupied.counts.tolist(), strict=True))
    assert {exponent: count for exponent, count in found.items() if count} == expected
    assert binades(occupied).tolist() == (list(range(min(expected), max(expected) + 1)) if expected else [])
    for row in (FORMATS["fp8_e4m3"], FORMATS["hif8"]):
        assert format_range(digest, row, 3).num_elements == array.size


def test_what_a_format_holds_is_what_rounding_keeps() -> None:
    for name, filling in itertools.product(NARROW_FORMATS, ["normal", "wide", "special", "zero"]):
        array, row = filled("bfloat16", (40, 60), filling=filling, seed=1), FORMATS[name]
        digest, values = digest_of_array(array), finite_of(array)
        aligned = aligned_exponent(digest, row)
        for exponent in (0, -7, 5, *(() if aligned is None else (aligned,))):
            scaled = values / 2.0**exponent
            rounded = np.abs(round_to(scaled, target=row))
            held = format_range(digest, row, exponent)
            is_over = np.abs(scaled) >= row.overflow_start
            assert (rounded[is_over] == row.maximum).all()
            assert held.above == is_over.sum()
            assert held.flushed == ((rounded == 0) & (values != 0)).sum()
            assert held.subnormal == ((rounded != 0) & (np.abs(scaled) < row.min_normal)).sum()
            assert held.normal == (~is_over & (np.abs(scaled) >= row.min_normal)).sum()
            assert (held.highest_exponent, held.lowest_normal_exponent) == (
                math.frexp(row.maximum)[1] - 1 + exponent,
                math.frexp(row.min_normal)[1] - 1 + exponent,
            )
            assert held.lowest_exponent == math.frexp(row.min_subnormal)[1] - 1 + exponent
        if aligned is None:
            assert not values.any()
        else:
            largest = np.abs(values).max()
            assert largest <= row.maximum * 2.0**aligned
            assert largest > row.maximum * 2.0 ** (aligned - 1)
            assert format_range(digest, row, aligned).above == 0


@EVERY_REAL
def test_the_normal_fit_is_scipys(dtype: str) -> None:
    for array, digest in every(dtype):
        assert_normal_fit(array, digest)


def assert_normal_fit(array: Array, digest: Digest) -> None:
    fit, values = fit_normal(digest, num_points=19), finite_of(array)
    assert fit.num_values == values.size
    if not values.size or values.min() == values.max():
        assert fit.ks_distance is fit.ks_p_value is fit.qq_correlation is None
        assert fit.std in {None, 0.0}
        assert fit.observed.size == 0
        return
    assert fit.mean == pytest.approx(values.mean(), rel=1e-9, abs=1e-9 * np.abs(values).max())
    assert fit.std == pytest.approx(values.std(), rel=1e-9)
    normal = scipy.stats.norm(values.mean(), values.std())
    assert fit.ks_distance == pytest.approx(scipy.stats.kstest(values, normal.cdf).statistic, abs=1e-9)
    assert fit.theoretical == pytest.approx(normal.ppf(fit.probabilities), rel=1e-6, abs=1e-9 * values.std())
    assert fit.observed.tolist() == np.quantile(values, fit.probabilities, method="inverted_cdf").tolist()
    if np.ptp(fit.observed):
        expected = np.corrcoef(fit.theoretical, fit.observed)[0, 1]
        assert fit.qq_correlation == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("num_values", [100, 250])
def test_the_p_value_is_that_of_a_fitted_normal(num_values: int) -> None:
    """Of normal samples one in twenty has a p value below 0.05; Kolmogorov's own would call almost none of them so."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(num_values) for _ in range(300)]
    fits = [fit_normal(digest) for digest in digests_from_columns(arrays)]
    p_values = np.array([fit.ks_p_value for fit in fits], dtype=np.float64)
    # Of a few, too many values are alike by chance.
    known = p_values[~np.isnan(p_values)]
    assert known.size > 280
    assert 0.02 < (known < 0.05).mean() < 0.085
    assert 0.4 < (known < 0.5).mean() < 0.6
    assert ((known >= 0) & (known <= 1)).all()
    uniform = digests_from_columns([rng.random(1000).astype(np.float32)])[0]
    assert (fit_normal(uniform).ks_p_value or 0) < 1e-3


def test_no_p_value_where_ties_move_the_distance() -> None:
    rng = np.random.default_rng(0)
    coarse, few = rng.standard_normal(100_000).astype(np.float32).round(1), rng.standard_normal(19)
    for digest in digests_from_columns([coarse, few]):
        fit = fit_normal(digest)
        assert fit.ks_distance is not None
        assert fit.ks_p_value is None


def digests_from_columns(arrays: list[Array]) -> list[Digest]:
    return list(digests(stored(*arrays)))


PAIRS = list(
    itertools.combinations_with_replacement(
        [
            ("bfloat16", "normal"),
            ("float16", "shifted"),
            ("bfloat16", "special"),
            ("int8", "normal"),
            ("float8_e4m3fn", "zero"),
        ],
        2,
    )
)


def test_distances_are_scipys() -> None:
    for first, second in PAIRS:
        arrays = [filled(dtype, (30, 40), filling=filling, seed=3) for dtype, filling in (first, second)]
        ours, theirs = (finite_of(array) for array in arrays)
        found = distance(*digests_from_columns(arrays))
        assert found.kolmogorov_smirnov == pytest.approx(scipy.stats.ks_2samp(ours, theirs).statistic, abs=1e-12)
        area = scipy.stats.wasserstein_distance(ours, theirs)
        assert found.wasserstein == pytest.approx(area, rel=1e-9, abs=1e-12)
        if ours.std():
            assert found.relative_wasserstein == pytest.approx(area / ours.std(), rel=1e-9, abs=1e-12)
        p, q = shares(*arrays)
        assert found.total_variation == pytest.approx(np.abs(p - q).sum() / 2, abs=1e-12)
        assert found.jensen_shannon == pytest.approx(scipy.spatial.distance.jensenshannon(p, q, base=2) ** 2, abs=1e-9)
        if first == second:
            assert set(vars_of(found).values()) == ({0.0} if ours.std() else {0.0, None})


def shares(*arrays: Array) -> tuple[Array, Array]:
    """Parts of each tensor in each class: element by element."""

    def name(value: float) -> str:
        if not math.isfinite(value) or value == 0:
            return str(abs(value) if value == 0 else value)
        return f"{math.copysign(1, value)} {math.floor(math.log2(abs(value)))}"

    found = [[name(value) for value in array.astype(np.float64).reshape(-1).tolist()] for array in arrays]
    names = sorted(set(found[0]) | set(found[1]))
    first, second = (np.array([names_of.count(one) for one in names]) / len(names_of) for names_of in found)
    return first, second


def vars_of(distances: Any) -> dict[str, float | None]:
    return {name: getattr(distances, name) for name in type(distances).__slots__ if name != "is_exact"}


def test_distances_to_nothing_are_not_known() -> None:
    empty, nan, ones = digests_from_columns([np.zeros(0), np.full(3, np.nan), np.ones(3)])
    assert set(vars_of(distance(empty, ones)).values()) == {None}
    found = distance(nan, ones)
    assert (found.kolmogorov_smirnov, found.wasserstein) == (None, None)
    assert (found.total_variation, found.jensen_shannon) == (1.0, 1.0)
    assert distance(ones, ones).relative_wasserstein is None


def test_of_complex_values_the_larger_parts_are_fitted() -> None:
    for dtype in COMPLEX:
        array = filled(dtype, (40, 50), filling="normal")
        fit, values = fit_normal(digest_of_array(array)), numbers_of(array)
        assert fit.mean == pytest.approx(values.mean(), abs=1e-12)
        assert fit.std == pytest.approx(values.std(), rel=1e-12)
        # Not those of magnitudes, which the statistics are of.
        assert statistics_of(array).minimum == pytest.approx(np.abs(array).min())


def test_mixed_types_are_one_distribution() -> None:
    arrays = [filled(dtype, (30, 40), filling="normal") for dtype in ("bfloat16", "float32", "int8", "complex64")]
    together = merge_digests(digests_from_columns(arrays))
    values = np.concatenate([finite_of(array) for array in arrays])
    assert format_range(together, FORMATS["bf16"]).num_elements == values.size
    assert linear_bins(together, 10).num_values == values.size
    assert fit_normal(together).num_values == values.size


def test_float64_beyond_float32_is_where_it_is() -> None:
    array = np.array([1e300, -1e300, 1e-300, 1.0])
    digest = digest_of_array(array)
    assert binades(log2_bins(digest))[[0, -1]].tolist() == [-997, 996]
    assert linear_bins(digest, 4).counts.tolist() == [1, 0, 2, 1]
    assert log2_bins(digest).num_values == 4
    assert aligned_exponent(digest, FORMATS["fp8_e4m3"]) == math.ceil(math.log2(1e300 / 448))
    fit_normal(digest)
