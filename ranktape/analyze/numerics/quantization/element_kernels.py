"""What becomes of each element of a piece of a tensor, once it was divided by its scale?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ranktape.analyze.numerics.formats import Format, Rounding
from ranktape.analyze.numerics.formats.kernels import (
    RoundingConstants,
    constants_of,
    round_away,
    round_even,
    round_floor,
    round_random,
    uniform_at,
)
from ranktape.analyze.numerics.kernels import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

BEYOND = 4.0
"""How far beyond the largest value of the format rounding goes on, where it must be seen that it goes beyond."""

COUNTS = ("underflow", "flushed", "overflow", "spoiled", "nan", "inf")
"""What is counted, in the order of the kernel: the fields of `Losses`."""


class ElementConstants(NamedTuple):
    """What the kernel knows of the element format and the rounding, besides how to round."""

    maximum: float
    """Largest finite value."""
    beyond: float
    """What is beyond becomes this."""
    overflow_start: float
    """Smallest magnitude that counts as overflow."""
    min_normal: float
    """Smallest positive normal value."""
    has_negative_zero: bool
    """Whether the sign of a zero is kept."""


def element_constants(element: Format, *, rounding: Rounding, saturate: bool) -> ElementConstants:
    """What `finish` takes of a format."""
    return ElementConstants(
        maximum=element.maximum,
        beyond=element.overflow_value(saturate=saturate),
        overflow_start=element.overflow_start_of(rounding),
        min_normal=element.min_normal,
        has_negative_zero=element.has_negative_zero,
    )


def unbounded_constants(element: Format) -> RoundingConstants:
    """What rounding takes of a format, were it to go on beyond its largest value."""
    return constants_of(element)._replace(maximum=BEYOND * element.maximum)


def round_magnitudes(
    magnitudes: NDArray[np.float64], *, constants: RoundingConstants, rounding: Rounding, rounded: NDArray[np.float64]
) -> None:
    """Write the values of the format that magnitudes round to; of NaN, anything."""
    _ROUND[rounding](magnitudes, constants, rounded)


@compiled
def _even(magnitudes: NDArray[np.float64], constants: RoundingConstants, rounded: NDArray[np.float64]) -> None:
    for index in range(magnitudes.size):
        rounded[index] = round_even(magnitudes[index], constants)


@compiled
def _away(magnitudes: NDArray[np.float64], constants: RoundingConstants, rounded: NDArray[np.float64]) -> None:
    for index in range(magnitudes.size):
        rounded[index] = round_away(magnitudes[index], constants)


@compiled
def _floor(magnitudes: NDArray[np.float64], constants: RoundingConstants, rounded: NDArray[np.float64]) -> None:
    for index in range(magnitudes.size):
        rounded[index] = round_floor(magnitudes[index], constants)


_ROUND = {Rounding.EVEN: _even, Rounding.AWAY: _away, Rounding.FLOOR: _floor}


@compiled
def round_randomly(
    magnitudes: NDArray[np.float64],
    constants: RoundingConstants,
    state: int,
    places: NDArray[np.int64],
    rounded: NDArray[np.float64],
) -> None:
    """The same by the uniform numbers of the elements with these indices in C order."""
    for index in range(magnitudes.size):
        rounded[index] = round_random(magnitudes[index], constants, uniform_at(state, places[index]))


@compiled
def finish(
    values: NDArray[np.float64],
    magnitudes: NDArray[np.float64],
    constants: ElementConstants,
    rounded: NDArray[np.float64],
    counts: NDArray[np.int64],
) -> None:
    """Bound rounded magnitudes, give them the signs of the values, and add up what is lost, in the order of `COUNTS`.

    `magnitudes` are those before rounding: NaN where the value or its scale is.
    """
    underflow = flushed = overflow = spoiled = nan = inf = 0
    for index in range(values.size):
        value, magnitude, result = values[index], magnitudes[index], rounded[index]
        is_number = magnitude == magnitude  # noqa: PLR0124 - NaN is not itself
        is_finite = abs(value) < np.inf
        is_counted = is_finite & is_number & (value != 0.0)
        underflow += is_counted & (magnitude < constants.min_normal)
        flushed += is_counted & (result == 0.0)
        overflow += is_counted & (magnitude >= constants.overflow_start)
        spoiled += is_finite & (not is_number)
        is_nan = value != value  # noqa: PLR0124 - as above
        nan += is_nan
        inf += (not is_finite) & (not is_nan)
        bounded = constants.beyond if result > constants.maximum else result
        signed = np.copysign(bounded, value)
        signed = signed if constants.has_negative_zero else signed + 0.0
        rounded[index] = signed if is_number else np.nan
    counts[0] += underflow
    counts[1] += flushed
    counts[2] += overflow
    counts[3] += spoiled
    counts[4] += nan
    counts[5] += inf
