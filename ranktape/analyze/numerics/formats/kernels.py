"""Rounds magnitudes to the values of a format, inside compiled loops.

The compiled loops call these functions of nonnegative float64 numbers. The compiler inlines them and vectorises the
loops. Magnitudes above `RoundingConstants.maximum` become `maximum`; the result for NaN is undefined.

numba caches a kernel beside its source and does not notice if a function that it calls has changed. After an edit of
this module, delete the caches of the modules that call it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.formats.table import Format, Rounding
from ranktape.analyze.numerics.formats.values import GOLDEN, HYBRID_BITS, UNIFORM_UNIT, mix
from ranktape.analyze.numerics.kernels import compiled

NO_TAPER = 2000
"""A limit above the magnitude of every float64 exponent."""

ONE_FIELD = 1023
"""The exponent field of the float64 1.0."""

HALF = 0.5
"""The part of a step from which the value above is the nearer one."""

EXPONENT_MASK = 0x7FF << 52
"""The exponent field of a float64."""

BF16_SHIFT = 16
"""The number of bits that a float32 has more than a bfloat16."""

ONE_BITS = ONE_FIELD << 52
"""The bits of the float64 1.0."""

_NUM_BITS, _NUM_BITS_BF16 = HYBRID_BITS["float32"], HYBRID_BITS["bfloat16"]

EVEN, EVEN_TAPERED, AWAY, FLOOR, RANDOM, HYBRID, HYBRID_BF16 = range(7)
"""The kinds of rounding.

