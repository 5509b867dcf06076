"""Rounds magnitudes to the values of a format, inside compiled loops.

Scalar functions without branches on nonnegative finite float64 numbers, for kernels that run over many values and many
scales: the compiler inlines them and turns the loop around them into vector instructions. What is beyond the largest
value becomes the largest value. Each equals `rounding.round_to` bit for bit.

numba caches a kernel beside its own source and does not see when a function that it calls has changed: whoever edits
this module removes the caches of the modules that call it.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ranktape.analyze.numerics.formats.table import Coding, Format
from ranktape.analyze.numerics.kernels import compiled
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

NO_TAPER = 1 << 20
"""A limit that no exponent of a float64 reaches."""

ONE_FIELD = 1023
"""The exponent field of the float64 1.0."""

HALF = 0.5
"""Of a step: from here on the value above is nearer."""

WHOLE = 2.0**52
"""Added to a smaller float64, it leaves no bits for a fraction: float64 itself rounds to the nearest integer."""

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""The step from one number's state to the next one's: 2**64 over the golden ratio, odd, as a signed integer."""

FIRST_FACTOR = 0xBF58476D1CE4E5B9 - (1 << 64)
"""What `mix` multiplies by first."""

SECOND_FACTOR = 0x94D049BB133111EB - (1 << 64)
"""What `mix` multiplies by second."""

UNIFORM_UNIT = 2.0**-53
"""The step between two uniform numbers."""


class RoundingConstants(NamedTuple):
    """What a kernel knows of a format; a named tuple, because numba takes it apart by name."""

    mantissa_bits: int
    """Width of the significand field where it is widest."""
    lowest_field: int
    """Float64 exponent field below which steps no longer get smaller."""
    taper_1: int
    """Magnitude of the exponent beyond which the significand has one bit less; `NO_TAPER` where it has not."""
    taper_2: int
    """Beyond which it has two bits less."""
    taper_3: int
    """Beyond which it has three bits less."""
    maximum: float
    """Largest finite value."""


def constants_of(target: Format) -> RoundingConstants:
    """What the functions of this module take of a format.

    Raises:
        UsageError: of e8m0, which has neither zero nor sign, and of fp64, which holds every float64.
    """
    if target.coding is Coding.EXPONENT or target.name == "fp64":
        why = "holds every float64" if target.name == "fp64" else "holds the scales of blocks, and has no zero"
        raise UsageError(f"{target.name} is no format to quantise to: it {why}. Use `round_to` for single values")
    taper_1, taper_2, taper_3 = (*target.taper, NO_TAPER, NO_TAPER, NO_TAPER)[:3]
    return RoundingConstants(
        mantissa_bits=target.mantissa_bits,
        lowest_field=target.lowest_exponent + ONE_FIELD,
        taper_1=taper_1,
        taper_2=taper_2,
        taper_3=taper_3,
        maximum=target.maximum,
    )


@compiled
def _unit_field(clipped: float, constants: RoundingConstants) -> np.int64:
    """The float64 exponent field of the step between the values of the format around a magnitude."""
    field = max(np.float64(clipped).view(np.int64) >> 52, np.int64(constants.lowest_field))
    exponent = abs(field - ONE_FIELD)
    lost = (
        np.int64(exponent > constants.taper_1)
        + np.int64(exponent > constants.taper_2)
        + np.int64(exponent > constants.taper_3)
    )
    return field - constants.mantissa_bits + lost


@compiled
def round_even(magnitude: float, constants: RoundingConstants) -> np.float64:
    """The nearest value of the format; of two equally near ones that with an even significand."""
    clipped = min(magnitude, constants.maximum)
    field = _unit_field(clipped, constants)
    # A unit in the last place of the format and its inverse are powers of two: both products are exact.
    unit: np.float64 = np.int64(field << 52).view(np.float64)
    per_unit: np.float64 = np.int64((2 * ONE_FIELD - field) << 52).view(np.float64)
    rounded: np.float64 = ((clipped * per_unit + WHOLE) - WHOLE) * unit
    return rounded


