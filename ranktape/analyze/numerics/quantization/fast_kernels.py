"""Loops that quantise float32 numbers fast enough for a training, where nothing but the values is asked for.

In place. Elements of blocks are scaled, rounded and scaled back in float32, which is exact: the scales of MX are powers
of two, and those of NVFP4 are defined so. Rounding adds a power of two and takes it away again.
"""

# Shapes: O = everything before the axis of blocks, L = elements along the axis, I = everything after.
# ruff: noqa: N803 - the letters of a shape end the name of the array

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ranktape.analyze.numerics.formats.kernels import AWAY, ONE_FIELD, RoundingConstants, round_away, round_even
from ranktape.analyze.numerics.kernels import BLOCK, compiled
from ranktape.analyze.numerics.quantization.group_scales import TensorScale, block_scale, factors_of
from ranktape.analyze.numerics.quantization.plan import QuantizePlan
from ranktape.analyze.numerics.quantization.schemes import ScaleRecipe, ScaleRule, raise_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGNITUDE = np.int32(0x7FFFFFFF)
"""The bits of a float32 without its sign."""

LOW_BITS = np.int32(0xFFFF)
"""The bits that a float32 has and bfloat16 has not."""

INFINITY = np.int32(0x7F800000)
"""The bits of an infinite float32."""

FRACTION_BITS = 23
"""Bits of a float32 below its exponent field."""

SMALLEST_SCALE = np.int32(1 << 22)
"""The bits of the float32 2**-127, which is subnormal."""

ONE_FIELD32 = 127
"""The exponent field of the float32 1.0."""


class BlockScheme(NamedTuple):
    """What the kernels know of a scheme with blocks; a named tuple, because numba takes it apart by name."""

    lowest_field: np.int32
    """Exponent field, in its place, of the smallest normal element."""
    anchor_step: np.int32
    """From the exponent field, in its place, of a number to that of the power of two to be added: see `_rounded`."""
    limit: np.int32
    """The bits of the largest element."""
    has_tensor_scale: bool
    """Whether scales are those of NVFP4, which follow from `tensor`; powers of two otherwise."""
    is_divided: bool
    """Whether elements are divided by the first factor, as ModelOpt does, and not multiplied."""
    tensor: TensorScale
    """What all blocks share."""
    is_apart: bool
    """Whether rounded elements are multiplied by the scale of their block alone, without that of the tensor."""
    raised: np.int64
    """Added to the bits of the largest magnitude, as float64, for the exponent of a power of two above them."""


def block_scheme(plan: QuantizePlan, *, tensor: TensorScale | None, is_apart: bool) -> BlockScheme:
    """What the kernels take of a plan with blocks, and of the scale of the tensor where there is one."""
    element = plan.scheme.element
    raised = raise_of(plan.scale_rule or ScaleRule.FLOOR, element=element)
    return BlockScheme(
        lowest_field=np.int32((element.emin + ONE_FIELD32) << FRACTION_BITS),
        anchor_step=np.int32((FRACTION_BITS - element.mantissa_bits) << FRACTION_BITS),
        limit=np.float32(element.maximum).view(np.int32),
        has_tensor_scale=tensor is not None,
        is_divided=plan.scheme.recipe is ScaleRecipe.MODELOPT,
        tensor=tensor or TensorScale(recipe=0, scale=np.float64(1.0), to_code=np.float64(1.0)),
        is_apart=is_apart,
        raised=np.int64(raised - ((ONE_FIELD + element.emax) << 52)),
    )


@compiled
def round_all(patterns: NDArray[np.int32], scale: float, after: float, zero: float, element: RoundingConstants) -> None:
    """Quantise float32 numbers, seen as integers, with one scale for all of them: in float64.

    They are divided by the scale, rounded, and multiplied by `after`. `zero` is added to results: -0.0 keeps the sign
    of a zero, 0.0 does not.
    """
    for index in range(patterns.size):
        value = np.float64(np.int32(patterns[index]).view(np.float32))
        magnitude = abs(value) / scale
        rounded = round_away(magnitude, element) if element.kind == AWAY else round_even(magnitude, element)
        result = np.copysign(rounded * after, value) + zero
        patterns[index] = np.float32(value if value != value else result).view(np.int32)  # noqa: PLR0124 - NaN stays


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
def has_low_bits(patterns: NDArray[np.int32]) -> bool:
    """Whether any of the float32 numbers, seen as integers, is none of bfloat16: has one of its last 16 bits. Not NaN.

    In pieces, so that the loops become vector instructions and the first such number ends them.
    """
    for start in range(0, patterns.size, BLOCK):
        low = np.int32(0)
        for pattern in patterns[start : start + BLOCK]:
            is_number = np.int32(pattern & MAGNITUDE) <= INFINITY
            low |= np.int32(pattern & LOW_BITS) if is_number else np.int32(0)
        if low != 0:
            return True
    return False


