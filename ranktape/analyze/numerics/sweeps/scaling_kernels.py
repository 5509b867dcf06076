"""Compiled loops that add up values and their roundings, at one scale after the other.

For a block of values that stays in the first-level cache, and for each level: divide by the scale, round, add up. Each
step is a loop of its own that the compiler turns into vector instructions. Sums are kept in lanes, in an order that
is part of the code and not of the machine; counts are integers.
"""

# Shapes: N = values, G = groups that share a scale, E = elements of a group, L = levels, A = lanes,
# K = kinds of sums, C = kinds of counts.
# ruff: noqa: N803, N806 - the letters of a shape end the name of the array

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.numerics.kernels import compiled
from ranktape.analyze.numerics.sweeps.rounding_kernels import RANDOM, Constants, raise_randomly, round_block

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.histograms.histogram import AnyArray

LANES = 32
"""Partial sums of each kind: adding lane by lane lets the compiler use vectors without reordering additions."""

UNROLLED = 4
"""Values of a lane that are added to each other before they are added to its sum."""

STEP = LANES * UNROLLED
"""Blocks are filled up with zeros to a multiple of this."""

BLOCK = 1024
"""Values of which everything fits into the first-level cache."""

NUM_SUMS = 6
"""Squared error, absolute error, squared result, product, what chance keeps from becoming zero; the largest error."""

RAISED, LARGEST = 4, 5
"""The places of the last two."""

NUM_COUNTS = 3
"""Overflow, underflow, flushed."""


@compiled
def magnitudes_of(values_N: AnyArray, factors: tuple[float, float], magnitudes_N: NDArray[np.float64]) -> np.int64:
    """Write the magnitudes times both factors, and zeros for NaN and infinities; count the finite values."""
    finite = np.int64(0)
    for index in range(values_N.size):
        magnitude = abs(np.float64(values_N[index]))
        is_finite = magnitude < np.inf
        shifted = magnitude * factors[0] * factors[1]
        # 1,500 binary orders below the largest value the shift loses bits, but nothing becomes zero by it.
        magnitudes_N[index] = max(shifted, min(magnitude, 5e-324)) if is_finite else 0.0
        finite += is_finite
    return finite


@compiled
def _add(
    values: NDArray[np.float64],
    rounded: NDArray[np.float64],
    scales: NDArray[np.float64],
    sums_KA: NDArray[np.float64],
) -> None:
    # In three dimensions the compiler sees that no index is negative, and uses vectors.
    shape = values.size // STEP, UNROLLED, LANES
    x, rounded_x, s = values.reshape(shape), rounded.reshape(shape), scales.reshape(shape)
    for row in range(shape[0]):
        for lane in range(LANES):
            x_0, x_1, x_2, x_3 = x[row, 0, lane], x[row, 1, lane], x[row, 2, lane], x[row, 3, lane]
            y_0, y_1 = rounded_x[row, 0, lane] * s[row, 0, lane], rounded_x[row, 1, lane] * s[row, 1, lane]
            y_2, y_3 = rounded_x[row, 2, lane] * s[row, 2, lane], rounded_x[row, 3, lane] * s[row, 3, lane]
            e_0, e_1, e_2, e_3 = abs(x_0 - y_0), abs(x_1 - y_1), abs(x_2 - y_2), abs(x_3 - y_3)
            sums_KA[0, lane] += (e_0 * e_0 + e_1 * e_1) + (e_2 * e_2 + e_3 * e_3)
            sums_KA[1, lane] += (e_0 + e_1) + (e_2 + e_3)
            sums_KA[2, lane] += (y_0 * y_0 + y_1 * y_1) + (y_2 * y_2 + y_3 * y_3)
            sums_KA[3, lane] += (x_0 * y_0 + x_1 * y_1) + (x_2 * y_2 + x_3 * y_3)
            sums_KA[LARGEST, lane] = max(sums_KA[LARGEST, lane], e_0, e_1, e_2, e_3)


