"""Adds up what a tensor loses when it is divided by scales, rounded to a format, and multiplied back.

The sums behind every metric, for many levels: from counts of values or of values in blocks, at a cost that does not
grow with the tensor, or from the values of wider types and of groups whose scales counts do not tell, chunk by chunk.
All arithmetic is float64. Chunks are added up in their order, whatever the number of threads.
"""

# Shapes: L = levels, K = kinds of sums, G = groups that share a scale, E = elements of a group, N = values.

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.formats import Format, Rounding
from ranktape.analyze.numerics.formats.kernels import constants_of, round_block
from ranktape.analyze.numerics.formats.values import above_of, powers_of_two
from ranktape.analyze.numerics.histograms.block_counts import NUM_MAGNITUDES
from ranktape.analyze.numerics.histograms.block_histogram import BlockHistogram
from ranktape.analyze.numerics.histograms.histogram import AnyArray, Histogram, own_limits, pattern_values, scan
from ranktape.analyze.numerics.kernels import compiled
from ranktape.analyze.numerics.pieces import RUN, Box, boxes, by_memory, grouped_shape, in_batches, pieces
from ranktape.analyze.numerics.quantization.plan import QuantizePlan
from ranktape.analyze.numerics.quantization.scales import factors_of, group_scales, is_divided
from ranktape.analyze.numerics.quantization.schemes import ScaleRule, Scaling, Scheme
from ranktape.analyze.numerics.sweeps.options import SweepOptions

CHUNK = 1 << 15
"""Values whose sums are added up apart, by one thread: what is computed of them stays in a cache."""

SQUARED_SAFELY = 500
"""Up to this exponent, either sign, the sums of squares of a tensor's values are within float64."""

MAX_SHIFTED_EXPONENT = 1000
"""Scales further than this from 1, after the shift, are taken as this far. All values overflow there, or all are
flushed, but for values of float64 that are themselves that far below the largest: of those, counts may be wrong."""

Floats = NDArray[np.float64]


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
    """Values that round to beyond the format's largest value, or may, and are saturated."""
    underflow_L: Floats
    """Nonzero values below the format's smallest normal value after division by the scale."""
    flushed_L: Floats
    """Nonzero values that become zero; where chance decides, as many as are to be expected."""


SUMS = tuple(name[:-2] for name in Sums.__dataclass_fields__ if name.endswith("_L"))
"""What is summed up for each level; of `largest_error` it is the maximum."""

_LARGEST = SUMS.index("largest_error")


def scale_of(exponent: float) -> float:
    """2**`exponent` as a float64, the same on every machine.

    Infinite above and zero below the range of float64.
    """
    whole = math.floor(exponent)
    try:
        return math.ldexp(2.0 ** (exponent - whole), whole)
    except OverflowError:
        return math.inf


class PartialSums(NamedTuple):
    """The sums of a part of a tensor."""

    sums_LK: Floats
    """`SUMS` by level."""
    absolute: float
    squared: float
    num_finite: int


LANES = 32
"""Partial sums of each kind: the compiler adds lane by lane with vectors, in an order that is part of the code."""


@compiled
def _add_errors(values_RA: Floats, weights_RA: Floats, results_RA: Floats, sums_KA: Floats) -> None:
    """Add what becomes of values to the first five of `SUMS`."""
    for row in range(values_RA.shape[0]):
        for lane in range(LANES):
            value, weight, result = values_RA[row, lane], weights_RA[row, lane], results_RA[row, lane]
            error = abs(value - result)
            weighted_error, weighted_result = weight * error, weight * result
            sums_KA[0, lane] += weighted_error * error
            sums_KA[1, lane] += weighted_error
            sums_KA[2, lane] += weighted_result * result
            sums_KA[3, lane] += weighted_result * value
            sums_KA[4, lane] = max(sums_KA[4, lane], error)


def _in_lanes(values: Floats) -> Floats:
    missing = -values.size % LANES
    flat = values.reshape(-1)
    return (np.pad(flat, (0, missing)) if missing else flat).reshape(-1, LANES)


