"""What does a tensor lose when it is divided by a scale, rounded to a format, and multiplied back?

The sums behind every metric, for many scales at once: from the histogram of an 8- or 16-bit type at a cost
that does not grow with the tensor, and from the values of wider types in one pass over memory. All
arithmetic is float64. Sums are added up in an order that is part of the code, not of the machine.
"""

# Shapes: N = values, L = levels (one scale each), M = kinds of sums, A = accumulators.
# ruff: noqa: N803, N806, N815 - the letters of a shape end the name of the array

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ranktape.analyze.histogram import frozen
from ranktape.analyze.kernels import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.formats import Format
    from ranktape.analyze.histogram import AnyArray

NUM_ACCUMULATORS = 64
"""Partial sums of each kind: adding lane by lane lets the compiler use vectors without reordering additions."""

BLOCK = 4096
"""Values that stay in the first-level cache while every level reads them."""

CHUNK = 1 << 18
"""Values whose sums are added up apart, so that chunks may be done in any order, by any number of threads."""

SUMS = (
    "squared_error",
    "absolute_error",
    "squared_result",
    "product",
    "largest_error",
    "overflow",
    "underflow",
    "flushed",
)
"""What is summed up for each level, in the order of the kernel; of `largest_error` it is the maximum."""

OWN_SUMS = ("num_finite", "absolute", "squared")
"""What is summed up of the tensor itself."""

LARGEST_ERROR = SUMS.index("largest_error")

SQUARED_SAFELY = 500
"""Up to this exponent, either sign, the sums of squares of a tensor's values are within float64."""

MAX_SHIFTED_EXPONENT = 1000
"""Scales further than this from 1, after the shift, change nothing: all overflows, or all is flushed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """The sums over all finite values x of a tensor and their roundings y, for each of L levels.

    All are of x / 2**`shift` and y / 2**`shift`.
    """

    shift: int
    """Exponent of the power of two that everything is divided by, so that squares neither overflow nor vanish:
    0, unless the largest magnitude is near an end of float64."""
    num_finite: int
    """Values that are neither NaN nor infinite."""
    largest: float
    """Largest |x|, shifted."""
    absolute: float
    """Sum of |x|."""
    squared: float
    """Sum of x squared."""
    squared_error_L: NDArray[np.float64]
    """Sum of (x - y) squared."""
    absolute_error_L: NDArray[np.float64]
    """Sum of |x - y|."""
    squared_result_L: NDArray[np.float64]
    """Sum of y squared."""
    product_L: NDArray[np.float64]
    """Sum of x * y."""
    largest_error_L: NDArray[np.float64]
    """Largest |x - y|."""
    overflow_L: NDArray[np.float64]
    """Values that round to beyond the format's largest value, and are saturated."""
    underflow_L: NDArray[np.float64]
    """Nonzero values below the format's smallest normal value after division by the scale."""
    flushed_L: NDArray[np.float64]
    """Nonzero values that become zero."""


def scale_of(exponent: float) -> float:
    """2**`exponent` as a float64, the same on every machine.

    Infinite above and zero below the range of float64.
    """
    whole = math.floor(exponent)
    try:
        return math.ldexp(2.0 ** (exponent - whole), whole)
    except OverflowError:
        return math.inf


def largest_alignment(largest: float, *, target: Format) -> int:
    """The smallest integer exponent with which `largest` does not exceed the format's largest value.

    `largest` is finite and above 0. (The text that the tool of the seeds came with rounds to the other
    side, which overflows by up to a factor of 2 at the very level that is to avoid it.)
    """
    exponent = math.frexp(largest)[1] - math.frexp(target.maximum)[1]
    return exponent if math.frexp(largest)[0] <= math.frexp(target.maximum)[0] else exponent + 1


def smallest_alignment(smallest: float, *, target: Format) -> int:
    """The largest integer exponent with which `smallest` is not below the format's smallest normal value.

    `smallest` is finite and above 0.
    """
    return math.frexp(smallest)[1] - 1 - target.emin


