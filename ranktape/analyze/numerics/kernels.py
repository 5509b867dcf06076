"""Compiles the loops over elements, and keeps what was compiled.

Loops that the compiler turns into vector instructions; everything that needs Python stays outside of them.
"""

# Shapes: O = everything before the dimension of samples, S = samples, I = everything after it,
# P = patterns, K = kinds of tallies, B = blocks, M = sums.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numba
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])

BLOCK = 4096
"""Elements that a kernel adds up in integers as narrow as the elements, so that the compiler vectorises it."""


def compiled(function: Function) -> Function:
    """`function` as machine code without the GIL, cached beside the source or in the user's cache.

    Where neither place can be written (a read-only container), it is compiled once for each process.
    """
    return _compiled(function, fastmath=False)


def compiled_sums(function: Function) -> Function:
    """The same, for sums of floats in any order: one after the other they take ten times as long."""
    return _compiled(function, fastmath={"reassoc"})


def _compiled(function: Function, **options: Any) -> Function:
    try:
        return cast("Function", numba.njit(nogil=True, cache=True, **options)(function))
    except RuntimeError:  # numba found no directory for its cache
        return cast("Function", numba.njit(nogil=True, **options)(function))


@compiled
def count(patterns_OSI: NDArray[Any], counts_SP: NDArray[np.int64]) -> None:
    """Add to the counts of each sample how often each of its patterns occurs."""
    for before in range(patterns_OSI.shape[0]):
        for sample in range(patterns_OSI.shape[1]):
            counts = counts_SP[sample]
            for pattern in patterns_OSI[before, sample]:
                counts[pattern] += 1


@compiled
def scan_keys(keys_OSI: NDArray[Any], marks: NDArray[Any], counts_SK: NDArray[np.int64], ends: NDArray[Any]) -> None:
    """Add to the counts of each sample what its elements are, and widen the ends to hold all elements.

    Elements are the patterns of an IEEE type read as signed integers, `marks` the patterns where kinds begin:
    infinity, overflow, the normal numbers, what is not flushed; last the mask of the magnitude. Counts are
    in the order of `histogram.KINDS`; ends are the smallest and largest key, the largest finite and the
    smallest nonzero magnitude.
    """
    as_key = keys_OSI.dtype.type
    infinity, overflow, normal, kept, top = marks
    nothing, bottom = as_key(0), as_key(~top)
    smallest, largest, largest_finite, smallest_nonzero = ends
    for before in range(keys_OSI.shape[0]):
        for sample in range(keys_OSI.shape[1]):
            row = keys_OSI[before, sample]
            counts = counts_SK[sample]
            for start in range(0, row.size, BLOCK):
                upper = lower = subnormal = flushed = nan = inf = zero = nothing
                block_smallest, block_largest = top, bottom
                block_finite, block_nonzero = as_key(-1), top
                block = row[start : start + BLOCK]
                for index in range(block.size):
                    key = block[index]
                    magnitude = as_key(key & top)
                    is_negative = key < 0
                    is_number = magnitude <= infinity
                    is_finite = magnitude < infinity
                    is_over = is_number & (magnitude >= overflow)
                    is_zero = magnitude == 0
                    upper = as_key(upper + (is_over & (not is_negative)))
                    lower = as_key(lower + (is_over & is_negative))
                    subnormal = as_key(subnormal + (magnitude < normal))
                    flushed = as_key(flushed + (magnitude < kept))
                    nan = as_key(nan + (not is_number))
                    inf = as_key(inf + (magnitude == infinity))
                    zero = as_key(zero + is_zero)
                    # Keys in the order of the values; both zeros are 0.
                    ordered = as_key(-magnitude) if is_negative else magnitude
                    block_smallest = min(block_smallest, ordered if is_number else top)
                    block_largest = max(block_largest, ordered if is_number else bottom)
                    block_finite = max(block_finite, magnitude if is_finite else as_key(-1))
                    block_nonzero = min(block_nonzero, magnitude if is_finite & (not is_zero) else top)
                counts[0] += upper
                counts[1] += lower
                counts[2] += subnormal - zero
                counts[3] += flushed - zero
                counts[4] += nan
                counts[5] += inf
                counts[6] += zero
                smallest, largest = min(smallest, block_smallest), max(largest, block_largest)
                largest_finite = max(largest_finite, block_finite)
                smallest_nonzero = min(smallest_nonzero, block_nonzero)
    ends[0], ends[1], ends[2], ends[3] = smallest, largest, largest_finite, smallest_nonzero


