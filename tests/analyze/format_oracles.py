"""Roundings to a format that are not ours: by a table of its values, and by gfloat."""

from __future__ import annotations

import dataclasses
from typing import Any

import gfloat  # type: ignore[import-untyped]
import ml_dtypes
import numpy as np
from gfloat import formats as gfloat_formats

from ranktape.analyze.numerics.formats import Coding, Format, Rounding, decode

Floats = np.ndarray[Any, np.dtype[np.float64]]

PATTERNS = np.arange(1 << 16, dtype=np.uint16)
"""Every code of a 16-bit type."""

TYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
"""The 16-bit types whose every value is tried."""


def every_16_bit_value() -> Floats:
    """All numbers, infinities and NaN patterns of bfloat16 and float16."""
    with np.errstate(invalid="ignore"):
        return np.concatenate([PATTERNS.view(dtype).astype(np.float64) for dtype in TYPES])


def listed(row: Format) -> Floats:
    """The nonnegative finite values of a format, ascending."""
    values = decode(np.arange(1 << row.num_bits), target=row)
    return np.unique(np.abs(values[np.isfinite(values) & (np.abs(values) <= row.maximum)]))


def neighbours(magnitudes: Floats, *, row: Format) -> tuple[Floats, Floats]:
    """The largest value of the format not above each magnitude, and the smallest not below it.

    At the ends both are the end.
    """
    table = listed(row)
    last = len(table) - 1
    lower = table[np.clip(np.searchsorted(table, magnitudes, side="right") - 1, 0, last)]
    upper = table[np.clip(np.searchsorted(table, magnitudes, side="left"), 0, last)]
    return lower, upper


def rounded_by_table(values: Floats, *, row: Format, rounding: Rounding, uniform: Floats | None = None) -> Floats:
    """The saturating rounding, by looking the neighbours up; `uniform` decides the stochastic one."""
    magnitudes = np.abs(values)
    lower, upper = neighbours(np.nan_to_num(magnitudes, nan=0.0, posinf=row.maximum), row=row)
    # Of neighbours the mean is a float64, and so is every multiple of their distance that occurs.
    middle = lower + (upper - lower) / 2
    step = np.where(upper > lower, upper - lower, 1.0)
    if rounding is Rounding.EVEN:
        # Of one significand bit, all significands are odd and the larger value is chosen (IEEE 754-2019, 4.3.1).
        is_up = (magnitudes > middle) | ((magnitudes == middle) & (np.floor(lower / step) % 2 == 1))
    elif rounding is Rounding.AWAY:
        is_up = magnitudes >= middle
    elif rounding is Rounding.FLOOR:
        is_up = np.zeros(values.shape, dtype=bool)
    else:
        assert uniform is not None
        with np.errstate(invalid="ignore"):
            is_up = uniform < (magnitudes - lower) / step
    found = np.where(is_up, upper, lower)
    return signed(np.where(np.isnan(values), np.nan, found), like=values, row=row)


def signed(magnitudes: Floats, *, like: Floats, row: Format) -> Floats:
    """The magnitudes with the signs of `like`, as far as the format has signs."""
    if not row.is_signed:
        return np.where(like < 0, np.nan, magnitudes)
    found = np.copysign(magnitudes, like)
    return found if row.has_negative_zero else found + 0.0


def gfloat_info(row: Format) -> gfloat.FormatInfo:
    """What gfloat knows the format as; the formats that it lacks in its own terms."""
    known = {
        "fp8_e4m3": gfloat_formats.format_info_ocp_e4m3,
        "fp8_e5m2": gfloat_formats.format_info_ocp_e5m2,
        "fp6_e2m3": gfloat_formats.format_info_ocp_e2m3,
        "fp6_e3m2": gfloat_formats.format_info_ocp_e3m2,
        "fp4_e2m1": gfloat_formats.format_info_ocp_e2m1,
        "nvfp4": gfloat_formats.format_info_ocp_e2m1,
        "int8": gfloat_formats.format_info_ocp_int8,
        "e8m0": gfloat_formats.format_info_ocp_e8m0,
        "bf16": gfloat_formats.format_info_bfloat16,
        "fp16": gfloat_formats.format_info_binary16,
        "fp32": gfloat_formats.format_info_binary32,
    }
    if row.name in known:
        return known[row.name]
    if row.coding is Coding.INTEGER:
        return dataclasses.replace(known["int8"], name=row.name, k=row.num_bits, precision=row.num_bits)
    is_ieee = row.num_infinities > 0
    return gfloat.FormatInfo(
        row.name,
        row.num_bits,
        row.mantissa_bits + 1,
        bias=row.bias,
        is_signed=row.is_signed,
        domain=gfloat.Domain.Extended if is_ieee else gfloat.Domain.Finite,
        has_nz=row.has_negative_zero,
        num_high_nans=(1 << row.mantissa_bits) - 1 if is_ieee else 0 if row.is_signed else row.num_nans,
        has_subnormals=True,
        is_twos_complement=False,
    )


GFLOAT_MODES = {
    Rounding.EVEN: gfloat.RoundMode.TiesToEven,
    Rounding.AWAY: gfloat.RoundMode.TiesToAway,
    Rounding.FLOOR: gfloat.RoundMode.TowardZero,
}


def rounded_by_gfloat(values: Floats, *, row: Format, rounding: Rounding, saturate: bool = True) -> Floats:
    """The same by gfloat; integers symmetric about 0, as ours are."""
    # Of int8 gfloat gives -2 too, of formats without a sign negative numbers: magnitudes are rounded, signs put back.
    is_by_magnitude = row.coding is Coding.INTEGER or not row.is_signed
    exact = np.abs(values) if is_by_magnitude else values
    is_number = ~np.isnan(values)
    found = np.full(values.shape, np.nan)
    found[is_number] = gfloat.round_ndarray(
        gfloat_info(row), exact[is_number], rnd=GFLOAT_MODES[rounding], sat=saturate
    )
    return signed(np.abs(found), like=values, row=row) if is_by_magnitude else found


def assert_same(found: Floats, expected: Floats) -> None:
    """Every value equal, a zero in its sign too, NaN where NaN is expected."""
    is_nan = np.isnan(expected)
    assert np.array_equal(np.isnan(found), is_nan)
    assert np.array_equal(found[~is_nan].view(np.int64), expected[~is_nan].view(np.int64))
