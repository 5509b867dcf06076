"""The compiled loops over elements that compute digests.

Elements of at most 16 bits are counted by their bit pattern. The patterns that occur are listed next to the counters,
so that a small record does not read all counters. Wider elements are sorted and thinned.
"""

# Shapes: S = samples, I = elements of a sample, P = patterns, T = tables of counters, F = metrics of a sample,
# D = distinct patterns.

from __future__ import annotations

import enum
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.kernels import compiled
from ranktape.storage.format.dtypes import HALF_NBYTES

ENDS = ("minimum", "maximum", "largest_finite", "smallest_nonzero")
"""The extremes of `Tallies`, in the order of their columns."""

NUM_TABLES = 4
"""Number of tables of counters. Adjacent elements use different ones, so that no counter waits for its last write."""

SMALL = 1 << 16
"""In a sample with fewer elements of 16 bits, patterns are listed while they are counted.

In any other, all counters are read after the count.
"""

_GROUP = 64
"""Number of counters that are checked together."""

_RUN = 256
"""Number of summands that are added up before their sum is added to the total, for smaller rounding errors."""

_PATTERN_BITS = 16
_PATTERN_MASK = 0xFFFF


class Nature(enum.IntEnum):
    """The kind of a value with respect to the limits of its dtype."""

    ORDINARY = 0
    ZERO = 1
    UNDERFLOW = 2
    UPPER = 3
    LOWER = 4
    NAN = 5


_ZERO, _UNDERFLOW, _UPPER, _LOWER, _NAN = map(int, list(Nature)[1:])
"""The natures as plain integers, which numba compiles."""

_NUM_NATURES = len(Nature)


@compiled
def _count_listed(patterns_I: NDArray[Any], table_P: NDArray[np.uint32], patterns_D: NDArray[np.uint16]) -> int:
    """Count the patterns and list each one that is new; returns the number of distinct patterns."""
    num = 0
    for pattern in patterns_I:
        before = table_P[pattern]
        table_P[pattern] = before + np.uint32(1)
        patterns_D[num] = pattern
        num += before == 0
    return num


@compiled
def _count_interleaved(patterns_I: NDArray[Any], tables_TP: NDArray[np.uint32]) -> None:
    """Count the patterns, adjacent elements in different tables."""
    first, second, third, fourth = tables_TP[0], tables_TP[1], tables_TP[2], tables_TP[3]
    num_fours = patterns_I.size // 4
    if patterns_I.itemsize == HALF_NBYTES:
        # One load for four elements.
        for word in patterns_I[: 4 * num_fours].view(np.uint64):
            first[word & _PATTERN_MASK] += np.uint32(1)
            second[(word >> _PATTERN_BITS) & _PATTERN_MASK] += np.uint32(1)
            third[(word >> 2 * _PATTERN_BITS) & _PATTERN_MASK] += np.uint32(1)
            fourth[word >> 3 * _PATTERN_BITS] += np.uint32(1)
    else:
        for number in range(num_fours):
            first[patterns_I[4 * number]] += np.uint32(1)
            second[patterns_I[4 * number + 1]] += np.uint32(1)
            third[patterns_I[4 * number + 2]] += np.uint32(1)
            fourth[patterns_I[4 * number + 3]] += np.uint32(1)
    for pattern in patterns_I[4 * num_fours :]:
        first[pattern] += np.uint32(1)


