"""Sums the errors of a tensor that is divided by scales, rounded to a format, and multiplied by the scales again.

All metrics of a level follow from these sums. They are computed from counts of values or of values in blocks, at a cost
that does not grow with the tensor; or chunk by chunk from the values, for wider dtypes and for groups whose scales do
not follow from counts. All arithmetic is float64. Chunks are added in order, whatever the number of threads.
"""

# Shapes: L = levels, K = kinds of sums, A = lanes, G = groups that share a scale, E = elements of a group, N = values,
# C = values of a part that fits into a cache.

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.formats import Format, Rounding
from ranktape.analyze.numerics.formats.kernels import RANDOM, RoundingConstants, constants_of, passed_of, round_block
from ranktape.analyze.numerics.formats.values import powers_of_two
from ranktape.analyze.numerics.histograms.block_counts import NUM_MAGNITUDES
from ranktape.analyze.numerics.histograms.block_histogram import BlockHistogram
from ranktape.analyze.numerics.histograms.histogram import AnyArray, Histogram, dtype_limits, pattern_values, scan
from ranktape.analyze.numerics.kernels import compiled, compiled_sums
from ranktape.analyze.numerics.pieces import RUN, Box, boxes, grouped_shape, in_batches, memory_order, pieces
from ranktape.analyze.numerics.quantization.plan import QuantizePlan
from ranktape.analyze.numerics.quantization.scales import factors_of, group_scales, is_divided, is_float32
from ranktape.analyze.numerics.quantization.schemes import ScaleRule, Scaling, Scheme
from ranktape.analyze.numerics.sweeps.options import SweepOptions

CHUNK, CELLS = 1 << 17, 1 << 14
"""Number of values, and of cells of block histograms, that one thread sums at a time."""

FACTORS = 1 << 14
"""Number of factors of groups that are computed at a time, for several levels if there are few groups."""

SQUARED_SAFELY = 500
"""Exponent, of either sign, up to which sums of squares of a tensor's values fit into float64."""

MAX_SHIFTED_EXPONENT = 1000
"""Limit of the exponents of scales after the shift. Beyond it, all values overflow or all are flushed.

Counts may be wrong for float64 values that are that many binades below the largest.
"""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums over all finite values x of a tensor and the rounded values y, for each of L levels.

    All sums are of x / 2**`shift` and y / 2**`shift`.
    """

    shift: int
    """Exponent of the divisor that keeps squares of large values in the range of float64.

    It is 0 unless the largest magnitude is near an end of that range.
    """
    num_finite: int
    """Number of finite values."""
    largest: float
    """Largest |x|."""
    absolute: float
    """Sum of |x|."""
    squared: float
    """Sum of x squared."""
    squared_error_L: Floats
    """Sum of (x - y) squared."""
    absolute_error_L: Floats
    """Sum of |x - y|."""
    squared_result_L: Floats
    """Sum of y squared."""
    product_L: Floats
    """Sum of x * y."""
    largest_error_L: Floats
    """Largest |x - y|."""
    overflow_L: Floats
    """Number of values that round (or, with stochastic rounding, may round) to beyond the largest value of the format.

    They are saturated.
    """
    underflow_L: Floats
    """Number of nonzero values below the smallest normal value of the format after division by the scale."""
    flushed_L: Floats
    """Number of nonzero values that become zero; with stochastic rounding, the expected number."""


SUMS = tuple(name[:-2] for name in Sums.__dataclass_fields__ if name.endswith("_L"))
"""The sums of each level; `largest_error` is a maximum."""

_LARGEST = SUMS.index("largest_error")


class PartialSums(NamedTuple):
    """The sums of a part of a tensor."""

    sums_LK: Floats
    """`SUMS` of each level."""
    absolute: float
    squared: float
    num_finite: int


LANES, UNROLLED, BLOCK = 32, 4, 1024
"""Number of partial sums of each kind, number of values of a lane that are added first, and number of values per block.

