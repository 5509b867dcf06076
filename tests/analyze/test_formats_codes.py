"""Are the codes of every format those that others write and read?"""

from __future__ import annotations

import re
from typing import Any

import gfloat  # type: ignore[import-untyped]
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktape.analyze.numerics.formats import FORMATS, Coding, Format, Rounding, codes_of, decode, encode, round_to
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import numpy_dtype
from tests.analyze.format_oracles import PATTERNS, TYPES, assert_same, every_16_bit_value, gfloat_info

SMALL = [row for row in FORMATS.values() if row.num_bits <= 16]

STORED = [row for row in FORMATS.values() if row.dtype is not None]


def every_format(rows: list[Format]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


def some_codes(row: Format) -> np.ndarray[Any, Any]:
    """Every code, or many of a format that has more than fit."""
    if row.num_bits <= 16:
        return np.arange(1 << row.num_bits)
    drawn = np.random.default_rng(0).integers(0, 1 << 64, 50_000, dtype=np.uint64) >> np.uint64(64 - row.num_bits)
    ends = np.array([0, 1, (1 << row.mantissa_bits) - 1, 1 << row.mantissa_bits, (1 << row.num_bits) - 1], np.uint64)
    return np.concatenate([drawn, ends, ends ^ np.uint64(1 << (row.num_bits - 1))])


@every_format([row for row in SMALL if row.name != "hif8"])
def test_codes_are_read_as_by_gfloat(row: Format) -> None:
    codes = np.arange(1 << row.num_bits)
    with np.errstate(over="ignore"):
        expected = gfloat.decode_ndarray(gfloat_info(row), codes.astype(np.uint64).astype(np.int64))
    assert_same(decode(codes, target=row), np.asarray(expected, dtype=np.float64))


def test_hif8_codes_are_read_as_by_its_makers() -> None:
    en_dtypes = pytest.importorskip("en_dtypes")
    codes = np.arange(256, dtype=np.uint8)
    assert_same(decode(codes, target=FORMATS["hif8"]), codes.view(en_dtypes.hifloat8).astype(np.float64))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_16_bit_value_is_written_to_hif8_as_by_its_makers(dtype: np.dtype[Any]) -> None:
    """By way of float32: they cast no bfloat16."""
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


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (0x00, 0.0),
        (0x01, 2.0**-22),
        (0x07, 2.0**-16),
        (0x08, 1.0),
        (0x0F, 1.875),
        (0x10, 2.0),
        (0x1F, 0.9375),
        (0x2F, 15.0),
        (0x3F, 15 / 64),
        (0x40, 16.0),
        (0x4F, 224.0),
        (0x5F, 1.75 * 2.0**-7),
        (0x60, 256.0),
        (0x6E, 32768.0),
        (0x6F, np.inf),
        (0x7F, 1.5 * 2.0**-15),
        (0x80, np.nan),
        (0x81, -(2.0**-22)),
        (0xEE, -32768.0),
        (0xEF, -np.inf),
    ],
)
def test_hif8_codes_of_the_published_table(code: int, value: float) -> None:
    """The ends of every width of the exponent (arXiv 2409.16626)."""
    row = FORMATS["hif8"]
    assert_same(decode([code], target=row), np.array([value]))
    assert encode([value], target=row, saturate=False).tolist() == [code]


@every_format(list(FORMATS.values()))
def test_what_is_read_is_written_back(row: Format) -> None:
    codes = some_codes(row)
    values = decode(codes, target=row)
    kept = ~np.isnan(values) & (np.abs(values) <= np.inf if row.num_infinities else np.abs(values) <= row.maximum)
    saturate = not row.num_infinities
    found = encode(values[kept], target=row, saturate=saturate)
    assert found.dtype == {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[-(-row.num_bits // 8)]
    assert np.array_equal(found, codes[kept])


@every_format([row for row in SMALL if row.num_nans])
@pytest.mark.parametrize("rounding", [Rounding.EVEN, Rounding.AWAY, Rounding.FLOOR, Rounding.STOCHASTIC])
@pytest.mark.parametrize("saturate", [True, False])
def test_the_code_of_every_16_bit_value_stands_for_its_rounding(
    row: Format, rounding: Rounding, *, saturate: bool
) -> None:
    values = every_16_bit_value()
    rounded = round_to(values, target=row, rounding=rounding, saturate=saturate)
    codes = encode(values, target=row, rounding=rounding, saturate=saturate)
    assert_same(decode(codes, target=row), rounded)
    assert np.array_equal(codes, codes_of(rounded, target=row))


@every_format([row for row in STORED if row.num_bits <= 8 and row.name != "e8m0"])
def test_every_16_bit_value_is_written_as_a_cast_of_ml_dtypes_in_range(row: Format) -> None:
    values = every_16_bit_value()
    values = values[np.abs(values) <= row.maximum]
    expected = values.astype(numpy_dtype(str(row.dtype))).view(np.uint8)
    assert np.array_equal(encode(values, target=row), expected)


@pytest.mark.parametrize(
    ("name", "code"),
    [
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
    ],
)
def test_nan_has_one_code(name: str, code: int) -> None:
    patterns = np.array([0x7FF8 << 48, 0xFFF8 << 48, (0xFFF << 52) + 1, (0x7FF << 52) + 1], dtype=np.uint64)
    assert encode(patterns.view(np.float64), target=FORMATS[name]).tolist() == [code] * 4


@every_format([row for row in SMALL if not row.num_nans])
def test_nan_is_refused_where_it_has_no_code(row: Format) -> None:
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


@every_format([row for row in FORMATS.values() if row.coding is Coding.FIELDS])
def test_codes_keep_shape_and_take_no_elements(row: Format) -> None:
    assert encode(np.zeros((2, 0, 3)), target=row).shape == (2, 0, 3)
    assert decode(np.zeros((2, 0, 3)), target=row).shape == (2, 0, 3)
    assert encode(1.0, target=row).shape == ()
    assert decode(encode(np.ones((2, 1)), target=row), target=row).tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize(
    ("codes", "why"),
    [
        ([16], "codes of fp4_e2m1 are between 0 and 15, not 16 to 16"),
        ([-1, 3], "between 0 and 15, not -1 to 3"),
        ([1.0], "codes are integers, not float64"),
        ([True], "codes are integers, not bool"),
    ],
)
def test_what_is_no_code_is_refused(codes: list[Any], why: str) -> None:
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