@compiled
def _collect(tables_TP: NDArray[np.uint32], patterns_D: NDArray[np.uint16], counts_D: NDArray[np.int64]) -> int:
    """List the patterns that `_count_apart` counted, ascending, and clear the tables; returns their number."""
    first, second, third, fourth = tables_TP[0], tables_TP[1], tables_TP[2], tables_TP[3]
    pairs_TP = tables_TP.view(np.uint64)
    num = 0
    for start in range(0, tables_TP.shape[1], _GROUP):
        # Checks many counters at once: most are zero.
        any_set = np.uint64(0)
        for table in range(tables_TP.shape[0]):
            for pair in range(start // 2, (start + _GROUP) // 2):
                any_set |= pairs_TP[table, pair]
        if any_set:
            for pattern in range(start, start + _GROUP):
                count = np.int64(first[pattern]) + second[pattern] + third[pattern] + fourth[pattern]
                patterns_D[num] = pattern
                counts_D[num] = count
                num += count > 0
            tables_TP[:, start : start + _GROUP] = 0
    return num


@compiled
def _fill_metrics(
    patterns_D: NDArray[np.uint16],
    counts_D: NDArray[np.int64],
    values_P: NDArray[np.float64],
    natures_P: NDArray[np.uint8],
    metrics_F: NDArray[np.float64],
) -> None:
    """Write the metrics of one sample in the order of `digest.SAMPLE_METRICS`; NaN for those that are undefined."""
    upper = lower = underflow = nan = zero = finite = np.int64(0)
    total, squares, moment = 0.0, 0.0, 0.0
    smallest, largest = np.inf, -np.inf
    for index in range(patterns_D.size):
        value, nature, count = values_P[patterns_D[index]], natures_P[patterns_D[index]], counts_D[index]
        upper += count if nature == _UPPER else 0
        lower += count if nature == _LOWER else 0
        underflow += count if nature == _UNDERFLOW else 0
        zero += count if nature == _ZERO else 0
        nan += count if nature == _NAN else 0
        if nature < _UPPER:
            finite += count
            total += value * count
            squares += value * value * count
            smallest, largest = min(smallest, value), max(largest, value)
    mean = total / finite if finite else np.nan
    if smallest < largest:
        for index in range(patterns_D.size):
            if natures_P[patterns_D[index]] < _UPPER:
                difference = values_P[patterns_D[index]] - mean
                moment += difference * difference * counts_D[index]
    metrics_F[0] = finite + upper + lower + nan
    metrics_F[1], metrics_F[2], metrics_F[3], metrics_F[4] = finite, upper, lower, underflow
    metrics_F[5], metrics_F[6], metrics_F[7] = nan, upper + lower, zero
    metrics_F[8] = mean
    metrics_F[9] = math.sqrt(moment / finite) if finite else np.nan
    metrics_F[10] = smallest if finite else np.nan
    metrics_F[11] = largest if finite else np.nan
    metrics_F[12] = max(abs(smallest), abs(largest)) if finite else np.nan
    metrics_F[13] = math.sqrt(squares)


@compiled
def count_samples(  # noqa: PLR0917  # compiled code is not called by keywords
    patterns_SI: NDArray[Any],
    tables_TP: NDArray[np.uint32],
    totals_P: NDArray[np.int64],
    listed_D: NDArray[np.uint16],
    num_listed: int,
    values_P: NDArray[np.float64],
    natures_P: NDArray[np.uint8],
    metrics_SF: NDArray[np.float64],
) -> int:
    """Add the patterns of each sample to the totals, list new ones in `met_D`, and write the metrics of the samples.

    No metrics are computed if `metrics_SF` has no rows. The tables are zero before and after. Returns the number of
    patterns in `met_D`.
    """
    patterns_D = np.empty(min(patterns_SI.shape[1], tables_TP.shape[1]) + 64, dtype=np.uint16)
    counts_D = np.empty(patterns_D.size, dtype=np.int64)
    for sample in range(patterns_SI.shape[0]):
        patterns_I = patterns_SI[sample]
        if patterns_I.size < SMALL and patterns_I.itemsize == HALF_NBYTES:
            num = _count_listed(patterns_I, tables_TP[0], patterns_D)
            for index in range(num):
                counts_D[index] = tables_TP[0, patterns_D[index]]
                tables_TP[0, patterns_D[index]] = np.uint32(0)
        else:
            _count_interleaved(patterns_I, tables_TP)
            num = _collect(tables_TP, patterns_D, counts_D)
        for index in range(num):
            pattern = patterns_D[index]
            listed_D[num_listed] = pattern
            num_listed += totals_P[pattern] == 0
            totals_P[pattern] += counts_D[index]
        if metrics_SF.shape[0]:
            _fill_metrics(patterns_D[:num], counts_D[:num], values_P, natures_P, metrics_SF[sample])
    return num_listed


@compiled
def _sort_values(  # noqa: PLR0917  # as above
    listed_D: NDArray[np.uint16],
    totals_P: NDArray[np.int64],
    natures_P: NDArray[np.uint8],
    ranks_P: NDArray[np.uint16],
    codes_P: NDArray[np.uint16],
    rank_counts_P: NDArray[np.int64],
    tallies_K: NDArray[np.int64],
    codes_D: NDArray[np.uint16],
    counts_D: NDArray[np.int64],
) -> int:
    """Write the patterns in `met_D` and their counts in the order of their values, without NaN, and clear the totals.

    Zeros of both signs have the same rank, and therefore one pattern in `codes_P`. Returns the number of patterns.
    """
    nature_counts = np.zeros(_NUM_NATURES, dtype=np.int64)
    marks = np.zeros((ranks_P.size + 63) // 64, dtype=np.uint64)
    for index in range(listed_D.size):
        pattern = listed_D[index]
        count, nature = totals_P[pattern], natures_P[pattern]
        totals_P[pattern] = 0
        nature_counts[nature] += count
        if nature != _NAN:
            rank = ranks_P[pattern]
            rank_counts_P[rank] += count
            marks[rank >> 6] |= np.uint64(1) << np.uint64(rank & 63)
    num = 0
    for word in range(marks.size):
        if marks[word]:
            for bit in range(64):
                if (marks[word] >> np.uint64(bit)) & np.uint64(1):
                    rank = 64 * word + bit
                    codes_D[num], counts_D[num] = codes_P[rank], rank_counts_P[rank]
                    rank_counts_P[rank] = 0
                    num += 1
    upper, lower = nature_counts[_UPPER], nature_counts[_LOWER]
    tallies_K[0] = nature_counts.sum()
    tallies_K[1], tallies_K[2], tallies_K[3], tallies_K[4] = upper, lower, nature_counts[_UNDERFLOW], 0
    tallies_K[5], tallies_K[6], tallies_K[7] = nature_counts[_NAN], upper + lower, nature_counts[_ZERO]
    return num


@compiled
def fill_statistics(
    values_D: NDArray[np.float64],
    counts_D: NDArray[np.int64],
    num_elements: int,
    statistics_K: NDArray[np.float64],
    ends_K: NDArray[np.float64],
) -> None:
    """Write the statistics and the extremes of distinct numbers, in the order of `STATISTICS` and of `ENDS`.

    Statistics are over the finite numbers; extremes are undefined if a number is NaN. The numbers are those of dtypes
    of at most 16 bits, whose fourth powers fit into float64. Their order affects the last bits of the sums.
    """
    first = 1 if values_D.size and values_D[0] == -np.inf else 0
    statistics_K[:] = 0.0
    statistics_K[0] = num_elements
    statistics_K[7:], ends_K[:] = np.nan, np.nan
    finite, total, magnitudes = np.int64(0), 0.0, 0.0
    minimum, maximum, smallest = np.inf, -np.inf, np.inf
    for start in range(first, values_D.size, _RUN):
        part, part_magnitudes = 0.0, 0.0
        for index in range(start, min(start + _RUN, values_D.size)):
            value = values_D[index]
            if abs(value) < np.inf:
                weighted = value * counts_D[index]
                finite += counts_D[index]
                part += weighted
                part_magnitudes += abs(weighted)
                minimum, maximum = min(minimum, value), max(maximum, value)
                smallest = min(smallest, abs(value) if value else np.inf)
        total += part
        magnitudes += part_magnitudes
    if values_D.size:
        ends_K[0], ends_K[1] = values_D.min(), values_D.max()
    if not finite:
        return
    statistics_K[1], statistics_K[2], statistics_K[6] = finite, total, magnitudes
    statistics_K[7], statistics_K[8], statistics_K[9] = minimum, maximum, max(abs(minimum), abs(maximum))
    ends_K[2] = statistics_K[9]
    ends_K[3] = smallest if smallest < np.inf else np.nan
    if minimum == maximum:
        return
    mean = total / finite
    for start in range(first, values_D.size, _RUN):
        second, third, fourth = 0.0, 0.0, 0.0
        for index in range(start, min(start + _RUN, values_D.size)):
            difference = values_D[index] - mean if abs(values_D[index]) < np.inf else 0.0
            square = difference * difference
            second += square * counts_D[index]
            third += square * difference * counts_D[index]
            fourth += square * square * counts_D[index]
        statistics_K[3] += second
        statistics_K[4] += third
        statistics_K[5] += fourth


@compiled
def finish_record(  # noqa: PLR0917  # as above
    listed_D: NDArray[np.uint16],
    totals_P: NDArray[np.int64],
    values_P: NDArray[np.float64],
    natures_P: NDArray[np.uint8],
    ranks_P: NDArray[np.uint16],
    codes_P: NDArray[np.uint16],
    rank_counts_P: NDArray[np.int64],
    statistics_K: NDArray[np.float64],
    tallies_K: NDArray[np.int64],
    ends_K: NDArray[np.float64],
    codes_D: NDArray[np.uint16],
    counts_D: NDArray[np.int64],
) -> int:
    """Write the digest of a record whose patterns were counted; returns its number of distinct numbers."""
    num = _sort_values(listed_D, totals_P, natures_P, ranks_P, codes_P, rank_counts_P, tallies_K, codes_D, counts_D)
    values_D = np.empty(num)
    for index in range(num):
        values_D[index] = values_P[codes_D[index]] + 0.0
    fill_statistics(values_D, counts_D[:num], tallies_K[0], statistics_K, ends_K)
    return num


@compiled
def digest_records(  # noqa: PLR0917  # as above
    patterns_RSI: NDArray[Any],
    tables_TP: NDArray[np.uint32],
    totals_P: NDArray[np.int64],
    listed_P: NDArray[np.uint16],
    values_P: NDArray[np.float64],
    natures_P: NDArray[np.uint8],
    ranks_P: NDArray[np.uint16],
    codes_P: NDArray[np.uint16],
    rank_counts_P: NDArray[np.int64],
    metrics_RSF: NDArray[np.float64],
    statistics_RK: NDArray[np.float64],
    tallies_RK: NDArray[np.int64],
    ends_RK: NDArray[np.float64],
    sizes_R: NDArray[np.int64],
    codes_D: NDArray[np.uint16],
    counts_D: NDArray[np.int64],
) -> int:
    """Write the digests of records of one shape, and the metrics of their samples if `metrics_RSF` has rows for them.

    The numbers and counts of all records are written one after the other; returns how many there are.
    """
    start = 0
    for record in range(patterns_RSI.shape[0]):
        num_listed = count_samples(
            patterns_RSI[record], tables_TP, totals_P, listed_P, 0, values_P, natures_P, metrics_RSF[record]
        )
        sizes_R[record] = finish_record(
            listed_P[:num_listed],
            totals_P,
            values_P,
            natures_P,
            ranks_P,
            codes_P,
            rank_counts_P,
            statistics_RK[record],
            tallies_RK[record],
            ends_RK[record],
            codes_D[start:],
            counts_D[start:],
        )
        start += sizes_R[record]
    return start


@compiled
def thin(
    values_N: NDArray[np.float64], counts_N: NDArray[np.int64], groups_N: NDArray[np.int64], num_cells: int
) -> tuple[int, int]:
    """Merge ascending values in place: equal ones, and if `num_cells` is not 0, close ones of the same group.

    The last of merged values represents all of them. Fewer than 2 / `num_cells` of all elements are between the first
    and the last. The first two distinct values are never merged, because one of them is the smallest finite value.

    Returns the number of values left, and the number of distinct ones that were merged into others.
    """
    total = counts_N.sum()
    num_kept, num_merged, index = 0, 0, 0
    # Ranks are multiplied by `num_cells`, so that a cell ends at a multiple of `total`.
    end, end_of_cell, previous = np.int64(0), np.int64(0), np.int64(0)
    previous_group = np.int64(0)
    while index < values_N.size:
        value, group, count = values_N[index], groups_N[index], np.int64(0)
        while index < values_N.size and values_N[index] == value:
            count += counts_N[index]
            index += 1
        end += count * num_cells
        is_mergeable = num_cells > 0 and end <= end_of_cell and previous < total
        if is_mergeable and group == previous_group and num_kept > 2:  # noqa: PLR2004 - see the docstring
            num_merged += 1
            counts_N[num_kept - 1] += count
        else:
            counts_N[num_kept] = count
            num_kept += 1
        values_N[num_kept - 1] = value
        previous, previous_group = count * num_cells, group
        if end > end_of_cell:
            end_of_cell = (end + total - 1) // total * total
    return num_kept, num_merged
