"""Compiled loops that add up values and their roundings, at one scale after the other.

For a block of values that stays in the first-level cache, and for each level: divide by the scale, round, add up. Each
step is a loop of its own that the compiler turns into vector instructions. The scales of a level are computed where
they are used, in one pass over memory. Sums are kept in lanes, in an order that is part of the code and not of the
machine; counts are integers.
"""

# Shapes: N = values, G = groups that share a scale, E = elements of a group, L = levels, A = lanes,
# K = kinds of sums, C = kinds of counts.

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.formats.kernels import HYBRID, RANDOM, RoundingConstants, passed_of, round_block
from ranktape.analyze.numerics.histograms.histogram import AnyArray
from ranktape.analyze.numerics.kernels import compiled
from ranktape.analyze.numerics.quantization.group_scales import (
    MAX_FLOAT32,
    MIN_FLOAT32,
    block_scale,
    factors_of,
    tensor_scale_of,
)
from ranktape.analyze.numerics.quantization.schemes import ScaleRecipe

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


POWERS, FLOATS, CODES, EXACT = range(4)
"""Scales are powers of two; float32 numbers to divide by; e4m3 numbers times the scale of the tensor, as NVFP4's are;
or what the level says."""

_MODELOPT = int(ScaleRecipe.MODELOPT)


class Scales(NamedTuple):
    """What the kernel knows of how scales follow from what is known of a group."""

    kind: int
    """`POWERS`, `FLOATS`, `CODES` or `EXACT`."""
    end: int
    """Largest magnitude of the exponent of a power of two."""
    shift: int
    """Exponent of the power of two that values are to be divided by, so that their squares are within float64."""
    shift_factors: tuple[float, float]
    """What divides by that, one after the other."""
    limit: int
    """Largest magnitude of the exponent of a shifted scale."""
    recipe: int
    """Of NVFP4, the `ScaleRecipe`."""


@compiled
def magnitudes_of(values_N: AnyArray, factors: tuple[float, float], magnitudes_N: NDArray[np.float64]) -> np.int64:
    """Write the magnitudes times both factors, and zeros for NaN and infinities; count the finite values."""
    finite = np.int64(0)
    for index in range(values_N.size):
        magnitude = abs(np.float64(values_N[index]))
        is_finite = magnitude < np.inf
        shifted = magnitude * factors[0] * factors[1]
        # 1,500 binades below the largest value the shift loses bits, but nothing becomes zero by it.
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
    constants: RoundingConstants,
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
def _raise_randomly(
    scaled: NDArray[np.float64],
    constants: RoundingConstants,
    rounded: NDArray[np.float64],
    weights: NDArray[np.float64],
    up_weights: NDArray[np.float64],
) -> None:
    """From the values below to those above; the weights are parted by how likely each of the two is."""
    for index in range(scaled.size):
        fraction, step = passed_of(scaled[index], rounded[index], constants)
        up_weights[index] = weights[index] * fraction
        weights[index] *= 1.0 - fraction
        rounded[index] += step if fraction > 0.0 else 0.0


