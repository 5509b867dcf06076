"""Gives the sums of what a tensor loses with many scales, for many offsets at once."""

# Shapes: O = everything before the axis, B = blocks, E = elements of a block, I = everything after the axis,
# G = groups that share a scale, L = levels.
# ruff: noqa: N803, N806 - the letters of a shape end the name of the array

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.numerics.formats.kernels import constants_of
from ranktape.analyze.numerics.histograms.histogram import pattern_values
from ranktape.analyze.numerics.pieces import RUN, Box, boxes, grouped_shape
from ranktape.analyze.numerics.quantization.group_scales import level_of
from ranktape.analyze.numerics.quantization.schemes import Scaling, Scheme, exact_target, unbounded_exponents
from ranktape.analyze.numerics.sweeps.population import Population, population_of_parts
from ranktape.analyze.numerics.sweeps.scaling import (
    MAX_SHIFTED_EXPONENT,
    PartialSums,
    Sums,
    in_batches,
    new_part,
    shift_factors,
    shift_of,
    total_of,
)
from ranktape.analyze.numerics.sweeps.scaling_kernels import CODES, FLOATS, POWERS, Scales, sum_grouped, sum_scaled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.formats import Format, Rounding
    from ranktape.analyze.numerics.histograms.block_histogram import BlockHistogram
    from ranktape.analyze.numerics.histograms.histogram import AnyArray
    from ranktape.analyze.numerics.quantization.schemes import ScaleRule
    from ranktape.analyze.numerics.sweeps.options import SweepOptions

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
    constants = constants_of(element, rounding)
    end = (1 << (scale_bits - 1)) - 1

    def part(exponent: int, values: NDArray[np.float64], counts: NDArray[np.int64]) -> PartialSums:
        scales_L = np.ldexp(1.0, np.clip(exponent + offsets, -end, end))
        found = new_part(offsets.size)._replace(num_finite=int(counts.sum()))
        sum_scaled(values, counts, scales_L, constants, found.sums_LK, found.counts_LC, found.own_K)
        return found

    def parts() -> Iterator[PartialSums]:
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


BOX = 1 << 16
"""Values that a thread works on at a time."""


def sums_of_groups(
    array: AnyArray, *, largest: float, scheme: Scheme, options: SweepOptions, axis: int, threads: int | None
) -> tuple[Sums, Population]:
    """The sums over the elements of groups, for each offset of the options, and what the array holds.

    Of blocks with a NaN or an infinity all elements are left out, of channels those alone. The sums mean nothing
    where no other element differs from zero. `largest` is the largest finite magnitude of all elements, `axis` is not
    negative, and the array has at least one dimension.
    """
    work = _GroupSweep(array, largest_finite=largest, scheme=scheme, options=options, axis=axis, threads=threads)
    rows: list[NDArray[Any]] = []

    def parts() -> Iterator[PartialSums]:
        for part, kinds in in_batches(work.part, work.boxes(), threads=threads):
            rows.append(kinds)
            yield part

    sums = total_of(parts(), num_levels=work.offsets_L.size, shift=work.how.shift, largest=0.0)
    found = population_of_parts(rows)
    return dataclasses.replace(sums, largest=math.ldexp(found.largest, -work.how.shift)), found


