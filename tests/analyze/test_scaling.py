"""Are the sums of many scales those of rounding the whole tensor at each scale?"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktape.analyze.numerics.formats import FORMATS, Format, Rounding, round_to
from ranktape.analyze.numerics.formats.kernels import constants_of, round_block
from ranktape.analyze.numerics.histograms.histogram import count_values
from ranktape.analyze.numerics.sweeps.metrics import levels_of
from ranktape.analyze.numerics.sweeps.options import scale_of
from ranktape.analyze.numerics.sweeps.sums import CHUNK, LANES, SUMS, Sums, sums_of_pairs, sums_of_values
from ranktape.storage.format.dtypes import DTYPES
from tests.strategies import arrays

Array = np.ndarray[Any, Any]

COUNTS = ("overflow", "underflow", "flushed")

TARGETS = [row for row in FORMATS.values() if row.is_signed and row.name != "fp64"]

MAGNITUDES = st.floats(min_value=5e-324, max_value=1.7e308)


def direct(array: Array, *, exponents: Array, target: Format, rounding: Rounding | None = None) -> dict[str, Array]:
    """The slow twin: the whole tensor is divided, rounded and multiplied at every level."""
    with np.errstate(invalid="ignore"):
        values = array.astype(np.float64).ravel()
    finite = values[np.isfinite(values)]
    chosen = rounding or target.rounding
    sums: dict[str, list[float]] = {name: [] for name in SUMS}
    for exponent in exponents:
        scale = scale_of(float(exponent))
        scaled = finite / scale
        seen = scaled.astype(np.float32) if chosen is Rounding.HYBRID else scaled
        results = round_to(seen, target=target, rounding=chosen) * scale
        errors = np.abs(finite - results)
        sums["squared_error"].append(math.fsum(errors * errors))
        sums["absolute_error"].append(math.fsum(errors))
        sums["squared_result"].append(math.fsum(results * results))
        sums["product"].append(math.fsum(finite * results))
        sums["largest_error"].append(errors.max())
        sums["overflow"].append(float(np.count_nonzero(np.abs(scaled) >= target.overflow_start_of(chosen))))
        sums["underflow"].append(float(np.count_nonzero((finite != 0) & (np.abs(scaled) < target.min_normal))))
        sums["flushed"].append(float(np.count_nonzero((finite != 0) & (results == 0))))
    return {name: np.array(values) for name, values in sums.items()}


def assert_equal(sums: Sums, expected: dict[str, Array]) -> None:
    """Counts are equal, sums to 1e-12 of what they are; `sums` is brought back to the tensor's unit."""
    unit = {name: 2.0 ** (sums.shift * power) for name, power in zip(SUMS, (2, 1, 2, 2, 1, 0, 0, 0), strict=True)}
    for name in SUMS:
        found = getattr(sums, f"{name}_L") * unit[name]
        if name in COUNTS:
            assert found.tolist() == expected[name].tolist(), name
        else:
            np.testing.assert_allclose(found, expected[name], rtol=1e-12, atol=0, err_msg=name)


def sums_of(array: Array, *, exponents: Array, target: Format, rounding: Rounding | None = None) -> Sums:
    """By the histogram where the type has one, else by the values."""
    if array.dtype.itemsize <= 2:
        values, counts = count_values(array).pairs()
        return sums_of_pairs(values, counts=counts, exponents=exponents, target=target, rounding=rounding)
    finite = np.abs(array[np.isfinite(array)])
    return sums_of_values(array, largest=float(finite.max()), exponents=exponents, target=target, rounding=rounding)


def special(dtype: Any) -> Array:
    """Ordinary values of many magnitudes among everything that is not ordinary, in one tensor of 9,000."""
    rng = np.random.default_rng(1)
    ordinary = rng.standard_normal(8000) * np.exp2(rng.integers(-12, 8, 8000))
    info = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    ends = [0.0, -0.0, np.nan, np.inf, -np.inf, float(info.smallest_subnormal), -float(info.smallest_normal) / 2]
    with np.errstate(all="ignore"):
        return np.concatenate([ordinary, np.resize(ends, 1000)]).astype(dtype).reshape(9, 1000)


def test_sums_equal_rounding_the_whole_tensor() -> None:
    for target, name in itertools.product(
        TARGETS, ["bfloat16", "float16", "float32", "float64", "float8_e5m2", "float8_e4m3fn"]
    ):
        array = special(DTYPES[name].numpy_dtype)
        # Whole exponents, at which ties are exact, and fractional ones.
        exponents = np.array([-9.0, -8.35, -3.0, -0.1, 0.0, 1.0, 2.6, 7.0])
        assert_equal(
            sums_of(array, exponents=exponents, target=target), direct(array, exponents=exponents, target=target)
        )


