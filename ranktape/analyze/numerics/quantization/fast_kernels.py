"""Loops that quantise float32 numbers fast enough for a training, where nothing but the values is asked for.

In place, in float32 wherever that is exact: as most blocks are finite and far from the ends of float32, their elements
are rounded by adding a power of two and taking it away again. The other ones go through float64, element by element.
"""

# Shapes: O = everything before the axis of blocks, L = elements along the axis, I = everything after.
# ruff: noqa: N803 - the letters of a shape end the name of the array

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ranktape.analyze.numerics.formats import FORMATS
from ranktape.analyze.numerics.formats.kernels import ONE_FIELD, RoundingConstants, round_away, round_even
from ranktape.analyze.numerics.kernels import compiled
from ranktape.analyze.numerics.quantization.group_scales import TensorScale, block_scale, factors_of
from ranktape.analyze.numerics.quantization.schemes import ScaleRecipe

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGNITUDE = np.int32(0x7FFFFFFF)
"""The bits of a float32 without its sign."""

INFINITY = np.int32(0x7F800000)
"""The bits of an infinite float32."""

FRACTION_BITS = 23
"""Bits of a float32 below its exponent field."""

_FP4 = FORMATS["fp4_e2m1"]

_FP4_ANCHOR_STEP = np.int32(FRACTION_BITS - _FP4.mantissa_bits)

_FP4_LIMIT = np.float32(_FP4.maximum).view(np.int32)

_MODELOPT = int(ScaleRecipe.MODELOPT)

ONE_FIELD32 = 127
"""The exponent field of the float32 1.0."""

MAX_FIELD32 = 230
"""Exponent field of largest magnitudes up to which no power of two that is added overflows."""


class BlockConstants(NamedTuple):
    """What the kernels know of a scheme with blocks; a named tuple, because numba takes it apart by name."""

    mantissa_bits: int
    """Width of the significand field of the elements."""
    emin: int
    """Exponent of the smallest normal element."""
    emax: int
    """Exponent of the largest element."""
    maximum: float
    """Largest element."""
    has_negative_zero: bool
    """Whether the sign of a zero is kept."""
    cut: float
    """From which significand of the largest magnitude on the scale is twice as large."""
    is_cut_inclusive: bool
    """Whether a significand of just `cut` is among them."""


class Flags(NamedTuple):
    """How single values are rounded."""

    has_negative_zero: bool
    """Whether the sign of a zero is kept."""
    is_away: bool
    """Whether ties round away from zero, not to even."""


@compiled
def _round_exactly(bits: np.int32, scale: float, flags: Flags, element: RoundingConstants) -> np.int32:
    """The pattern of one float32, divided by the scale, rounded in float64, and multiplied again."""
    value = np.float64(np.int32(bits).view(np.float32))
    magnitude = abs(value) / scale
    rounded = round_away(magnitude, element) if flags.is_away else round_even(magnitude, element)
    signed = np.copysign(rounded * scale, value)
    kept = signed if flags.has_negative_zero else signed + 0.0
    return np.float32(value if value != value else kept).view(np.int32)  # noqa: PLR0124 - NaN stays


@compiled
def round_all(patterns: NDArray[np.int32], scale: float, flags: Flags, element: RoundingConstants) -> None:
    """Quantise float32 numbers, seen as integers, with one scale for all of them."""
    for index in range(patterns.size):
        patterns[index] = _round_exactly(patterns[index], scale, flags, element)


@compiled
def largest_finite(patterns: NDArray[np.int32]) -> float:
    """The largest finite magnitude of float32 numbers, seen as integers; 0 without any."""
    largest = np.int32(0)
    for index in range(patterns.size):
        magnitude = np.int32(patterns[index] & MAGNITUDE)
        finite = magnitude if magnitude < INFINITY else np.int32(0)
        largest = max(largest, finite)
    return np.float64(np.int32(largest).view(np.float32))


