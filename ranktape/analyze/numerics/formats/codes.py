"""Gives the bits that stand for a value of a format, and the value that bits stand for.

A code is an integer whose lowest `num_bits` bits are those of the format, the sign first: of fp4_e2m1 -6 is 0b1111.
"""

from __future__ import annotations

import bisect
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.numerics.formats.rounding import round_to
from ranktape.analyze.numerics.formats.table import FORMATS, Coding, Format, Rounding
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import numpy_dtype

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
    codes: NDArray[Any]
    if target.coding is Coding.INTEGER:
        codes = (exact / target.min_subnormal).astype(np.int64) & ((1 << target.num_bits) - 1)
    elif target.coding is Coding.TAPERED:
        magnitudes = _table(target.name)[: 1 << (target.num_bits - 1)]
        in_order = np.argsort(magnitudes)
        found = np.searchsorted(magnitudes, np.where(is_nan, 0.0, np.abs(exact)), sorter=in_order)
        codes = in_order[np.minimum(found, in_order.size - 1)]
        # The bits of negative zero are NaN's.
        codes |= (np.signbit(exact) & (codes != 0)).astype(np.int64) << (target.num_bits - 1)
    else:
        stored = np.ascontiguousarray(np.where(is_nan, 1.0, exact).astype(_stored(target)))
        codes = stored.view(f"u{stored.itemsize}").reshape(exact.shape)
    return np.where(is_nan, _nan_code(target), codes).astype(np.min_scalar_type((1 << target.num_bits) - 1))


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


def _stored(target: Format) -> np.dtype[Any]:
    """The element type whose bits are the codes; that of NVFP4's elements is fp4_e2m1's."""
    return numpy_dtype(target.dtype or "float4_e2m1fn")


def _values(codes: NDArray[Any], target: Format) -> NDArray[np.float64]:
    if target.coding is Coding.INTEGER:
        half = 1 << (target.num_bits - 1)
        return np.asarray(((codes.astype(np.int64) ^ half) - half) * target.min_subnormal)
    if target.coding is Coding.TAPERED:
        return np.array([_tapered(code, target) for code in codes.tolist()])
    dtype = _stored(target)
    with np.errstate(invalid="ignore"):  # signalling NaN
        values = np.ascontiguousarray(codes.astype(f"u{dtype.itemsize}")).view(dtype).astype(np.float64)
    return np.where(np.isnan(values), np.nan, values).reshape(codes.shape)


def _tapered(code: int, target: Format) -> float:
    sign, bits = divmod(code, 1 << (target.num_bits - 1))
    if bits == 0:
        return np.nan if sign else 0.0
    if bits < TAPER_PREFIXES[0]:
        magnitude = 2.0 ** (bits + target.lowest_exponent - 1)
    else:
        width = bisect.bisect(TAPER_PREFIXES, bits) - 1
        mantissa_bits = target.mantissa_bits - max(width - 2, 0)
        field, fraction = divmod(bits - TAPER_PREFIXES[width], 1 << mantissa_bits)
        leading = (1 << width) >> 1
        exponent = -(field | leading) if field & leading else field | leading
        magnitude = 2.0**exponent * (1 + fraction / (1 << mantissa_bits))
    magnitude = magnitude if magnitude <= target.maximum else np.inf
    return -magnitude if sign else magnitude


def _nan_code(target: Format) -> int:
    """The one code that NaN gets, of however many there are."""
    if target.num_infinities and target.coding is Coding.FIELDS:
        return ((2 << target.exponent_bits) - 1) << (target.mantissa_bits - 1)
    if target.has_negative_zero:
        return (1 << (target.num_bits - 1)) - 1
    return 0xFF if target.coding is Coding.EXPONENT else 1 << (target.num_bits - 1)