Partial sums are lanes of vector instructions, so that the order of all additions is fixed in the code. The data of a
block fits into the L1 cache; its size is a multiple of `LANES` * `UNROLLED`.
"""


class _How(NamedTuple):
    """The parameters of a format for the kernel, in a named tuple because numba supports its fields."""

    constants: RoundingConstants
    """Constants of the rounding."""
    overflow_start: float
    """Smallest scaled magnitude that overflows."""
    min_normal: float
    """Smallest normal value."""
    is_float32: bool
    """Whether scaled magnitudes are rounded to float32 before they are rounded to the format."""


@compiled
def _weighted(number: float, weights: Floats | None, index: int) -> float:
    return number if weights is None else number * weights[index]


@compiled
def _part(weights_N: Floats | None, start: int, width: int) -> Any:
    return None if weights_N is None else weights_N[start : start + width]


@compiled
def _add_errors(values_N: Floats, weights_N: Floats | None, results_N: Floats, sums_KA: Floats) -> None:
    """Add the errors and products of values to the first five of `SUMS`; without weights, each value counts once."""
    # With three dimensions, the compiler can tell that no index is negative, and vectorises the loop.
    shape = values_N.size // (UNROLLED * LANES), UNROLLED, LANES
    x, y = values_N.reshape(shape), results_N.reshape(shape)
    for row in range(shape[0]):
        for lane in range(LANES):
            start = row * UNROLLED * LANES + lane
            y_0, y_1, y_2, y_3 = y[row, 0, lane], y[row, 1, lane], y[row, 2, lane], y[row, 3, lane]
            x_0, x_1, x_2, x_3 = x[row, 0, lane], x[row, 1, lane], x[row, 2, lane], x[row, 3, lane]
            e_0, e_1, e_2, e_3 = abs(x_0 - y_0), abs(x_1 - y_1), abs(x_2 - y_2), abs(x_3 - y_3)
            a_0, a_1 = _weighted(e_0, weights_N, start), _weighted(e_1, weights_N, start + LANES)
            a_2, a_3 = _weighted(e_2, weights_N, start + 2 * LANES), _weighted(e_3, weights_N, start + 3 * LANES)
            b_0, b_1 = _weighted(y_0, weights_N, start), _weighted(y_1, weights_N, start + LANES)
            b_2, b_3 = _weighted(y_2, weights_N, start + 2 * LANES), _weighted(y_3, weights_N, start + 3 * LANES)
            sums_KA[0, lane] += (a_0 * e_0 + a_1 * e_1) + (a_2 * e_2 + a_3 * e_3)
            sums_KA[1, lane] += (a_0 + a_1) + (a_2 + a_3)
            sums_KA[2, lane] += (b_0 * y_0 + b_1 * y_1) + (b_2 * y_2 + b_3 * y_3)
            sums_KA[3, lane] += (b_0 * x_0 + b_1 * x_1) + (b_2 * x_2 + b_3 * x_3)
            sums_KA[4, lane] = max(sums_KA[4, lane], e_0, e_1, e_2, e_3)


@compiled_sums
def _count(
    values_N: Floats,
    weights_N: Floats | None,
    scaled_N: Floats,
    rounded_N: Floats,
    how: _How,
) -> tuple[float, float, float]:
    """The last three of `SUMS`, which are whole numbers, so that the order of additions does not matter."""
    overflow = underflow = flushed = 0.0
    for index in range(values_N.size):
        weight = _weighted(1.0, weights_N, index) if values_N[index] > 0.0 else 0.0
        overflow += weight if scaled_N[index] >= how.overflow_start else 0.0
        underflow += weight if scaled_N[index] < how.min_normal else 0.0
        flushed += weight if rounded_N[index] == 0.0 else 0.0
    return overflow, underflow, flushed


@compiled
def _scale(  # noqa: PLR0917 - numba has no keyword-only arguments
    values_C: Floats, factors_G: Floats, size: int, start: int, divides: int | None, results_C: Floats
) -> None:
    """Write values multiplied or, if `divides` is not None, divided by the factors of their groups.

    `start` is the index of the first value. Groups have `size` values; the last one includes all further values.
    """
    index, last = 0, factors_G.size - 1
    if size == 1:
        for position in range(min(values_C.size, last + 1 - start)):
            value, factor = values_C[position], factors_G[start + position]
            results_C[position] = value * factor if divides is None else np.divide(value, factor)
        index = max(0, min(values_C.size, last + 1 - start))
    elif start % size == 0:
        # Whole groups as a matrix, whose rows the compiler vectorises.
        first = start // size
        shape = min(values_C.size // size, last + 1 - first), size
        index = shape[0] * size
        values_GE, results_GE = values_C[:index].reshape(shape), results_C[:index].reshape(shape)
        for row in range(shape[0]):
            factor = factors_G[first + row]
            for position in range(size):
                value = values_GE[row, position]
                results_GE[row, position] = value * factor if divides is None else np.divide(value, factor)
    while index < values_C.size:
        group = min((start + index) // size, last)
        stop = min((group + 1) * size - start, values_C.size) if group < last else values_C.size
        values, results, factor = values_C[index:stop], results_C[index:stop], factors_G[group]
        for position in range(values.size):
            results[position] = values[position] * factor if divides is None else np.divide(values[position], factor)
        index = stop


@compiled
def _add_levels(  # noqa: PLR0917 - as above
    source_N: Floats,
    values_N: Floats,
    weights_N: Floats | None,
    before_LG: Floats,
    after_LG: Floats,
    size: int,
    how: _How,
    divides: int | None,
    sums_LKA: Floats,
) -> None:
    """Add `SUMS` of values in groups of `size` for each level, given the factors before and after the rounding.

    Values occur `weights_N` times each, or once; stochastic rounding needs weights. `source_N` are the values before
    the shift, which are scaled and rounded. Each step is a vectorised loop over values that fit into the L1 cache.
    """
    scratch_2C = np.empty((2, BLOCK))
    for start in range(0, values_N.size, BLOCK):
        width = min(BLOCK, values_N.size - start)
        scaled, rounded = scratch_2C[0, :width], scratch_2C[1, :width]
        source, values = source_N[start : start + width], values_N[start : start + width]
        weights = _part(weights_N, start, width)
        for level in range(sums_LKA.shape[0]):
            sums_KA, after_G = sums_LKA[level], after_LG[level]
            _scale(source, before_LG[level], size, start, divides, scaled)
            if how.is_float32:
                for index in range(width):
                    scaled[index] = np.float64(np.float32(scaled[index]))
            round_block(scaled, how.constants, rounded)
            overflow, underflow, flushed = _count(values, weights, scaled, rounded, how)
            if weights_N is not None and how.constants.kind == RANDOM:
                flushed = _add_risen(values, weights, scaled, rounded, after_G, size, start, flushed, how, sums_KA)
            else:
                _scale(rounded, after_G, size, start, None, rounded)
                _add_errors(values, weights, rounded, sums_KA)
            sums_KA[5, 0] += overflow
            sums_KA[6, 0] += underflow
            sums_KA[7, 0] += flushed


@compiled
def _add_risen(  # noqa: PLR0917 - as above
    values: Floats,
    weights: Floats,
    scaled: Floats,
    rounded: Floats,
    after_G: Floats,
    size: int,
    start: int,
    flushed: float,
    how: _How,
    sums_KA: Floats,
) -> float:
    """Add the expected errors of stochastic rounding, and return the expected number of values that become zero.

    `rounded` are the values rounded down, and `flushed` is how many of those are zero.
    """
    scratch_3C = np.empty((3, values.size))
    rising, falling, above = scratch_3C[0], scratch_3C[1], scratch_3C[2]
    for index in range(values.size):
        passed, step = passed_of(scaled[index], rounded[index], how.constants)
        rising[index] = weights[index] * passed
        falling[index] = weights[index] - rising[index]
        above[index] = rounded[index] + (step if passed > 0.0 else 0.0)
        flushed -= rising[index] if rounded[index] == 0.0 else 0.0
    for results, result_weights in ((above, rising), (rounded, falling)):
        _scale(results, after_G, size, start, None, results)
        _add_errors(values, result_weights, results, sums_KA)
    return flushed


def _padded(values: Floats) -> Floats:
    missing = -values.size % (UNROLLED * LANES)
    flat = values.reshape(-1)
    return np.pad(flat, (0, missing)) if missing else flat


def partial_sums(
    values: Floats,
    levels: Iterable[tuple[Floats | list[float], Floats | list[float]]],
    *,
    element: Format,
    rounding: Rounding,
    is_divided: bool,
    is_float32: bool = False,
    source: Floats | None = None,
    weights: NDArray[np.int64] | None = None,
    num_finite: int | None = None,
) -> PartialSums:
    """The sums over finite magnitudes that occur `weights` times each, or once.

    Groups are the rows of `values`, or all values. For each level, there are two factors for each group: the one by
    which `source` is multiplied (or divided, if `is_divided`) before it is rounded, and the one by which it is
    multiplied after. `source` is `values` by default. If `is_float32`, scaled magnitudes are rounded to float32 first.
    """
    how = _How(constants_of(element, rounding), element.overflow_start_of(rounding), element.min_normal, is_float32)
    times = np.ones(values.size) if weights is None and how.constants.kind == RANDOM else weights
    x_N, w_N = _padded(values), None if times is None else _padded(times.astype(np.float64))
    source_N = x_N if source is None else _padded(source)
    remaining, sums = iter(levels), list[Floats]()
    for first in remaining:
        # A few levels at a time, so that their factors stay in a cache.
        group_of_levels = [first, *itertools.islice(remaining, FACTORS // len(first[0]))]
        before_LG, after_LG = (np.array(factors) for factors in zip(*group_of_levels, strict=True))
        sums.append(np.zeros((len(group_of_levels), len(SUMS), LANES)))
        size = values.size // before_LG.shape[1]
        _add_levels(source_N, x_N, w_N, before_LG, after_LG, size, how, 1 if is_divided else None, sums[-1])
    # In the same order as the errors, so that both sums are equal if all values become zero.
    sums.append(np.zeros((1, len(SUMS), LANES)))
    _add_errors(x_N, w_N, np.zeros_like(x_N), sums[-1][0])
    sums_LKA = np.concatenate(sums)
    sums_LK = sums_LKA.sum(axis=2)
    sums_LK[:, _LARGEST] = sums_LKA[:, _LARGEST].max(axis=1)
    squared, absolute = sums_LK[-1, :2].tolist()
    if num_finite is None:
        num_finite = values.size if weights is None else int(weights.sum())
    return PartialSums(sums_LK[:-1], absolute, squared, num_finite)


def total_of(parts: Iterable[PartialSums], *, largest: float, shift: int = 0) -> Sums:
    """Add the sums of parts in order; `largest` is the largest magnitude of the tensor before the shift."""
    together = functools.reduce(_merge, parts)
    return Sums(
        shift=shift,
        num_finite=together.num_finite,
        largest=math.ldexp(largest, -shift),
        absolute=together.absolute,
        squared=together.squared,
        **{f"{name}_L": column for name, column in zip(SUMS, together.sums_LK.T, strict=True)},
    )


def _merge(left: PartialSums, right: PartialSums) -> PartialSums:
    sums_LK = left.sums_LK + right.sums_LK
    sums_LK[:, _LARGEST] = np.maximum(left.sums_LK[:, _LARGEST], right.sums_LK[:, _LARGEST])
    return PartialSums(
        sums_LK, left.absolute + right.absolute, left.squared + right.squared, left.num_finite + right.num_finite
    )


def _shift_of(largest: float) -> int:
    exponent = math.frexp(largest)[1] if largest else 0
    return exponent if abs(exponent) > SQUARED_SAFELY else 0


def _shifted(magnitudes: Floats, shift: int) -> Floats:
    if not shift:
        return magnitudes
    # Values 1,500 binades below the largest lose bits by the shift, but must not become zero.
    return np.maximum(np.ldexp(magnitudes, -shift), np.minimum(magnitudes, 5e-324))


class _OneScale(NamedTuple):
    """The levels of a tensor with one scale."""

    scales: list[float]
    """The scales for the shifted values."""
    shift: int
    element: Format
    rounding: Rounding

    @classmethod
    def of(cls, exponents: Floats, *, largest: float, target: Format, rounding: Rounding | None) -> _OneScale:
        shift = _shift_of(largest)
        # Beyond the limit, all values overflow or all are flushed.
        moved = (math.floor(exponent) - shift for exponent in exponents.tolist())
        wholes = [min(max(exponent, -MAX_SHIFTED_EXPONENT), MAX_SHIFTED_EXPONENT) for exponent in moved]
        scales = [
            math.ldexp(2.0 ** (exponent - math.floor(exponent)), whole)
            for exponent, whole in zip(exponents.tolist(), wholes, strict=True)
        ]
        return cls(scales, shift, target, rounding or target.rounding)

    @np.errstate(over="ignore", under="ignore")
    def part(self, magnitudes: Floats, weights: NDArray[np.int64] | None = None) -> PartialSums:
        """The sums of finite magnitudes."""
        values = _shifted(magnitudes, self.shift)
        levels = [([scale], [scale]) for scale in self.scales]
        return partial_sums(
            values, levels, element=self.element, rounding=self.rounding, is_divided=True, weights=weights
        )


def sums_of_pairs(
    values: Floats,
    *,
    counts: NDArray[np.int64],
    exponents: Floats,
    target: Format,
    rounding: Rounding | None = None,
) -> Sums:
    """The sums over values, given the count of each; NaN and infinities are ignored.

    At least one value must be finite and nonzero. `rounding` is that of the format by default. With stochastic
    rounding, the sums and the number of values that become zero are expected values.
    """
    is_finite = np.isfinite(values)
    magnitudes, weights = np.abs(values[is_finite]), counts[is_finite]
    largest = float(magnitudes.max())
    levels = _OneScale.of(exponents, largest=largest, target=target, rounding=rounding)
    return total_of([levels.part(magnitudes, weights)], largest=largest, shift=levels.shift)


def sums_of_values(
    array: AnyArray,
    *,
    largest: float,
    exponents: Floats,
    target: Format,
    rounding: Rounding | None = None,
    threads: int | None = None,
) -> Sums:
    """The sums over the values of an array of any real dtype; NaN and infinities are ignored.

    `largest` is the largest finite magnitude, above 0. For the other arguments, see `sums_of_pairs`.
    """
    levels = _OneScale.of(exponents, largest=largest, target=target, rounding=rounding)
    # A slice of `flat` is a copy in any layout; a view of a contiguous array is faster.
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat

    def part(start: int) -> PartialSums:
        with np.errstate(invalid="ignore"):  # signalling NaN
            magnitudes = np.abs(np.asarray(flat[start : start + CHUNK]).astype(np.float64))
        is_finite = magnitudes < np.inf
        return levels.part(magnitudes if is_finite.all() else magnitudes[is_finite])

    parts = in_batches(part, range(0, array.size, CHUNK), threads=threads)
    return total_of(parts, largest=largest, shift=levels.shift)


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

    At least one such element must be nonzero.

    Raises:
        UsageError: the classes of the histogram do not determine the scales of the rule for the format.
    """
    end = (1 << (scale_bits - 1)) - 1
    # Cells with the same magnitude whose blocks have the same scale are merged.
    keys = histogram.scale_exponents(rule, element) * NUM_MAGNITUDES + histogram.magnitudes
    distinct, inverse = np.unique(keys, return_inverse=True)
    # float64 represents all counts below 2**53 exactly.
    counts = np.bincount(inverse, weights=histogram.counts).astype(np.int64)
    exponents, magnitudes = np.divmod(distinct, NUM_MAGNITUDES)
    values = pattern_values(histogram.dtype)[magnitudes]

    def part(start: int) -> PartialSums:
        part_cells = slice(start, start + CELLS)
        scales = (np.clip(exponents[part_cells] + offset, -end, end) for offset in offsets.tolist())
        levels = ((powers_of_two(-clipped), powers_of_two(clipped)) for clipped in scales)
        return partial_sums(
            values[part_cells], levels, element=element, rounding=rounding, is_divided=False, weights=counts[part_cells]
        )

    parts = [part(start) for start in range(0, values.size, CELLS)]
    zeros = PartialSums(np.zeros((offsets.size, len(SUMS))), 0.0, 0.0, histogram.zero_elements)
    return total_of([*parts, zeros], largest=float(values.max()))


