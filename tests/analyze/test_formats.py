"""Is every format what its definition says, with the limits at which its rounding overflows and flushes?"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import gfloat  # type: ignore[import-untyped]
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktape.analyze.numerics.formats import (
    BY_DTYPE,
    FORMATS,
    Coding,
    Format,
    Rounding,
    codes_of,
    decode,
    encode,
    parse_format,
    round_to,
)
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import DTYPES, numpy_dtype
from tests.analyze.test_formats_rounding import PATTERNS, TYPES, assert_same, every_16_bit_value, gfloat_info

SMALL = [row for row in FORMATS.values() if row.num_bits <= 16]
"""Formats whose codes can all be listed."""

ALL = list(FORMATS.values())

STORED = [row for row in ALL if row.dtype is not None]
"""Formats that ml_dtypes or numpy has."""


def codes(row: Format) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The value of every code, in the order of the codes; by ml_dtypes where it has the format."""
    patterns = np.arange(1 << row.num_bits)
    if row.dtype is None:
        return decode(patterns, target=row)
    dtype = numpy_dtype(row.dtype)
    with np.errstate(invalid="ignore"):
        return patterns.astype(f"u{dtype.itemsize}").view(dtype).astype(np.float64)


def test_limits_are_those_of_ml_dtypes() -> None:
    for row in STORED:
        info = ml_dtypes.finfo(numpy_dtype(str(row.dtype)))  # type: ignore[no-untyped-call]
        assert row.maximum == float(info.max)
        assert row.minimum == float(info.min)
        assert row.min_normal == float(info.smallest_normal)
        assert row.min_subnormal == float(info.smallest_subnormal)
        assert row.mantissa_bits == info.nmant
        assert row.emax == info.maxexp - 1
        assert row.emin == info.minexp


def test_ue5m3_has_the_significand_of_e4m3_and_the_exponents_of_e5m2() -> None:
    row, e4m3, e5m2 = (FORMATS[name] for name in ("ue5m3", "fp8_e4m3", "fp8_e5m2"))
    values = codes(row)
    assert (row.minimum, row.maximum, row.min_normal, row.min_subnormal) == (0, 1.75 * 2**16, 2.0**-14, 2.0**-17)
    assert (row.mantissa_bits, row.emin) == (e4m3.mantissa_bits, e5m2.emin)
    assert np.isnan(values[-1])
    assert (np.diff(values[:-1]) > 0).all()
    assert values[0x78:0x80].tolist() == codes(e4m3)[0x38:0x40].tolist()


def test_nvfp4_elements_are_those_of_fp4_e2m1() -> None:
    assert np.array_equal(codes(FORMATS["nvfp4"]), codes(FORMATS["fp4_e2m1"]))
    assert sorted(set(np.abs(codes(FORMATS["nvfp4"])).tolist())) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_hif8_has_less_significand_bits_the_larger_the_exponent() -> None:
    """Bits by the magnitude of the exponent: 3 up to 3, 2 up to 7, 1 up to 15, none below 2**-15."""
    row = FORMATS["hif8"]
    listed = sorted({x for x in codes(row).tolist() if 0 < x <= row.maximum})
    for exponent in range(-22, 15):
        bits = 3 if abs(exponent) <= 3 else 2 if abs(exponent) <= 7 else 1 if abs(exponent) <= 15 else 0
        assert sum(2.0**exponent <= x < 2.0 ** (exponent + 1) for x in listed) == 2**bits
        assert row.unit_exponent(exponent) == exponent - bits


def test_codes_are_counted() -> None:
    for row in SMALL:
        values = codes(row)
        assert row.num_finite == np.isfinite(values).sum()
        assert row.num_infinities == np.isinf(values).sum()
        assert row.num_nans == np.isnan(values).sum()
        assert row.has_negative_zero == bool(np.any((values == 0) & np.signbit(values)))


def test_overflow_begins_where_a_cast_leaves_the_finite_values() -> None:
    for name in ["fp8_e4m3", "fp8_e5m2", "e8m0", "bf16", "fp16", "fp8_e4m3_ieee", "fp8_e3m4"]:
        row = FORMATS[name]
        # float32 is exact at these ends, and ml_dtypes does not saturate.
        ends = np.array(
            [row.overflow_start, np.nextafter(np.float32(row.overflow_start), np.float32(0))], dtype=np.float32
        )
        if row.overflow_start != float(ends[0]):
            ends = np.array([np.nextafter(np.float32(row.overflow_start), np.float32(np.inf)), row.overflow_threshold])
        with np.errstate(over="ignore"):
            cast = ends.astype(np.float32).astype(numpy_dtype(str(row.dtype))).astype(np.float64)
        assert np.isfinite(cast).tolist() == [False, True]


