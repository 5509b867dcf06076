"""Adds up what a tensor loses when it is divided by scales, rounded to a format, and multiplied back.

The sums behind every metric, for many levels at once. One scale for the tensor: from the values that occur, at a cost
that does not grow with the tensor, or from all values of wider types in one pass over memory. Many scales: from counts
of blocks, or from the values in boxes. All arithmetic is float64. Sums are added up in an order that is part of the
code, not of the machine.
"""

# Shapes: L = levels, K = kinds of sums, C = kinds of counts, E = elements of a group, G = groups that share a scale.

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.formats import Format, Rounding
from ranktape.analyze.numerics.formats.kernels import RoundingConstants, constants_of
from ranktape.analyze.numerics.histograms.block_histogram import BlockHistogram
from ranktape.analyze.numerics.histograms.histogram import AnyArray, pattern_values
from ranktape.analyze.numerics.pieces import RUN, Box, frozen, in_batches
from ranktape.analyze.numerics.quantization.scales import level_of
from ranktape.analyze.numerics.quantization.schemes import ScaleRule, Scaling, Scheme, exact_target, unbounded_exponents
from ranktape.analyze.numerics.sweeps.kernels import (
    CODES,
    EXACT,
    FLOATS,
    NUM_COUNTS,
    NUM_SUMS,
    POWERS,
    RAISED,
    Scales,
    sum_levels,
)
from ranktape.analyze.numerics.sweeps.options import SweepOptions
from ranktape.analyze.numerics.sweeps.population import BOX, Population, ScaledGroups, left_out, population_of_parts

CHUNK = 1 << 18
"""Values with one scale whose sums are added up apart, so that chunks may be done in any order, by any threads."""

MERGED_FROM = 1 << 13
"""From so many cells on, adding up those with the same magnitude takes less time than rounding each of them."""

SQUARED_SAFELY = 500
"""Up to this exponent, either sign, the sums of squares of a tensor's values are within float64."""

MAX_SHIFTED_EXPONENT = 1000
"""Scales further than this from 1, after the shift, are taken as this far. All values overflow there, or all are
flushed, but for values of float64 that are themselves that far below the largest: of those, counts may be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """The sums over all finite values x of a tensor and their roundings y, for each of L levels.

    All are of x / 2**`shift` and y / 2**`shift`.
    """

    shift: int
    """Exponent of the power of two that everything is divided by, so that squares of what is near the largest
    magnitude neither overflow nor vanish: 0, unless that is near an end of float64."""
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
    """Values that round to beyond the format's largest value, or may, and are saturated."""
    underflow_L: NDArray[np.float64]
    """Nonzero values below the format's smallest normal value after division by the scale."""
    flushed_L: NDArray[np.float64]
    """Nonzero values that become zero; where chance decides, as many as are to be expected."""


SUMS = tuple(name[:-2] for name in Sums.__dataclass_fields__ if name.endswith("_L"))
"""What is summed up for each level; of `largest_error` it is the maximum."""


def scale_of(exponent: float) -> float:
    """2**`exponent` as a float64, the same on every machine.

    Infinite above and zero below the range of float64.
    """
    whole = math.floor(exponent)
    try:
        return math.ldexp(2.0 ** (exponent - whole), whole)
    except OverflowError:
        return math.inf


class _Part(NamedTuple):
    """The sums of a part of a tensor."""

    sums_LK: NDArray[np.float64]
    counts_LC: NDArray[np.int64]
    own_K: NDArray[np.float64]
    num_finite: int


NO_WEIGHTS = np.zeros(0, dtype=np.int64)
"""Each value counts once."""


