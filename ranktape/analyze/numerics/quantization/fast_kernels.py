"""Loops over float32 numbers that look at them, round them in float64, and find the factors of their blocks."""

# Shapes: O = everything before the axis of channels, L = channels, I = everything after; N = numbers.

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.formats import Rounding
from ranktape.analyze.numerics.formats.kernels import (
    ONE_FIELD,
    RANDOM,
    RoundingConstants,
    constants_of,
    draw,
    round_block,
    state_of,
)
from ranktape.analyze.numerics.kernels import BLOCK, compiled
from ranktape.analyze.numerics.quantization.group_scales import (
    ExactScale,
    TensorScale,
    block_scale,
    exact_scale,
    exact_scale_of,
    factors_of,
)
from ranktape.analyze.numerics.quantization.plan import QuantizePlan
from ranktape.analyze.numerics.quantization.schemes import ScaleRecipe, ScaleRule, raise_of

MAGNITUDE = np.int32(0x7FFFFFFF)
"""The bits of a float32 without its sign."""

LOW_BITS = np.int32(0xFFFF)
"""The bits that a float32 has and bfloat16 has not."""

INFINITY = np.int32(0x7F800000)
"""The bits of an infinite float32."""


@compiled
def round_wide(  # noqa: PLR0917 - numba knows no keyword-only arguments
    scaled_N: NDArray[np.float64],
    rounded_N: NDArray[np.float64],
    element: RoundingConstants,
    state: int,
    first: int,
    step: int,
    places_N: NDArray[np.int64],
) -> None:
    """Write the elements that magnitudes round to, those at such places in the tensor."""
    if element.kind == RANDOM:
        for index in range(scaled_N.size):
            places_N[index] = first + step * index
        draw(scaled_N, element, state, places_N[: scaled_N.size], rounded_N)
    else:
        round_block(scaled_N, element, rounded_N)


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
def largest_of_channels(patterns_OLI: NDArray[np.int32], largest_L: NDArray[np.int32]) -> None:
    """Write the pattern of the largest finite magnitude of each index along the second of three dimensions."""
    largest_L[:] = 0
    for outer in range(patterns_OLI.shape[0]):
        for channel in range(patterns_OLI.shape[1]):
            largest = largest_L[channel]
            for index in range(patterns_OLI.shape[2]):
                magnitude = np.int32(patterns_OLI[outer, channel, index] & MAGNITUDE)
                largest = max(largest, magnitude if magnitude < INFINITY else np.int32(0))
            largest_L[channel] = largest


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


FRACTION_BITS = 23
"""Bits of a float32 below its exponent field."""

SMALLEST_SCALE = np.int32(1 << 22)
"""The bits of the float32 2**-127, which is subnormal."""

ONE_FIELD32 = 127
"""The exponent field of the float32 1.0."""

POWER, TENSOR_SCALED, EXACT = range(3)
"""Scales of blocks: powers of two, those of NVFP4, and those that make the largest magnitude the largest element."""

NARROW_BITS = 8
"""Rounding in float32 needs room for the bits that it takes away: elements have no more than these."""


class BlockScheme(NamedTuple):
    """What the kernels know of a scheme; a named tuple, because numba takes it apart by name."""

    lowest_field: np.int32
    """Exponent field, in its place, of the smallest normal element."""
    anchor_step: np.int32
    """From the exponent field, in its place, of a number to that of the power of two that rounding adds."""
    limit: np.int32
    """The bits of the largest element."""
    is_wide: bool
    """Whether elements are rounded in float64."""
    wide: RoundingConstants
    """How, where they are."""
    state: int
    """Where the random numbers of stochastic rounding begin."""
    scales: int
    """What kind of scales there are."""
    is_divided: bool
    """Whether elements are divided by the first factor, and not multiplied."""
    tensor: TensorScale
    """What all blocks of NVFP4 share."""
    exact: ExactScale
    """How scales follow that are neither powers of two nor those of NVFP4."""
    raised: np.int64
    """Added to the bits of the largest magnitude, as float64, for the exponent of a power of two above them."""
    offset: int
    """Added to the exponent of a power of two."""
    end: int
    """Largest magnitude of that exponent."""
    four_over_six: bool
    """Whether each block has the better of two scales."""
    is_apart: bool
    """Whether rounded elements are multiplied by the scale of their block alone, without that of the tensor."""