def test_values_just_at_the_flush_limit() -> None:
    for row, rounding in itertools.product(ALL, [Rounding.EVEN, Rounding.AWAY, Rounding.FLOOR]):
        limit = row.flush_limit_of(rounding)
        if limit == 0:
            assert round_to(row.min_subnormal, target=row, rounding=rounding) == row.min_subnormal
            return
        assert round_to(limit, target=row, rounding=rounding) == 0
        assert round_to(math.nextafter(limit, 1), target=row, rounding=rounding) == row.min_subnormal


def test_chance_may_flush_whatever_is_below_the_smallest_value() -> None:
    row = FORMATS["fp4_e2m1"]
    assert set(round_to(np.full(1000, 0.25), target=row, rounding="stochastic").tolist()) == {0.0, row.min_subnormal}
    assert row.flush_limit_of(Rounding.STOCHASTIC) == math.nextafter(row.min_subnormal, 0)


def test_what_chance_may_decide_overflows_beyond_the_largest_value() -> None:
    for row, rounding in itertools.product(
        [row for row in ALL if row.name != "fp64"], [Rounding.STOCHASTIC, Rounding.HYBRID]
    ):
        assert row.overflow_start_of(rounding) == math.nextafter(row.maximum, math.inf)


def written(value: float) -> str:
    """A number as the page writes it, exactly: in digits, or as what a power of two is multiplied by."""
    fraction, exponent = math.frexp(value)
    if fraction == 0.5 and abs(exponent) > 4:
        return f"2^{exponent - 1}"
    if value < 1e6:
        return repr(value).removesuffix(".0")
    num_bits = -math.frexp(1 - fraction)[1]
    assert 2 * fraction == 2 - 2.0**-num_bits
    return f"(2 - 2^-{num_bits}) x 2^{exponent - 1}"


def page_row(row: Format) -> str:
    """The line of `docs/formats.md` for a format."""
    threshold = row.overflow_threshold
    overflow = "-" if threshold == math.inf else f"above {written(threshold)}"
    flush = "-" if row.flush_limit == 0 else f"up to {written(row.min_subnormal / 2)}"
    is_wide = row.num_bits > 16
    cells = (
        f"`{row.name}`",
        str(row.num_bits),
        f"{row.exponent_bits} + {row.mantissa_bits}",
        f"{row.emin} to {row.emax}",
        *map(written, (row.maximum, row.min_normal, row.min_subnormal)),
        overflow.replace("above", "from") if row.overflow_start == threshold else overflow,
        flush.replace("up to", "below") if row.rounding is Rounding.AWAY else flush,
        f"2^{row.num_bits} - 2^{row.mantissa_bits + 1}" if is_wide else f"{row.num_finite:,}",
        f"{row.num_infinities} / " + (f"2^{row.mantissa_bits + 1} - 2" if is_wide else str(row.num_nans)),
        "yes" if row.has_negative_zero else "no",
        f"`{row.dtype}`" if row.dtype else "-",
    )
    return "| " + " | ".join(cells) + " |"


PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")


