"""Loops that add up values and their roundings where each group of them has a scale of its own, at many offsets.

As in `scaling_kernels`, for values in rows of one group each. The scales of a level are computed where they are used,
in one pass over memory for all levels. What it calls is compiled into it: see `formats.kernels` on caches.
"""

# Shapes: G = groups, E = elements of a group, L = levels, A = lanes, K = kinds of sums, C = kinds of counts.
# ruff: noqa: N803, N806 - the letters of a shape end the name of the array

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ranktape.analyze.numerics.kernels import compiled
from ranktape.analyze.numerics.quantization.group_scales import (
    MAX_FLOAT32,
    MIN_FLOAT32,
    block_scale,
    factors_of,
    tensor_scale_of,
)
from ranktape.analyze.numerics.quantization.schemes import ScaleRecipe
from ranktape.analyze.numerics.sweeps.rounding_kernels import Constants
from ranktape.analyze.numerics.sweeps.scaling_kernels import (
    BLOCK,
    LANES,
    NUM_SUMS,
    STEP,
    add_own,
    finish_block,
    fold,
    magnitudes_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

POWERS, FLOATS, CODES = range(3)
"""Scales are powers of two; or numbers to divide by; or e4m3 numbers times the scale of the tensor, as NVFP4's are."""

_MODELOPT = int(ScaleRecipe.MODELOPT)


class Scales(NamedTuple):
    """What the kernel knows of how scales follow from what is known of a group."""

    kind: int
    """`POWERS`, `FLOATS` or `CODES`."""
    end: int
    """Largest magnitude of the exponent of a power of two."""
    shift: int
    """Exponent of the power of two that values are to be divided by, so that their squares are within float64."""
    shift_factors: tuple[float, float]
    """What divides by that: see `shift_factors`."""
    limit: int
    """Largest magnitude of the exponent of a shifted scale."""
    recipe: int
    """Of NVFP4, the `ScaleRecipe`."""


@compiled
def sum_grouped(  # noqa: PLR0917 - numba knows no keyword-only arguments
    values_GE: NDArray[np.float64],
    known_G: NDArray[np.float64],
    offsets_L: NDArray[np.float64],
    how: Scales,
    constants: Constants,
    sums_LK: NDArray[np.float64],
    counts_LC: NDArray[np.int64],
    own_K: NDArray[np.float64],
) -> None:
    """Add the sums of magnitudes in groups.

    `known_G` is of each group the exponent of its scale (`POWERS`), its scale (`FLOATS`) or its largest magnitude
    (`CODES`); `offsets_L` is of each level what is added to the exponent, what scales are multiplied by, or what the
    scale of the tensor follows from.
    """
    num_groups, size_of_group = values_GE.shape
    flat = values_GE.reshape(values_GE.size)
    sums_LKA = np.zeros((offsets_L.size, NUM_SUMS, LANES))
    own_KA = np.zeros((2, LANES))
    block, shifted, scratch = np.zeros(BLOCK), np.zeros(BLOCK), np.zeros((6, BLOCK))
    no_weights, ones = np.zeros(0, dtype=np.int64), np.ones(BLOCK)
    # Of each group of a block: what values are multiplied or divided by, and what results are multiplied by.
    factors = np.zeros((2, BLOCK))
    zeros = np.int64(0)
    # A block holds several groups, or one of several parts of a group.
    groups, parts = max(1, BLOCK // size_of_group), (size_of_group + BLOCK - 1) // BLOCK
    for number in range((num_groups + groups - 1) // groups * parts):
        group, place = number // parts * groups, number % parts * BLOCK
        known = known_G[group : group + groups]
        width = min(BLOCK, size_of_group - place)
        size = known.size * width
        used = -(-size // STEP) * STEP
        start = group * size_of_group + place
        block[:size] = flat[start : start + size]
        block[size:used] = 0.0
        magnitudes_of(block[:used], how.shift_factors, shifted)
        values, scaled, scales = shifted[:used], scratch[4, :used], scratch[5, :used]
        scaled[size:], scales[size:] = 0.0, 0.0
        zeros += add_own(values, ones[:used], own_KA)
        for level in range(offsets_L.size):
            _factors_of(known, offsets_L[level], how, factors)
            _scale_block(block[:size], width, how, factors, scaled[:size], scales[:size])
            finish_block(
                values, no_weights, ones[:used], scaled, scales, constants, scratch, sums_LKA[level], counts_LC[level]
            )
    fold(sums_LKA, own_KA, zeros, sums_LK, counts_LC, own_K)


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
        elif how.kind == FLOATS:
            for index in range(shape[1]):
                y[row, index] = np.divide(x[row, index], before)
                s[row, index] = after
        elif how.recipe == _MODELOPT:
            for index in range(shape[1]):
                y[row, index] = np.float64(np.float32(np.divide(x[row, index], before)))
                s[row, index] = after
        else:
            for index in range(shape[1]):
                y[row, index] = np.float64(np.float32(x[row, index] * before))
                s[row, index] = after