def block_scheme(plan: QuantizePlan, *, tensor: TensorScale | None, is_apart: bool) -> BlockScheme:
    """What the kernels take of a plan, and of the scale of the scales of NVFP4."""
    scheme, element = plan.scheme, plan.scheme.element
    is_power = plan.scale_rule is not None
    raised = raise_of(plan.scale_rule or ScaleRule.FLOOR, element=element)
    is_narrow = plan.rounding is Rounding.EVEN and not element.taper and element.num_bits <= NARROW_BITS
    return BlockScheme(
        lowest_field=np.int32((element.emin + ONE_FIELD32) << FRACTION_BITS),
        anchor_step=np.int32((FRACTION_BITS - element.mantissa_bits) << FRACTION_BITS),
        limit=np.float32(element.maximum).view(np.int32),
        is_wide=not is_narrow,
        wide=constants_of(element, plan.rounding),
        state=state_of(plan.seed),
        scales=POWER if is_power else EXACT if tensor is None else TENSOR_SCALED,
        is_divided=not is_power and (tensor is None or scheme.recipe is ScaleRecipe.MODELOPT),
        tensor=tensor or TensorScale(recipe=0, scale=np.float64(1.0), to_code=np.float64(1.0)),
        exact=exact_scale_of(plan),
        raised=np.int64(raised - ((ONE_FIELD + element.emax) << 52)),
        offset=plan.scale_offset,
        end=(1 << (plan.scale_bits - 1)) - 1,
        four_over_six=plan.four_over_six,
        is_apart=is_apart,
    )


@compiled
def _power_factors(largest: np.int32, scheme: BlockScheme) -> tuple[np.float32, np.float32]:
    """See `block_factors`: of scales that are powers of two."""
    widest = np.float64(np.int32(largest).view(np.float32))
    wanted = np.int64(((widest.view(np.int64) + scheme.raised) >> 52) + scheme.offset)
    exponent = np.int32(min(max(wanted, np.int64(-scheme.end)), np.int64(scheme.end)))
    if largest == 0:
        exponent = np.int32(-scheme.end)
    before = np.int32(max((ONE_FIELD32 - exponent) << FRACTION_BITS, SMALLEST_SCALE)).view(np.float32)
    after = np.int32(max((ONE_FIELD32 + exponent) << FRACTION_BITS, SMALLEST_SCALE)).view(np.float32)
    return before, after if largest < INFINITY else np.float32(np.nan)


@compiled
def _tensor_factors(
    largest: np.int32,
    scheme: BlockScheme,
    stretch: float,
    is_apart: bool,  # noqa: FBT001 - numba knows no keyword-only arguments
) -> tuple[np.float32, np.float32]:
    """See `block_factors`: of scales that have a scale of their own."""
    scale = block_scale(np.float64(np.int32(largest).view(np.float32)), scheme.tensor, stretch)
    before, whole = factors_of(scale, scheme.tensor)
    after = np.float32(scale if is_apart else whole)
    return np.float32(before), after if largest < INFINITY else np.float32(np.nan)


@compiled
def block_factors(
    largest: np.int32,
    scheme: BlockScheme,
    stretch: float,
    is_apart: bool,  # noqa: FBT001 - as above
) -> tuple[np.float32, np.float32]:
    """What elements are multiplied by, or divided by, before they are rounded, and multiplied by after it.

    The latter is NaN of blocks that hold NaN or an infinity.
    """
    if scheme.scales == POWER:
        return _power_factors(largest, scheme)
    if scheme.scales == TENSOR_SCALED:
        return _tensor_factors(largest, scheme, stretch, is_apart)
    scale = np.float32(exact_scale(np.float64(np.int32(largest).view(np.float32)), scheme.exact, stretch))
    return scale, scale if largest < INFINITY else np.float32(np.nan)


@compiled
def fill_factors(
    largest_C: NDArray[np.int32],
    scheme: BlockScheme,
    before_C: NDArray[np.float32],
    after_C: NDArray[np.float32],
) -> None:
    """Write `block_factors` of blocks that lie beside each other, with their first scales.

    In a loop for each kind of scale: only then do they become vector instructions.
    """
    if scheme.scales == POWER:
        for column in range(largest_C.size):
            before_C[column], after_C[column] = _power_factors(largest_C[column], scheme)
    elif scheme.scales == TENSOR_SCALED:
        for column in range(largest_C.size):
            before_C[column], after_C[column] = _tensor_factors(largest_C[column], scheme, 1.0, scheme.is_apart)
    else:
        for column in range(largest_C.size):
            before_C[column], after_C[column] = block_factors(largest_C[column], scheme, 1.0, scheme.is_apart)