@compiled
def _add_weighted(
    values: NDArray[np.float64],
    weights: NDArray[np.float64],
    rounded: NDArray[np.float64],
    scales: NDArray[np.float64],
    sums_KA: NDArray[np.float64],
) -> None:
    shape = values.size // LANES, LANES
    x, w, rounded_x, s = values.reshape(shape), weights.reshape(shape), rounded.reshape(shape), scales.reshape(shape)
    for row in range(shape[0]):
        for lane in range(LANES):
            value, result = x[row, lane], rounded_x[row, lane] * s[row, lane]
            error = abs(value - result)
            weighted_error, weighted_result = w[row, lane] * error, w[row, lane] * result
            sums_KA[0, lane] += weighted_error * error
            sums_KA[1, lane] += weighted_error
            sums_KA[2, lane] += weighted_result * result
            sums_KA[3, lane] += weighted_result * value
            sums_KA[LARGEST, lane] = max(sums_KA[LARGEST, lane], error)


@compiled
def _count(
    scaled: NDArray[np.float64],
    rounded: NDArray[np.float64],
    weights: NDArray[np.int64],
    constants: Constants,
    counts_C: NDArray[np.int64],
) -> None:
    """Count zeros as underflow and as flushed; without weights, every value once."""
    overflow = np.int64(0)
    underflow = np.int64(0)
    flushed = np.int64(0)
    if weights.size:
        for index in range(scaled.size):
            magnitude, weight = scaled[index], weights[index]
            overflow += weight if magnitude >= constants.overflow_start else 0
            underflow += weight if magnitude < constants.min_normal else 0
            flushed += weight if rounded[index] == 0.0 else 0
    else:
        for index in range(scaled.size):
            magnitude = scaled[index]
            overflow += magnitude >= constants.overflow_start
            underflow += magnitude < constants.min_normal
            flushed += rounded[index] == 0.0
    counts_C[0] += overflow
    counts_C[1] += underflow
    counts_C[2] += flushed


@compiled
def finish_block(  # noqa: PLR0917 - numba knows no keyword-only arguments
    values: NDArray[np.float64],
    weights: NDArray[np.int64],
    factors: NDArray[np.float64],
    scaled: NDArray[np.float64],
    scales: NDArray[np.float64],
    constants: Constants,
    scratch: NDArray[np.float64],
    sums_KA: NDArray[np.float64],
    counts_C: NDArray[np.int64],
) -> None:
    """Round scaled magnitudes and add up what became of the values.

    `factors` are the weights as float64, and ones without weights.
    """
    rounded = scratch[0, : values.size]
    round_block(scaled, constants, rounded)
    _count(scaled, rounded, weights, constants, counts_C)
    if constants.kind != RANDOM and not weights.size:
        _add(values, rounded, scales, sums_KA)
        return
    if constants.kind != RANDOM:
        _add_weighted(values, factors, rounded, scales, sums_KA)
        return
    down, up, lower = scratch[1, : values.size], scratch[2, : values.size], scratch[3, : values.size]
    down[:] = factors
    lower[:] = rounded
    raise_randomly(scaled, constants, rounded, down, up)
    for index in range(values.size):
        sums_KA[RAISED, index % LANES] += up[index] if lower[index] == 0.0 else 0.0
    _add_weighted(values, up, rounded, scales, sums_KA)
    _add_weighted(values, down, lower, scales, sums_KA)


@compiled
def add_own(values: NDArray[np.float64], weights: NDArray[np.float64], own_KA: NDArray[np.float64]) -> np.int64:
    """Add the magnitudes and their squares; how many of the values are zero."""
    zeros = np.int64(0)
    x, factors = values.reshape(-1, LANES), weights.reshape(-1, LANES)
    for row in range(x.shape[0]):
        for lane in range(LANES):
            value = x[row, lane]
            weighted = factors[row, lane] * value
            own_KA[0, lane] += weighted
            own_KA[1, lane] += weighted * value
            zeros += np.int64(factors[row, lane]) if value == 0.0 else 0
    return zeros