def sums_of_groups(
    array: AnyArray, *, largest: float, scheme: Scheme, options: SweepOptions, axis: int, threads: int | None
) -> tuple[Sums, Population]:
    """The sums over the elements of groups for each offset of the options, and the population of the array.

    In blocks with NaN or infinities all elements are ignored, in channels only NaN and infinities. The sums are
    meaningless if no other element is nonzero. `largest` is the largest finite magnitude of all elements, `axis` is not
    negative, and the array has at least one dimension.
    """
    is_channel = scheme.scaling is Scaling.CHANNEL
    groups = _ScaledGroups(array, axis=axis, is_channel=is_channel, block_size=scheme.block_size)
    # Blocks that are split into several boxes need their largest magnitudes beforehand.
    keeps_groups = is_channel or min(scheme.block_size, array.shape[axis]) > CHUNK // RUN
    extremes = (
        groups.find_largest(keeps_groups=keeps_groups, threads=threads)
        if keeps_groups or array.dtype == np.float64
        else (None, 0.0)
    )
    largest_of_groups, largest_in_sums = extremes
    shift, element, rounding = _shift_of(largest_in_sums), scheme.element, options.rounding or scheme.element.rounding
    plan = QuantizePlan(
        scheme=scheme,
        axis=axis,
        scale_rule=options.rule if scheme.has_power_scales else None,
        rounding=rounding,
        scale_bits=options.bits,
    )
    plans = [dataclasses.replace(plan, scale_offset=offset) for offset in options.offsets().tolist()]

    def levels(largest_G: Floats) -> Iterator[tuple[Floats, Floats]]:
        for level_plan in plans:
            before, after = factors_of(
                group_scales(largest_G, plan=level_plan, largest_of_all=largest), plan=level_plan
            )
            # float32 scales of NVFP4 would underflow.
            yield before, np.ldexp(after.astype(np.float64), -shift) if shift else after

    @np.errstate(over="ignore", under="ignore")
    def part(box: Box) -> tuple[PartialSums, Floats]:
        values_GE = groups.rows(box)
        if largest_of_groups is None:
            largest_G = values_GE.max(axis=1)
        else:
            largest_G = largest_of_groups[groups.group_index(box)].reshape(-1)
        is_spoiled_G = ~(largest_G < np.inf)
        kinds = _exclude(values_GE, ~(values_GE < np.inf) if is_channel else is_spoiled_G)
        num_finite = values_GE.size - int(kinds[1] + kinds[2] + kinds[4])
        level_plan = partial_sums(
            _shifted(values_GE, shift),
            levels(np.where(is_spoiled_G, 0.0, largest_G)),
            element=element,
            rounding=rounding,
            is_divided=is_divided(plan),
            is_float32=is_float32(plan),
            source=values_GE if shift else None,
            num_finite=num_finite,
        )
        return level_plan, kinds

    rows: list[Floats] = []

    def parts() -> Iterator[PartialSums]:
        yield PartialSums(np.zeros((len(plans), len(SUMS))), 0.0, 0.0, 0)  # an array may have no elements
        for level_plan, kinds in in_batches(part, groups.boxes(), threads=threads):
            rows.append(kinds)
            yield level_plan

    sums = total_of(parts(), largest=0.0, shift=shift)
    population = population_of_parts(rows)
    return dataclasses.replace(sums, largest=math.ldexp(population.largest, -shift)), population


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """The number of elements of each kind, and the extremes of the values in metrics."""

    num_elements: int
    """Number of all elements."""
    nan: int
    """Number of NaN, which are in no metric."""
    inf: int
    """Number of infinities, which are in no metric."""
    zero: int
    """Number of zeros of either sign, except in blocks with NaN or infinities."""
    spoiled: int = 0
    """Number of finite elements of blocks with NaN or infinities. They become NaN and are in no metric."""
    minimum: float | None = None
    """Smallest finite value; None if there is none, or if values were counted without their signs."""
    maximum: float | None = None
    """Largest finite value; None if `minimum` is None."""
    largest: float
    """Largest magnitude of the values in metrics; 0 if all are zero or there are none."""
    smallest: float
    """Smallest nonzero magnitude of the values in metrics; 0 if there is none."""

    @property
    def is_lossless(self) -> bool:
        """Whether there are elements and all are zeros, which any format represents at any scale."""
        return self.num_elements > 0 and not (self.largest or self.nan or self.inf or self.spoiled)

    @property
    def note(self) -> str:
        """A description of unusual values; empty if there are none."""
        num_finite = self.num_elements - self.nan - self.inf
        if self.num_elements == 0:
            return "empty"
        if num_finite == 0:
            return "no finite number"
        if num_finite == self.spoiled:
            return "NaN or Inf in every block"
        if self.largest:
            text = "blocks with NaN or Inf left out" if self.spoiled else "NaN or Inf left out"
            return text if num_finite < self.num_elements else ""
        if num_finite == self.num_elements:
            return "all zero: exact at any scale"
        return "no finite number other than zero"