@compiled
def _factors(largest: np.int32, scheme: BlockScheme) -> tuple[np.float32, np.float32]:
    """What elements are multiplied by, or of ModelOpt divided by, before they are rounded, and multiplied by after it.

    The latter is NaN of blocks that hold NaN or an infinity.
    """
    widest = np.float64(np.int32(largest).view(np.float32))
    if scheme.has_tensor_scale:
        scale = block_scale(widest, scheme.tensor)
        wide_before, wide_after = factors_of(scale, scheme.tensor)
        before, after = np.float32(wide_before), np.float32(scale if scheme.is_apart else wide_after)
    else:
        exponent = np.int32(min(max((widest.view(np.int64) + scheme.raised) >> 52, np.int64(-127)), np.int64(127)))
        before = np.int32(max((ONE_FIELD32 - exponent) << FRACTION_BITS, SMALLEST_SCALE)).view(np.float32)
        after = np.int32(max((ONE_FIELD32 + exponent) << FRACTION_BITS, SMALLEST_SCALE)).view(np.float32)
    return before, after if largest < INFINITY else np.float32(np.nan)


@compiled
def _rounded(scaled: np.float32, after: np.float32, scheme: BlockScheme, zero: np.float32 | None) -> np.int32:
    """The pattern of a scaled float32, rounded to the nearest element, ties to even, and scaled back.

    `zero` is added to elements, 0.0 where they have no negative zero; of None nothing is compiled.
    """
    bits = np.float32(scaled).view(np.int32)
    magnitude = np.int32(bits & MAGNITUDE)
    field = max(scheme.lowest_field, np.int32(magnitude & INFINITY))
    # Added to the magnitude, it leaves no bits below the last one of the element.
    anchor = np.int32(field + scheme.anchor_step).view(np.float32)
    rounded = np.float32(np.float32(magnitude.view(np.float32) + anchor) - anchor).view(np.int32)
    signed = np.int32(min(scheme.limit, rounded) | np.int32(bits & ~MAGNITUDE))
    result = signed.view(np.float32)
    if zero is not None:
        result = np.float32(result + zero)
    return np.float32(result * after).view(np.int32)


@compiled
def round_rows(
    patterns: NDArray[np.int32], length: int, scheme: BlockScheme, block_size: int, zero: np.float32 | None
) -> None:
    """Quantise rows of that length, one after the other, in blocks of neighbours; `zero` as in `_rounded`."""
    for row in range(0, patterns.size, length):
        for start in range(row, row + length, block_size):
            block = patterns[start : min(start + block_size, row + length)]
            largest = np.int32(0)
            for index in range(block.size):
                magnitude = np.int32(block[index] & MAGNITUDE)
                largest = max(largest, magnitude)
            before, after = _factors(largest, scheme)
            # Two loops: in one, each element would be divided and multiplied.
            if scheme.is_divided:
                for index in range(block.size):
                    block[index] = _rounded(
                        np.divide(np.int32(block[index]).view(np.float32), before), after, scheme, zero
                    )
            else:
                for index in range(block.size):
                    block[index] = _rounded(np.int32(block[index]).view(np.float32) * before, after, scheme, zero)


@compiled
def round_columns(
    patterns_OLI: NDArray[np.int32], scheme: BlockScheme, block_size: int, zero: np.float32 | None
) -> None:
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
                line = block[row]
                if scheme.is_divided:
                    for column in range(width):
                        scaled = np.divide(np.int32(line[column]).view(np.float32), before[column])
                        line[column] = _rounded(scaled, after[column], scheme, zero)
                else:
                    for column in range(width):
                        scaled = np.int32(line[column]).view(np.float32) * before[column]
                        line[column] = _rounded(scaled, after[column], scheme, zero)
