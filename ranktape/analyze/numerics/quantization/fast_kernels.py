"""Loops over float32 numbers without blocks, in place: what quantises them with one scale, and what looks at them.

Rounding is in float64, by the kernels of `formats`.
"""

# Shapes: O = everything before the axis of channels, L = channels, I = everything after; N = numbers.

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.numerics.formats.kernels import RANDOM, RoundingConstants, draw, round_block
from ranktape.analyze.numerics.kernels import BLOCK, compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGNITUDE = np.int32(0x7FFFFFFF)
"""The bits of a float32 without its sign."""

LOW_BITS = np.int32(0xFFFF)
"""The bits that a float32 has and bfloat16 has not."""

INFINITY = np.int32(0x7F800000)
"""The bits of an infinite float32."""

SHORT = 256
"""Runs with one scale that are shorter are quantised together with their neighbours."""


@compiled
def round_all(  # noqa: PLR0917 - numba knows no keyword-only arguments
    patterns: NDArray[np.int32],
    scales: NDArray[np.float64],
    afters: NDArray[np.float64],
    zero: float,
    element: RoundingConstants,
    state: int,
    first: int,
) -> None:
    """Quantise float32 numbers, seen as integers, each with its scale or all with a single one: in float64.

    They are divided by the scale, rounded, and multiplied by what is after it. `zero` is added to results: -0.0 keeps
    the sign of a zero, 0.0 does not. Their places in the whole tensor are `first` and those after it.
    """
    scaled, rounded = np.empty((2, min(patterns.size, BLOCK)))
    places = np.empty(scaled.size, dtype=np.int64)
    step = 0 if scales.size == 1 else 1
    for start in range(0, patterns.size, BLOCK):
        part = patterns[start : start + BLOCK]
        own_scales, own_afters = scales[step * start :], afters[step * start :]
        if step:
            for index in range(part.size):
                scaled[index] = abs(np.float64(np.int32(part[index]).view(np.float32))) / own_scales[index]
        else:
            for index in range(part.size):
                scaled[index] = abs(np.float64(np.int32(part[index]).view(np.float32))) / own_scales[0]
        round_wide(scaled[: part.size], rounded[: part.size], element, state, first + start, 1, places)
        for index in range(part.size):
            value = np.float64(np.int32(part[index]).view(np.float32))
            result = np.copysign(rounded[index] * own_afters[step * index], value) + zero
            part[index] = np.float32(value if value != value else result).view(np.int32)  # noqa: PLR0124 - NaN stays


@compiled
def round_wide(  # noqa: PLR0917 - as above
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
def round_channels(  # noqa: PLR0917 - as above
    patterns_OLI: NDArray[np.int32],
    scales_L: NDArray[np.float64],
    afters_L: NDArray[np.float64],
    zero: float,
    element: RoundingConstants,
    state: int,
    first: int,
) -> None:
    """`round_all` with a scale for each index along the second of three dimensions; the array is contiguous."""
    num_outer, length, width = patterns_OLI.shape
    if width >= SHORT:
        for outer in range(num_outer):
            for channel in range(length):
                place = first + (outer * length + channel) * width
                own = slice(channel, channel + 1)
                round_all(patterns_OLI[outer, channel], scales_L[own], afters_L[own], zero, element, state, place)
        return
    scales, afters = np.repeat(scales_L, width), np.repeat(afters_L, width)
    for outer in range(num_outer):
        row = patterns_OLI[outer].reshape(length * width)
        round_all(row, scales, afters, zero, element, state, first + outer * length * width)


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