def part_of(
    values: Floats,
    levels: Iterable[tuple[Floats, Floats | float]],
    *,
    element: Format,
    rounding: Rounding,
    weights: NDArray[np.int64] | None = None,
    num_finite: int | None = None,
) -> PartialSums:
    """The sums of finite magnitudes that occur `weights` times each, or once.

    For each level the scaled magnitudes, and what they are multiplied by once they are rounded.
    """
    constants, start = constants_of(element, rounding), element.overflow_start_of(rounding)
    factors = np.ones(values.shape) if weights is None else weights.astype(np.float64)
    x_RA, w_RA = _in_lanes(values), _in_lanes(factors)
    is_zero = values == 0
    zeros = _total(is_zero, weights)
    rounded, rows = np.empty(values.shape), []
    for scaled, after in levels:
        round_block(scaled.reshape(-1), constants, rounded.reshape(-1))
        counts = [_total(scaled >= start, weights), _total(scaled < element.min_normal, weights) - zeros]
        flushed, sums_KA = rounded == 0, np.zeros((5, LANES))
        counts.append(_total(flushed, weights) - zeros)
        if rounding is Rounding.STOCHASTIC:
            above, passed = above_of(scaled, rounded, element=element)
            rising = factors * passed
            # Chance does not make zero of all that rounding down would.
            counts[-1] -= float(rising[flushed].sum())
            _add_errors(x_RA, _in_lanes(rising), _in_lanes(above * after), sums_KA)
            _add_errors(x_RA, _in_lanes(factors - rising), _in_lanes(rounded * after), sums_KA)
        else:
            _add_errors(x_RA, w_RA, _in_lanes(rounded * after), sums_KA)
        rows.append([*sums_KA[:-1].sum(axis=1).tolist(), float(sums_KA[-1].max()), *counts])
    # In the same order as the errors: where all values become zero, the errors add up to exactly the values.
    sums_KA = np.zeros((5, LANES))
    _add_errors(x_RA, w_RA, np.zeros_like(x_RA), sums_KA)
    squared, absolute = sums_KA[:2].sum(axis=1).tolist()
    return PartialSums(
        np.array(rows).reshape(-1, len(SUMS)),
        absolute,
        squared,
        int(factors.sum()) if num_finite is None else num_finite,
    )


def _total(mask: NDArray[np.bool_], weights: NDArray[np.int64] | None) -> float:
    return float(np.count_nonzero(mask) if weights is None else weights[mask].sum())


def total_of(parts: Iterable[PartialSums], *, largest: float, shift: int = 0) -> Sums:
    """All parts together, added up in their order; `largest` is the tensor's, not yet shifted."""
    together = functools.reduce(_together, parts)
    return Sums(
        shift=shift,
        num_finite=together.num_finite,
        largest=math.ldexp(largest, -shift),
        absolute=together.absolute,
        squared=together.squared,
        **{f"{name}_L": column for name, column in zip(SUMS, together.sums_LK.T, strict=True)},
    )


def _together(one: PartialSums, other: PartialSums) -> PartialSums:
    sums_LK = one.sums_LK + other.sums_LK
    sums_LK[:, _LARGEST] = np.maximum(one.sums_LK[:, _LARGEST], other.sums_LK[:, _LARGEST])
    return PartialSums(
        sums_LK, one.absolute + other.absolute, one.squared + other.squared, one.num_finite + other.num_finite
    )


def _shift_of(largest: float) -> int:
    exponent = math.frexp(largest)[1] if largest else 0
    return exponent if abs(exponent) > SQUARED_SAFELY else 0


def _shifted(magnitudes: Floats, shift: int) -> Floats:
    if not shift:
        return magnitudes
    # 1,500 binades below the largest value the shift loses bits, but nothing becomes zero by it.
    return np.maximum(np.ldexp(magnitudes, -shift), np.minimum(magnitudes, 5e-324))


class _OneScale(NamedTuple):
    """The levels of a tensor with one scale."""

    scales: list[float]
    """Of the shifted values."""
    shift: int
    element: Format
    rounding: Rounding

    @classmethod
    def of(cls, exponents: Floats, *, largest: float, target: Format, rounding: Rounding | None) -> _OneScale:
        shift = _shift_of(largest)
        # Further than the limit, all values overflow or are flushed.
        moved = (math.floor(one) - shift for one in exponents.tolist())
        wholes = [min(max(one, -MAX_SHIFTED_EXPONENT), MAX_SHIFTED_EXPONENT) for one in moved]
        scales = [
            math.ldexp(2.0 ** (one - math.floor(one)), whole)
            for one, whole in zip(exponents.tolist(), wholes, strict=True)
        ]
        return cls(scales, shift, target, rounding or target.rounding)

    @np.errstate(over="ignore", under="ignore")
    def part(self, magnitudes: Floats, weights: NDArray[np.int64] | None = None) -> PartialSums:
        """The sums of finite magnitudes."""
        values = _shifted(magnitudes, self.shift)
        levels = ((values / scale, scale) for scale in self.scales)
        return part_of(values, levels, element=self.element, rounding=self.rounding, weights=weights)