class _GroupSweep:
    """What is common to all boxes of one sweep."""

    def __init__(
        self,
        array: AnyArray,
        *,
        largest_finite: float,
        scheme: Scheme,
        options: SweepOptions,
        axis: int,
        threads: int | None,
    ) -> None:
        self._array, self._axis, self._scheme, self._options = array, axis, scheme, options
        self._is_channel = scheme.scaling is Scaling.CHANNEL
        self._block_size = 1 if self._is_channel else scheme.block_size
        length = min(self._block_size, array.shape[axis])
        # Blocks may be cut into boxes: then their largest magnitudes must be known before.
        is_cut = length > BOX // RUN
        self._largest: NDArray[np.float64] | None = None
        largest = 0.0
        if self._is_channel or is_cut or array.dtype == np.float64:  # whose squares may overflow
            largest = self._look(keep=self._is_channel or is_cut, threads=threads)
        rounding = options.rounding or scheme.element.rounding
        self._constants = constants_of(scheme.element, rounding)
        offsets, recipe = options.offsets(), scheme.recipe
        kind, self.offsets_L = POWERS, offsets.astype(np.float64)
        if self._is_channel:
            kind, self.offsets_L = FLOATS, np.ldexp(1.0, offsets)
        elif recipe is not None:
            levels = [level_of(largest_finite, recipe=recipe, offset=offset) for offset in offsets.tolist()]
            kind, self.offsets_L = CODES, np.array(levels)
        shift = shift_of(largest) if largest else 0
        end = (1 << (options.bits - 1)) - 1
        self.how = Scales(kind, end, shift, shift_factors(shift), MAX_SHIFTED_EXPONENT, int(recipe or 0))

    def boxes(self) -> Iterator[Box]:
        """What the array is cut into."""
        return boxes(self._array.shape, axis=self._axis, block_size=self._block_size, box_size=BOX)

    def part(self, box: Box) -> tuple[PartialSums, NDArray[np.float64]]:
        """The sums of one box, and how much it holds of each kind."""
        values_GE = self._rows(box)
        if self._is_channel:
            known_G = self._channel_scales(box)
            kinds = _left_out(values_GE, ~(values_GE < np.inf))
        else:
            largest_G = values_GE.max(axis=1) if self._largest is None else self._largest[box.groups].reshape(-1)
            is_spoiled_G = ~(largest_G < np.inf)
            known_G = np.where(is_spoiled_G, 0.0, largest_G)
            if self.how.kind == POWERS:
                rule, element = self._options.rule, self._scheme.element
                known_G = unbounded_exponents(known_G, rule=rule, element=element).astype(np.float64)
            kinds = _left_out(values_GE, is_spoiled_G)
        part = new_part(self.offsets_L.size)._replace(num_finite=values_GE.size - int(kinds[1] + kinds[2] + kinds[4]))
        sums = part.sums_LK, part.counts_LC, part.own_K
        sum_grouped(values_GE, known_G, self.offsets_L, self.how, self._constants, *sums)
        return part, kinds

    def _rows(self, box: Box) -> NDArray[np.float64]:
        """The magnitudes of a box, one row for each group."""
        with np.errstate(invalid="ignore"):  # signalling NaN
            magnitudes = np.abs(self._array[box.place].astype(np.float64, order="C"))
        order = (1, 0, 2, 3) if self._is_channel else (0, 1, 3, 2)
        ordered = magnitudes.reshape(box.shape_OBEI).transpose(order)
        num_groups = box.shape_OBEI[1] if self._is_channel else box.size // box.shape_OBEI[2]
        return np.ascontiguousarray(ordered).reshape(num_groups, -1)

    def _look(self, *, keep: bool, threads: int | None) -> float:
        """The largest magnitude that is in any metric; with `keep`, that of each group is remembered too."""
        shape = grouped_shape(self._array.shape, axis=self._axis, block_size=self._block_size)
        largest = np.zeros(shape[self._axis] if self._is_channel else shape) if keep else np.zeros(0)

        def look(box: Box) -> tuple[Box, NDArray[np.float64]]:
            values_GE = self._rows(box)
            if self._is_channel:
                values_GE[~(values_GE < np.inf)] = 0.0
            return box, values_GE.max(axis=1)

        largest_of_all = 0.0
        for box, of_groups in in_batches(look, self.boxes(), threads=threads):
            if keep:
                kept = largest[box.place[self._axis] if self._is_channel else box.groups]
                np.maximum(kept, of_groups.reshape(kept.shape), out=kept)
            else:
                largest_of_all = max(largest_of_all, float(of_groups[of_groups < np.inf].max(initial=0.0)))
        if not keep:
            return largest_of_all
        self._largest = largest
        return float(largest[largest < np.inf].max(initial=0.0))

    def _channel_scales(self, box: Box) -> NDArray[np.float64]:
        assert self._largest is not None, "it was kept"
        target = exact_target(self._scheme.element)
        largest = self._largest[box.place[self._axis]]
        with np.errstate(over="ignore", under="ignore"):
            return np.where(largest == 0, 1.0, (largest / target).astype(np.float32))


def _left_out(values_GE: NDArray[np.float64], is_left_out: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Put zeros in place of what is left out; how much there is of each kind, for `population_of_parts`."""
    nan = inf = num_left_out = 0
    if is_left_out.any():
        left_out = values_GE[is_left_out]
        nan, inf = int(np.isnan(left_out).sum()), int(np.isinf(left_out).sum())
        num_left_out = left_out.size
        values_GE[is_left_out] = 0.0
    zero = values_GE.size - np.count_nonzero(values_GE) - num_left_out
    spoiled = num_left_out - nan - inf
    return np.array([values_GE.size, nan, inf, zero, spoiled, values_GE.max(), _smallest(values_GE)])


def _smallest(magnitudes: NDArray[np.float64]) -> float:
    """The smallest that is not zero, or infinity."""
    # One less, the bits of a zero are the largest number there is.
    bits = magnitudes.view(np.uint64) - np.uint64(1)
    smallest = bits.min()
    return float((smallest + np.uint64(1)).view(np.float64)) if smallest < np.iinfo(np.uint64).max else math.inf