@compiled
def _exponent(largest: np.int32, constants: BlockConstants) -> int:
    """The exponent of the scale of a block with that largest magnitude, which is finite; -127 of zeros."""
    bits = np.float64(np.int32(largest).view(np.float32)).view(np.int64)
    significand = np.int64((bits & 0xFFFFFFFFFFFFF) | (ONE_FIELD << 52)).view(np.float64)
    is_above = significand >= constants.cut if constants.is_cut_inclusive else significand > constants.cut
    exponent = int((bits >> 52) - ONE_FIELD + np.int64(is_above) - constants.emax)
    return min(max(exponent, -127), 127)


@compiled
def _round_block(
    patterns: NDArray[np.int32],
    place: tuple[int, int, int],
    largest: np.int32,
    constants: BlockConstants,
    element: RoundingConstants,
) -> None:
    """Quantise one block, whatever it holds; its place is the first index, the one after the last, and the step."""
    start, stop, step = place
    if largest >= INFINITY:
        for index in range(start, stop, step):
            patterns[index] = np.float32(np.nan).view(np.int32)
        return
    scale = np.int64((_exponent(largest, constants) + ONE_FIELD) << 52).view(np.float64)
    flags = Flags(constants.has_negative_zero, False)  # noqa: FBT003 - numba knows no keywords here
    for index in range(start, stop, step):
        patterns[index] = _round_exactly(patterns[index], scale, flags, element)


@compiled
def _is_ordinary(largest: np.int32, exponent: int, constants: BlockConstants) -> bool:
    """Whether all that a block needs are normal float32 numbers."""
    return bool((largest >> FRACTION_BITS) <= MAX_FIELD32 and exponent + constants.emin > -ONE_FIELD32)


@compiled
def _limit(exponent: int, constants: BlockConstants) -> np.int32:
    """The pattern of the largest value of a block with that scale."""
    scale = np.int64((exponent + ONE_FIELD) << 52).view(np.float64)
    return np.float32(constants.maximum * scale).view(np.int32)


@compiled
def _round_quickly(
    bits: np.int32, lowest_field: np.int32, anchor_step: np.int32, limit: np.int32, kept_sign: np.int32
) -> np.int32:
    """The pattern of a float32 rounded to the element's significand, ties to even; between the limits of its block."""
    magnitude = np.int32(bits & MAGNITUDE)
    own_field = np.int32(magnitude >> FRACTION_BITS)
    field = max(lowest_field, own_field)
    # Added to the magnitude, it leaves no bits below the last one of the element.
    anchor = np.int32(np.int32(field + anchor_step) << FRACTION_BITS).view(np.float32)
    rounded = np.float32(np.float32(magnitude.view(np.float32) + anchor) - anchor).view(np.int32)
    bounded = min(limit, rounded)
    sign = np.int32(bits & ~MAGNITUDE)
    return np.int32(bounded | (sign if bounded != 0 else np.int32(sign & kept_sign)))


@compiled
def round_rows(
    patterns: NDArray[np.int32], length: int, block_size: int, constants: BlockConstants, element: RoundingConstants
) -> None:
    """Quantise rows of that length, one after the other, in blocks of neighbours."""
    anchor_step = np.int32(FRACTION_BITS - constants.mantissa_bits)
    kept_sign = np.int32(-1 if constants.has_negative_zero else 0)
    for row in range(0, patterns.size, length):
        for start in range(row, row + length, block_size):
            block = patterns[start : min(start + block_size, row + length)]
            largest = np.int32(0)
            for index in range(block.size):
                magnitude = np.int32(block[index] & MAGNITUDE)
                largest = max(largest, magnitude)
            exponent = _exponent(largest, constants)
            if not _is_ordinary(largest, exponent, constants):
                _round_block(block, (0, block.size, 1), largest, constants, element)
                continue
            lowest_field = np.int32(exponent + constants.emin + ONE_FIELD32)
            limit = np.int32(_limit(exponent, constants))
            for index in range(block.size):
                block[index] = _round_quickly(block[index], lowest_field, anchor_step, limit, kept_sign)


