"""What does a tensor lose in blocks with scales that are powers of two, for many offsets at once, from its counts?"""

# ruff: noqa: N806 - the letters of a shape end the name of the array

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.numerics.histograms.histogram import pattern_values
from ranktape.analyze.numerics.sweeps.rounding_kernels import kernel_constants
from ranktape.analyze.numerics.sweeps.scaling import Part, Sums, new_part, total_of
from ranktape.analyze.numerics.sweeps.scaling_kernels import sum_scaled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.formats import Format, Rounding
    from ranktape.analyze.numerics.histograms.block_histogram import BlockHistogram
    from ranktape.analyze.numerics.quantization.scales import ScaleRule

MERGED_FROM = 1 << 13
"""From so many cells on, adding up those with the same magnitude takes less time than rounding each of them."""


def sums_of_blocks(
    histogram: BlockHistogram,
    *,
    element: Format,
    rule: ScaleRule,
    rounding: Rounding,
    offsets: NDArray[np.int64],
    scale_bits: int,
) -> Sums:
    """The sums over all elements of blocks without NaN and infinities, for each offset.

    At least one of them must be nonzero.

    Raises:
        UsageError: the counts do not answer that rule for that format.
    """
    constants = kernel_constants(element, rounding=rounding)
    end = (1 << (scale_bits - 1)) - 1

    def part(exponent: int, values: NDArray[np.float64], counts: NDArray[np.int64]) -> Part:
        scales_L = np.ldexp(1.0, np.clip(exponent + offsets, -end, end))
        found = new_part(offsets.size)._replace(num_finite=int(counts.sum()))
        sum_scaled(values, counts, scales_L, constants, found.sums_LK, found.counts_LC, found.own_K)
        return found

    def parts() -> Iterator[Part]:
        yield new_part(offsets.size)._replace(num_finite=histogram.zero_elements)
        for exponent, values, counts in _by_exponent(histogram, rule=rule, element=element):
            yield part(exponent, values, counts)

    largest = float(pattern_values(histogram.dtype)[histogram.magnitudes.max()])
    return total_of(parts(), num_levels=offsets.size, shift=0, largest=largest)


def _by_exponent(
    histogram: BlockHistogram, *, rule: ScaleRule, element: Format
) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.int64]]]:
    """The magnitudes and counts of the cells whose blocks have the same scale, in the order of its exponent.

    The cells are sorted by the exponent and the class of the maximum, and so by what a rule makes of them.
    """
    is_first = (np.diff(histogram.exponents, prepend=-1 << 14) != 0) | (np.diff(histogram.classes, prepend=0) != 0)
    rows = np.flatnonzero(is_first)
    firsts = dataclasses.replace(
        histogram,
        exponents=histogram.exponents[rows],
        classes=histogram.classes[rows],
        magnitudes=histogram.magnitudes[rows],
        counts=histogram.counts[rows],
    )
    exponents = firsts.scale_exponents(rule, element)
    values = pattern_values(histogram.dtype)
    changes = np.flatnonzero(np.diff(exponents, prepend=exponents[:1] - 1))
    starts = rows[changes].tolist()
    for exponent, start, stop in zip(
        exponents[changes].tolist(), starts, [*starts[1:], histogram.num_cells], strict=True
    ):
        patterns, counts = histogram.magnitudes[start:stop], histogram.counts[start:stop]
        if patterns.size > MERGED_FROM:
            # float64 holds all counts of less than 2**53 elements.
            merged = np.bincount(patterns, weights=counts).astype(np.int64)
            (found,) = np.nonzero(merged)
            yield exponent, values[found], merged[found]
        else:
            yield exponent, values[patterns], counts
