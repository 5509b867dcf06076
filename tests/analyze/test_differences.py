"""Are the differences of two arrays those that numpy and scipy find in the raw values?"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]  # it has no types
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktape.analyze.numerics.differences import Differences, compare_parts
from ranktape.storage.format.dtypes import DTYPES

Array = np.ndarray[Any, Any]

SPECIALS = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0)


def spoiled(dtype: Any, *, shape: tuple[int, ...], seed: int, scale: float = 3.0) -> Array:
    """Values with every special one among them, where the dtype has it."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * scale
    flat = values.reshape(-1)
    for place, special in enumerate(np.tile(SPECIALS, 2)[: flat.size // 3]):
        flat[rng.integers(flat.size) if place % 2 else place] = special
    with np.errstate(all="ignore"):
        if np.dtype(dtype).kind == "c":
            return np.asarray(values + 1j * rng.standard_normal(shape)).astype(dtype)
        return values.astype(dtype)


def compare_arrays(a: Array, b: Array, *, first_dim: int = 0) -> Differences:
    """Of two whole arrays, gone along one dimension first."""
    order = [first_dim, *(dim for dim in range(a.ndim) if dim != first_dim)] if a.ndim else []
    flat_a, flat_b = (np.ascontiguousarray(array.transpose(order)).reshape(-1) for array in (a, b))
    return compare_parts([(flat_a, flat_b)], shape=a.shape, first_dim=first_dim)


def wide(array: Array) -> Array:
    with np.errstate(invalid="ignore"):
        return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def check(a: Array, b: Array, found: Differences) -> None:
    """Every figure, computed once more from the raw values."""
    x, y = wide(a), wide(b)
    both = np.isfinite(x) & np.isfinite(y)
    nan_x, nan_y = np.isnan(x), np.isnan(y)
    rest = ~both & ~nan_x & ~nan_y
    counts = (found.num_elements, found.num_compared, found.nan_both, found.nan_one)
    assert counts == (a.size, both.sum(), (nan_x & nan_y).sum(), (nan_x ^ nan_y).sum())
    assert (found.inf_equal, found.inf_differing) == ((rest & (x == y)).sum(), (rest & (x != y)).sum())
    signs = (np.signbit(x.real) != np.signbit(y.real)) | (np.signbit(x.imag) != np.signbit(y.imag))
    # Of one dtype as they are: 64-bit integers have numbers that float64 has not.
    is_other = (a != b) if a.dtype == b.dtype else (x != y)
    assert found.num_differing == ((is_other | signs) & ~(nan_x & nan_y)).sum()
    p, q = x[both], y[both]
    if not p.size:
        assert {found.max_abs, found.mean_abs, found.cosine, found.sqnr, found.correlation} == {None}
        return
    apart, size = np.abs(p - q), np.abs(p)
    # The magnitude of a complex number may be rounded otherwise.
    assert found.max_abs == pytest.approx(apart.max(), rel=1e-15 * (p.dtype.kind == "c"))
    if found.max_abs_at is None:
        assert not apart.any()
    else:
        assert abs(x[found.max_abs_at] - y[found.max_abs_at]) == pytest.approx(apart.max(), rel=1e-15)
    assert found.mean_abs == pytest.approx(apart.mean(), rel=1e-12)
    assert found.num_zeros == (size == 0).sum()
    relative = apart[size > 0] / size[size > 0]
    expected = (relative.max(), relative.mean()) if relative.size else (None, None)
    assert (found.max_rel, found.mean_rel) == pytest.approx(expected, rel=1e-12)
    norms = np.linalg.norm(p), np.linalg.norm(q), np.linalg.norm(p - q)
    if norms[0] and norms[2]:
        assert found.relative_norm == pytest.approx(norms[2] / norms[0], rel=1e-12)
        assert found.sqnr == pytest.approx(10 * np.log10((size**2).mean() / (apart**2).mean()), rel=1e-9, abs=1e-9)
    if norms[0] and norms[1]:
        assert found.cosine == pytest.approx(np.vdot(p, q).real / norms[0] / norms[1], abs=1e-12)
    if p.dtype.kind != "c" and p.size > 2 and np.ptp(p) and np.ptp(q):
        assert found.correlation == pytest.approx(scipy.stats.pearsonr(p, q).statistic, abs=1e-9)


def test_of_every_dtype_and_shape() -> None:
    for name, shape in itertools.product(DTYPES, [(), (1,), (0, 3), (7, 33), (3, 10, 41)]):
        dtype = DTYPES[name].numpy_dtype
        a, b = (spoiled(dtype, shape=shape, seed=seed) for seed in (1, 2))
        check(a, b, compare_arrays(a, b))
        same = compare_arrays(a, a.copy())
        check(a, a, same)
        assert (same.num_differing, same.num_apart) == (0, 0)
        assert same.max_abs in {0.0, None}
        assert same.cosine in {1.0, None}
        assert same.correlation in {1.0, None}
        assert same.sqnr in {np.inf, None}


def test_of_two_dtypes() -> None:
    cases: list[tuple[str, str]] = [
        ("float32", "bfloat16"),
        ("float8_e4m3fn", "float8_e5m2"),
        ("int64", "float16"),
        ("bool", "uint8"),
        ("complex64", "float32"),
        ("complex128", "complex64"),
    ]
    for one, other in cases:
        a, b = (spoiled(DTYPES[name].numpy_dtype, shape=(40, 30), seed=3) for name in (one, other))
        found = compare_arrays(a, b)
        check(a, b, found)
        assert found.ulp_max is None


def test_ulps_are_steps_between_representable_numbers() -> None:
    for name in [name for name, row in DTYPES.items() if row.is_floating and row.itemsize <= 2]:
        dtype = DTYPES[name].numpy_dtype
        patterns = np.arange(1 << ml_dtypes.finfo(dtype).bits, dtype=f"u{dtype.itemsize}").view(dtype)  # type: ignore[no-untyped-call]
        numbers = np.unique(wide(patterns)[np.isfinite(wide(patterns))] + 0.0)
        rng = np.random.default_rng(0)
        for _ in range(20):
            a, b = rng.choice(patterns, 5), rng.choice(patterns, 5)
            known = np.isfinite(wide(a)) & np.isfinite(wide(b))
            steps = np.abs(np.searchsorted(numbers, wide(a)) - np.searchsorted(numbers, wide(b)))[known]
            assert compare_arrays(a, b).ulp_max == steps.max(initial=0)


def test_ulps_of_wide_types() -> None:
    dtypes: list[Any] = [np.float32, np.float64]
    for dtype in dtypes:
        start = np.array([1.0, -0.0, np.finfo(dtype).smallest_subnormal, -1e-3], dtype=dtype)
        stepped = start
        for _ in range(7):
            stepped = np.nextafter(stepped, dtype(-np.inf))
        assert compare_arrays(start, stepped).ulp_max == 7
        ends = np.array([np.finfo(dtype).max]), np.array([np.finfo(dtype).min])
        expected = 2 * int(ends[0].astype(dtype).view(f"u{np.dtype(dtype).itemsize}")[0])
        assert compare_arrays(ends[0].astype(dtype), ends[1].astype(dtype)).ulp_max == expected


def test_what_is_not_defined_is_none() -> None:
    zeros, ones = np.zeros(5), np.ones(5)
    nothing = compare_arrays(np.full(3, np.nan), np.full(3, np.nan))
    assert (nothing.nan_both, nothing.num_differing, nothing.max_abs, nothing.relative_norm) == (3, 0, None, None)
    from_zero = compare_arrays(zeros, ones)
    assert (from_zero.relative_norm, from_zero.sqnr, from_zero.cosine) == (np.inf, -np.inf, None)
    assert (from_zero.max_rel, from_zero.num_zeros, from_zero.correlation) == (None, 5, None)
    both_zero = compare_arrays(zeros, -zeros)
    assert (both_zero.relative_norm, both_zero.sqnr, both_zero.num_differing, both_zero.max_abs) == (0.0, np.inf, 5, 0)
    # One value is constant, though its mean may not be exact.
    assert compare_arrays(np.full(10_007, 0.1), np.arange(10_007.0)).correlation is None
    tiny = compare_arrays(np.array([1e-200]), np.array([2e-200]))
    assert tiny.max_abs == 1e-200
    assert tiny.relative_norm is not None
    assert tiny.relative_norm > 0
    huge = compare_arrays(np.array([1.7e308, 1.0]), np.array([-1.7e308, 1.0]))
    assert (huge.max_abs, huge.num_apart) == (np.inf, 0)


def test_payloads_of_nan_do_not_differ_and_large_integers_do() -> None:
    nans = np.array([0x7FC1, 0x7FC2, 0xFFC0], dtype=np.uint16).view(ml_dtypes.bfloat16)
    assert compare_arrays(nans, nans[::-1]).num_differing == 0
    large = np.array([1 << 60], dtype=np.int64)
    found = compare_arrays(large, large + 1)
    assert (found.num_differing, found.max_abs) == (1, 0.0)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 9000), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_parts_change_no_bit(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    a = rng.standard_normal(sum(lengths)).astype(np.float32)
    b = np.where(rng.random(a.size) < 0.01, np.nan, a * 1.01).astype(np.float32)
    ends = np.cumsum(lengths)[:-1]
    parts = list(zip(np.split(a, ends), np.split(b, ends), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compare_parts(parts, shape=a.shape) == compare_arrays(a, b)


def test_samples_first_is_the_same_but_for_the_order() -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((5, 7, 6, 100))
    b = a.copy()
    b[3, 2, 5, 99] += 4
    found = compare_arrays(a, b, first_dim=2)
    assert (found.max_abs_at, found.num_differing) == ((3, 2, 5, 99), 1)
    check(a, b, found)


@pytest.mark.parametrize("factor", [1e170, 1e300, 1e-170, 1e-300])
@pytest.mark.parametrize("is_complex", [False, True])
def test_figures_of_float64_at_its_ends_are_those_of_ordinary_numbers(factor: float, is_complex: bool) -> None:  # noqa: FBT001
    rng = np.random.default_rng(0)
    a = rng.standard_normal(10_000) + (1j * rng.standard_normal(10_000) if is_complex else 0)
    b = a + 1e-3 * rng.standard_normal(10_000)
    expected, found = compare_arrays(a, b), compare_arrays(a * factor, b * factor)
    for name in ("relative_norm", "cosine", "sqnr", "correlation", "mean_rel"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-9), name
    for name in ("max_abs", "mean_abs"):
        assert getattr(found, name) / factor == pytest.approx(getattr(expected, name), rel=1e-9), name
    opposite = compare_arrays(a * factor, -a * factor)
    assert opposite.cosine == pytest.approx(-1)


def test_ordinary_numbers_beside_the_largest_and_special_ones() -> None:
    a = np.concatenate([np.full(5000, 1e200), np.ones(5000), [np.nan, np.inf, -np.inf, 0.0]])
    b = np.concatenate([np.full(5000, 2e200), np.ones(5000), [np.nan, np.inf, np.inf, 0.0]])
    found = compare_arrays(a, b)
    assert (found.num_compared, found.num_zeros, found.nan_both, found.inf_equal) == (10_001, 1, 1, 1)
    assert found.relative_norm == pytest.approx(1.0)
    assert (found.max_abs, found.max_rel, found.inf_differing) == (1e200, 1.0, 1)
    assert found.mean_rel == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(6))
def test_correlations_are_right_to_the_last_digits(seed: int) -> None:
    generator, size = np.random.default_rng(seed), 1 << 17
    a, other = ((1e-6 * generator.standard_normal(size)).astype(ml_dtypes.bfloat16) for _ in range(2))
    b = (0.3 * a.astype(np.float64) + other.astype(np.float64)).astype(ml_dtypes.bfloat16)
    x, y = (one.astype(np.longdouble) - one.astype(np.longdouble).mean() for one in (a, b))
    expected = float((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))
    assert compare_arrays(a, b).correlation == pytest.approx(expected, abs=1.5e-15, rel=0)
