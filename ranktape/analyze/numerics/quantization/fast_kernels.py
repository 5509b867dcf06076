"""Loops that quantise float32 numbers fast enough for a training, where nothing but the values is asked for.

In place. Elements of blocks are scaled, rounded and scaled back in float32, which is exact: the scales of MX are powers
of two, and those of NVFP4 are defined so. Rounding adds a power of two and takes it away again.
"""

# Shapes: O = everything before the axis of blocks, L = elements along the axis, I = everything after.
# ruff: noqa: N803 - the letters of a shape end the name of the array

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ranktape.analyze.numerics.formats.kernels import ONE_FIELD, RoundingConstants, round_block
from ranktape.analyze.numerics.kernels import compiled
from ranktape.analyze.numerics.quantization.group_scales import TensorScale, block_scale, factors_of
from ranktape.analyze.numerics.quantization.schemes import QuantizePlan, ScaleRecipe, ScaleRule, cut_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGNITUDE = np.int32(0x7FFFFFFF)
"""The bits of a float32 without its sign."""

INFINITY = np.int32(0x7F800000)
"""The bits of an infinite float32."""

FRACTION_BITS = 23
"""Bits of a float32 below its exponent field."""

BLOCK = 1024
"""Numbers of which everything fits into the first-level cache."""

ONE_FIELD32 = 127
"""The exponent field of the float32 1.0."""

_MODELOPT = int(ScaleRecipe.MODELOPT)


class BlockScheme(NamedTuple):
    """What the kernels know of a scheme with blocks; a named tuple, because numba takes it apart by name."""

    lowest_field: np.int32
    """Exponent field, in its place, of the smallest normal element."""
    anchor_step: np.int32
    """From the exponent field, in its place, of a number to that of the power of two to be added: see `_round`."""
    limit: np.int32
    """The bits of the largest element."""
    zero: np.float32
    """Added to results: -0.0 where the sign of a zero is kept, else 0.0."""
    has_tensor_scale: bool
    """Whether scales are those of NVFP4, which follow from `tensor`; powers of two otherwise."""
    tensor: TensorScale
    """What all blocks share."""
    emax: int
    """Exponent of the largest element."""
    cut: float
    """From which significand of the largest magnitude on a power of two is twice as large."""
    is_cut_inclusive: bool
    """Whether a significand of just `cut` is among them."""


def block_scheme(plan: QuantizePlan, *, tensor: TensorScale | None) -> BlockScheme:
    """What the kernels take of a plan with blocks, and of the scale of the tensor where there is one."""
    element = plan.scheme.element
    cut = cut_of(plan.scale_rule or ScaleRule.FLOOR, element=element)
    return BlockScheme(
        lowest_field=np.int32((element.emin + ONE_FIELD32) << FRACTION_BITS),
        anchor_step=np.int32((FRACTION_BITS - element.mantissa_bits) << FRACTION_BITS),
        limit=np.float32(element.maximum).view(np.int32),
        zero=np.float32(-0.0 if element.has_negative_zero else 0.0),
        has_tensor_scale=tensor is not None,
        tensor=tensor or TensorScale(recipe=0, scale=np.float64(1.0), to_code=np.float64(1.0)),
        emax=element.emax,
        cut=cut.at,
        is_cut_inclusive=cut.is_inclusive,
    )