@compiled
def fold(  # noqa: PLR0917 - as above
    sums_LKA: NDArray[np.float64],
    own_KA: NDArray[np.float64],
    zeros: np.int64,
    sums_LK: NDArray[np.float64],
    counts_LC: NDArray[np.int64],
    own_K: NDArray[np.float64],
) -> None:
    """Add the lanes up, and take the zeros from what was counted as underflow and as flushed."""
    for lane in range(LANES):
        own_K[0] += own_KA[0, lane]
        own_K[1] += own_KA[1, lane]
        for level in range(sums_LK.shape[0]):
            for kind in range(NUM_SUMS - 1):
                sums_LK[level, kind] += sums_LKA[level, kind, lane]
            sums_LK[level, NUM_SUMS - 1] = max(sums_LK[level, NUM_SUMS - 1], sums_LKA[level, NUM_SUMS - 1, lane])
    for level in range(sums_LK.shape[0]):
        counts_LC[level, 1] -= zeros
        counts_LC[level, 2] -= zeros


@compiled
def sum_scaled(  # noqa: PLR0917 - as above
    values_N: NDArray[np.float64],
    weights_N: NDArray[np.int64],
    scales_L: NDArray[np.float64],
    constants: Constants,
    sums_LK: NDArray[np.float64],
    counts_LC: NDArray[np.int64],
    own_K: NDArray[np.float64],
) -> None:
    """Add the sums of magnitudes that share the scale of each level; without weights, each counts once."""
    sums_LKA = np.zeros((scales_L.size, NUM_SUMS, LANES))
    own_KA = np.zeros((2, LANES))
    block, block_factors = np.zeros(BLOCK), np.ones(BLOCK)
    block_weights = np.zeros(BLOCK if weights_N.size else 0, dtype=np.int64)
    scratch = np.zeros((6, BLOCK))
    zeros = np.int64(0)
    for start in range(0, values_N.size, BLOCK):
        size = min(BLOCK, values_N.size - start)
        used = -(-size // STEP) * STEP
        block[:size] = values_N[start : start + size]
        block[size:used] = 0.0
        if weights_N.size:
            block_weights[:size] = weights_N[start : start + size]
            block_weights[size:used] = 0
            block_factors[:used] = block_weights[:used]
        values, weights, factors = block[:used], block_weights[:used], block_factors[:used]
        scaled, scales = scratch[4, :used], scratch[5, :used]
        zeros += add_own(values, factors, own_KA)
        for level in range(scales_L.size):
            scale = scales_L[level]
            for index in range(used):
                scaled[index] = np.divide(values[index], scale)
                scales[index] = scale
            finish_block(
                values, weights, factors, scaled, scales, constants, scratch, sums_LKA[level], counts_LC[level]
            )
    fold(sums_LKA, own_KA, zeros, sums_LK, counts_LC, own_K)


@compiled
def add_rounded(  # noqa: PLR0917 - as above
    values_N: NDArray[np.float64],
    weights_N: NDArray[np.int64],
    rounded_N: NDArray[np.float64],
    scale: float,
    constants: Constants,
    sums_LK: NDArray[np.float64],
    counts_LC: NDArray[np.int64],
    own_K: NDArray[np.float64],
) -> None:
    """Add the sums of one level whose scaled magnitudes were rounded elsewhere; a weight for each value, or none."""
    sums_LKA, own_KA = np.zeros((1, NUM_SUMS, LANES)), np.zeros((2, LANES))
    block, scratch = np.zeros(BLOCK), np.zeros((4, BLOCK))
    weights = np.zeros(BLOCK, dtype=np.int64)
    zeros = np.int64(0)
    for start in range(0, values_N.size, BLOCK):
        size = min(BLOCK, values_N.size - start)
        block[size:], weights[size:], scratch[:, size:] = 0.0, 0, 0.0
        block[:size] = values_N[start : start + size]
        for index in range(size):
            weights[index] = weights_N[start + index] if weights_N.size else 1
        scaled, rounded, scales, factors = scratch[0], scratch[1], scratch[2], scratch[3]
        rounded[:size] = rounded_N[start : start + size]
        for index in range(BLOCK):
            scaled[index] = np.divide(block[index], scale)
            scales[index] = scale
            factors[index] = np.float64(weights[index])
        zeros += add_own(block, factors, own_KA)
        _count(scaled, rounded, weights, constants, counts_LC[0])
        _add_weighted(block, factors, rounded, scales, sums_LKA[0])
    fold(sums_LKA, own_KA, zeros, sums_LK, counts_LC, own_K)
