"""Rounds numbers to the values of a format, and encodes and decodes these values.

Functions that take `Any` accept numpy arrays and torch tensors, and compute on the device of the tensor. A code is an
integer whose lowest `num_bits` bits are those of the format, with the sign first: -6 in fp4_e2m1 is 0b1111.
"""

from __future__ import annotations

import bisect
import functools
import operator
import sys
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ranktape.analyze.numerics.formats.table import FORMATS, Coding, Format, Rounding, parse_rounding
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import numpy_dtype

MAX_TABLE_BITS = 16
"""Formats of at most this width are decoded by a table of all their codes."""

NARROW_BITS = 8
"""All values of formats of at most this width, except tables, are bfloat16 numbers: `code_table` has their codes."""

TAPER_PREFIXES = (0x08, 0x10, 0x20, 0x40, 0x60)
"""The bits after the sign of HiF8 codes that mark exponents whose magnitude has 0, 1, 2, 3 and 4 bits.

The bits of the magnitude follow, with the sign of the exponent instead of their leading 1, and then the significand.
Codes below the first prefix are powers of two: 2**(code - 23).
"""


HYBRID_BITS = {"float32": 14, "float16": 2, "bfloat16": 2}
"""The types that hybrid rounding accepts, with the number of discarded bits that it compares with the threshold."""

_FIELD_SHIFT, _ONE_FIELD = 52, 1023
"""The number of bits below the exponent field of a float64, and the exponent field of 1.0."""

_EXPONENT_MASK, _ONE_BITS = 0x7FF << _FIELD_SHIFT, _ONE_FIELD << _FIELD_SHIFT
"""The exponent field of a float64, and the bits of 1.0."""