def sums_of_pairs(
    values: Floats,
    *,
    counts: NDArray[np.int64],
    exponents: Floats,
    target: Format,
    rounding: Rounding | None = None,
) -> Sums:
    """The sums over values that occur so many times each; NaN and infinities are left out.

    At least one value must be finite and nonzero. `rounding` is the format's own unless given; of stochastic rounding
    the sums are those to be expected, and so is how many values become zero.
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
    """The sums over the values of an array of any real type; NaN and infinities are left out.

    `largest` is the largest finite magnitude, above 0. The rest is as in `sums_of_pairs`.
    """
    levels = _OneScale.of(exponents, largest=largest, target=target, rounding=rounding)
    # A part of `flat` is a copy of that part, whatever the layout; a view of a contiguous array costs less.
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

    At least one of them must be nonzero.

    Raises:
        UsageError: the counts do not answer that rule for that format.
    """
    end = (1 << (scale_bits - 1)) - 1
    # Of cells whose blocks have the same scale, those of the same magnitude are one.
    keys = histogram.scale_exponents(rule, element) * NUM_MAGNITUDES + histogram.magnitudes
    distinct, places = np.unique(keys, return_inverse=True)
    # float64 holds all counts of less than 2**53 elements.
    counts = np.bincount(places, weights=histogram.counts).astype(np.int64)
    exponents, magnitudes = np.divmod(distinct, NUM_MAGNITUDES)
    values = pattern_values(histogram.dtype)[magnitudes]

    def part(start: int) -> PartialSums:
        own = slice(start, start + CHUNK)
        scales = (np.clip(exponents[own] + offset, -end, end) for offset in offsets.tolist())
        levels = ((values[own] * powers_of_two(-one), powers_of_two(one)) for one in scales)
        return part_of(values[own], levels, element=element, rounding=rounding, weights=counts[own])

    parts = [part(start) for start in range(0, values.size, CHUNK)]
    zeros = PartialSums(np.zeros((offsets.size, len(SUMS))), 0.0, 0.0, histogram.zero_elements)
    return total_of([*parts, zeros], largest=float(values.max()))