class _Levels(NamedTuple):
    """What the kernel knows of the levels of a sweep."""

    offsets_L: NDArray[np.float64]
    how: Scales
    constants: RoundingConstants

    def part(self, values_GE: AnyArray, known_G: NDArray[np.float64], weights: NDArray[np.int64] = NO_WEIGHTS) -> _Part:
        """The sums of one part, of float32 or float64; safe for several threads with a part each."""
        num_levels = self.offsets_L.size
        sums = np.zeros((num_levels, NUM_SUMS)), np.zeros((num_levels, NUM_COUNTS), dtype=np.int64), np.zeros(2)
        values = frozen(values_GE, shape=values_GE.shape)
        num_finite = sum_levels(values, weights, known_G, self.offsets_L, self.how, self.constants, *sums)
        return _Part(*sums, int(weights.sum()) if weights.size else int(num_finite))

    def total(self, parts: Iterable[_Part], *, largest: float) -> Sums:
        """All parts together, added up in their order; `largest` is the tensor's, not yet shifted."""
        num_levels = self.offsets_L.size
        sums_LK, counts_LC = np.zeros((num_levels, NUM_SUMS)), np.zeros((num_levels, NUM_COUNTS), dtype=np.int64)
        own_K, num_finite = np.zeros(2), 0
        for part in parts:
            largest_error_L = np.maximum(sums_LK[:, -1], part.sums_LK[:, -1])
            sums_LK += part.sums_LK
            sums_LK[:, -1] = largest_error_L
            counts_LC += part.counts_LC
            own_K += part.own_K
            num_finite += part.num_finite
        columns = [*np.delete(sums_LK, RAISED, axis=1).T, *counts_LC.T.astype(np.float64)]
        # Chance does not make zero of all that rounding down would.
        columns[SUMS.index("flushed")] -= sums_LK[:, RAISED]
        absolute, squared = own_K.tolist()
        return Sums(
            shift=self.how.shift,
            num_finite=num_finite,
            largest=math.ldexp(largest, -self.how.shift),
            absolute=absolute,
            squared=squared,
            **{f"{name}_L": column for name, column in zip(SUMS, columns, strict=True)},
        )


def _scales(kind: int, *, largest: float, end: int = 0, recipe: int = 0) -> Scales:
    """How scales of that kind are found, for values up to `largest`."""
    exponent = math.frexp(largest)[1] if largest else 0
    shift = exponent if abs(exponent) > SQUARED_SAFELY else 0
    half = -shift // 2
    # Two factors: 2**1074 is not a float64.
    factors = math.ldexp(1.0, half), math.ldexp(1.0, -shift - half)
    return Scales(kind, end, shift, factors, MAX_SHIFTED_EXPONENT, recipe)


_ONE_GROUP = np.ones(1)
"""All values share the scale of the level."""


def _one_scale(exponents: NDArray[np.float64], *, largest: float, constants: RoundingConstants) -> _Levels:
    """The levels of a tensor with one scale."""
    how, wholes = _scales(EXACT, largest=largest), np.floor(exponents)
    fractions = np.array([2.0 ** float(part) for part in exponents - wholes])
    shifted = np.clip(wholes - how.shift, -MAX_SHIFTED_EXPONENT, MAX_SHIFTED_EXPONENT).astype(np.int64)
    return _Levels(np.ldexp(fractions, shifted), how, constants)


def sums_of_pairs(
    values: NDArray[np.float64],
    *,
    counts: NDArray[np.int64],
    exponents: NDArray[np.float64],
    target: Format,
    rounding: Rounding | None = None,
) -> Sums:
    """The sums over values that occur so many times each; NaN and infinities are left out.

    At least one value must be finite and nonzero. `rounding` is the format's own unless given; of stochastic rounding
    the sums are those to be expected, and so is how many values become zero.
    """
    is_finite = np.isfinite(values)
    largest = float(np.abs(values[is_finite]).max())
    levels = _one_scale(exponents, largest=largest, constants=constants_of(target, rounding))
    part = levels.part(values.reshape(1, -1), _ONE_GROUP, np.where(is_finite, counts, 0))
    return levels.total([part], largest=largest)


def sums_of_values(
    array: AnyArray,
    *,
    largest: float,
    exponents: NDArray[np.float64],
    target: Format,
    rounding: Rounding | None = None,
    threads: int | None = None,
) -> Sums:
    """The sums over the values of an array of any real type; NaN and infinities are left out.

    `largest` is the largest finite magnitude, above 0. The rest is as in `sums_of_pairs`.
    """
    levels = _one_scale(exponents, largest=largest, constants=constants_of(target, rounding))
    # A part of `flat` is a copy of that part, whatever the layout; a view of a contiguous array costs less.
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat

    def part(start: int) -> _Part:
        values = np.asarray(flat[start : start + CHUNK])
        floats = values if values.dtype.kind == "f" else values.astype(np.float64)
        return levels.part(floats.reshape(1, -1), _ONE_GROUP)

    return levels.total(in_batches(part, range(0, array.size, CHUNK), threads=threads), largest=largest)


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
    end = (1 << (scale_bits - 1)) - 1
    # Of a type of 16 bits: nothing is shifted.
    levels = _Levels(offsets.astype(np.float64), _scales(EXACT, largest=0.0), constants_of(element, rounding))

    def parts() -> Iterator[_Part]:
        yield levels.part(np.zeros((1, 0)), _ONE_GROUP)._replace(num_finite=histogram.zero_elements)
        for exponent, values, counts in _by_exponent(histogram, rule=rule, element=element):
            scales_L = np.ldexp(1.0, np.clip(exponent + offsets, -end, end))
            yield levels._replace(offsets_L=scales_L).part(values.reshape(1, -1), _ONE_GROUP, counts)

    return levels.total(parts(), largest=float(pattern_values(histogram.dtype)[histogram.magnitudes.max()]))