_HALF = 0.5
"""The part of a step from which the value above is the nearer one."""

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""The step from one state of splitmix64 to the next: 2**64 over the golden ratio, odd, as a signed integer."""

UNIFORM_UNIT = 2.0**-53
"""The distance between neighbouring uniform numbers."""


def namespace(x: Any) -> ModuleType:
    """The module `numpy` or `torch` that `x` belongs to, for functions that both have under one name."""
    return np if isinstance(x, np.ndarray) else sys.modules["torch"]


@np.errstate(invalid="ignore")  # signalling NaN
def round_to(
    values: ArrayLike,
    *,
    target: Format,
    rounding: Rounding | str | None = None,
    saturate: bool = True,
    seed: int | None = None,
) -> NDArray[np.float64]:
    """Round `values` to the format, and return float64 in the shape of `values`.

    NaN stays NaN, even if the format has no code for it: count and mask NaN first. Values that round beyond the largest
    value, including infinities, become the largest value of their sign; with `saturate=False` infinity, or NaN if the
    format has no infinity. If the format has a negative zero, zeros and flushed values keep their sign. Subnormals are
    preserved. Empty input gives empty output. Negative numbers are NaN in e8m0 and ue5m3, which have no sign. In e8m0,
    which has no zero, zeros and values below the smallest value become the smallest value.

    The result is exact for every float64. `rounding` is by default that of the format. Stochastic rounding rounds a
    magnitude up if the uniform number of the element (`uniforms(seed, ...)`, in C order) is less than its distance
    from the value below as a fraction of the step, computed in float64; the default seed is 0. Hybrid rounding reads
    the bits of `values` in their type: float32, float16 or bfloat16. In a table, ties go to the lower value.

    Raises:
        UsageError: the rounding is unknown; it is not even and the format is a table; it is hybrid, and the format is
            not hif8 or the type of `values` is not supported; the seed is not an integer, or is given with a rounding
            that is not stochastic; `saturate` is False and the format has neither infinity nor NaN; or the values are
            complex.
    """
    chosen = parse_rounding(rounding, target=target, seed=seed)
    overflow = target.overflow_value(saturate=saturate)
    if np.iscomplexobj(values):
        raise UsageError("complex numbers are not rounded: give their real and imaginary parts")
    array = np.asarray(values)
    exact = array.reshape(-1).astype(np.float64)
    if target.coding is Coding.TABLE:
        nearest: NDArray[np.float64] = nearest_in_table(exact, target=target)
        return nearest.reshape(array.shape)
    magnitude = np.abs(exact)
    source, indices = np.ascontiguousarray(array).reshape(-1), np.arange(exact.size)
    unbounded = round_magnitudes(
        magnitude, element=target, rounding=chosen, seed=seed or 0, indices=indices, source=source
    )
    rounded = np.where(np.isnan(magnitude), np.nan, np.where(unbounded > target.maximum, overflow, unbounded))
    if target.is_signed:
        signed = np.copysign(rounded, exact)
        return (signed if target.has_negative_zero else signed + 0.0).reshape(array.shape)
    least = target.min_subnormal if target.coding is Coding.EXPONENT else 0.0
    return np.where(exact < 0, np.nan, np.maximum(rounded, least)).reshape(array.shape)


def nearest_in_table(exact: Any, *, target: Format) -> Any:
    """Round a float64 array or tensor to the values of a table; NaN stays NaN."""
    xp = namespace(exact)
    table = xp.asarray(target.table, dtype=xp.float64, device=exact.device)
    nearest = table[xp.searchsorted((table[:-1] + table[1:]) / 2, xp.nan_to_num(exact).reshape(-1))]
    return xp.where(xp.isnan(exact), xp.nan, nearest.reshape(exact.shape))


def round_magnitudes(
    magnitudes: Any, *, element: Format, rounding: Rounding, seed: int = 0, indices: Any = None, source: Any = None
) -> Any:
    """Round float64 magnitudes to the format as if it had values beyond `maximum`; NaN gives an undefined result.

    Results above `maximum` only mark overflow, because magnitudes are clamped two steps beyond it. Magnitudes may be
    float32 if the rounding is even and the format is narrow. Stochastic rounding needs `places`, the indices of the
    elements in C order; hybrid rounding needs `source`, the same numbers in the type whose bits it reads.

    Raises:
        UsageError: the rounding is hybrid, and the type of `source` is not supported; or the seed is not an integer.
    """
    if element.name == "fp64":
        return magnitudes
    xp = namespace(magnitudes)
    bounded = at_most(magnitudes, element.maximum + 2 * float(np.ldexp(1.0, element.unit_exponent(element.emax))))
    steps, field = _steps(bounded, element)
    nearest = bounded + steps
    nearest -= steps
    if rounding is Rounding.EVEN:
        return nearest
    step = steps * 2.0**-52
    below = nearest - (nearest > bounded) * step
    if rounding is Rounding.FLOOR:
        return below
    passed = (bounded - below) / step
    if rounding is Rounding.AWAY:
        return below + (passed >= _HALF) * step
    if rounding is Rounding.STOCHASTIC:
        return below + (uniforms_at(indices, seed=seed) < passed) * step
    hybrid = below + _is_up(passed, magnitudes, source=source, field=field, element=element) * step
    # Beyond the largest value, hybrid rounding is to nearest, ties away, regardless of the bits.
    return xp.where(magnitudes >= element.overflow_start_of(Rounding.AWAY), 2 * bounded, hybrid)


def _steps(bounded: Any, element: Format) -> tuple[Any, Any]:
    """2**52 times the step of the format at each magnitude, and the exponent field of each, as bits of its type.

    For float32 magnitudes it is 2**23 times the step. Adding this number to the magnitude rounds the magnitude to the
    nearest step, ties to even, because no bits are left for a fraction of a step. Subtracting it again is exact.
    """
    xp = namespace(bounded)
    is_wide = bounded.dtype.itemsize == np.dtype(np.float64).itemsize
    kind, shift, one = (xp.int64, _FIELD_SHIFT, _ONE_FIELD) if is_wide else (xp.int32, 23, 127)
    bits = bounded.view(kind) & (_EXPONENT_MASK if is_wide else 0xFF << shift)
    field = at_least(bits, (element.lowest_exponent + one) << shift)
    raised = field + ((shift - element.mantissa_bits) << shift)
    for limit in element.taper:
        raised += (xp.abs(field - (one << shift)) > limit << shift) * (1 << shift)
    return raised.view(bounded.dtype), field


def at_most(x: Any, limit: float) -> Any:
    """The smaller of each number and the limit; NaN stays NaN. It takes a third of the time of `clip`."""
    return np.minimum(x, limit) if isinstance(x, np.ndarray) else x.clamp(max=limit)


def at_least(x: Any, limit: float) -> Any:
    """The larger of each number and the limit; NaN stays NaN."""
    return np.maximum(x, limit) if isinstance(x, np.ndarray) else x.clamp(min=limit)


def powers_of_two(exponents: Any) -> Any:
    """2.0 to the power of each int64 exponent from -1022 to 1023, as float64."""
    return ((exponents + _ONE_FIELD) << _FIELD_SHIFT).view(namespace(exponents).float64)


def _is_up(passed: Any, magnitudes: Any, *, source: Any, field: Any, element: Format) -> Any:
    """Whether hybrid rounding rounds each magnitude up: from half a step on where HiF8 has all its significand bits.

    Elsewhere it rounds up if the first discarded bits reach a threshold, and the magnitude is at least half of the
    smallest value. The threshold is the last 14 bits of a float32, or the last bit of a 16-bit type followed by a 1.
    """
    xp, kind = namespace(passed), str(source.dtype).removeprefix("torch.")
    num_bits = HYBRID_BITS.get(kind)
    if num_bits is None:
        raise UsageError(
            "hybrid rounding looks at the bits of the type that values come in: give "
            f"{', '.join(HYBRID_BITS)}, not {kind}"
        )
    is_wide = source.dtype.itemsize == np.dtype(np.float32).itemsize
    bits = xp.asarray(source.view(xp.int32 if is_wide else xp.int16), dtype=xp.int64)
    thresholds = bits & ((1 << num_bits) - 1) if is_wide else (bits & 1) * 2 + 1
    is_reached = xp.floor(passed * (1 << num_bits)) >= thresholds
    is_reached &= magnitudes >= _HALF * float(np.ldexp(1.0, element.lowest_exponent))
    has_all_bits = xp.abs(field - _ONE_BITS) <= element.taper[0] << _FIELD_SHIFT
    return xp.where(has_all_bits, passed >= _HALF, is_reached)


def uniforms(seed: int, *, start: int, size: int) -> NDArray[np.float64]:
    """The uniform numbers in [0, 1), multiples of 2**-53, of `size` elements from index `start` on.

    Each depends only on the seed and its index, so chunks, threads and machines do not change it. With int64
    arithmetic modulo 2**64, `GOLDEN` = 0x9E3779B97F4A7C15 and `mix`:

        state = mix(seed + GOLDEN)
        uniform = ((mix(state + (index + 1) * GOLDEN) >> 11) & (2**53 - 1)) * 2**-53

    This is the generator splitmix64 (Steele, Lea and Flood, OOPSLA 2014) with a mixed seed. Any number can be computed
    without those before it.

    Raises:
        UsageError: the seed is not an integer.
    """
    numbers: NDArray[np.float64] = uniforms_at(np.arange(start, start + size, dtype=np.int64), seed=seed)
    return numbers


def uniforms_at(index: Any, *, seed: int) -> Any:
    """`uniforms` of the elements with the int64 indices `index`, an array or a tensor.

    Raises:
        UsageError: the seed is not an integer.
    """
    mixed = mix((index + 1) * GOLDEN + state_of(seed))
    return namespace(index).asarray((mixed >> 11) & 0x1FFFFFFFFFFFFF, dtype=namespace(index).float64) * UNIFORM_UNIT


def mix(state: Any) -> Any:
    """The output function of splitmix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit numbers.

    Each bit of the result depends on every bit of the state. All operations are available for int64 everywhere:
    products modulo 2**64, and arithmetic shifts, whose copies of the sign are masked away:

        x ^= (x >> 30) & (2**34 - 1);  x *= 0xBF58476D1CE4E5B9
        x ^= (x >> 27) & (2**37 - 1);  x *= 0x94D049BB133111EB
        x ^= (x >> 31) & (2**33 - 1)
    """
    first = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    second = (first ^ ((first >> 27) & 0x1FFFFFFFFF)) * (0x94D049BB133111EB - (1 << 64))
    return second ^ ((second >> 31) & 0x1FFFFFFFF)


def state_of(seed: int) -> int:
    """The initial state of a seed, as a signed 64-bit integer: `mix` of seed + `GOLDEN`, modulo 2**64.

    Raises:
        UsageError: the seed is not an integer.
    """
    try:
        integer = operator.index(seed)
    except TypeError as error:
        raise UsageError(f"seed is {seed!r}: give an integer") from error
    state = (integer + GOLDEN + (1 << 63)) % (1 << 64) - (1 << 63)
    return int(mix(np.array([state]))[0])


def encode(
    values: ArrayLike,
    *,
    target: Format,
    rounding: Rounding | str | None = None,
    saturate: bool = True,
    seed: int | None = None,
) -> NDArray[Any]:
    """Round `values` with `round_to`, and return their codes in the narrowest unsigned type, in the shape of `values`.

    All NaN get one code: in IEEE 754 formats the quiet NaN with sign bit 0, in fp8_e4m3 0x7F, in hif8 and the `fnuz`
    types 0x80, in e8m0 and ue5m3 0xFF. Negative zero has its own code if the format has a negative zero.

    Raises:
        UsageError: as for `round_to`; or a value is or becomes NaN, and the format has no code for it.
    """
    return codes_of(
        round_to(values, target=target, rounding=rounding, saturate=saturate, seed=seed),
        target=target,
    )


def codes_of(values: ArrayLike, *, target: Format) -> NDArray[Any]:
    """The codes of values of the format, as `round_to` returns them; the codes of other values are undefined.

    Raises:
        UsageError: a value is NaN, and the format has no code for it.
    """
    exact = np.asarray(values, dtype=np.float64)
    is_nan = np.isnan(exact)
    if not target.num_nans and is_nan.any():
        raise UsageError(f"{target.name} has no code for NaN, and {is_nan.sum()} values are NaN: replace them first")
    codes: NDArray[Any]
    if target.coding is Coding.TABLE:
        codes = np.searchsorted(target.table, exact)
    elif target.coding is Coding.INTEGER:
        codes = (exact / target.min_subnormal).astype(np.int64) & ((1 << target.num_bits) - 1)
    elif target.dtype is None and not target.is_signed:
        codes = np.searchsorted(_table(target.name)[: target.num_finite], np.where(is_nan, 0.0, exact))
    elif target.coding is Coding.TAPERED:
        magnitudes = _table(target.name)[: 1 << (target.num_bits - 1)]
        in_order = np.argsort(magnitudes)
        positions = np.searchsorted(magnitudes, np.where(is_nan, 0.0, np.abs(exact)), sorter=in_order)
        codes = in_order[np.minimum(positions, in_order.size - 1)]
        # The bits of negative zero are the code of NaN.
        codes |= (np.signbit(exact) & (codes != 0)).astype(np.int64) << (target.num_bits - 1)
    else:
        stored = np.ascontiguousarray(np.where(is_nan, 1.0, exact).astype(_stored(target)))
        codes = stored.view(f"u{stored.itemsize}").reshape(exact.shape)
    return np.where(is_nan, _nan_code(target), codes).astype(np.min_scalar_type((1 << target.num_bits) - 1))


def decode(codes: ArrayLike, *, target: Format) -> NDArray[np.float64]:
    """The values of codes, in the shape of `codes`, as float64, which represents all values of all formats exactly.

    Empty input gives empty output.

    Raises:
        UsageError: the codes are not integers, or not all are between 0 and the largest code of the format.
    """
    array = np.asarray(codes)
    if array.size == 0:
        return np.zeros(array.shape)
    if array.dtype.kind not in "iu":
        raise UsageError(f"codes are integers, not {array.dtype}: `encode` makes them from values")
    largest = (1 << target.num_bits) - 1
    if int(array.min()) < 0 or int(array.max()) > largest:
        raise UsageError(
            f"codes of {target.name} are between 0 and {largest}, not {array.min()} to {array.max()}: "
            "view signed integers as unsigned ones"
        )
    if target.coding is Coding.TABLE:
        return np.asarray(np.array(target.table)[array])
    if target.num_bits > MAX_TABLE_BITS:
        return _values(array, target)
    return np.asarray(_table(target.name)[array])


@functools.cache
def _table(name: str) -> NDArray[np.float64]:
    target = FORMATS[name]
    table = _values(np.arange(1 << target.num_bits), target)
    table.flags.writeable = False
    return table


@functools.cache
def code_table(name: str) -> NDArray[np.uint8]:
    """The code of each bfloat16 bit pattern in a format of at most `NARROW_BITS` bits, with the pattern as index.

    The codes of numbers that are not values of the format are undefined. NaN has the code 0 if the format has no NaN.
    """
    target = FORMATS[name]
    values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    has_no_code = np.isnan(values) & (target.num_nans == 0)
    codes: NDArray[np.uint8] = encode(
        np.where(has_no_code, 0.0, values),
        target=target,
        rounding=Rounding.FLOOR,
        saturate=not target.num_infinities,
    )
    codes.flags.writeable = False
    return codes


def narrow_codes(values: Any, *, target: Format) -> Any:
    """The codes, as uint8, of a float64 array or tensor of values of a format of at most `NARROW_BITS` bits.

    NaN has the code 0 if the format has no NaN.
    """
    xp = namespace(values)
    if target.coding is Coding.TABLE:
        table = xp.asarray(target.table, dtype=xp.float64, device=values.device)
        positions = xp.searchsorted(table, xp.nan_to_num(values).reshape(-1))
        return xp.asarray(positions, dtype=xp.uint8).reshape(values.shape)
    patterns = (xp.asarray(values, dtype=xp.float32).view(xp.int32) >> 16) & 0xFFFF
    codes = code_table(target.name)
    return (codes if xp is np else xp.tensor(codes, device=values.device))[patterns]


def check_values(target: Format) -> None:
    """Check that tensors can be quantised to the format.

    Raises:
        UsageError: the format is e8m0 or ue5m3, which have no sign, or fp64, which contains every float64.
    """
    if not target.is_signed or target.name == "fp64":
        why = "holds every float64" if target.name == "fp64" else "holds the scales of blocks, and has no sign"
        raise UsageError(f"{target.name} is no format to quantise to: it {why}. Use `round_to` for single values")


def _stored(target: Format) -> np.dtype[Any]:
    """The element type whose bits are the codes; NVFP4 elements use the type of fp4_e2m1."""
    return numpy_dtype(target.dtype or "float4_e2m1fn")


def _values(codes: NDArray[Any], target: Format) -> NDArray[np.float64]:
    if target.coding is Coding.INTEGER:
        half = 1 << (target.num_bits - 1)
        return np.asarray(((codes.astype(np.int64) ^ half) - half) * target.min_subnormal)
    if target.coding is Coding.TAPERED:
        return np.array([_tapered(code, target) for code in codes.tolist()])
    if target.dtype is None and not target.is_signed:
        return _unsigned(codes, target)
    dtype = _stored(target)
    with np.errstate(invalid="ignore"):  # signalling NaN
        values = np.ascontiguousarray(codes.astype(f"u{dtype.itemsize}")).view(dtype).astype(np.float64)
    return np.where(np.isnan(values), np.nan, values).reshape(codes.shape)


def _unsigned(codes: NDArray[Any], target: Format) -> NDArray[np.float64]:
    """The values of codes with an exponent and a significand field but no sign; the last codes are NaN."""
    fields, fractions = np.divmod(codes.astype(np.int64), 1 << target.mantissa_bits)
    leading = np.where(fields == 0, 0, 1 << target.mantissa_bits)
    values = np.ldexp(
        (leading + fractions).astype(np.float64), np.maximum(fields, 1) - target.bias - target.mantissa_bits
    )
    return np.where(codes < target.num_finite, values, np.nan)


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
    """The code that `codes_of` gives NaN; the format may have more."""
    if target.num_infinities and target.coding is Coding.FIELDS:
        return ((2 << target.exponent_bits) - 1) << (target.mantissa_bits - 1)
    if target.has_negative_zero:
        return (1 << (target.num_bits - 1)) - 1
    return 1 << (target.num_bits - 1) if target.is_signed else (1 << target.num_bits) - 1