@compiled
def _finish_block(  # noqa: PLR0917 - numba knows no keyword-only arguments
    values: NDArray[np.float64],
    weights: NDArray[np.int64],
    factors: NDArray[np.float64],
    scaled: NDArray[np.float64],
    scales: NDArray[np.float64],
    constants: RoundingConstants,
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
    if constants.kind not in (RANDOM, HYBRID) and not weights.size:
        _add(values, rounded, scales, sums_KA)
        return
    if constants.kind != RANDOM:
        _add_weighted(values, factors, rounded, scales, sums_KA)
        return
    down, up, lower = scratch[1, : values.size], scratch[2, : values.size], scratch[3, : values.size]
    down[:] = factors
    lower[:] = rounded
    _raise_randomly(scaled, constants, rounded, down, up)
    for index in range(values.size):
        sums_KA[RAISED, index % LANES] += up[index] if lower[index] == 0.0 else 0.0
    _add_weighted(values, up, rounded, scales, sums_KA)
    _add_weighted(values, down, lower, scales, sums_KA)


@compiled
def _add_own(values: NDArray[np.float64], weights: NDArray[np.float64], own_KA: NDArray[np.float64]) -> np.int64:
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
def _fold(  # noqa: PLR0917 - as above
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
def sum_levels(  # noqa: PLR0917 - as above
    values_GE: AnyArray,
    weights_N: NDArray[np.int64],
    known_G: NDArray[np.float64],
    offsets_L: NDArray[np.float64],
    how: Scales,
    constants: RoundingConstants,
    sums_LK: NDArray[np.float64],
    counts_LC: NDArray[np.int64],
    own_K: NDArray[np.float64],
) -> np.int64:
    """Add the sums of values in groups that have a scale each; count the finite ones.

    `known_G` is of each group the exponent of its scale (`POWERS`), its scale (`FLOATS`) or its largest magnitude
    (`CODES`); `offsets_L` is of each level what is added to the exponent, what scales are multiplied by, or what the
    scale of the tensor follows from. `EXACT` are scales of the shifted values themselves, for all groups alike.
    Without weights, each value counts once.
    """
    num_groups, size_of_group = values_GE.shape
    flat = values_GE.reshape(values_GE.size)
    sums_LKA = np.zeros((offsets_L.size, NUM_SUMS, LANES))
    own_KA = np.zeros((2, LANES))
    block, shifted, scratch = np.zeros(BLOCK), np.zeros(BLOCK), np.zeros((6, BLOCK))
    block_weights, block_factors = np.zeros(BLOCK if weights_N.size else 0, dtype=np.int64), np.ones(BLOCK)
    # Of each group of a block: what values are multiplied or divided by, and what results are multiplied by.
    factors = np.zeros((2, BLOCK))
    finite, zeros = np.int64(0), np.int64(0)
    # A block holds several groups, or one of several parts of a group.
    groups, parts = max(1, BLOCK // max(1, size_of_group)), (size_of_group + BLOCK - 1) // BLOCK
    for number in range((num_groups + groups - 1) // groups * parts):
        group, place = number // parts * groups, number % parts * BLOCK
        known = known_G[group : group + groups]
        width = min(BLOCK, size_of_group - place)
        size = known.size * width
        used = -(-size // STEP) * STEP
        start = group * size_of_group + place
        block[:size] = flat[start : start + size]
        finite += magnitudes_of(block[:size], how.shift_factors, shifted)
        shifted[size:used] = 0.0
        if weights_N.size:
            block_weights[:size] = weights_N[start : start + size]
            block_weights[size:used] = 0
            block_factors[:used] = block_weights[:used]
        values, weights, weighted = shifted[:used], block_weights[:used], block_factors[:used]
        scaled, scales = scratch[4, :used], scratch[5, :used]
        scaled[size:], scales[size:] = 0.0, 0.0
        zeros += _add_own(values, weighted, own_KA)
        source = shifted[:size] if how.kind == EXACT else block[:size]
        for level in range(offsets_L.size):
            _factors_of(known, offsets_L[level], how, factors)
            _scale_block(source, width, how, factors, scaled[:size], scales[:size])
            _finish_block(
                values, weights, weighted, scaled, scales, constants, scratch, sums_LKA[level], counts_LC[level]
            )
    _fold(sums_LKA, own_KA, zeros, sums_LK, counts_LC, own_K)
    return finite


@compiled
def _factors_of(known: NDArray[np.float64], offset: float, how: Scales, factors: NDArray[np.float64]) -> None:
    before, after = factors[0, : known.size], factors[1, : known.size]
    if how.kind == POWERS:
        for group in range(known.size):
            exponent = np.int64(min(max(known[group] + offset, -how.end), how.end))
            before[group] = np.int64((1023 - exponent) << 52).view(np.float64)
            moved = np.int64(min(max(exponent - np.int64(how.shift), np.int64(-how.limit)), np.int64(how.limit)))
            after[group] = np.int64((1023 + moved) << 52).view(np.float64)
        return
    if how.kind == EXACT:
        before[:] = offset
        after[:] = offset
        return
    low, high = how.shift_factors
    if how.kind == FLOATS:
        for group in range(known.size):
            # float32 holds no smaller and no larger scale.
            scale = min(max(np.float64(np.float32(known[group] * offset)), MIN_FLOAT32), MAX_FLOAT32)
            before[group] = scale
            after[group] = scale * low * high
        return
    tensor = tensor_scale_of(offset, how.recipe)
    for group in range(known.size):
        before[group], unshifted = factors_of(block_scale(known[group], tensor), tensor)
        after[group] = unshifted * low * high


@compiled
def _scale_block(  # noqa: PLR0917 - as above
    values: NDArray[np.float64],
    width: int,
    how: Scales,
    factors: NDArray[np.float64],
    scaled: NDArray[np.float64],
    scales: NDArray[np.float64],
) -> None:
    """Write the scaled values of a block and the scale of each; `width` values in a row share one."""
    shape = values.size // width, width
    x, y, s = values.reshape(shape), scaled.reshape(shape), scales.reshape(shape)
    for row in range(shape[0]):
        before, after = factors[0, row], factors[1, row]
        if how.kind == POWERS:
            for index in range(shape[1]):
                y[row, index] = x[row, index] * before
                s[row, index] = after
        elif how.kind == EXACT:
            for index in range(shape[1]):
                y[row, index] = np.divide(x[row, index], before)
                s[row, index] = after
        elif how.kind == FLOATS or how.recipe == _MODELOPT:
            for index in range(shape[1]):
                y[row, index] = np.float64(np.float32(np.divide(x[row, index], before)))
                s[row, index] = after
        else:
            for index in range(shape[1]):
                y[row, index] = np.float64(np.float32(x[row, index] * before))
                s[row, index] = after