@pytest.mark.parametrize("rounding", [Rounding.EVEN, Rounding.AWAY, Rounding.FLOOR])
@pytest.mark.parametrize("target", ["fp8_e4m3", "fp4_e2m1", "int8", "hif8"])
@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_sums_equal_rounding_the_whole_tensor_in_every_way(name: str, target: str, rounding: Rounding) -> None:
    array, row = special(DTYPES[name].numpy_dtype), FORMATS[target]
    exponents = np.array([-9.0, -3.0, -0.1, 2.6])
    expected = direct(array, exponents=exponents, target=row, rounding=rounding)
    assert_equal(sums_of(array, exponents=exponents, target=row, rounding=rounding), expected)


def test_hybrid_rounding_looks_at_the_scaled_values_as_float32() -> None:
    for name in ["bfloat16", "float32"]:
        array, row = special(DTYPES[name].numpy_dtype), FORMATS["hif8"]
        exponents = np.array([-9.0, -0.1, 2.6])
        expected = direct(array, exponents=exponents, target=row, rounding=Rounding.HYBRID)
        assert_equal(sums_of(array, exponents=exponents, target=row, rounding=Rounding.HYBRID), expected)


@pytest.mark.parametrize("target", ["fp8_e4m3", "fp4_e2m1", "int8", "hif8"])
@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_sums_of_stochastic_rounding_are_what_is_to_be_expected(name: str, target: str) -> None:
    """The two neighbours by how likely they are, not by draws."""
    row, scale = FORMATS[target], 2.0**-1.3
    values = np.abs(special(DTYPES[name].numpy_dtype).astype(np.float64))
    finite = values[np.isfinite(values)]
    scaled = np.minimum(finite / scale, row.maximum)
    below = round_to(scaled, target=row, rounding=Rounding.FLOOR)
    step = np.ldexp(1.0, np.vectorize(row.unit_exponent)(np.maximum(np.frexp(scaled)[1] - 1, row.lowest_exponent)))
    up = (scaled - below) / step
    above = np.where(up > 0, below + step, below)
    likely = {"squared_error": 0.0, "absolute_error": 0.0, "squared_result": 0.0, "product": 0.0}
    for chance, rounded in ((up, above), (1 - up, below)):
        result = rounded * scale
        likely["squared_error"] += math.fsum(chance * (finite - result) ** 2)
        likely["absolute_error"] += math.fsum(chance * np.abs(finite - result))
        likely["squared_result"] += math.fsum(chance * result**2)
        likely["product"] += math.fsum(chance * result * finite)
    array = special(DTYPES[name].numpy_dtype)
    found = sums_of(array, exponents=np.array([-1.3]), target=row, rounding=Rounding.STOCHASTIC)
    for kind, expected in likely.items():
        assert math.isclose(getattr(found, f"{kind}_L")[0], expected, rel_tol=1e-12), kind
    assert found.overflow_L[0] == np.count_nonzero(finite / scale > row.maximum)
    becoming_zero = (1 - up)[(finite > 0) & (below == 0)]
    assert math.isclose(found.flushed_L[0], math.fsum(becoming_zero), rel_tol=1e-9, abs_tol=1e-9)


def test_every_16_bit_magnitude_rounds_as_the_reference() -> None:
    for dtype, rounding, target in itertools.product(
        [ml_dtypes.bfloat16, np.float16], [Rounding.EVEN, Rounding.AWAY, Rounding.FLOOR], TARGETS
    ):
        with np.errstate(invalid="ignore"):
            listed = np.arange(1 << 15, dtype=np.uint16).view(dtype).astype(np.float64)
        magnitudes = np.where(np.isfinite(listed), listed, 0.0)
        for scale in (1.0, 2.0**0.35):
            scaled = np.concatenate([magnitudes / scale, [math.inf]])
            rounded = np.empty_like(scaled)
            round_block(scaled, constants_of(target, rounding), rounded)
            assert np.array_equal(rounded, round_to(scaled, target=target, rounding=rounding))


@settings(max_examples=30)
@given(data=st.data(), name=st.sampled_from(["float16", "bfloat16", "float32"]), target=st.sampled_from(TARGETS))
def test_any_bits_and_any_layout(data: st.DataObject, name: str, target: Format) -> None:
    array = data.draw(arrays(name=name))
    with np.errstate(invalid="ignore"):
        values = array.astype(np.float64)
    finite = np.abs(values[np.isfinite(values)])
    if not np.any(finite > 0):
        return
    exponents = np.array(data.draw(st.lists(st.floats(-30, 30), min_size=1, max_size=4)))
    found = sums_of(array, exponents=exponents, target=target)
    expected = direct(array, exponents=exponents, target=target)
    for name_of_count in COUNTS:
        assert getattr(found, f"{name_of_count}_L").tolist() == expected[name_of_count].tolist()
    assert found.num_finite == finite.size