@compiled
def round_columns(
    patterns_OLI: NDArray[np.int32], block_size: int, constants: BlockConstants, element: RoundingConstants
) -> None:
    """Quantise in blocks along the second of three dimensions, row after row as memory has them."""
    anchor_step = np.int32(FRACTION_BITS - constants.mantissa_bits)
    kept_sign = np.int32(-1 if constants.has_negative_zero else 0)
    length, width = patterns_OLI.shape[1:]
    largest, lowest_field, limit = np.empty((3, width), dtype=np.int32)
    for before in range(patterns_OLI.shape[0]):
        for start in range(0, length, block_size):
            block = patterns_OLI[before, start : min(start + block_size, length)]
            _find_largest(block, largest)
            is_ordinary = True
            for column in range(width):
                exponent = _exponent(largest[column], constants)
                is_ordinary &= _is_ordinary(largest[column], exponent, constants)
                lowest_field[column] = exponent + constants.emin + ONE_FIELD32
                limit[column] = _limit(exponent, constants)
            if not is_ordinary:
                flat = block.reshape(-1)
                for column in range(width):
                    _round_block(flat, (column, flat.size, width), largest[column], constants, element)
                continue
            for row in range(block.shape[0]):
                for column in range(width):
                    block[row, column] = _round_quickly(
                        block[row, column], lowest_field[column], anchor_step, limit[column], kept_sign
                    )


@compiled
def _find_largest(block_LI: NDArray[np.int32], largest: NDArray[np.int32]) -> None:
    largest[:] = 0
    for row in range(block_LI.shape[0]):
        for column in range(block_LI.shape[1]):
            magnitude = np.int32(block_LI[row, column] & MAGNITUDE)
            largest[column] = max(largest[column], magnitude)


@compiled
def _factors(largest: np.int32, tensor: TensorScale) -> tuple[np.float32, np.float32]:
    """What elements are multiplied or divided by before they are rounded, and multiplied by after it: both float32."""
    scale = block_scale(np.float64(np.int32(largest).view(np.float32)), tensor)
    before, after = factors_of(scale, tensor)
    return np.float32(before), np.float32(after) if largest < INFINITY else np.float32(np.nan)


@compiled
def _round_scaled(bits: np.int32, recipe: int, before: np.float32, after: np.float32) -> np.int32:
    """The pattern of a float32, scaled in float32, rounded to fp4_e2m1 and scaled back."""
    value = np.int32(bits).view(np.float32)
    scaled = np.float32(np.divide(value, before) if recipe == _MODELOPT else value * before).view(np.int32)
    rounded = _round_quickly(scaled, np.int32(ONE_FIELD32), _FP4_ANCHOR_STEP, _FP4_LIMIT, np.int32(-1))
    return np.float32(np.int32(rounded).view(np.float32) * after).view(np.int32)


@compiled
def round_scaled_rows(patterns: NDArray[np.int32], length: int, block_size: int, tensor: TensorScale) -> None:
    """Quantise rows of that length to NVFP4, one after the other, in blocks of neighbours."""
    for row in range(0, patterns.size, length):
        for start in range(row, row + length, block_size):
            block = patterns[start : min(start + block_size, row + length)]
            largest = np.int32(0)
            for index in range(block.size):
                magnitude = np.int32(block[index] & MAGNITUDE)
                largest = max(largest, magnitude)
            before, after = _factors(largest, tensor)
            for index in range(block.size):
                block[index] = _round_scaled(block[index], tensor.recipe, before, after)


@compiled
def round_scaled_columns(patterns_OLI: NDArray[np.int32], block_size: int, tensor: TensorScale) -> None:
    """Quantise to NVFP4 in blocks along the second of three dimensions, row after row as memory has them."""
    length, width = patterns_OLI.shape[1:]
    largest = np.empty(width, dtype=np.int32)
    before, after = np.empty((2, width), dtype=np.float32)
    for outer in range(patterns_OLI.shape[0]):
        for start in range(0, length, block_size):
            block = patterns_OLI[outer, start : min(start + block_size, length)]
            _find_largest(block, largest)
            for column in range(width):
                before[column], after[column] = _factors(largest[column], tensor)
            for row in range(block.shape[0]):
                for column in range(width):
                    block[row, column] = _round_scaled(block[row, column], tensor.recipe, before[column], after[column])
