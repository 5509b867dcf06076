"""Gives the bits that stand for a value of a format, and the value that bits stand for.

A code is an integer whose lowest `num_bits` bits are those of the format, the sign first: of fp4_e2m1 -6 is 0b1111.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.numerics.formats.rounding import round_to
from ranktape.analyze.numerics.formats.table import FORMATS, Coding, Format, Rounding
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

MAX_TABLE_BITS = 16
"""Formats up to this width are decoded by a table of all their codes."""

NARROW_BITS = 8
"""Values of formats up to this width are all bfloat16 numbers: `code_table` has their codes."""

TAPER_PREFIXES = (0x08, 0x10, 0x20, 0x40, 0x60)
"""The first bits of HiF8 codes after the sign, for exponents whose magnitude has 0, 1, 2, 3 and 4 bits.

Those bits follow, with the sign of the exponent in place of their leading 1, and then the significand. Codes below the
first one are powers of two: 2**(code - 23).
"""

TAPER_BIAS = 23
"""What is subtracted from HiF8 codes that are powers of two."""


def encode(
    values: ArrayLike,
    *,
    target: Format,
    rounding: Rounding | str | None = None,
    saturate: bool = True,
    seed: int | None = None,
) -> NDArray[Any]:
    """The codes of what `round_to` makes of `values`, in the narrowest unsigned type that holds them, in their shape.

    NaN has one code, whatever its bits: the quiet one of IEEE 754 formats without a sign, 0x7F of fp8_e4m3, 0x80 of
    hif8 and the `fnuz` types, 0xFF of e8m0. Negative zero has its code where the format has a negative zero.

    Raises:
        UsageError: as `round_to`; a value is NaN, or becomes NaN, and the format has no code for it.
    """
    return codes_of(
        round_to(values, target=target, rounding=rounding, saturate=saturate, seed=seed),
        target=target,
    )


def codes_of(values: ArrayLike, *, target: Format) -> NDArray[Any]:
    """The codes of values that the format holds, as `round_to` gives them; of others nothing is said.

    Raises:
        UsageError: a value is NaN, and the format has no code for it.
    """
    exact = np.asarray(values, dtype=np.float64)
    is_nan = np.isnan(exact)
    if not target.num_nans and is_nan.any():
        raise UsageError(f"{target.name} has no code for NaN, and {is_nan.sum()} values are NaN: replace them first")
    is_infinite = np.isinf(exact)
    magnitude = np.where(is_nan | is_infinite, 0.0, np.abs(exact))
    codes = _CODES_OF[target.coding](magnitude, target)
    codes = np.where(is_infinite, _infinity_code(target), codes)
    negative = np.signbit(exact)
    if target.coding is Coding.INTEGER:
        codes = np.where(negative, -codes, codes) & ((1 << target.num_bits) - 1)
    elif target.coding is not Coding.EXPONENT:
        # Without a negative zero its bits are NaN's, or 0 becomes it by no rounding.
        has_sign = negative & ((codes != 0) | target.has_negative_zero)
        codes = codes | (has_sign.astype(np.int64) << (target.num_bits - 1))
    return np.where(is_nan, _nan_code(target), codes).astype(_code_dtype(target))


def decode(codes: ArrayLike, *, target: Format) -> NDArray[np.float64]:
    """The values that codes stand for, in their shape: infinities and NaN where the format has them.

    Every value of every format is a float64. Empty input gives empty output.

    Raises:
        UsageError: the codes are not integers, or not all between 0 and the largest code of the format.
    """
    given = np.asarray(codes)
    if given.size == 0:
        return np.zeros(given.shape)
    if given.dtype.kind not in "iu":
        raise UsageError(f"codes are integers, not {given.dtype}: `encode` makes them from values")
    largest = (1 << target.num_bits) - 1
    if int(given.min()) < 0 or int(given.max()) > largest:
        raise UsageError(
            f"codes of {target.name} are between 0 and {largest}, not {given.min()} to {given.max()}: "
            "view signed integers as unsigned ones"
        )
    if target.num_bits > MAX_TABLE_BITS:
        return _values(given, target)
    return np.asarray(_table(target.name)[given])


@functools.cache
def _table(name: str) -> NDArray[np.float64]:
    target = FORMATS[name]
    table = _values(np.arange(1 << target.num_bits), target)
    table.flags.writeable = False
    return table


@functools.cache
def code_table(name: str) -> NDArray[np.uint8]:
    """The code that each pattern of bfloat16 has in a format of at most `NARROW_BITS` bits; of others nothing is said.

    NaN has the code 0 where the format has no code for it.
    """
    target = FORMATS[name]
    values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    without_code = np.isnan(values) & (target.num_nans == 0)
    codes: NDArray[np.uint8] = encode(
        np.where(without_code, 0.0, values),
        target=target,
        rounding=Rounding.FLOOR,
        saturate=not target.num_infinities,
    )
    codes.flags.writeable = False
    return codes


def _values(codes: NDArray[Any], target: Format) -> NDArray[np.float64]:
    # int64 keeps the bits of the widest codes, and shifts of what is masked bring no sign in.
    bits = codes.astype(np.uint64).view(np.int64)
    if target.coding is Coding.INTEGER:
        half = 1 << (target.num_bits - 1)
        return np.asarray(((bits ^ half) - half) * target.min_subnormal)
    if target.coding is Coding.EXPONENT:
        return np.where(bits == _nan_code(target), np.nan, np.ldexp(1.0, bits - target.bias))
    sign = (bits >> (target.num_bits - 1)) & 1
    magnitude_bits = bits & ((1 << (target.num_bits - 1)) - 1)
    decoded = _tapered_values if target.coding is Coding.TAPERED else _field_values
    values = np.where(sign == 1, -1.0, 1.0) * decoded(magnitude_bits, target)
    if target.has_negative_zero:
        return values
    # The bits of negative zero are NaN's where there is one NaN.
    return np.where((sign == 1) & (magnitude_bits == 0), np.nan, values)


def _field_values(bits: NDArray[np.int64], target: Format) -> NDArray[np.float64]:
    field = bits >> target.mantissa_bits
    fraction = bits & ((1 << target.mantissa_bits) - 1)
    significand = fraction + (np.minimum(field, 1) << target.mantissa_bits)
    with np.errstate(over="ignore"):  # the specials of fp64
        values = np.ldexp(significand.astype(np.float64), np.maximum(field, 1) - target.bias - target.mantissa_bits)
    special = np.where(fraction == 0, np.inf, np.nan) if target.num_infinities else np.nan
    return np.where(values > target.maximum, special, values)


def _tapered_values(bits: NDArray[np.int64], target: Format) -> NDArray[np.float64]:
    width = np.searchsorted(TAPER_PREFIXES, bits, side="right") - 1
    payload = bits - np.asarray(TAPER_PREFIXES)[np.maximum(width, 0)]
    mantissa_bits = target.mantissa_bits - np.maximum(width - 2, 0)
    field = payload >> mantissa_bits
    leading = (1 << np.maximum(width, 1)) >> 1
    exponent = np.where((field & leading) != 0, -1, 1) * (field | leading) * (width > 0)
    significand = (1 << mantissa_bits) + (payload & ((1 << mantissa_bits) - 1))
    values = np.ldexp(significand.astype(np.float64), exponent - mantissa_bits)
    values = np.where(width < 0, np.where(bits == 0, 0.0, np.ldexp(1.0, bits - TAPER_BIAS)), values)
    return np.where(values > target.maximum, np.inf, values)


def _field_codes(magnitude: NDArray[np.float64], target: Format) -> NDArray[np.int64]:
    own_exponent = np.where(magnitude == 0, target.emin, np.frexp(magnitude)[1].astype(np.int64) - 1)
    exponent = np.maximum(own_exponent, target.emin)
    significand = np.ldexp(magnitude, target.mantissa_bits - exponent).astype(np.int64)
    # The leading bit of the significand adds 1 to the field, but for subnormal numbers, which lack it.
    return np.asarray(((exponent - target.emin) << target.mantissa_bits) + significand)


def _integer_codes(magnitude: NDArray[np.float64], target: Format) -> NDArray[np.int64]:
    return (magnitude / target.min_subnormal).astype(np.int64)


def _exponent_codes(magnitude: NDArray[np.float64], target: Format) -> NDArray[np.int64]:
    return np.frexp(magnitude)[1].astype(np.int64) - 1 + target.bias


def _tapered_codes(magnitude: NDArray[np.float64], target: Format) -> NDArray[np.int64]:
    exponent = np.frexp(magnitude)[1].astype(np.int64) - 1
    size = np.abs(exponent)
    width = np.frexp(size.astype(np.float64))[1]
    # Beyond the last prefix the code is an exponent alone; the entry that stands in for it is not used.
    prefix = np.asarray(TAPER_PREFIXES)[np.minimum(width, len(TAPER_PREFIXES) - 1)]
    mantissa_bits = target.mantissa_bits - np.maximum(np.minimum(width, len(TAPER_PREFIXES) - 1) - 2, 0)
    leading = (1 << np.maximum(width, 1).astype(np.int64)) >> 1
    field = np.where(exponent < 0, size, size ^ leading) * (size > 0)
    fraction = np.ldexp(magnitude, mantissa_bits - exponent).astype(np.int64) - (1 << mantissa_bits)
    codes = prefix + (field << mantissa_bits) + fraction
    codes = np.where(size > target.taper[-1], exponent + TAPER_BIAS, codes)
    return np.where(magnitude == 0, 0, codes)


_CODES_OF = {
    Coding.FIELDS: _field_codes,
    Coding.INTEGER: _integer_codes,
    Coding.EXPONENT: _exponent_codes,
    Coding.TAPERED: _tapered_codes,
}


def _infinity_code(target: Format) -> int:
    """The code of positive infinity: the one after that of the largest value, where there is one."""
    largest = _CODES_OF[target.coding](np.array(target.maximum), target)
    return int(largest) + 1 if target.num_infinities else 0


def _nan_code(target: Format) -> int:
    """The one code that NaN gets, of however many there are."""
    if target.num_infinities and target.coding is Coding.FIELDS:
        return _infinity_code(target) + (1 << (target.mantissa_bits - 1))
    if target.has_negative_zero:
        return (1 << (target.num_bits - 1)) - 1
    return 0xFF if target.coding is Coding.EXPONENT else 1 << (target.num_bits - 1)


def _code_dtype(target: Format) -> np.dtype[Any]:
    return np.min_scalar_type((1 << target.num_bits) - 1)
