"""Does hybrid rounding to HiF8 look at the bits that its definition names?"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranktape.analyze.numerics.formats import FORMATS, encode, round_to
from ranktape.errors import UsageError
from tests.analyze.format_oracles import PATTERNS, TYPES, assert_same

HIF8 = FORMATS["hif8"]

FIELDS = {"float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7)}
"""Bits of the exponent and of the significand."""


def twin(bits: int, *, dtype: str) -> float:
    """The definition of arXiv 2409.16626, 3.2, on the bits of one number; saturating."""
    exponent_bits, mantissa_bits = FIELDS[dtype]
    bias = (1 << (exponent_bits - 1)) - 1
    sign = -1.0 if bits >> (exponent_bits + mantissa_bits) else 1.0
    field = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = bits & ((1 << mantissa_bits) - 1)
    if field == (1 << exponent_bits) - 1:
        return float("nan") if fraction else sign * 32768.0
    last_bits = fraction
    exponent = field - bias
    if field == 0:
        if fraction == 0:
            return 0.0
        shift = mantissa_bits + 1 - fraction.bit_length()
        fraction, exponent = (fraction << shift) & ((1 << mantissa_bits) - 1), 1 - bias - shift
    if exponent < -23:
        return 0.0
    kept = 3 if abs(exponent) < 4 else 2 if abs(exponent) < 8 else 1 if abs(exponent) < 16 else 0
    significand = (1 << mantissa_bits) + fraction
    # One binary order below the smallest value, all of the significand is discarded, its leading bit too.
    num_discarded = mantissa_bits - kept + (exponent == -23)
    retained, discarded = significand >> num_discarded, significand & ((1 << num_discarded) - 1)
    num_bits = 14 if dtype == "float32" else 2
    if abs(exponent) < 4:
        is_up = discarded >= 1 << (num_discarded - 1)
    else:
        threshold = last_bits & 0x3FFF if dtype == "float32" else 2 * (last_bits & 1) + 1
        is_up = (discarded << num_bits) >> num_discarded >= threshold
    return sign * min((retained + is_up) * 2.0 ** (exponent - mantissa_bits + num_discarded), 32768.0)


def expected(patterns: np.ndarray[Any, Any], *, dtype: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = np.array([twin(bits, dtype=dtype) for bits in patterns.tolist()])
    return values + 0.0


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_16_bit_value_rounds_as_its_bits_say(dtype: np.dtype[Any]) -> None:
    with np.errstate(invalid="ignore"):
        found = round_to(PATTERNS.view(dtype), target=HIF8, rounding="hybrid")
    assert_same(found, expected(PATTERNS, dtype=dtype.name))


def test_float32_rounds_as_its_bits_say() -> None:
    rng = np.random.default_rng(4)
    exponents = rng.integers(127 - 26, 127 + 18, 60_000)
    fractions = rng.integers(0, 1 << 23, 60_000)
    fractions[:20_000] &= ~0x3FFF  # a threshold of zero
    fractions[20_000:30_000] = rng.choice([0, 1, 0x3FFF, 0x4000, 0x7FFFFF, 0x400000], 10_000)
    patterns = (rng.integers(0, 2, 60_000) << 31 | exponents << 23 | fractions).astype(np.uint32)
    ends = np.array([0, 1, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF], dtype=np.uint32)
    for given in (patterns, ends):
        found = round_to(given.view(np.float32), target=HIF8, rounding="hybrid")
        assert_same(found, expected(given, dtype="float32"))


def test_it_rounds_to_nearest_where_hif8_has_all_its_bits() -> None:
    values = np.random.default_rng(6).uniform(0.125, 15.5, 10_000).astype(np.float32)
    assert_same(round_to(values, target=HIF8, rounding="hybrid"), round_to(values, target=HIF8, rounding="away"))


def test_it_gives_a_neighbour_and_is_right_on_average_for_random_bits() -> None:
    values = np.random.default_rng(7).uniform(16, 32, 1_000_000).astype(np.float32)
    found = round_to(values, target=HIF8, rounding="hybrid")
    assert np.all(np.abs(found - values) < 4)
    # A step of 4: the mean of a million errors stays within a few thousandths.
    assert abs(float(np.mean(found - values))) < 0.01


def test_16_bit_values_that_hif8_holds_stay_and_float32_ones_do_not() -> None:
    """The definition's own edge: a float32 that ends in 14 zeros has a threshold of zero, and goes up."""
    assert round_to(np.array([16, 20], dtype=np.float16), target=HIF8, rounding="hybrid").tolist() == [16, 20]
    assert round_to(np.array([16], dtype=ml_dtypes.bfloat16), target=HIF8, rounding="hybrid").tolist() == [16]
    assert round_to(np.array([16, 20, 8, 0], dtype=np.float32), target=HIF8, rounding="hybrid").tolist() == [
        20,
        24,
        8,
        0,
    ]


def test_what_goes_beyond_the_largest_value_is_saturated_or_infinite() -> None:
    values = np.array([32768.5, 33000.25, 40960, 1e30, -1e30, np.inf], dtype=np.float32)
    assert np.abs(round_to(values, target=HIF8, rounding="hybrid")).tolist() == [32768.0] * 6
    free = round_to(values, target=HIF8, rounding="hybrid", saturate=False)
    assert np.isinf(free[2:]).all()
    assert set(encode(values[2:], target=HIF8, rounding="hybrid", saturate=False).tolist()) == {0x6F, 0xEF}


@pytest.mark.parametrize("dtype", [np.float64, np.int32, ml_dtypes.float8_e5m2])
def test_other_types_are_refused(dtype: Any) -> None:
    with pytest.raises(UsageError, match="give float32, float16, bfloat16, not"):
        round_to(np.ones(3).astype(dtype), target=HIF8, rounding="hybrid")