def population_of_values(array: AnyArray) -> Population:
    """The population of an array with a real dtype of records and at least one dimension, without a copy of it."""
    limits = dtype_limits(array.dtype)
    in_order, _ = memory_order(array, axis=0)
    kinds: list[tuple[float, ...]] = []
    ends: list[tuple[float, float]] = []
    for piece in pieces(in_order, axis=0, block_size=1):
        tallies = scan(piece, limits=limits)
        smallest = math.inf if tallies.smallest_nonzero is None else tallies.smallest_nonzero
        counts = tallies.num_elements, tallies.nan, tallies.inf, tallies.zero, 0
        kinds.append((*counts, tallies.largest_finite or 0.0, smallest))
        finite = piece[np.isfinite(piece)] if tallies.inf else None
        if finite is not None and finite.size:
            ends.append((float(finite.min()), float(finite.max())))
        elif finite is None and tallies.minimum is not None and tallies.maximum is not None:
            ends.append((tallies.minimum, tallies.maximum))
    return dataclasses.replace(
        population_of_parts(kinds),
        minimum=min((low for low, _ in ends), default=None),
        maximum=max((high for _, high in ends), default=None),
    )


def population_of_histogram(histogram: Histogram) -> Population:
    """The population of the array that was counted."""
    values, counts = histogram.pairs()
    is_finite = np.isfinite(values)
    finite = values[is_finite]
    magnitudes = np.abs(finite)
    ordinary = magnitudes[magnitudes > 0]
    num_elements = int(counts.sum())
    nan = int(counts[np.isnan(values)].sum())
    return Population(
        num_elements=num_elements,
        nan=nan,
        inf=num_elements - nan - int(counts[is_finite].sum()),
        zero=int(counts[values == 0].sum()),
        minimum=float(finite.min()) if finite.size else None,
        maximum=float(finite.max()) if finite.size else None,
        largest=float(ordinary.max(initial=0.0)),
        smallest=float(ordinary.min()) if ordinary.size else 0.0,
    )


