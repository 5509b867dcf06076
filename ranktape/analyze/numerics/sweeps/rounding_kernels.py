"""Rounds blocks of magnitudes to the values of a format, inside compiled loops.

The arithmetic of `formats.kernels`, with fewer operations for each value: sweeps round every value at every level.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ranktape.analyze.numerics.formats import Rounding
from ranktape.analyze.numerics.formats.kernels import constants_of
from ranktape.analyze.numerics.kernels import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.formats import Format

EXPONENT_MASK = 0x7FF << 52
"""The exponent field of a float64."""

ONE_BITS = 1023 << 52
"""The bits of 1.0."""

MAX_TAPER = 2000
"""More than any exponent of a float64."""

EVEN, EVEN_TAPERED, AWAY, FLOOR, RANDOM = range(5)
"""How to round; `EVEN_TAPERED` is for formats whose significand gets shorter away from 1, the others are for all."""


class Constants(NamedTuple):
    """What the kernels know of a format and a rounding; a named tuple, because numba takes it apart by name."""

    kind: int
    """How to round."""
    maximum: float
    """Largest finite value."""
    lowest: int
    """Float64 exponent field, in its place, below which steps no longer get smaller."""
    raise_by: int
    """From the exponent field of a value to that of 2**52 steps of the format there, where it is widest."""
    taper_1: int
    """Magnitude of the exponent, in its place, beyond which the significand has one bit less."""
    taper_2: int
    """Beyond which it has two bits less."""
    taper_3: int
    """Beyond which it has three bits less."""
    overflow_start: float
    """Smallest magnitude that counts as overflow."""
    min_normal: float
    """Smallest positive normal value."""


def kernel_constants(target: Format, *, rounding: Rounding) -> Constants:
    """What the kernels take of a format and a rounding that looks at nothing but the scaled magnitude.

    Raises:
        UsageError: of e8m0 and fp64, to which nothing is quantised.
    """
    row = constants_of(target)
    nearest = EVEN_TAPERED if target.taper else EVEN
    kinds = {Rounding.EVEN: nearest, Rounding.AWAY: AWAY, Rounding.FLOOR: FLOOR, Rounding.STOCHASTIC: RANDOM}
    tapers = [min(limit, MAX_TAPER) << 52 for limit in (row.taper_1, row.taper_2, row.taper_3)]
    return Constants(
        kinds[rounding],
        row.maximum,
        row.lowest_field << 52,
        (52 - row.mantissa_bits) << 52,
        tapers[0],
        tapers[1],
        tapers[2],
        target.overflow_start_of(rounding),
        target.min_normal,
    )


@compiled
def round_block(scaled: NDArray[np.float64], constants: Constants, rounded: NDArray[np.float64]) -> None:
    """Write the values of the format that scaled magnitudes round to, saturated: `formats.round_to` bit for bit.

    What chance decides is rounded down.
    """
    # 2**52 steps of the format leave no bits for a fraction of a step: float64 itself rounds their sum with a value
    # to the nearest step, ties to even, and taking them away again is exact.
    if constants.kind == EVEN:
        for index in range(scaled.size):
            clipped = min(scaled[index], constants.maximum)
            field = max(np.float64(clipped).view(np.int64) & EXPONENT_MASK, np.int64(constants.lowest))
            own_steps = np.int64(field + constants.raise_by).view(np.float64)
            rounded[index] = (clipped + own_steps) - own_steps
    elif constants.kind == EVEN_TAPERED:
        for index in range(scaled.size):
            clipped = min(scaled[index], constants.maximum)
            steps = _steps(clipped, constants)
            rounded[index] = (clipped + steps) - steps
    elif constants.kind == AWAY:
        for index in range(scaled.size):
            clipped = min(scaled[index], constants.maximum)
            steps = _steps(clipped, constants)
            nearest = (clipped + steps) - steps
            step = steps * 2.0**-52
            rounded[index] = nearest + (step if clipped - nearest == 0.5 * step else 0.0)
    else:
        for index in range(scaled.size):
            clipped = min(scaled[index], constants.maximum)
            steps = _steps(clipped, constants)
            nearest = (clipped + steps) - steps
            rounded[index] = nearest - (steps * 2.0**-52 if nearest > clipped else 0.0)


@compiled
def _steps(clipped: float, constants: Constants) -> float:
    """2**52 steps of the format around a magnitude."""
    field = max(np.float64(clipped).view(np.int64) & EXPONENT_MASK, np.int64(constants.lowest))
    distance = abs(field - ONE_BITS)
    lost = (
        np.int64(distance > constants.taper_1)
        + np.int64(distance > constants.taper_2)
        + np.int64(distance > constants.taper_3)
    )
    return np.int64(field + constants.raise_by + (lost << 52)).view(np.float64)


@compiled
def raise_randomly(
    scaled: NDArray[np.float64],
    constants: Constants,
    rounded: NDArray[np.float64],
    weights: NDArray[np.float64],
    up_weights: NDArray[np.float64],
) -> None:
    """From the values below to those above; the weights are parted by how likely each of the two is."""
    for index in range(scaled.size):
        clipped = min(scaled[index], constants.maximum)
        step = _steps(clipped, constants) * 2.0**-52
        passed = clipped - rounded[index]
        fraction = np.divide(passed, step)
        up_weights[index] = weights[index] * fraction
        weights[index] *= 1.0 - fraction
        rounded[index] += step if passed > 0.0 else 0.0
