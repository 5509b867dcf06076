"""Is every format what its definition says, and is rounding to it exact?"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktape.analyze.formats import BY_DTYPE, FORMATS, Format, parse_format, round_to
from ranktape.errors import UsageError
from ranktape.storage.dtypes import DTYPES, numpy_dtype

SMALL = [row for row in FORMATS.values() if row.exponent_bits + row.mantissa_bits < 16]
"""Formats whose codes can all be listed."""

ALL = list(FORMATS.values())


def codes(row: Format) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The value of every code, in the order of the codes."""
    num_bits = 1 + row.exponent_bits + row.mantissa_bits
    dtype = numpy_dtype(row.dtype)
    patterns = np.arange(1 << num_bits).astype(f"u{dtype.itemsize}").view(dtype)
    with np.errstate(invalid="ignore"):
        return patterns.astype(np.float64)


def every_16_bit_value() -> np.ndarray[Any, np.dtype[np.float64]]:
    """All numbers, infinities and NaN patterns of bfloat16 and float16."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        return np.concatenate([patterns.view(dtype).astype(np.float64) for dtype in (ml_dtypes.bfloat16, np.float16)])


def nearest(value: float, *, row: Format) -> float:
    """The slow twin: the nearest of all values of the format, of two equally near ones that with an even code."""
    if math.isnan(value):
        return value
    magnitude = min(abs(value), row.maximum)
    listed = codes(row)
    half = listed[: len(listed) // 2]
    candidates = [
        (abs(Fraction(float(x)) - Fraction(magnitude)), code % 2, float(x))
        for code, x in enumerate(half)
        if math.isfinite(x)
    ]
    found = min(candidates)[2]
    return math.copysign(found, value) if found or row.has_negative_zero else 0.0


@pytest.mark.parametrize("row", ALL, ids=lambda row: row.name)
def test_limits_are_those_of_ml_dtypes(row: Format) -> None:
    info = ml_dtypes.finfo(numpy_dtype(row.dtype))  # type: ignore[no-untyped-call]
    assert row.maximum == float(info.max)
    assert row.minimum == float(info.min)
    assert row.min_normal == float(info.smallest_normal)
    assert row.min_subnormal == float(info.smallest_subnormal)
    assert row.mantissa_bits == info.nmant
    assert row.emax == info.maxexp - 1
    assert row.emin == info.minexp


@pytest.mark.parametrize("row", SMALL, ids=lambda row: row.name)
def test_codes_are_counted(row: Format) -> None:
    values = codes(row)
    assert row.num_finite == np.isfinite(values).sum()
    assert row.num_infinities == np.isinf(values).sum()
    assert row.num_nans == np.isnan(values).sum()
    assert row.has_negative_zero == bool(np.any((values == 0) & np.signbit(values)))


@pytest.mark.parametrize(
    ("name", "threshold", "start"),
    [
        ("fp8_e4m3", 464.0, math.nextafter(464.0, math.inf)),
        ("fp8_e5m2", 61440.0, 61440.0),
        ("fp6_e2m3", 7.75, 7.75),
        ("fp6_e3m2", 30.0, 30.0),
        ("fp4_e2m1", 7.0, 7.0),
        ("fp16", 65520.0, 65520.0),
        ("fp64", math.inf, math.inf),
    ],
)
def test_overflow_begins_half_a_step_beyond_the_largest_value(name: str, threshold: float, start: float) -> None:
    assert FORMATS[name].overflow_threshold == threshold
    assert FORMATS[name].overflow_start == start


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "bf16", "fp16", "fp8_e4m3_ieee", "fp8_e3m4"])
def test_overflow_begins_where_a_cast_leaves_the_finite_values(name: str) -> None:
    row = FORMATS[name]
    # float32 is exact at these ends, and ml_dtypes does not saturate.
    ends = np.array([row.overflow_start, np.nextafter(np.float32(row.overflow_start), np.float32(0))], dtype=np.float32)
    if row.overflow_start != float(ends[0]):
        ends = np.array([np.nextafter(np.float32(row.overflow_start), np.float32(np.inf)), row.overflow_threshold])
    with np.errstate(over="ignore"):
        cast = ends.astype(np.float32).astype(numpy_dtype(row.dtype)).astype(np.float64)
    assert np.isfinite(cast).tolist() == [False, True]


@pytest.mark.parametrize("row", SMALL, ids=lambda row: row.name)
def test_rounding_every_16_bit_value_equals_the_cast(row: Format) -> None:
    """ml_dtypes is the oracle inside the range; outside of it is the largest value, and NaN is NaN."""
    values = every_16_bit_value()
    rounded = round_to(values, target=row)
    inside = np.abs(values) <= row.maximum
    # Casting float64 rounds once, also where float16 values meet narrow formats.
    expected = values[inside].astype(numpy_dtype(row.dtype)).astype(np.float64)
    assert np.array_equal(rounded[inside].view(np.int64), expected.view(np.int64))
    beyond = ~inside & ~np.isnan(values)
    assert np.array_equal(rounded[beyond], np.copysign(row.maximum, values[beyond]))
    assert np.array_equal(np.isnan(rounded), np.isnan(values))


@pytest.mark.parametrize(
    "row", [row for row in SMALL if row.exponent_bits + row.mantissa_bits < 8], ids=lambda row: row.name
)
@given(value=st.floats(width=32))
def test_rounding_equals_its_twin(row: Format, value: float) -> None:
    rounded = float(round_to(value, target=row))
    expected = nearest(value, row=row)
    assert math.isnan(rounded) if math.isnan(expected) else rounded == expected
    assert math.copysign(1, rounded) == math.copysign(1, expected) or math.isnan(expected)


@pytest.mark.parametrize("row", ALL, ids=lambda row: row.name)
@given(value=st.floats(allow_nan=False))
def test_rounding_twice_is_rounding_once(row: Format, value: float) -> None:
    once = round_to(value, target=row)
    assert round_to(once, target=row) == once
    assert abs(float(once)) <= row.maximum


@pytest.mark.parametrize("row", ALL, ids=lambda row: row.name)
@given(values=st.lists(st.floats(allow_nan=False), min_size=2, max_size=2))
def test_rounding_keeps_the_order(row: Format, values: list[float]) -> None:
    low, high = round_to(sorted(values), target=row)
    assert low <= high


@pytest.mark.parametrize("row", ALL, ids=lambda row: row.name)
def test_values_just_at_the_flush_limit(row: Format) -> None:
    if row.flush_limit == 0:
        assert round_to(row.min_subnormal, target=row) == row.min_subnormal
        return
    assert round_to(row.flush_limit, target=row) == 0
    assert round_to(math.nextafter(row.flush_limit, 1), target=row) == row.min_subnormal


def test_float64_is_exact_at_its_ends() -> None:
    values = np.array([5e-324, -5e-324, 2.0**-1022, 1.7976931348623157e308, 1 / 3])
    assert np.array_equal(round_to(values, target=FORMATS["fp64"]), values)


def test_rounding_keeps_shape_and_takes_no_elements() -> None:
    assert round_to(np.zeros((2, 0, 3)), target=FORMATS["fp8_e4m3"]).shape == (2, 0, 3)
    assert round_to(1.3, target=FORMATS["fp4_e2m1"]).shape == ()


def test_every_floating_dtype_of_a_record_has_a_format() -> None:
    without = {name for name, row in DTYPES.items() if row.is_floating and name not in BY_DTYPE}
    # No sign, no zero, no fraction: rounding to it is a scale's business.
    assert without == {"float8_e8m0fnu"}


@pytest.mark.parametrize("name", [*FORMATS, *BY_DTYPE])
def test_a_format_is_found_by_name_and_by_dtype(name: str) -> None:
    assert name in {parse_format(name).name, parse_format(name).dtype}


@pytest.mark.parametrize(
    ("name", "hint"),
    [("fp8_e4m4", "did you mean fp8_e4m3"), ("bfloat", "did you mean bfloat16"), ("?", "use one of fp8_e4m3, ")],
)
def test_an_unknown_format_names_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        parse_format(name)
