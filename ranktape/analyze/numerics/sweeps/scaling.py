"""Adds up what a tensor loses when it is divided by a scale, rounded to a format, and multiplied back.

The sums behind every metric, for many scales at once: from the histogram of an 8- or 16-bit type at a cost
that does not grow with the tensor, and from the values of wider types in one pass over memory. All
arithmetic is float64. Sums are added up in an order that is part of the code, not of the machine.
"""

# Shapes: N = values, L = levels (one scale each), K = kinds of sums, C = kinds of counts.
# ruff: noqa: N806, N815 - the letters of a shape end the name of the array

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from ranktape.analyze.numerics.formats.kernels import constants_of
from ranktape.analyze.numerics.histograms.histogram import pattern_values
from ranktape.analyze.numerics.pieces import each, frozen
from ranktape.analyze.numerics.sweeps.scaling_kernels import (
    NUM_COUNTS,
    NUM_SUMS,
    RAISED,
    magnitudes_of,
    sum_scaled,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.formats import Format, Rounding
    from ranktape.analyze.numerics.histograms.histogram import AnyArray, Histogram

Item = TypeVar("Item")
Result = TypeVar("Result")

CHUNK = 1 << 18
"""Values whose sums are added up apart, so that chunks may be done in any order, by any number of threads."""

SUMS = (
    "squared_error",
    "absolute_error",
    "squared_result",
    "product",
    "largest_error",
    "overflow",
    "underflow",
    "flushed",
)
"""What is summed up for each level; of `largest_error` it is the maximum."""

BATCH = 32
"""Chunks whose sums are held at a time."""

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

    sums_LK: NDArray[np.float64]
    """Those of the kernel: see `NUM_SUMS`."""
    counts_LC: NDArray[np.int64]
    """Overflow, underflow and flushed."""
    own_K: NDArray[np.float64]
    """Sum of |x|, sum of x squared."""
    num_finite: int
    """Values that were added up."""


def new_part(num_levels: int) -> PartialSums:
    """The sums of nothing; the kernels add to its arrays."""
    return PartialSums(
        np.zeros((num_levels, NUM_SUMS)), np.zeros((num_levels, NUM_COUNTS), dtype=np.int64), np.zeros(2), num_finite=0
    )


def total_of(parts: Iterable[PartialSums], *, num_levels: int, shift: int, largest: float) -> Sums:
    """All parts together, added up in their order; `largest` is the tensor's largest magnitude, not yet shifted."""
    sums_LK, counts_LC, own_K, num_finite = new_part(num_levels)
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
        shift=shift,
        num_finite=num_finite,
        largest=math.ldexp(largest, -shift),
        absolute=absolute,
        squared=squared,
        **{f"{name}_L": column for name, column in zip(SUMS, columns, strict=True)},
    )


def in_batches(work: Callable[[Item], Result], items: Iterable[Item], *, threads: int | None) -> Iterator[Result]:
    """What `work` gives for each item, in their order; a few of them are held at a time."""
    remaining = iter(items)
    while batch := list(itertools.islice(remaining, BATCH)):
        yield from each(work, batch, threads=threads)


def shift_of(largest: float) -> int:
    """The exponent of the power of two by which values up to `largest` are to be divided before they are squared."""
    exponent = math.frexp(largest)[1]
    return exponent if abs(exponent) > SQUARED_SAFELY else 0


def shift_factors(shift: int) -> tuple[float, float]:
    """Two factors that divide by 2**`shift`: 2**1074 is not a float64."""
    half = -shift // 2
    return math.ldexp(1.0, half), math.ldexp(1.0, -shift - half)


def magnitude_pairs(histogram: Histogram) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The magnitudes that occur and how often; both signs together where the type has a sign bit."""
    half = histogram.counts.size // 2
    if not _has_sign_bit(histogram.dtype):
        values, counts = histogram.pairs()
        return np.abs(values), counts
    both = histogram.counts[:half] + histogram.counts[half:]
    (patterns,) = np.nonzero(both)
    return pattern_values(histogram.dtype)[patterns], both[patterns]


@functools.cache
def _has_sign_bit(dtype: np.dtype[Any]) -> bool:
    values = pattern_values(dtype)
    half = values.size // 2
    return np.array_equal(values[:half], -values[half:], equal_nan=True)


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
    magnitudes = np.abs(values)
    largest = float(magnitudes[np.isfinite(magnitudes)].max())
    weights = np.where(np.isfinite(magnitudes), counts, 0)
    work = _ValueSweep(largest=largest, exponents=exponents, target=target, rounding=rounding or target.rounding)
    return work.total([work.part(magnitudes, weights=weights)])


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
    work = _ValueSweep(largest=largest, exponents=exponents, target=target, rounding=rounding or target.rounding)
    # A part of `flat` is a copy of that part, whatever the layout; a view of a contiguous array costs less.
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat

    def part(start: int) -> PartialSums:
        return work.part(np.asarray(flat[start : start + CHUNK]), weights=NO_WEIGHTS)

    return work.total(in_batches(part, range(0, array.size, CHUNK), threads=threads))


NO_WEIGHTS = np.zeros(0, dtype=np.int64)
"""Each value counts once."""


class _ValueSweep:
    """What is common to all parts of one sweep of a tensor with one scale."""

    def __init__(self, *, largest: float, exponents: NDArray[np.float64], target: Format, rounding: Rounding) -> None:
        self._largest = largest
        self._shift = shift_of(largest)
        wholes = np.floor(exponents)
        fractions = np.array([2.0 ** float(part) for part in exponents - wholes])
        limit = MAX_SHIFTED_EXPONENT
        self._scales_L = np.ldexp(fractions, np.clip(wholes - self._shift, -limit, limit).astype(np.int64))
        self._constants = constants_of(target, rounding)
        self._factors = shift_factors(self._shift)

    def part(self, values: AnyArray, *, weights: NDArray[np.int64]) -> PartialSums:
        """The sums of one part; safe for several threads with a part each."""
        floats = values if values.dtype.kind == "f" else values.astype(np.float64)
        magnitudes = np.empty(values.size)
        num_finite = magnitudes_of(frozen(floats, shape=(values.size,)), self._factors, magnitudes)
        found = new_part(self._scales_L.size)._replace(
            num_finite=int(weights.sum()) if weights.size else int(num_finite)
        )
        sums = found.sums_LK, found.counts_LC, found.own_K
        sum_scaled(magnitudes, weights, self._scales_L, self._constants, *sums)
        return found

    def total(self, parts: Iterable[PartialSums]) -> Sums:
        """All parts together."""
        return total_of(parts, num_levels=self._scales_L.size, shift=self._shift, largest=self._largest)