def sums_of_groups(
    array: AnyArray, *, largest: float, scheme: Scheme, options: SweepOptions, axis: int, threads: int | None
) -> tuple[Sums, Population]:
    """The sums over the elements of groups, for each offset of the options, and what the array holds.

    Of blocks with a NaN or an infinity all elements are left out, of channels those alone. The sums mean nothing
    where no other element differs from zero. `largest` is the largest finite magnitude of all elements, `axis` is not
    negative, and the array has at least one dimension.
    """
    is_channel = scheme.scaling is Scaling.CHANNEL
    groups = _ScaledGroups(array, axis=axis, is_channel=is_channel, block_size=scheme.block_size)
    # Blocks may be cut into boxes: then their largest magnitudes must be known before.
    keep = is_channel or min(scheme.block_size, array.shape[axis]) > CHUNK // RUN
    found = groups.look(keep=keep, threads=threads) if keep or array.dtype == np.float64 else (None, 0.0)
    largest_of_groups, largest_in_sums = found
    shift, element, rounding = _shift_of(largest_in_sums), scheme.element, options.rounding or scheme.element.rounding
    plan = QuantizePlan(
        scheme=scheme,
        axis=axis,
        scale_rule=options.rule if scheme.has_power_scales else None,
        rounding=rounding,
        scale_offset=0,
        saturate=True,
        seed=0,
        scale_bits=options.bits,
        four_over_six=False,
        rotation=0,
        rotation_seed=None,
    )
    plans = [dataclasses.replace(plan, scale_offset=offset) for offset in options.offsets().tolist()]

    def levels(values_GE: Floats, largest_G: Floats) -> Iterator[tuple[Floats, Floats]]:
        for own in plans:
            before, after = factors_of(group_scales(largest_G, plan=own, largest_of_all=largest), plan=own)
            scaled = values_GE / before[:, None] if is_divided(own) else values_GE * before[:, None]
            # Programs divide by scales that are no powers of two in float32.
            yield (
                scaled if own.scale_rule is not None else scaled.astype(np.float32).astype(np.float64),
                np.ldexp(after, -shift)[:, None] if shift else after[:, None],
            )

    @np.errstate(over="ignore", under="ignore")
    def part(box: Box) -> tuple[PartialSums, Floats]:
        values_GE = groups.rows(box)
        if largest_of_groups is None:
            largest_G = values_GE.max(axis=1)
        else:
            largest_G = largest_of_groups[groups.place(box)].reshape(-1)
        is_spoiled_G = ~(largest_G < np.inf)
        kinds = _left_out(values_GE, ~(values_GE < np.inf) if is_channel else is_spoiled_G)
        num_finite = values_GE.size - int(kinds[1] + kinds[2] + kinds[4])
        of_levels = levels(values_GE, np.where(is_spoiled_G, 0.0, largest_G))
        own = part_of(_shifted(values_GE, shift), of_levels, element=element, rounding=rounding, num_finite=num_finite)
        return own, kinds

    rows: list[Floats] = []

    def parts() -> Iterator[PartialSums]:
        yield PartialSums(np.zeros((len(plans), len(SUMS))), 0.0, 0.0, 0)  # an array may have no elements
        for own, kinds in in_batches(part, groups.boxes(), threads=threads):
            rows.append(kinds)
            yield own

    sums = total_of(parts(), largest=0.0, shift=shift)
    population = population_of_parts(rows)
    return dataclasses.replace(sums, largest=math.ldexp(population.largest, -shift)), population


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """How many numbers of each kind there are, and the ends of those that metrics are made of."""

    num_elements: int
    """Elements of any kind."""
    nan: int
    """Elements that are not a number; in no metric."""
    inf: int
    """Infinities; in no metric."""
    zero: int
    """Zeros of either sign, but for those that are spoiled."""
    spoiled: int = 0
    """Finite elements of blocks that hold NaN or an infinity, and so become NaN themselves; in no metric."""
    minimum: float | None = None
    """Smallest finite value; None where there is none, or where counts that know no signs were kept."""
    maximum: float | None = None
    """Largest finite value; None where `minimum` is."""
    largest: float
    """Largest magnitude that is neither spoiled nor infinite; 0 where no such number differs from zero."""
    smallest: float
    """The smallest of them that is not zero; 0 where there is none."""

    @property
    def is_lossless(self) -> bool:
        """Whether all numbers are zeros: any format holds them, at any scale."""
        return self.num_elements > 0 and not (self.largest or self.nan or self.inf or self.spoiled)

    @property
    def note(self) -> str:
        """What is unusual; empty for an ordinary tensor."""
        num_finite = self.num_elements - self.nan - self.inf
        if self.num_elements == 0:
            return "empty"
        if num_finite == 0:
            return "no finite number"
        if num_finite == self.spoiled:
            return "NaN or Inf in every block"
        if self.largest:
            left_out = "blocks with NaN or Inf left out" if self.spoiled else "NaN or Inf left out"
            return left_out if num_finite < self.num_elements else ""
        if num_finite == self.num_elements:
            return "all zero: exact at any scale"
        return "no finite number other than zero"


def population_of_values(array: AnyArray) -> Population:
    """What an array of any record's real type with at least one dimension holds; no copy of the whole is made."""
    limits = own_limits(array.dtype)
    in_order, _ = by_memory(array, axis=0)
    kinds: list[tuple[float, ...]] = []
    ends: list[tuple[float, float]] = []
    for piece in pieces(in_order, axis=0, block_size=1):
        found = scan(piece, limits=limits)
        smallest = math.inf if found.smallest_nonzero is None else found.smallest_nonzero
        counts = found.num_elements, found.nan, found.inf, found.zero, 0
        kinds.append((*counts, found.largest_finite or 0.0, smallest))
        finite = piece[np.isfinite(piece)] if found.inf else None
        if finite is not None and finite.size:
            ends.append((float(finite.min()), float(finite.max())))
        elif finite is None and found.minimum is not None and found.maximum is not None:
            ends.append((found.minimum, found.maximum))
    return dataclasses.replace(
        population_of_parts(kinds),
        minimum=min((low for low, _ in ends), default=None),
        maximum=max((high for _, high in ends), default=None),
    )