def test_the_page_about_formats_has_a_row_for_each() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("| `") and line.count("|") > 3]
    assert lines == [page_row(row) for row in ALL]
    roundings = [line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `") and line.count("|") == 3]
    assert roundings == list(Rounding)


def test_the_examples_of_the_page_are_true() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(example, "docs/formats.md", "exec"), {})  # noqa: S102 - our own page


def test_float64_is_exact_at_its_ends() -> None:
    values = np.array([5e-324, -5e-324, 2.0**-1022, 1.7976931348623157e308, 1 / 3])
    assert np.array_equal(round_to(values, target=FORMATS["fp64"]), values)


def test_rounding_keeps_shape_and_takes_no_elements() -> None:
    assert round_to(np.zeros((2, 0, 3)), target=FORMATS["fp8_e4m3"]).shape == (2, 0, 3)
    assert round_to(1.3, target=FORMATS["fp4_e2m1"]).shape == ()


def test_every_floating_dtype_of_a_record_has_a_format() -> None:
    assert {name for name, row in DTYPES.items() if row.is_floating} == BY_DTYPE.keys()


def test_a_format_is_found_by_other_words_for_it() -> None:
    for name, expected in [("hifp8", "hif8"), ("hifloat8", "hif8"), ("mxint8", "int8")]:
        assert parse_format(name) is FORMATS[expected]


def test_a_format_is_found_by_name_and_by_dtype() -> None:
    for name in [*FORMATS, *BY_DTYPE]:
        assert name in {parse_format(name).name, parse_format(name).dtype}


def test_an_unknown_format_names_the_nearest() -> None:
    for name, hint in [
        ("fp8_e4m4", "did you mean fp8_e4m3"),
        ("fp6", "did you mean fp6_e2m3, fp6_e3m2"),
        ("bfloat", "did you mean bfloat16"),
        ("?", "use one of fp8_e4m3, "),
    ]:
        with pytest.raises(UsageError, match=hint):
            parse_format(name)


def some_codes(row: Format) -> np.ndarray[Any, Any]:
    """Every code, or many of a format that has more than fit."""
    if row.num_bits <= 16:
        return np.arange(1 << row.num_bits)
    drawn = np.random.default_rng(0).integers(0, 1 << 64, 50_000, dtype=np.uint64) >> np.uint64(64 - row.num_bits)
    ends = np.array([0, 1, (1 << row.mantissa_bits) - 1, 1 << row.mantissa_bits, (1 << row.num_bits) - 1], np.uint64)
    return np.concatenate([drawn, ends, ends ^ np.uint64(1 << (row.num_bits - 1))])


def test_codes_are_read_as_by_gfloat() -> None:
    for row in [row for row in SMALL if row.name != "hif8"]:
        codes = np.arange(1 << row.num_bits)
        with np.errstate(over="ignore"):
            expected = gfloat.decode_ndarray(gfloat_info(row), codes.astype(np.uint64).astype(np.int64))
        assert_same(decode(codes, target=row), np.asarray(expected, dtype=np.float64))


def test_hif8_codes_are_read_as_by_its_makers() -> None:
    en_dtypes = pytest.importorskip("en_dtypes")
    codes = np.arange(256, dtype=np.uint8)
    assert_same(decode(codes, target=FORMATS["hif8"]), codes.view(en_dtypes.hifloat8).astype(np.float64))


def test_every_16_bit_value_is_written_to_hif8_as_by_its_makers() -> None:
    """By way of float32: they cast no bfloat16."""
    for dtype in TYPES:
        en_dtypes = pytest.importorskip("en_dtypes")
        with np.errstate(all="ignore"):
            values = PATTERNS.view(dtype).astype(np.float32)
            expected = values.astype(en_dtypes.hifloat8).view(np.uint8)
        assert np.array_equal(encode(values, target=FORMATS["hif8"], saturate=False), expected)


def test_random_float32_bits_are_written_to_hif8_as_by_its_makers() -> None:
    en_dtypes = pytest.importorskip("en_dtypes")
    values = np.random.default_rng(5).integers(0, 1 << 32, 1_000_000, dtype=np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(en_dtypes.hifloat8).view(np.uint8)
        found = encode(values, target=FORMATS["hif8"], saturate=False)
    assert np.array_equal(found, expected)


def test_what_is_read_is_written_back() -> None:
    for row in FORMATS.values():
        codes = some_codes(row)
        values = decode(codes, target=row)
        kept = ~np.isnan(values) & (np.abs(values) <= np.inf if row.num_infinities else np.abs(values) <= row.maximum)
        saturate = not row.num_infinities
        found = encode(values[kept], target=row, saturate=saturate)
        assert found.dtype == {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[-(-row.num_bits // 8)]
        assert np.array_equal(found, codes[kept])


def test_the_code_of_every_16_bit_value_stands_for_its_rounding() -> None:
    for row, rounding, saturate in itertools.product(
        [row for row in SMALL if row.num_nans],
        [Rounding.EVEN, Rounding.AWAY, Rounding.FLOOR, Rounding.STOCHASTIC],
        [True, False],
    ):
        values = every_16_bit_value()
        rounded = round_to(values, target=row, rounding=rounding, saturate=saturate)
        codes = encode(values, target=row, rounding=rounding, saturate=saturate)
        assert_same(decode(codes, target=row), rounded)
        assert np.array_equal(codes, codes_of(rounded, target=row))


def test_nan_has_one_code() -> None:
    for name, code in [
        ("fp8_e4m3", 0x7F),
        ("fp8_e5m2", 0x7E),
        ("hif8", 0x80),
        ("e8m0", 0xFF),
        ("bf16", 0x7FC0),
        ("fp16", 0x7E00),
        ("fp32", 0x7FC00000),
        ("fp64", 0x7FF8 << 48),
        ("fp8_e4m3fnuz", 0x80),
        ("fp8_e4m3_ieee", 0x7C),
    ]:
        patterns = np.array([0x7FF8 << 48, 0xFFF8 << 48, (0xFFF << 52) + 1, (0x7FF << 52) + 1], dtype=np.uint64)
        assert encode(patterns.view(np.float64), target=FORMATS[name]).tolist() == [code] * 4


def test_nan_is_refused_where_it_has_no_code() -> None:
    for row in [row for row in SMALL if not row.num_nans]:
        with pytest.raises(UsageError, match=f"{row.name} has no code for NaN, and 2 values are NaN"):
            encode([1.0, np.nan, np.nan], target=row)


def test_what_overflows_to_nan_is_refused_nowhere() -> None:
    assert encode([500.0, -np.inf], target=FORMATS["fp8_e4m3"], saturate=False).tolist() == [0x7F, 0x7F]
    assert encode([500.0, -np.inf], target=FORMATS["fp8_e4m3"]).tolist() == [0x7E, 0xFE]


def test_negative_zero_has_a_code_where_the_format_has_one() -> None:
    tiny = [-0.0, -1e-30]
    assert encode(tiny, target=FORMATS["fp4_e2m1"]).tolist() == [0b1000, 0b1000]
    for name in ("int8", "hif8", "fp8_e4m3fnuz"):
        assert encode(tiny, target=FORMATS[name]).tolist() == [0, 0]


def test_int8_is_symmetric_and_reads_its_last_code() -> None:
    row = FORMATS["int8"]
    assert encode([-2.0, -127 / 64, -1 / 64, 0.0, 1 / 64, 2.0], target=row).tolist() == [0x81, 0x81, 0xFF, 0, 1, 0x7F]
    assert decode([0x80, 0x81], target=row).tolist() == [-2.0, -127 / 64]


def test_codes_keep_shape_and_take_no_elements() -> None:
    for row in [row for row in FORMATS.values() if row.coding is Coding.FIELDS]:
        assert encode(np.zeros((2, 0, 3)), target=row).shape == (2, 0, 3)
        assert decode(np.zeros((2, 0, 3)), target=row).shape == (2, 0, 3)
        assert encode(1.0, target=row).shape == ()
        assert decode(encode(np.ones((2, 1)), target=row), target=row).tolist() == [[1.0], [1.0]]


def test_what_is_no_code_is_refused() -> None:
    cases: list[tuple[Any, str]] = [
        ([16], "codes of fp4_e2m1 are between 0 and 15, not 16 to 16"),
        ([-1, 3], "between 0 and 15, not -1 to 3"),
        ([1.0], "codes are integers, not float64"),
        ([True], "codes are integers, not bool"),
    ]
    for codes, why in cases:
        with pytest.raises(UsageError, match=re.escape(why)):
            decode(codes, target=FORMATS["fp4_e2m1"])


@given(value=st.floats(allow_nan=False))
def test_float64_bits_are_its_codes(value: float) -> None:
    code = encode(value, target=FORMATS["fp64"], saturate=False)
    assert code == np.float64(value).view(np.uint64)
    assert_same(decode(code[None], target=FORMATS["fp64"]), np.array([value]))


def test_any_type_of_values_is_taken() -> None:
    row = FORMATS["fp8_e4m3"]
    for values in ([1, 2], np.array([1, 2], dtype=np.int32), np.array([1, 2], dtype=ml_dtypes.float8_e5m2)):
        assert encode(values, target=row).tolist() == [0x38, 0x40]


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


def test_every_16_bit_value_rounds_as_its_bits_say() -> None:
    for dtype in TYPES:
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
    for bits in (patterns, ends):
        found = round_to(bits.view(np.float32), target=HIF8, rounding="hybrid")
        assert_same(found, expected(bits, dtype="float32"))


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


def test_other_types_are_refused() -> None:
    for dtype in [np.float64, np.int32, ml_dtypes.float8_e5m2]:
        with pytest.raises(UsageError, match="give float32, float16, bfloat16, not"):
            round_to(np.ones(3).astype(dtype), target=HIF8, rounding="hybrid")