def _by_exponent(
    histogram: BlockHistogram, *, rule: ScaleRule, element: Format
) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.int64]]]:
    """The magnitudes and counts of the cells whose blocks have the same scale, in the order of its exponent.

    The cells are sorted by the exponent and the class of the maximum, and so by what a rule makes of them.
    """
    exponents = histogram.scale_exponents(rule, element)
    values = pattern_values(histogram.dtype)
    starts = np.flatnonzero(np.diff(exponents, prepend=exponents[:1] - 1)).tolist()
    for start, stop in zip(starts, [*starts[1:], histogram.num_cells], strict=True):
        patterns, counts = histogram.magnitudes[start:stop], histogram.counts[start:stop]
        if patterns.size > MERGED_FROM:
            # float64 holds all counts of less than 2**53 elements.
            merged = np.bincount(patterns, weights=counts).astype(np.int64)
            patterns = np.flatnonzero(merged).astype(np.uint16)
            counts = merged[patterns]
        yield int(exponents[start]), values[patterns], counts


def sums_of_groups(
    array: AnyArray, *, largest: float, scheme: Scheme, options: SweepOptions, axis: int, threads: int | None
) -> tuple[Sums, Population]:
    """The sums over the elements of groups, for each offset of the options, and what the array holds.

    Of blocks with a NaN or an infinity all elements are left out, of channels those alone. The sums mean nothing
    where no other element differs from zero. `largest` is the largest finite magnitude of all elements, `axis` is not
    negative, and the array has at least one dimension.
    """
    groups = ScaledGroups(array, axis=axis, is_channel=scheme.scaling is Scaling.CHANNEL, block_size=scheme.block_size)
    # Blocks may be cut into boxes: then their largest magnitudes must be known before.
    keep = groups.is_channel or min(scheme.block_size, array.shape[axis]) > BOX // RUN
    found = groups.look(keep=keep, threads=threads) if keep or array.dtype == np.float64 else (None, 0.0)
    largest_of_groups, largest_in_sums = found
    offsets, recipe = options.offsets(), scheme.recipe
    kind, offsets_L = POWERS, offsets.astype(np.float64)
    if groups.is_channel:
        kind, offsets_L = FLOATS, np.ldexp(1.0, offsets)
    elif recipe is not None:
        kind = CODES
        offsets_L = np.array([level_of(largest, recipe=recipe, offset=offset) for offset in offsets.tolist()])
    end = (1 << (options.bits - 1)) - 1
    how = _scales(kind, largest=largest_in_sums, end=end, recipe=int(recipe or 0))
    levels = _Levels(offsets_L, how, constants_of(scheme.element, options.rounding))

    def known(largest_G: NDArray[np.float64]) -> NDArray[np.float64]:
        if kind == POWERS:
            exponents = unbounded_exponents(largest_G, rule=options.rule, element=scheme.element)
            return np.asarray(exponents, dtype=np.float64)
        if kind == CODES:
            return largest_G
        with np.errstate(over="ignore", under="ignore"):
            narrow = (largest_G / exact_target(scheme.element)).astype(np.float32)
        return np.where(largest_G == 0, 1.0, narrow.astype(np.float64))

    def part(box: Box) -> tuple[_Part, NDArray[np.float64]]:
        values_GE = groups.rows(box)
        if largest_of_groups is None:
            largest_G = values_GE.max(axis=1)
        else:
            largest_G = largest_of_groups[groups.place(box)].reshape(-1)
        is_spoiled_G = ~(largest_G < np.inf)
        kinds = left_out(values_GE, ~(values_GE < np.inf) if groups.is_channel else is_spoiled_G)
        found = levels.part(values_GE, known(np.where(is_spoiled_G, 0.0, largest_G)))
        return found._replace(num_finite=values_GE.size - int(kinds[1] + kinds[2] + kinds[4])), kinds

    rows: list[NDArray[Any]] = []

    def parts() -> Iterator[_Part]:
        for found, kinds in in_batches(part, groups.boxes(), threads=threads):
            rows.append(kinds)
            yield found

    sums = levels.total(parts(), largest=0.0)
    population = population_of_parts(rows)
    return dataclasses.replace(sums, largest=math.ldexp(population.largest, -how.shift)), population
