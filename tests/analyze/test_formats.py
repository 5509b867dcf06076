"""Is every format what its definition says, with the limits at which its rounding overflows and flushes?"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranktape.analyze.numerics.formats import (
    BY_DTYPE,
    FORMATS,
    Format,
    Rounding,
    decode,
    parse_format,
    round_to,
)
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import DTYPES, numpy_dtype

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


@pytest.mark.parametrize("row", STORED, ids=lambda row: row.name)
def test_limits_are_those_of_ml_dtypes(row: Format) -> None:
    info = ml_dtypes.finfo(numpy_dtype(str(row.dtype)))  # type: ignore[no-untyped-call]
    assert row.maximum == float(info.max)
    assert row.minimum == float(info.min)
    assert row.min_normal == float(info.smallest_normal)
    assert row.min_subnormal == float(info.smallest_subnormal)
    assert row.mantissa_bits == info.nmant
    assert row.emax == info.maxexp - 1
    assert row.emin == info.minexp


@pytest.mark.parametrize(
    ("name", "emax", "emin", "maximum", "min_normal", "min_subnormal", "num_finite"),
    [
        # OCP microscaling formats 1.0, 5.3.4: 1.984375 at most, in steps of 2**-6; no number is subnormal.
        ("int8", 0, 0, 1.984375, 2.0**-6, 2.0**-6, 256),
        # The table of formats of microxcaling: int4 is symmetric, 7/4 at most, in steps of 1/4.
        ("int4", 0, 0, 1.75, 0.25, 0.25, 16),
        # arXiv 2409.16626.
        ("hif8", 15, -15, 32768.0, 2.0**-15, 2.0**-22, 253),
        ("nvfp4", 2, 0, 6.0, 1.0, 0.5, 16),
    ],
)
def test_limits_of_what_ml_dtypes_lacks(  # noqa: PLR0917 - a row of a table
    name: str, emax: int, emin: int, maximum: float, min_normal: float, min_subnormal: float, num_finite: int
) -> None:
    row = FORMATS[name]
    assert (row.emax, row.emin, row.maximum, row.minimum) == (emax, emin, maximum, -maximum)
    assert (row.min_normal, row.min_subnormal, row.num_finite) == (min_normal, min_subnormal, num_finite)


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
        ("hif8", 40960.0, 40960.0),
        ("int8", 2 - 2.0**-7, 2 - 2.0**-7),
        ("nvfp4", 7.0, 7.0),
        ("e8m0", 1.5 * 2.0**127, 1.5 * 2.0**127),
    ],
)
def test_overflow_begins_half_a_step_beyond_the_largest_value(name: str, threshold: float, start: float) -> None:
    assert FORMATS[name].overflow_threshold == threshold
    assert FORMATS[name].overflow_start == start


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "e8m0", "bf16", "fp16", "fp8_e4m3_ieee", "fp8_e3m4"])
def test_overflow_begins_where_a_cast_leaves_the_finite_values(name: str) -> None:
    row = FORMATS[name]
    # float32 is exact at these ends, and ml_dtypes does not saturate.
    ends = np.array([row.overflow_start, np.nextafter(np.float32(row.overflow_start), np.float32(0))], dtype=np.float32)
    if row.overflow_start != float(ends[0]):
        ends = np.array([np.nextafter(np.float32(row.overflow_start), np.float32(np.inf)), row.overflow_threshold])
    with np.errstate(over="ignore"):
        cast = ends.astype(np.float32).astype(numpy_dtype(str(row.dtype))).astype(np.float64)
    assert np.isfinite(cast).tolist() == [False, True]


@pytest.mark.parametrize("row", ALL, ids=lambda row: row.name)
@pytest.mark.parametrize("rounding", [Rounding.EVEN, Rounding.AWAY, Rounding.FLOOR])
def test_values_just_at_the_flush_limit(row: Format, rounding: Rounding) -> None:
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


@pytest.mark.parametrize("row", [row for row in ALL if row.name != "fp64"], ids=lambda row: row.name)
@pytest.mark.parametrize("rounding", [Rounding.STOCHASTIC, Rounding.HYBRID])
def test_what_chance_may_decide_overflows_beyond_the_largest_value(row: Format, rounding: Rounding) -> None:
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


@pytest.mark.parametrize(("name", "expected"), [("hifp8", "hif8"), ("hifloat8", "hif8"), ("mxint8", "int8")])
def test_a_format_is_found_by_other_words_for_it(name: str, expected: str) -> None:
    assert parse_format(name) is FORMATS[expected]


@pytest.mark.parametrize("name", [*FORMATS, *BY_DTYPE])
def test_a_format_is_found_by_name_and_by_dtype(name: str) -> None:
    assert name in {parse_format(name).name, parse_format(name).dtype}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("fp8_e4m4", "did you mean fp8_e4m3"),
        ("fp6", "did you mean fp6_e2m3, fp6_e3m2"),
        ("bfloat", "did you mean bfloat16"),
        ("?", "use one of fp8_e4m3, "),
    ],
)
def test_an_unknown_format_names_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        parse_format(name)