@pytest.mark.parametrize("size", [1, LANES - 1, LANES, LANES + 1, CHUNK - 1, CHUNK, CHUNK + 1])
def test_values_and_histogram_agree_at_every_size(size: int) -> None:
    array = np.random.default_rng(size).standard_normal(size).astype(ml_dtypes.bfloat16)
    exponents, target = np.linspace(-9, 1, 5), FORMATS["fp8_e4m3"]
    by_histogram = sums_of(array, exponents=exponents, target=target)
    by_values = sums_of(array.astype(np.float32), exponents=exponents, target=target)
    for name in SUMS:
        left, right = getattr(by_histogram, f"{name}_L"), getattr(by_values, f"{name}_L")
        np.testing.assert_allclose(left, right, rtol=1e-12, atol=0)
        if name in COUNTS:
            assert left.tolist() == right.tolist()
    assert by_histogram.num_finite == by_values.num_finite == size
    assert math.isclose(by_histogram.squared, by_values.squared, rel_tol=1e-12)
    assert math.isclose(by_histogram.absolute, by_values.absolute, rel_tol=1e-12)


def test_the_same_bits_with_any_threads_and_layout() -> None:
    array = np.random.default_rng(0).standard_normal(3 * CHUNK + 5).astype(np.float32)
    exponents, target = np.linspace(-9, 1, 3), FORMATS["fp4_e2m1"]
    first, *others = (
        sums_of_values(layout, largest=6.0, exponents=exponents, target=target, threads=threads)
        for layout, threads in ((array, 1), (array, 2), (array, 3), (np.repeat(array, 2)[::2], 2))
    )
    for name in SUMS:
        for other in others:
            assert getattr(first, f"{name}_L").tobytes() == getattr(other, f"{name}_L").tobytes()
    assert all(other.squared == first.squared for other in others)


def test_magnitudes_at_the_ends_of_float64_lose_nothing() -> None:
    """Squares of these overflow or vanish; the sums are of values that were shifted."""
    for power in [-1060, -500, 500, 1010]:
        values = np.array([1.0, 1.25, -1.375, 1.5, 1.8125, 0.0])
        exponents, target = np.array([-2.0, -1.0]), FORMATS["fp4_e2m1"]
        near_one = levels_of(sums_of(values, exponents=exponents, target=target), exponents=exponents.tolist())
        far_sums = sums_of(np.ldexp(values, power), exponents=exponents + power, target=target)
        far = levels_of(far_sums, exponents=(exponents + power).tolist())
        for expected, found in zip(near_one, far, strict=True):
            for name in ("cosine", "relative_error", "psnr", "sqnr", "score", "overflow_count", "flushed_count"):
                assert getattr(found, name) == getattr(expected, name), name
            assert math.isclose(found.rmse, math.ldexp(expected.rmse, power), rel_tol=1e-3)


def test_scales_far_from_the_tensor_saturate_or_flush_all() -> None:
    for exponent in [-1000.0, 1000.0]:
        values = np.ldexp(np.array([1.0, 1.5]), -int(exponent))
        found = sums_of(values, exponents=np.array([exponent]), target=FORMATS["fp8_e4m3"])
        assert np.isfinite([getattr(found, f"{name}_L")[0] for name in SUMS]).all()
        assert (found.flushed_L[0], found.overflow_L[0]) == ((2, 0) if exponent > 0 else (0, 2))


def test_where_all_is_flushed_the_errors_are_the_values() -> None:
    """To the last bit: their ratio is 0 dB, and not almost."""
    for dtype in ["float16", "float64"]:
        values = np.random.default_rng(0).normal(size=100_003).astype(dtype)
        found = sums_of(values, exponents=np.array([20.0]), target=FORMATS["fp4_e2m1"])
        assert (found.squared_error_L[0], found.absolute_error_L[0]) == (found.squared, found.absolute)
        assert [level.sqnr for level in levels_of(found, exponents=[20.0])] == [0.0]


@pytest.mark.parametrize("target", TARGETS, ids=lambda row: row.name)
@given(magnitude=MAGNITUDES)
def test_alignments_are_the_tightest_that_hold(target: Format, magnitude: float) -> None:
    exact = Fraction(magnitude)
    largest = target.largest_alignment(magnitude)
    assert (
        Fraction(target.maximum) * Fraction(2) ** (largest - 1)
        < exact
        <= Fraction(target.maximum) * Fraction(2) ** largest
    )
    smallest = target.smallest_alignment(magnitude)
    normal = Fraction(target.min_normal)
    assert normal * Fraction(2) ** smallest <= exact < normal * Fraction(2) ** (smallest + 1)


def test_the_largest_value_just_fits() -> None:
    cases: list[tuple[float, int]] = [(448.0, 0), (448.00001, 1), (5.3, -6), (224.0, -1), (1.0, -8), (2.0**-133, -141)]
    for largest, expected in cases:
        assert FORMATS["fp8_e4m3"].largest_alignment(largest) == expected


def test_whole_exponents_are_powers_of_two() -> None:
    for exponent in [-1074, -1022, -3, 0, 1, 1023]:
        assert scale_of(exponent) == math.ldexp(1.0, exponent)


def test_scales_beyond_float64_are_zero_and_infinite() -> None:
    assert (scale_of(-1080.5), scale_of(1024.5)) == (0.0, math.inf)
    assert math.isclose(scale_of(-5.85), 2**-5.85, rel_tol=1e-15)
