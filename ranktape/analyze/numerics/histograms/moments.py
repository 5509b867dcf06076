"""Computes the statistics of the finite values of an array or of a histogram.

In large arrays of at most 16 bits, bit patterns are counted first, and the statistics are those of the patterns that
occur. Other arrays are summed in blocks in float64, in two passes: the mean, then the differences from it. The writer
process loads this module, so it imports neither torch nor zarr.
"""

# Shapes: B = blocks, M = sums.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.digest_kernels import ENDS, fill_statistics
from ranktape.analyze.numerics.histograms.block_histogram import count_blocks
from ranktape.analyze.numerics.histograms.histogram import Histogram, count_values, measure
from ranktape.analyze.numerics.kernels import BLOCK, compiled_sums
from ranktape.analyze.numerics.pieces import frozen
from ranktape.storage.format.dtypes import HALF_NBYTES, dtype_name, dtype_row
from ranktape.storage.format.statistics import STATISTICS, Statistics, exponent_of, merge_moments, merge_statistics

_COUNTED_FROM = 1 << 16
"""Minimum number of elements for which counting patterns is worth the 65,536 counts."""

_PART = 1 << 18
"""Number of elements that are widened at once, so that the copy is small."""

_NUM_SUMS = 6


def statistics_of(array: NDArray[Any]) -> Statistics:
    """The statistics of the finite values of an array of any shape and layout; for complex values, of their magnitudes.

    NaN and infinities only count as elements. An empty array has counts and sums of 0 and no extremes. 64-bit integers
    are rounded to float64.

    Raises:
        UsageError: the dtype is not one of records.
    """
    row = dtype_row(dtype_name(array.dtype))
    flat = np.ascontiguousarray(array).reshape(-1)
    if row.itemsize <= HALF_NBYTES and flat.size >= _COUNTED_FROM:
        return statistics_of_histogram(count_values(flat))
    return merge_statistics([_float_statistics(part) for part in _as_floats(flat, is_complex=row.is_complex)])


def statistics_of_histogram(counted: Histogram) -> Statistics:
    """The statistics of the finite values of the array that a histogram was counted from."""
    values, counts = counted.pairs()
    vector, ends = np.zeros(len(STATISTICS)), np.zeros(len(ENDS))
    fill_statistics(values, counts, int(counts.sum()), vector, ends)
    return Statistics.from_vector(vector)


def warm_up() -> None:
    """Compile, or load from the cache, all kernels that the writer needs, including those of other modules."""
    for dtype in (np.float16, np.float32, np.float64, np.uint8):
        measure(np.zeros(1, dtype=dtype), sample_dim=0)
    statistics_of_histogram(count_values(np.zeros(1, dtype=np.uint16)))
    for axis in (0, 1):
        count_blocks(np.ones((2, 2), dtype=dtype_row("bfloat16").numpy_dtype), axis=axis, threads=1)
    for wide in (np.float32, np.float64):
        _float_statistics(np.zeros(1, dtype=wide))


def _as_floats(flat: NDArray[Any], *, is_complex: bool) -> Iterator[NDArray[Any]]:
    """The values as float32 or float64, in parts if they have to be converted."""
    if flat.dtype in (np.float32, np.float64):
        yield flat
        return
    for start in range(0, flat.size, _PART):
        part = flat[start : start + _PART]
        with np.errstate(over="ignore", invalid="ignore"):
            # In float64, because the magnitude of a complex value may overflow float32.
            wide = part.astype(np.complex128 if is_complex else np.float64)
            yield np.abs(wide) if is_complex else wide


@compiled_sums
def _sum_powers(values: NDArray[Any], sums_BM: NDArray[np.float64]) -> None:
    """Write the sums of the finite values of each block of `BLOCK` elements.

    These are the number of values, their sum, the sums of the second, third and fourth power of their differences from
    the mean of the block, and the sum of their magnitudes.
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


def _float_statistics(values: NDArray[Any]) -> Statistics:
    sums_BM = np.zeros((-(-values.size // BLOCK), _NUM_SUMS))
    _sum_powers(frozen(values, shape=(values.size,)), sums_BM)
    is_all_finite = sums_BM[:, 0].sum() == values.size
    finite = values if is_all_finite else values[np.isfinite(values)]
    ends = _ends(finite)
    if exponent := exponent_of(ends[2]):
        _sum_powers(frozen(np.ldexp(finite, -exponent), shape=finite.shape), sums_BM)
    return _statistics(sums_BM.T, ends=ends, num_elements=values.size)


Ends = tuple[float | None, float | None, float | None]
"""The smallest and the largest finite value, and the largest magnitude; None if there are no finite values."""


def _ends(finite: NDArray[Any]) -> Ends:
    if not finite.size:
        return None, None, None
    minimum, maximum = float(finite.min()), float(finite.max())
    return minimum, maximum, max(abs(minimum), abs(maximum))


def _statistics(sums: Iterable[NDArray[np.float64]], *, ends: Ends, num_elements: int) -> Statistics:
    """Merge the sums of blocks, given in columns in the order of `_sum_powers`, to statistics."""
    counts, totals, second, third, fourth, magnitudes = sums
    total, moments = merge_moments(counts, totals, [second, third, fourth])
    if ends[0] == ends[1]:
        moments = [0.0, 0.0, 0.0]
    return Statistics(
        num_elements=num_elements,
        num_finite=int(counts.sum()),
        sum=total,
        moment_2=moments[0],
        moment_3=moments[1],
        moment_4=moments[2],
        sum_magnitudes=float(magnitudes.sum()),
        minimum=ends[0],
        maximum=ends[1],
        absmax=ends[2],
    )