@compiled_sums
def sum_powers(values: NDArray[Any], sums_BM: NDArray[np.float64]) -> None:
    """Write what the finite values of each block of `BLOCK` add up to.

    That is how many there are, their sum, the sums of the second, third and fourth power of their differences from
    the block's mean, and the sum of their magnitudes.
    """
    for number in range(sums_BM.shape[0]):
        block = values[number * BLOCK : (number + 1) * BLOCK]
        count, total, magnitudes = 0.0, 0.0, 0.0
        for index in range(block.size):
            value = np.float64(block[index])
            is_finite = abs(value) < np.inf
            count += 1.0 if is_finite else 0.0
            total += value if is_finite else 0.0
            magnitudes += abs(value) if is_finite else 0.0
        mean = total / count if count else 0.0
        second, third, fourth = 0.0, 0.0, 0.0
        for index in range(block.size):
            value = np.float64(block[index])
            difference = value - mean if abs(value) < np.inf else 0.0
            square = difference * difference
            second += square
            third += square * difference
            fourth += square * square
        sums = sums_BM[number]
        sums[0], sums[1], sums[2], sums[3], sums[4], sums[5] = count, total, second, third, fourth, magnitudes


@compiled_sums
def summarise(
    keys_OSI: NDArray[np.int32], values_OSI: NDArray[np.float32], normal: np.int32, summary: NDArray[np.float64]
) -> bool:
    """Write what float32 values add up to, and per sample how many are subnormal and zero, in one pass over memory.

    Keys are the patterns of the values. The summary is count, sum, the second to fourth moment about the mean, the sum
    of magnitudes; smallest and largest key in the order of values, the largest magnitude's key; then for each sample
    those below `normal` (zeros too) and the zeros. False, and nothing is written, where one is not finite.
    """
    top, infinity = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
    smallest, largest, magnitude_key = top, np.int32(~top), np.int32(0)
    count, mean, second, third, fourth, magnitudes = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    summary[9:] = 0.0
    for before in range(keys_OSI.shape[0]):
        for sample in range(keys_OSI.shape[1]):
            for start in range(0, keys_OSI.shape[2], BLOCK):
                keys = keys_OSI[before, sample, start : start + BLOCK]
                values = values_OSI[before, sample, start : start + BLOCK]
                below, zero = np.int32(0), np.int32(0)
                for index in range(keys.size):
                    key = keys[index]
                    magnitude = np.int32(key & top)
                    ordered = np.int32(key ^ ((key >> 31) & top))
                    zero += np.int32(magnitude == 0)
                    below += np.int32(magnitude < normal)
                    magnitude_key = max(magnitude_key, magnitude)
                    smallest, largest = min(smallest, ordered), max(largest, ordered)
                if magnitude_key >= infinity:
                    return False
                total, of_magnitudes = 0.0, 0.0
                for index in range(values.size):
                    value = np.float64(values[index])
                    total += value
                    of_magnitudes += abs(value)
                size = np.float64(values.size)
                own_mean = total / size
                own_2, own_3, own_4 = 0.0, 0.0, 0.0
                for index in range(values.size):
                    difference = np.float64(values[index]) - own_mean
                    square = difference * difference
                    own_2 += square
                    own_3 += square * difference
                    own_4 += square * square
                # What the part and the parts before it come to together, about their common mean.
                both = count + size
                new_mean = mean + (own_mean - mean) * (size / both)
                a, b = mean - new_mean, own_mean - new_mean
                fourth += 4 * a * third + 6 * a * a * second + count * a * a * a * a
                fourth += own_4 + 4 * b * own_3 + 6 * b * b * own_2 + size * b * b * b * b
                third += 3 * a * second + count * a * a * a + own_3 + 3 * b * own_2 + size * b * b * b
                second += count * a * a + own_2 + size * b * b
                count, mean, magnitudes = both, new_mean, magnitudes + of_magnitudes
                summary[9 + 2 * sample] += below
                summary[10 + 2 * sample] += zero
    summary[0], summary[1], summary[5] = count, mean * count, magnitudes
    summary[2], summary[3], summary[4] = second, third, fourth
    summary[6], summary[7], summary[8] = smallest, largest, magnitude_key
    return True