@compiled
def round_away(magnitude: float, constants: RoundingConstants) -> np.float64:
    """The nearest value of the format; of two equally near ones the larger."""
    clipped = min(magnitude, constants.maximum)
    field = _unit_field(clipped, constants)
    unit: np.float64 = np.int64(field << 52).view(np.float64)
    in_units: np.float64 = clipped * np.int64((2 * ONE_FIELD - field) << 52).view(np.float64)
    whole = np.floor(in_units)
    # The difference is exact, where adding a half to the value itself would round.
    rounded: np.float64 = (whole + np.float64(in_units - whole >= HALF)) * unit
    return rounded


@compiled
def round_floor(magnitude: float, constants: RoundingConstants) -> np.float64:
    """The largest value of the format that is not above the magnitude."""
    clipped = min(magnitude, constants.maximum)
    field = _unit_field(clipped, constants)
    unit: np.float64 = np.int64(field << 52).view(np.float64)
    in_units: np.float64 = clipped * np.int64((2 * ONE_FIELD - field) << 52).view(np.float64)
    rounded: np.float64 = np.floor(in_units) * unit
    return rounded


@compiled
def round_random(magnitude: float, constants: RoundingConstants, uniform: float) -> np.float64:
    """The next value above if `uniform` is below the fraction of the step that is passed, else that below."""
    clipped = min(magnitude, constants.maximum)
    field = _unit_field(clipped, constants)
    unit: np.float64 = np.int64(field << 52).view(np.float64)
    in_units: np.float64 = clipped * np.int64((2 * ONE_FIELD - field) << 52).view(np.float64)
    whole = np.floor(in_units)
    rounded: np.float64 = (whole + np.float64(uniform < in_units - whole)) * unit
    return rounded


@compiled
def mix(state: int | np.int64) -> np.int64:
    """A signed 64-bit number of which each bit depends on every bit of the state: a bijection.

    The output function of splitmix64 (Steele, Lea and Flood, 2014) in operations that int64 has everywhere, products
    modulo 2**64 and shifts that keep the sign, whose copies of the sign are masked away:

        x ^= (x >> 30) & (2**34 - 1);  x *= 0xBF58476D1CE4E5B9
        x ^= (x >> 27) & (2**37 - 1);  x *= 0x94D049BB133111EB
        x ^= (x >> 31) & (2**33 - 1)
    """
    first = np.int64(state ^ ((state >> 30) & 0x3FFFFFFFF)) * FIRST_FACTOR
    second = (first ^ ((first >> 27) & 0x1FFFFFFFFF)) * SECOND_FACTOR
    return second ^ ((second >> 31) & 0x1FFFFFFFF)


@compiled
def uniform_at(state: int, index: int) -> np.float64:
    """The uniform number of the element with that index in C order; `state` is `state_of(seed)`."""
    mixed = mix(state + (index + 1) * GOLDEN)
    return np.float64((mixed >> 11) & 0x1FFFFFFFFFFFFF) * UNIFORM_UNIT


def state_of(seed: int) -> int:
    """Where the numbers of a seed begin, as a signed 64-bit integer: `mix` of seed + `GOLDEN`, modulo 2**64.

    Raises:
        UsageError: the seed is not an integer.
    """
    try:
        whole = operator.index(seed)
    except TypeError as error:
        raise UsageError(f"seed is {seed!r}: give an integer") from error
    return int(mix(np.int64(_signed(whole + GOLDEN))))


def _signed(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


@compiled
def fill_uniforms(state: int, start: int, uniforms: NDArray[np.float64]) -> None:
    """Write the uniform numbers of the elements from index `start` on."""
    for offset in range(uniforms.size):
        uniforms[offset] = uniform_at(state, start + offset)