def sums_of_pairs(
    values: NDArray[np.float64], *, counts: NDArray[np.int64], exponents: NDArray[np.float64], target: Format
) -> Sums:
    """The sums over values that occur so many times each; NaN and infinities are left out.

    At least one value must be finite and nonzero.
    """
    largest = float(np.abs(values[np.isfinite(values)]).max())
    parts = _Parts(largest=largest, exponents=exponents, target=target, num_chunks=1)
    parts.add(values, weights=counts.astype(np.float64), chunk=0)
    return parts.total()


def sums_of_values(array: AnyArray, *, largest: float, exponents: NDArray[np.float64], target: Format) -> Sums:
    """The sums over the values of an array of float32 or float64; NaN and infinities are left out.

    `largest` is the largest finite magnitude, above 0.
    """
    flat = np.ravel(array)
    num_chunks = -(-flat.size // CHUNK)
    parts = _Parts(largest=largest, exponents=exponents, target=target, num_chunks=num_chunks)
    for chunk in range(num_chunks):
        parts.add(flat[chunk * CHUNK : (chunk + 1) * CHUNK], weights=np.ones(1), chunk=chunk)
    return parts.total()


class _Parts:
    """The sums of each chunk, which are added up once all are there."""

    def __init__(self, *, largest: float, exponents: NDArray[np.float64], target: Format, num_chunks: int) -> None:
        exponent = math.frexp(largest)[1]
        self._shift = exponent if abs(exponent) > SQUARED_SAFELY else 0
        self._largest = math.ldexp(largest, -self._shift)
        wholes = np.floor(exponents)
        fractions = np.array([2.0 ** float(part) for part in exponents - wholes])
        limit = MAX_SHIFTED_EXPONENT
        self._scales_L = np.ldexp(fractions, np.clip(wholes - self._shift, -limit, limit).astype(np.int64))
        self._constants = _Constants(
            target.mantissa_bits, target.emin, target.maximum, target.overflow_start, target.min_normal
        )
        # Two factors: 2**1074 is not a float64.
        half = -self._shift // 2
        self._factors = math.ldexp(1.0, half), math.ldexp(1.0, -self._shift - half)
        self._sums_CLM = np.zeros((num_chunks, exponents.size, len(SUMS)))
        self._own_CM = np.zeros((num_chunks, len(OWN_SUMS)))

    def add(self, values: AnyArray, *, weights: NDArray[np.float64], chunk: int) -> None:
        """Sum up one chunk; safe for several threads with a chunk each."""
        _sum_levels(
            frozen(values, shape=values.shape),
            weights,
            self._factors,
            self._scales_L,
            self._constants,
            self._sums_CLM[chunk],
            self._own_CM[chunk],
        )

    def total(self) -> Sums:
        """The sums over all chunks, added up in their order."""
        sums_LM = self._sums_CLM.sum(axis=0)
        sums_LM[:, LARGEST_ERROR] = self._sums_CLM[:, :, LARGEST_ERROR].max(axis=0)
        num_finite, absolute, squared = self._own_CM.sum(axis=0).tolist()
        return Sums(
            shift=self._shift,
            num_finite=int(num_finite),
            largest=self._largest,
            absolute=absolute,
            squared=squared,
            **{f"{name}_L": sums_LM[:, index] for index, name in enumerate(SUMS)},
        )


class _Constants(NamedTuple):
    """What the kernel knows of a format; a named tuple, because numba takes it apart by name."""

    mantissa_bits: int
    emin: int
    maximum: float
    overflow_start: float
    min_normal: float


@compiled
def _sum_levels(  # noqa: PLR0917 - numba knows no keyword-only arguments
    values_N: AnyArray,
    weights_N: NDArray[np.float64],
    factors: tuple[float, float],
    scales_L: NDArray[np.float64],
    constants: _Constants,
    sums_LM: NDArray[np.float64],
    own_M: NDArray[np.float64],
) -> None:
    """Add the sums of all levels; `weights_N` is one weight for each value, or a single one for all."""
    accumulators_LA = np.zeros((scales_L.size, len(SUMS) * NUM_ACCUMULATORS))
    own_A = np.zeros(len(OWN_SUMS) * NUM_ACCUMULATORS)
    block_values, block_weights = np.zeros(BLOCK), np.zeros(BLOCK)
    for start in range(0, values_N.size, BLOCK):
        size = min(BLOCK, values_N.size - start)
        used = -(-size // NUM_ACCUMULATORS) * NUM_ACCUMULATORS
        block_values[size:used] = 0.0
        block_weights[size:used] = 0.0
        for index in range(size):
            magnitude = abs(np.float64(values_N[start + index]))
            is_finite = magnitude < np.inf
            weight = weights_N[start + index] if weights_N.size > 1 else weights_N[0]
            shifted = magnitude * factors[0] * factors[1]
            # 1,500 binary orders below the largest value the shift loses bits, but nothing becomes zero by it.
            block_values[index] = max(shifted, min(magnitude, 5e-324)) if is_finite else 0.0
            block_weights[index] = weight if is_finite else 0.0
        _add_own(block_values[:used], block_weights, own_A)
        for level in range(scales_L.size):
            _add_block(block_values[:used], block_weights, scales_L[level], constants, accumulators_LA[level])
    for lane in range(NUM_ACCUMULATORS):
        for kind in range(own_M.size):
            own_M[kind] += own_A[kind * NUM_ACCUMULATORS + lane]
        for level in range(scales_L.size):
            for kind in range(len(SUMS)):
                part = accumulators_LA[level, kind * NUM_ACCUMULATORS + lane]
                if kind == LARGEST_ERROR:
                    sums_LM[level, kind] = max(sums_LM[level, kind], part)
                else:
                    sums_LM[level, kind] += part


@compiled
def _add_own(values: NDArray[np.float64], weights: NDArray[np.float64], own_A: NDArray[np.float64]) -> None:
    for start in range(0, values.size, NUM_ACCUMULATORS):
        for lane in range(NUM_ACCUMULATORS):
            value, weight = values[start + lane], weights[start + lane]
            own_A[lane] += weight
            own_A[NUM_ACCUMULATORS + lane] += weight * value
            own_A[2 * NUM_ACCUMULATORS + lane] += weight * value * value


@compiled
def _add_block(
    values: NDArray[np.float64],
    weights: NDArray[np.float64],
    scale: float,
    constants: _Constants,
    accumulators_A: NDArray[np.float64],
) -> None:
    """Round a block of magnitudes to the format at one scale; equal to `formats.round_to` bit for bit."""
    mantissa_bits, maximum = constants.mantissa_bits, constants.maximum
    lowest_field = np.int64(constants.emin + 1023)
    for start in range(0, values.size, NUM_ACCUMULATORS):
        for lane in range(NUM_ACCUMULATORS):
            value, weight = values[start + lane], weights[start + lane]
            scaled = value / scale
            clipped = min(scaled, maximum)
            # The float64 exponent field; a unit in the last place of the format and its inverse are powers of two.
            field = max(np.float64(clipped).view(np.int64) >> 52, lowest_field)
            unit = np.int64((field - mantissa_bits) << 52).view(np.float64)
            per_unit = np.int64((2046 - field + mantissa_bits) << 52).view(np.float64)
            # Adding 2**52 leaves no bits for a fraction: float64 itself rounds to the nearest integer, ties to even.
            rounded = ((clipped * per_unit + 4503599627370496.0) - 4503599627370496.0) * unit
            result = rounded * scale
            error = abs(value - result)
            weighted_error, weighted_result = weight * error, weight * result
            is_nonzero = value > 0.0
            accumulators_A[lane] += weighted_error * error
            accumulators_A[NUM_ACCUMULATORS + lane] += weighted_error
            accumulators_A[2 * NUM_ACCUMULATORS + lane] += weighted_result * result
            accumulators_A[3 * NUM_ACCUMULATORS + lane] += weighted_result * value
            accumulators_A[4 * NUM_ACCUMULATORS + lane] = max(accumulators_A[4 * NUM_ACCUMULATORS + lane], error)
            accumulators_A[5 * NUM_ACCUMULATORS + lane] += weight if scaled >= constants.overflow_start else 0.0
            accumulators_A[6 * NUM_ACCUMULATORS + lane] += (
                weight if is_nonzero & (scaled < constants.min_normal) else 0.0
            )
            accumulators_A[7 * NUM_ACCUMULATORS + lane] += weight if is_nonzero & (rounded == 0.0) else 0.0