@compiled
def round_all(patterns: NDArray[np.int32], scale: float, zero: float, element: RoundingConstants) -> None:
    """Quantise float32 numbers, seen as integers, with one scale for all of them: in float64.

    `zero` is added to results: -0.0 keeps the sign of a zero, 0.0 does not.
    """
    scaled, rounded = np.empty(BLOCK), np.empty(BLOCK)
    for start in range(0, patterns.size, BLOCK):
        block = patterns[start : start + BLOCK]
        for index in range(block.size):
            scaled[index] = abs(np.float64(np.int32(block[index]).view(np.float32))) / scale
        round_block(scaled[: block.size], element, rounded[: block.size])
        for index in range(block.size):
            value = np.float64(np.int32(block[index]).view(np.float32))
            result = np.copysign(rounded[index] * scale, value) + zero
            block[index] = np.float32(value if value != value else result).view(np.int32)  # noqa: PLR0124 - NaN stays


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
def _factors(largest: np.int32, scheme: BlockScheme) -> tuple[np.float32, np.float32]:
    """What elements are multiplied by, or of ModelOpt divided by, before they are rounded, and multiplied by after it.

    The latter is NaN of blocks that hold NaN or an infinity.
    """
    widest = np.float64(np.int32(largest).view(np.float32))
    if scheme.has_tensor_scale:
        wide_before, wide_after = factors_of(block_scale(widest, scheme.tensor), scheme.tensor)
        before, after = np.float32(wide_before), np.float32(wide_after)
    else:
        bits = widest.view(np.int64)
        significand = np.int64((bits & 0xFFFFFFFFFFFFF) | (ONE_FIELD << 52)).view(np.float64)
        is_above = significand >= scheme.cut if scheme.is_cut_inclusive else significand > scheme.cut
        unbounded = (bits >> 52) - ONE_FIELD + np.int64(is_above) - scheme.emax
        exponent = min(max(unbounded, np.int64(-127)), np.int64(127))
        before = np.float32(np.int64((ONE_FIELD - exponent) << 52).view(np.float64))
        after = np.float32(np.int64((ONE_FIELD + exponent) << 52).view(np.float64))
    return before, after if largest < INFINITY else np.float32(np.nan)


@compiled
def _round(bits: np.int32, before: np.float32, after: np.float32, scheme: BlockScheme) -> np.int32:
    """The pattern of a float32, scaled, rounded to the nearest element, ties to even, and scaled back."""
    value = np.int32(bits).view(np.float32)
    is_divided = scheme.has_tensor_scale and scheme.tensor.recipe == _MODELOPT
    scaled = np.float32(np.divide(value, before) if is_divided else value * before).view(np.int32)
    magnitude = np.int32(scaled & MAGNITUDE)
    field = max(scheme.lowest_field, np.int32(magnitude & INFINITY))
    # Added to the magnitude, it leaves no bits below the last one of the element.
    anchor = np.int32(field + scheme.anchor_step).view(np.float32)
    rounded = np.float32(np.float32(magnitude.view(np.float32) + anchor) - anchor).view(np.int32)
    signed = np.int32(min(scheme.limit, rounded) | np.int32(scaled & ~MAGNITUDE))
    return np.float32(np.float32(signed.view(np.float32) + scheme.zero) * after).view(np.int32)


@compiled
def round_rows(patterns: NDArray[np.int32], length: int, scheme: BlockScheme, block_size: int) -> None:
    """Quantise rows of that length, one after the other, in blocks of neighbours."""
    for row in range(0, patterns.size, length):
        for start in range(row, row + length, block_size):
            block = patterns[start : min(start + block_size, row + length)]
            largest = np.int32(0)
            for index in range(block.size):
                magnitude = np.int32(block[index] & MAGNITUDE)
                largest = max(largest, magnitude)
            before, after = _factors(largest, scheme)
            for index in range(block.size):
                block[index] = _round(block[index], before, after, scheme)


@compiled
def round_columns(patterns_OLI: NDArray[np.int32], scheme: BlockScheme, block_size: int) -> None:
    """Quantise in blocks along the second of three dimensions, row after row as memory has them."""
    length, width = patterns_OLI.shape[1:]
    largest = np.empty(width, dtype=np.int32)
    before, after = np.empty((2, width), dtype=np.float32)
    for outer in range(patterns_OLI.shape[0]):
        for start in range(0, length, block_size):
            block = patterns_OLI[outer, start : min(start + block_size, length)]
            largest[:] = 0
            for row in range(block.shape[0]):
                for column in range(width):
                    magnitude = np.int32(block[row, column] & MAGNITUDE)
                    largest[column] = max(largest[column], magnitude)
            for column in range(width):
                before[column], after[column] = _factors(largest[column], scheme)
            for row in range(block.shape[0]):
                for column in range(width):
                    block[row, column] = _round(block[row, column], before[column], after[column], scheme)