`EVEN_TAPERED` is `EVEN` for formats whose significand gets shorter away from 1. `HYBRID` and `HYBRID_BF16` read the
bits of magnitudes as float32 and as bfloat16.
"""


class RoundingConstants(NamedTuple):
    """The constants of a format and a rounding for kernels; a named tuple, because numba supports its attributes.

    Exponents are shifted to the position of the float64 exponent field.
    """

    kind: int
    """The kind of rounding, as `EVEN`."""
    maximum: float
    """Largest finite value."""
    lowest: int
    """Exponent field below which steps no longer get smaller."""
    raise_by: int
    """The difference between the exponent fields of 2**52 steps and of a value whose significand is widest."""
    taper_1: int
    """Magnitude of the exponent beyond which the significand has one bit less."""
    taper_2: int
    """Magnitude of the exponent beyond which the significand has two bits less."""
    taper_3: int
    """Magnitude of the exponent beyond which the significand has three bits less."""


@functools.cache
def constants_of(target: Format, rounding: Rounding | None = None, *, is_bf16: bool = False) -> RoundingConstants:
    """The constants for kernels of a format and a rounding, by default that of the format.

    With `is_bf16`, hybrid rounding reads the bits of bfloat16 numbers. fp64 has more bits than kernels can round to.
    """
    chosen = target.rounding if rounding is None else rounding
    kinds = {
        Rounding.EVEN: EVEN_TAPERED if target.taper else EVEN,
        Rounding.AWAY: AWAY,
        Rounding.FLOOR: FLOOR,
        Rounding.STOCHASTIC: RANDOM,
        Rounding.HYBRID: HYBRID_BF16 if is_bf16 else HYBRID,
    }
    taper_1, taper_2, taper_3 = (limit << 52 for limit in (*target.taper, NO_TAPER, NO_TAPER, NO_TAPER)[:3])
    return RoundingConstants(
        kind=kinds[chosen],
        maximum=target.maximum,
        lowest=(target.lowest_exponent + ONE_FIELD) << 52,
        raise_by=(52 - target.mantissa_bits) << 52,
        taper_1=taper_1,
        taper_2=taper_2,
        taper_3=taper_3,
    )


@compiled
def _steps(clipped: float, constants: RoundingConstants) -> float:
    """2**52 times the step of the format at a magnitude.

    Adding this number to the magnitude in float64 rounds the magnitude to the nearest step, ties to even, because no
    bits are left for a fraction of a step. Subtracting it again is exact.
    """
    field = max(np.float64(clipped).view(np.int64) & EXPONENT_MASK, np.int64(constants.lowest))
    distance = abs(field - ONE_BITS)
    lost = (
        np.int64(distance > constants.taper_1)
        + np.int64(distance > constants.taper_2)
        + np.int64(distance > constants.taper_3)
    )
    return np.int64(field + constants.raise_by + (lost << 52)).view(np.float64)


@compiled
def round_even(magnitude: float, constants: RoundingConstants) -> float:
    """The nearest value of the format; ties go to the even significand."""
    clipped = min(magnitude, constants.maximum)
    steps = _steps(clipped, constants)
    return (clipped + steps) - steps


@compiled
def round_away(magnitude: float, constants: RoundingConstants) -> float:
    """The nearest value of the format; ties go to the larger value."""
    clipped = min(magnitude, constants.maximum)
    steps = _steps(clipped, constants)
    nearest = (clipped + steps) - steps
    step = steps * 2.0**-52
    return nearest + (step if clipped - nearest == HALF * step else 0.0)


@compiled
def round_floor(magnitude: float, constants: RoundingConstants) -> float:
    """The largest value of the format that is not above the magnitude."""
    clipped = min(magnitude, constants.maximum)
    steps = _steps(clipped, constants)
    nearest = (clipped + steps) - steps
    return nearest - (steps * 2.0**-52 if nearest > clipped else 0.0)


@compiled
def passed_of(magnitude: float, floor: float, constants: RoundingConstants) -> tuple[float, float]:
    """The distance from `floor`, the value below a magnitude, as a fraction of the step, and the step."""
    clipped = min(magnitude, constants.maximum)
    step = _steps(clipped, constants) * 2.0**-52
    return np.divide(clipped - floor, step), step


@compiled
def round_hybrid(
    magnitude: float, threshold: int | np.integer[Any], num_bits: int, constants: RoundingConstants
) -> float:
    """Round to nearest, ties away, where HiF8 has all its significand bits; elsewhere by the threshold.

    There a magnitude is rounded up if its first discarded bits reach the threshold, and it is at least half of the
    smallest value.
    """
    below = round_floor(magnitude, constants)
    passed, step = passed_of(magnitude, below, constants)
    field = max(np.float64(magnitude).view(np.int64) & EXPONENT_MASK, np.int64(constants.lowest))
    has_all_bits = abs(field - ONE_BITS) <= constants.taper_1
    is_reached = magnitude >= HALF * np.int64(constants.lowest).view(np.float64)
    is_reached &= np.floor(passed * (1 << num_bits)) >= threshold
    is_up = passed >= HALF if has_all_bits else is_reached
    return min(below + (step if is_up else 0.0), constants.maximum)


@compiled
def round_block(scaled: NDArray[np.float64], constants: RoundingConstants, rounded: NDArray[np.float64]) -> None:
    """Write the values of the format that magnitudes round to; stochastic rounding rounds down (see `draw`)."""
    if constants.kind == EVEN:
        for index in range(scaled.size):
            clipped = min(scaled[index], constants.maximum)
            field = max(np.float64(clipped).view(np.int64) & EXPONENT_MASK, np.int64(constants.lowest))
            steps = np.int64(field + constants.raise_by).view(np.float64)
            rounded[index] = (clipped + steps) - steps
    elif constants.kind == EVEN_TAPERED:
        for index in range(scaled.size):
            rounded[index] = round_even(scaled[index], constants)
    elif constants.kind == AWAY:
        for index in range(scaled.size):
            rounded[index] = round_away(scaled[index], constants)
    elif constants.kind >= HYBRID:
        is_float32 = constants.kind == HYBRID
        num_bits = _NUM_BITS if is_float32 else _NUM_BITS_BF16
        for index in range(scaled.size):
            narrow = np.float32(scaled[index])
            bits = np.float32(narrow).view(np.int32)
            threshold = bits & ((1 << num_bits) - 1) if is_float32 else 2 * ((bits >> BF16_SHIFT) & 1) + 1
            rounded[index] = round_hybrid(np.float64(narrow), threshold, num_bits, constants)
    else:
        for index in range(scaled.size):
            rounded[index] = round_floor(scaled[index], constants)


_mix = compiled(mix)


@compiled
def uniform_at(state: int, index: int) -> np.float64:
    """The uniform number of the element with that index in C order; `state` is `state_of(seed)`."""
    mixed = _mix(state + (index + 1) * GOLDEN)
    return np.float64((mixed >> 11) & 0x1FFFFFFFFFFFFF) * UNIFORM_UNIT


@compiled
def draw(
    magnitudes: NDArray[np.float64], constants: RoundingConstants, state: int, start: int, rounded: NDArray[np.float64]
) -> None:
    """Round magnitudes stochastically, by the uniform numbers of the elements from index `place` on."""
    for index in range(magnitudes.size):
        below = round_floor(magnitudes[index], constants)
        passed, step = passed_of(magnitudes[index], below, constants)
        rounded[index] = below + (step if uniform_at(state, start + index) < passed else 0.0)