def population_of_histogram(histogram: Histogram) -> Population:
    """What the array holds that was counted."""
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
    """What the array holds whose blocks were counted; of signs nothing is known."""
    patterns = histogram.magnitudes
    values = pattern_values(histogram.dtype)
    ordinary = patterns[patterns > 0]
    return Population(
        num_elements=histogram.num_elements,
        nan=histogram.nan,
        inf=histogram.inf,
        spoiled=histogram.spoiled,
        zero=histogram.zero_elements + int(histogram.counts[patterns == 0].sum()),
        # Magnitudes are in the order of their patterns.
        largest=float(values[ordinary.max()]) if ordinary.size else 0.0,
        smallest=float(values[ordinary.min()]) if ordinary.size else 0.0,
    )


def population_of_parts(parts: Sequence[Sequence[float] | Floats]) -> Population:
    """All parts together, each a row of `num_elements`, nan, inf, zero, spoiled, largest, smallest."""
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
    """An array whose elements share scales in blocks along an axis, or in channels beside it."""

    def __init__(self, array: AnyArray, *, axis: int, is_channel: bool, block_size: int) -> None:
        self._array, self._axis, self._is_channel = array, axis, is_channel
        self._block_size = 1 if is_channel else block_size

    def boxes(self) -> Iterator[Box]:
        """What the array is cut into."""
        return boxes(self._array.shape, axis=self._axis, block_size=self._block_size, box_size=CHUNK)

    def place(self, box: Box) -> slice | tuple[slice, ...]:
        """Where the groups of a box are among all groups."""
        return box.place[self._axis] if self._is_channel else box.groups

    def rows(self, box: Box) -> Floats:
        """The magnitudes of a box, one row for each group."""
        with np.errstate(invalid="ignore"):  # signalling NaN
            magnitudes = np.abs(self._array[box.place].astype(np.float64, order="C"))
        order = (1, 0, 2, 3) if self._is_channel else (0, 1, 3, 2)
        num_groups = box.shape_OBEI[1] if self._is_channel else box.size // box.shape_OBEI[2]
        return np.ascontiguousarray(magnitudes.reshape(box.shape_OBEI).transpose(order)).reshape(num_groups, -1)

    def look(self, *, keep: bool, threads: int | None) -> tuple[Floats | None, float]:
        """The largest magnitude of each group, if they are to be kept, and the largest that is in any metric."""
        shape = grouped_shape(self._array.shape, axis=self._axis, block_size=self._block_size)
        largest = np.zeros(shape[self._axis] if self._is_channel else shape) if keep else None
        largest_of_all = 0.0

        def look(box: Box) -> tuple[Box, Floats]:
            values_GE = self.rows(box)
            if self._is_channel:
                values_GE[~(values_GE < np.inf)] = 0.0
            return box, values_GE.max(axis=1)

        for box, of_groups in in_batches(look, self.boxes(), threads=threads):
            if largest is None:
                largest_of_all = max(largest_of_all, float(of_groups[of_groups < np.inf].max(initial=0.0)))
            else:
                kept = largest[self.place(box)]
                np.maximum(kept, of_groups.reshape(kept.shape), out=kept)
        if largest is not None:
            largest_of_all = float(largest[largest < np.inf].max(initial=0.0))
        return largest, largest_of_all


def _left_out(values_GE: Floats, is_left_out: NDArray[np.bool_]) -> Floats:
    """Put zeros in place of what is left out; how much there is of each kind, for `population_of_parts`."""
    nan = inf = num_left_out = 0
    if is_left_out.any():
        left_out = values_GE[is_left_out]
        nan, inf = int(np.isnan(left_out).sum()), int(np.isinf(left_out).sum())
        num_left_out = left_out.size
        values_GE[is_left_out] = 0.0
    zero = values_GE.size - np.count_nonzero(values_GE) - num_left_out
    spoiled = num_left_out - nan - inf
    # One less, the bits of a zero are the largest number there is.
    lowest = (values_GE.view(np.uint64) - np.uint64(1)).min()
    smallest = float((lowest + np.uint64(1)).view(np.float64)) if lowest < np.iinfo(np.uint64).max else math.inf
    return np.array([values_GE.size, nan, inf, zero, spoiled, values_GE.max(), smallest])