def population_of_blocks(histogram: BlockHistogram) -> Population:
    """The population of the array whose blocks were counted, without `minimum` and `maximum`."""
    patterns = histogram.magnitudes
    values = pattern_values(histogram.dtype)
    ordinary = patterns[patterns > 0]
    return Population(
        num_elements=histogram.num_elements,
        nan=histogram.nan,
        inf=histogram.inf,
        spoiled=histogram.spoiled,
        zero=histogram.zero_elements + int(histogram.counts[patterns == 0].sum()),
        # Patterns are in the order of the magnitudes.
        largest=float(values[ordinary.max()]) if ordinary.size else 0.0,
        smallest=float(values[ordinary.min()]) if ordinary.size else 0.0,
    )


def population_of_parts(parts: Sequence[Sequence[float] | Floats]) -> Population:
    """Merge the populations of parts, each given as `num_elements`, nan, inf, zero, spoiled, largest, smallest."""
    rows = np.array(parts, dtype=np.float64).reshape(-1, 7)
    num_elements, nan, inf, zero, spoiled = (int(column.sum()) for column in rows.T[:5])
    smallest = float(rows[:, 6].min(initial=math.inf))
    return Population(
        num_elements=num_elements,
        nan=nan,
        inf=inf,
        zero=zero,
        spoiled=spoiled,
        largest=float(rows[:, 5].max(initial=0.0)),
        smallest=smallest if math.isfinite(smallest) else 0.0,
    )


class _ScaledGroups:
    """An array whose elements share scales in blocks along an axis, or in channels, one for each index of the axis."""

    def __init__(self, array: AnyArray, *, axis: int, is_channel: bool, block_size: int) -> None:
        self._array, self._axis, self._is_channel = array, axis, is_channel
        self._block_size = 1 if is_channel else block_size

    def boxes(self) -> Iterator[Box]:
        """The boxes into which the array is split."""
        return boxes(self._array.shape, axis=self._axis, block_size=self._block_size, box_size=CHUNK)

    def group_index(self, box: Box) -> slice | tuple[slice, ...]:
        """The index of a box's groups in the array of all groups."""
        return box.slices[self._axis] if self._is_channel else box.groups

    def rows(self, box: Box) -> Floats:
        """The magnitudes of a box, one row for each group."""
        with np.errstate(invalid="ignore"):  # signalling NaN
            magnitudes = np.abs(self._array[box.slices].astype(np.float64, order="C"))
        order = (1, 0, 2, 3) if self._is_channel else (0, 1, 3, 2)
        num_groups = box.shape_OBEI[1] if self._is_channel else box.size // box.shape_OBEI[2]
        return np.ascontiguousarray(magnitudes.reshape(box.shape_OBEI).transpose(order)).reshape(num_groups, -1)

    def find_largest(self, *, keeps_groups: bool, threads: int | None) -> tuple[Floats | None, float]:
        """The largest magnitude of each group (None unless `keep`), and the largest magnitude in any metric."""
        shape = grouped_shape(self._array.shape, axis=self._axis, block_size=self._block_size)
        largest = np.zeros(shape[self._axis] if self._is_channel else shape) if keeps_groups else None
        largest_of_all = 0.0

        def find_largest(box: Box) -> tuple[Box, Floats]:
            values_GE = self.rows(box)
            if self._is_channel:
                values_GE[~(values_GE < np.inf)] = 0.0
            return box, values_GE.max(axis=1)

        for box, group_largest in in_batches(find_largest, self.boxes(), threads=threads):
            if largest is None:
                largest_of_all = max(largest_of_all, float(group_largest[group_largest < np.inf].max(initial=0.0)))
            else:
                box_largest = largest[self.group_index(box)]
                np.maximum(box_largest, group_largest.reshape(box_largest.shape), out=box_largest)
        if largest is not None:
            largest_of_all = float(largest[largest < np.inf].max(initial=0.0))
        return largest, largest_of_all


def _exclude(values_GE: Floats, is_excluded: NDArray[np.bool_]) -> Floats:
    """Replace ignored values by zeros, and return the row of the values for `population_of_parts`."""
    nan = inf = num_excluded = 0
    if is_excluded.any():
        excluded = values_GE[is_excluded]
        nan, inf = int(np.isnan(excluded).sum()), int(np.isinf(excluded).sum())
        num_excluded = excluded.size
        values_GE[is_excluded] = 0.0
    zero = values_GE.size - np.count_nonzero(values_GE) - num_excluded
    spoiled = num_excluded - nan - inf
    # Subtracting 1 from the bits makes zeros the largest unsigned integers.
    lowest = (values_GE.view(np.uint64) - np.uint64(1)).min()
    smallest = float((lowest + np.uint64(1)).view(np.float64)) if lowest < np.iinfo(np.uint64).max else math.inf
    return np.array([values_GE.size, nan, inf, zero, spoiled, values_GE.max(), smallest])
