"""Digests of tensors, which answer questions about their values, and the digests of many tensors in columns.

The digest of a wide dtype has a limited number of distinct values. Each of them occurs in the tensor and may also
represent smaller ones that are close to it. However many parts are merged, the fraction of values at or below any
number is accurate to `MAX_RANK_ERROR`, and no value is moved past a number with nine significant bits.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.digest_kernels import ENDS, thin
from ranktape.analyze.numerics.histograms.histogram import KINDS, Limits, Tallies, larger_part, pattern_values
from ranktape.storage.format.dtypes import numpy_dtype
from ranktape.storage.format.record_info import RUN
from ranktape.storage.format.statistics import MAX_EXPONENT, POWERS, STATISTICS, Statistics

SAMPLE_METRICS = (
    "num_elements",
    "num_finite",
    "upper",
    "lower",
    "underflow",
    "nan",
    "inf",
    "zero",
    "mean",
    "std",
    "minimum",
    "maximum",
    "absmax",
    "norm",
)
"""The metrics of each sample: counts against the limits of the dtype, and metrics of the finite values."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Digest:
    """The digest of the values of a record, or of several records together."""

    dtype: str
    """The dtype as which the values were read, as named by torch; dtypes of several records are joined by spaces."""
    statistics: Statistics
    """Exact statistics of the finite values."""
    tallies: Tallies
    """Exact counts against the limits of the dtype."""
    values: NDArray[np.float64]
    """The distinct numbers in ascending order, with infinities, without NaN; zeros of both signs are the number 0."""
    counts: NDArray[np.int64]
    """The number of elements for each of `values`."""
    is_exact: bool
    """Whether `values` are all recorded values, and none represents others as in a thinned `Summary`."""
    has_values: bool = True
    """Whether `values` are known. They are not if only statistics were stored."""
    samples: dict[str, NDArray[Any]] | None = None
    """The value for each sample, by name of `SAMPLE_METRICS`, NaN if undefined; None without samples."""

    def count(self, limits: Limits) -> Tallies:
        """Counts against other limits: exact if `is_exact`, or if the limits have at most eight significant bits."""
        starts = limits.overflow_start, limits.min_normal, limits.flush_limit
        columns = Digests.of(self).count(*(np.array([start]) for start in starts))
        counts: dict[str, Any] = {kind: int(count[0]) for kind, count in columns.items()}
        return dataclasses.replace(self.tallies, **counts, per_sample=None)

    def quantiles(self, probabilities: Sequence[float | Fraction]) -> list[float | None]:
        """The quantiles: the smallest numbers with at least that fraction of all numbers at or below them.

        NaN is ignored, infinities count. A quantile is None if there is no number. A float is taken as the decimal
        number that it prints as: 0.999 of 1,000 is 999.
        """
        columns = Digests.of(self)
        values = (float(columns.quantiles(probability)[0]) for probability in probabilities)
        return [None if math.isnan(value) else value for value in values]


CODE_KINDS = tuple(np.dtype(kind) for kind in ("u1", "u2", "f4", "f8"))
"""The types in which the numbers of a record are stored: bit patterns of its dtype, or floats."""

_FLOAT64 = CODE_KINDS.index(np.dtype("f8"))

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Digests:
    """The digests of several records, or of groups of records, in columns."""

    def __init__(
        self,
        *,
        dtypes: Sequence[str],
        statistics: Floats,
        tallies: Integers,
        ends: Floats,
        flags: NDArray[np.bool_],
        kinds: NDArray[np.uint8],
        sizes: Integers,
        codes: Callable[[], NDArray[np.uint8]],
        counts: Callable[[], NDArray[Any]],
        sample_sizes: Integers,
        samples: Callable[[], Floats],
        cached_metrics: Callable[[], Floats] | None = None,
    ) -> None:
        """Take the columns; `codes`, `counts`, `samples` and `cached_metrics` are called when they are first needed.

        `codes` gives the bytes of the numbers of all records. `kinds` is the index in `CODE_KINDS` of the type of the
        numbers of each record.
        """
        self.dtypes = dtypes
        """The dtype as which the values of each record were read."""
        self.statistics = statistics
        """`STATISTICS` of each record; shape (records, 10)."""
        self.tallies = tallies
        """The number of elements and `KINDS` of each record; shape (records, 8)."""
        self.ends = ends
        """`ENDS` of each record, NaN if there is no such number; shape (records, 4)."""
        self.is_exact, self.has_values = flags[:, 0], flags[:, 1]
        """`Digest.is_exact` and `Digest.has_values` of each record."""
        self.sizes = sizes
        """Number of distinct numbers of each record."""
        self.sample_sizes = sample_sizes
        """Number of samples of each record; -1 if its samples are not distinguished."""
        self._kinds, self._codes, self._counts = kinds, codes, counts
        self._samples, self._cached_metrics = samples, cached_metrics

    @classmethod
    def of(cls, digest: Digest) -> Digests:
        """The columns of one digest."""
        tallies, samples = digest.tallies, digest.samples
        ends = [getattr(tallies, name) for name in ENDS]
        num_samples = -1 if samples is None else samples[SAMPLE_METRICS[0]].size
        return cls(
            dtypes=[digest.dtype],
            statistics=digest.statistics.to_vector().reshape(1, -1),
            tallies=np.array([[tallies.num_elements, *(getattr(tallies, kind) for kind in KINDS)]]),
            ends=np.array([[math.nan if end is None else end for end in ends]], dtype=np.float64),
            flags=np.array([[digest.is_exact, digest.has_values]]),
            kinds=np.array([_FLOAT64], dtype=np.uint8),
            sizes=np.array([digest.values.size]),
            codes=lambda: digest.values.view(np.uint8),
            counts=lambda: digest.counts,
            sample_sizes=np.array([num_samples]),
            samples=lambda: np.stack([(samples or {})[name] for name in SAMPLE_METRICS], axis=1),
        )

    def __len__(self) -> int:
        """The number of digests."""
        return len(self.sizes)

    @functools.cached_property
    def codes(self) -> NDArray[np.uint8]:
        """The bytes of the stored numbers of all records, those of each record in ascending order."""
        return self._codes()

    @functools.cached_property
    def values(self) -> Floats:
        """The numbers of all records, those of each record in ascending order; zeros of both signs are 0."""
        names = np.unique(np.array(self.dtypes, dtype=object), return_inverse=True)[1]
        changes = np.flatnonzero((np.diff(names) != 0) | (np.diff(self._kinds) != 0)) + 1
        parts, ends = [np.zeros(0)], self.code_ends
        for first, last in itertools.pairwise([0, *changes.tolist(), len(self)]):
            kind = CODE_KINDS[int(self._kinds[first])] if len(self) else CODE_KINDS[0]
            numbers = np.frombuffer(self.codes[ends[first] : ends[last]].tobytes(), dtype=kind)
            if numbers.size:
                dtype = None if kind.kind == "f" else numpy_dtype(self.dtypes[first])
                parts.append(numbers.astype(np.float64) if dtype is None else numbers_of_patterns(dtype)[numbers])
        return np.concatenate(parts)

    def values_at(self, indices: Integers) -> Floats:
        """Some of `values`; if all records have the same narrow dtype, the other values are not computed."""
        if "values" in self.__dict__ or self.patterns is None:
            return self.values[indices]
        codes, numbers = self.patterns
        return numbers[codes[indices]]

    @functools.cached_property
    def patterns(self) -> tuple[Integers, Floats] | None:
        """The bit patterns of all records, and the number for each possible pattern.

        None unless all records have the same narrow dtype.
        """
        kind = CODE_KINDS[int(self._kinds[0])] if len(self) else CODE_KINDS[-1]
        if kind.kind == "f" or (self._kinds != self._kinds[0]).any() or len(set(self.dtypes)) > 1:
            return None
        return np.frombuffer(self.codes, dtype=kind), numbers_of_patterns(numpy_dtype(self.dtypes[0]))

    @functools.cached_property
    def code_ends(self) -> Integers:
        """The offset in `codes` of the numbers of each record, and the end of the last."""
        nbytes = np.array([kind.itemsize for kind in CODE_KINDS])[self._kinds]
        return np.concatenate([[0], np.cumsum(self.sizes * nbytes)])

    @functools.cached_property
    def stored_counts(self) -> NDArray[Any]:
        """The number of elements for each of `values`, in the narrow type in which they are stored."""
        return self._counts()

    @functools.cached_property
    def counts(self) -> Integers:
        """The `stored_counts` as int64."""
        return self.stored_counts.astype(np.int64)

    def stored_pairs(self, row: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The numbers of one record and their counts, in the types in which they are stored."""
        codes = self.codes[self.code_ends[row] : self.code_ends[row + 1]]
        kind = CODE_KINDS[int(self._kinds[row])]
        return np.frombuffer(codes.tobytes(), kind), self.stored_counts[self.starts[row] : self.starts[row + 1]]

    @functools.cached_property
    def samples(self) -> Floats:
        """`SAMPLE_METRICS` of the samples of all records; shape (samples, 14)."""
        return self._samples() if (self.sample_sizes > 0).any() else np.zeros((0, len(SAMPLE_METRICS)))

    @functools.cached_property
    def cached_metrics(self) -> Floats | None:
        """Numbers derived from the columns of each record and cached with them; None if there are none."""
        return None if self._cached_metrics is None else self._cached_metrics()

    @functools.cached_property
    def starts(self) -> Integers:
        """The index in `values` of the first number of each record, and the end of the last record."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    @functools.cached_property
    def ranks(self) -> Integers:
        """The number of elements before each of `values`, over all records, and the number of all elements."""
        totals = np.zeros(self.stored_counts.size + 1, dtype=np.int64)
        # Widened first: `cumsum` of narrow integers into an int64 array takes ten times as long.
        totals[1:] = self.stored_counts
        return np.cumsum(totals, out=totals)

    def tally(self, kind: str) -> Integers:
        """The column of `num_elements` or of one of `KINDS`."""
        column: Integers = self.tallies[:, 0 if kind == "num_elements" else 1 + KINDS.index(kind)]
        return column

    def end(self, name: str) -> Floats:
        """The column of one of `ENDS`."""
        column: Floats = self.ends[:, ENDS.index(name)]
        return column

    def statistic(self, name: str) -> Floats:
        """The column of one of `STATISTICS`."""
        column: Floats = self.statistics[:, STATISTICS.index(name)]
        return column

    def search(self, numbers: Floats, *, side: Literal["left", "right"]) -> Integers:
        """For each record, the index in `values` at which its number would be inserted, as by `numpy.searchsorted`."""
        low, high = self.starts[:-1].copy(), self.starts[1:].copy()
        while (is_open := low < high).any():
            middle = (low + high) // 2
            middle_values = self.values_at(np.where(is_open, middle, 0))
            is_before = is_open & (middle_values < numbers if side == "left" else middle_values <= numbers)
            low = np.where(is_before, middle + 1, low)
            high = np.where(is_open & ~is_before, middle, high)
        return low

    def count_between(self, low: Floats, high: Floats, *, closed: bool = True) -> Integers:
        """The number of elements of each record from `low` to `high`; the limits are included if `closed`."""
        if not self.sizes.any():
            return np.zeros(len(self), dtype=np.int64)
        first = self.ranks[self.search(low, side="left" if closed else "right")]
        last = self.ranks[self.search(high, side="right" if closed else "left")]
        between: Integers = np.maximum(0, last - first)
        return between

    def count(self, overflow_start: Floats, min_normal: Floats, flush_limit: Floats) -> dict[str, Integers]:
        """`upper`, `lower`, `underflow` and `flushed` against the limits given for each record: see `Digest.count`."""
        zeros = np.where(self.has_values, self.tally("zero"), 0)
        underflow = self.count_between(-min_normal, min_normal, closed=False) - np.where(min_normal > 0, zeros, 0)
        upper, lower = (np.zeros(len(self), dtype=np.int64) for _ in range(2))
        # Skips the searches if no record overflows, as after scaling to a format.
        if (self.end("maximum") >= overflow_start).any():
            upper = self.ranks[self.starts[1:]] - self.ranks[self.search(overflow_start, side="left")]
        if (self.end("minimum") <= -overflow_start).any():
            lower = self.ranks[self.search(-overflow_start, side="right")] - self.ranks[self.starts[:-1]]
        return {
            "upper": upper,
            "lower": lower,
            "underflow": underflow,
            "flushed": self.count_between(-flush_limit, flush_limit) - zeros,
        }

    def quantiles(self, probability: float | Fraction) -> Floats:
        """The quantile of each record, as in `Digest.quantiles`; NaN if there is no number."""
        fraction = Fraction(str(probability))
        totals = self.ranks[self.starts[1:]] - self.ranks[self.starts[:-1]]
        # In integers, as the float 0.999 times 1,000 is above 999; in integers of Python if int64 would overflow.
        is_long = fraction.numerator * int(totals.max(initial=0)) > np.iinfo(np.int64).max
        exact = totals.astype(object) if is_long else totals
        positions = (-(-exact * fraction.numerator // fraction.denominator)).astype(np.int64)
        positions = np.clip(positions, 1, np.maximum(totals, 1))
        index = np.searchsorted(self.ranks, self.ranks[self.starts[:-1]] + positions, side="left") - 1
        quantiles = np.full(len(self), math.nan)
        has_numbers = totals > 0
        quantiles[has_numbers] = self.values_at(index[has_numbers])
        return quantiles

    def pairs(self, row: int) -> tuple[Floats, Integers]:
        """The numbers of one record and their counts."""
        part = slice(int(self.starts[row]), int(self.starts[row + 1]))
        return self.values[part], self.counts[part]

    def digest(self, row: int) -> Digest:
        """The digest of one record."""
        extremes = (None if math.isnan(end) else end for end in self.ends[row].tolist())
        ends: dict[str, Any] = dict(zip(ENDS, extremes, strict=True))
        values, counts = self.pairs(row)
        samples = None
        if self.sample_sizes[row] >= 0:
            start = int(np.maximum(self.sample_sizes[:row], 0).sum())
            sample_rows = self.samples[start : start + int(self.sample_sizes[row])]
            samples = dict(zip(SAMPLE_METRICS, sample_rows.T, strict=True))
        return Digest(
            dtype=self.dtypes[row],
            statistics=Statistics.from_vector(self.statistics[row]),
            tallies=Tallies(
                **dict(zip(("num_elements", *KINDS), self.tallies[row].tolist(), strict=True)),
                **ends,
                per_sample=None,
            ),
            values=values,
            counts=counts,
            is_exact=bool(self.is_exact[row]),
            has_values=bool(self.has_values[row]),
            samples=samples,
        )

    def without_masks(self, is_mask: NDArray[np.bool_]) -> Digests:
        """The digests with -Inf not counted as overflow in the records that are masks."""
        if not is_mask.any():
            return self
        tallies = self.tallies.copy()
        lower, inf = (1 + KINDS.index(kind) for kind in ("lower", "inf"))
        tallies[is_mask, lower] -= tallies[is_mask, inf]

        def samples() -> Floats:
            corrected = self.samples.copy()
            is_masked = np.repeat(is_mask, np.maximum(self.sample_sizes, 0))
            corrected[is_masked, SAMPLE_METRICS.index("lower")] -= corrected[is_masked, SAMPLE_METRICS.index("inf")]
            return corrected

        return Digests(
            dtypes=self.dtypes,
            statistics=self.statistics,
            tallies=tallies,
            ends=self.ends,
            flags=np.stack([self.is_exact, self.has_values], axis=1),
            kinds=self._kinds,
            sizes=self.sizes,
            codes=lambda: self.codes,
            counts=lambda: self.stored_counts,
            sample_sizes=self.sample_sizes,
            samples=samples,
            cached_metrics=self._cached_metrics,
        )


@functools.cache
def numbers_of_patterns(dtype: np.dtype[Any]) -> Floats:
    """The number of each bit pattern of a dtype of at most 16 bits; zeros of both signs are 0."""
    with np.errstate(invalid="ignore"):
        numbers: Floats = pattern_values(dtype) + 0.0
    return numbers


def merge_tally_columns(tallies: Integers, ends: Floats, starts: Integers) -> tuple[Integers, Floats]:
    """The tallies and extremes of groups of consecutive rows; `starts` has the first row of each group."""
    with np.errstate(invalid="ignore"):
        smallest = np.fmin.reduceat(ends[:, [0, 3]], starts)
        largest = np.fmax.reduceat(ends[:, [1, 2]], starts)
    merged_ends = np.stack([smallest[:, 0], largest[:, 0], largest[:, 1], smallest[:, 1]], axis=1)
    return np.add.reduceat(tallies, starts), merged_ends


def merge_statistic_columns(statistics: Floats, starts: Integers) -> Floats:
    """The statistics of groups of consecutive rows: `merge_statistics` of the rows of each group."""
    columns = {name: statistics[:, column] for column, name in enumerate(STATISTICS)}
    owners = np.repeat(np.arange(len(starts)), np.diff([*starts, len(statistics)]))
    ends = {
        "minimum": np.fmin.reduceat(columns["minimum"], starts),
        "maximum": np.fmax.reduceat(columns["maximum"], starts),
        "absmax": np.fmax.reduceat(columns["absmax"], starts),
    }
    steps = exponents_of(columns["absmax"]) - exponents_of(ends["absmax"])[owners]
    sums = {name: np.ldexp(columns[name], power * steps) for name, power in POWERS.items()}
    counts = columns["num_finite"]
    # Sums that were stored without a division may be infinite.
    with np.errstate(over="ignore", invalid="ignore"):
        totals = np.add.reduceat(sums["sum"], starts)
        finite = np.add.reduceat(counts, starts)
        means = totals / np.maximum(1.0, finite)
        # From the mean m' of a part to the mean m: (x - m) = (x - m') + (m' - m), and the x - m' of a part sum to 0.
        shift = np.where(counts > 0, sums["sum"] / np.maximum(counts, 1) - means[owners], 0.0)
        second, third, fourth = (sums[f"moment_{power}"] for power in (2, 3, 4))
        shift_2 = shift * shift
        moments = [
            second + counts * shift_2,
            third + 3 * shift * second + counts * shift_2 * shift,
            fourth + 4 * shift * third + 6 * shift_2 * second + counts * shift_2 * shift_2,
        ]
        # If all values are equal, the moments would be rounding errors of their mean.
        is_constant = ends["minimum"] == ends["maximum"]
        merged = [np.where(is_constant, 0.0, np.add.reduceat(moment, starts)) for moment in moments]
        magnitudes = np.add.reduceat(sums["sum_magnitudes"], starts)
    elements = np.add.reduceat(columns["num_elements"], starts)
    stacked = np.stack([elements, finite, totals, *merged, magnitudes, *ends.values()], axis=1)
    is_single = np.diff([*starts, len(statistics)]) == 1
    stacked[is_single] = statistics[np.asarray(starts)[is_single]]
    return stacked


def exponents_of(absmax: Floats) -> Integers:
    """`Statistics.exponent` for each `absmax`."""
    exponents = np.frexp(np.nan_to_num(absmax))[1].astype(np.int64)
    return np.where(np.abs(exponents) > MAX_EXPONENT, exponents, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finite:
    """The finite numbers of a digest; for complex values, the larger part of each."""

    values: NDArray[np.float64]
    """The distinct numbers in ascending order."""
    counts: NDArray[np.int64]
    """Number of elements for each of `values`."""

    @property
    def minimum(self) -> float:
        """The smallest number; NaN if there is none."""
        return float(self.values[0]) if self.values.size else math.nan

    @property
    def maximum(self) -> float:
        """The largest number; NaN if there is none."""
        return float(self.values[-1]) if self.values.size else math.nan

    @property
    def num_values(self) -> int:
        """The number of finite elements."""
        return int(self.counts.sum())


def finite(digest: Digest) -> Finite:
    """The finite numbers of a digest; none if only statistics were stored.

    If the digest is not exact, each of `values` represents those just below it, too (see `Summary`).
    """
    is_finite = np.isfinite(digest.values) if digest.has_values else np.zeros(digest.values.size, dtype=bool)
    return Finite(values=digest.values[is_finite], counts=digest.counts[is_finite])


Part = TypeVar("Part")

SUMMARY_CELLS = 1 << 13
"""The cells of the summary of a record. Up to twice as many distinct values are stored exactly."""

MERGED_CELLS = 1 << 16
"""The cells of a summary while parts of a record, or records of a group, are merged."""

MAX_RANK_ERROR = 2.0**-10
"""The largest error of the fraction of values at or below a number.

An error is at most 2 / `SUMMARY_CELLS` plus 2 / `MERGED_CELLS` for each doubling of the number of parts, which are up
to 2**10 runs of each of up to 2**13 records.
"""

_REST = 44
"""Number of bits of a float64 after the first nine of its significand."""

_STEP = 16
"""Number of consecutive sorted values that are merged in one step."""


class Summary(NamedTuple):
    """Ascending numbers, the count of each, and whether they are exact.

    If they are not, some of the numbers also represent smaller ones that are close to them.
    """

    values: NDArray[np.float64]
    counts: NDArray[np.int64]
    is_exact: bool


def merge_summaries(parts: Sequence[Summary], *, num_cells: int = MERGED_CELLS) -> Summary:
    """Merge summaries; exact if the parts are and have at most twice as many distinct values as there are cells."""
    values = np.concatenate([part.values for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    order = np.argsort(values, kind="stable")
    return _thinned(values[order], counts[order], num_cells=num_cells, is_exact=all(part.is_exact for part in parts))


def push(stack: list[Part], part: Part, *, number: int, merge: Callable[[Sequence[Part]], Part]) -> None:
    """Push a part on a stack of merged parts and merge as a binary counter carries; `number` counts parts from 1.

    Each part is merged at most as often as the binary logarithm of the number of parts.
    """
    stack.append(part)
    while number % 2 == 0:
        stack[-2:] = [merge(stack[-2:])]
        number //= 2


class Summarizer:
    """Summarizes the values of arrays of any wide dtype; for complex values, the larger part of each."""

    def __init__(self) -> None:
        self._pending: list[NDArray[Any]] = []
        self._num_pending = 0
        self._stack: list[Summary] = []
        self._num_parts = 0

    def add(self, values: NDArray[Any]) -> None:
        """Add the values of an array."""
        real = (larger_part(values) if values.dtype.kind == "c" else values).reshape(-1)
        # Not `dtype.kind`: dtypes of ml_dtypes may have that of floats, but numpy does not sort their NaN last.
        flat = real if real.dtype in (np.float32, np.float64) else real.astype(np.float64)
        for start in range(0, flat.size, RUN):
            piece = flat[start : start + RUN]
            if self._num_pending + piece.size > RUN:
                self._sort()
            self._pending.append(piece)
            self._num_pending += piece.size

    def summary(self) -> Summary:
        """The summary of all values that were added."""
        self._sort()
        return merge_summaries([_EMPTY, *self._stack], num_cells=SUMMARY_CELLS)

    def _sort(self) -> None:
        if not self._pending:
            return
        ascending = np.sort(np.concatenate(self._pending))
        self._pending.clear()
        self._num_pending = 0
        self._num_parts += 1
        numbers = ascending[: np.searchsorted(ascending, np.inf, side="right")]
        push(self._stack, _summarize(numbers), number=self._num_parts, merge=merge_summaries)


_EMPTY = Summary(np.zeros(0), np.zeros(0, dtype=np.int64), is_exact=True)


def _summarize(ascending: NDArray[Any]) -> Summary:
    """The summary of ascending numbers."""
    is_representative = np.append(ascending[1:] != ascending[:-1], np.ones(min(1, ascending.size), dtype=np.bool_))
    is_exact = int(np.count_nonzero(is_representative)) <= 2 * MERGED_CELLS
    if not is_exact:
        # Merges whole rows of close values at once: far fewer steps than merging single values.
        rows = ascending[: ascending.size // _STEP * _STEP].reshape(-1, _STEP)
        is_close = _groups(rows[:, 0]) == _groups(rows[:, -1])
        is_representative[: rows.size].reshape(rows.shape)[is_close] = np.arange(_STEP) == _STEP - 1
        is_representative[:2] = True  # as `thin` does
    (indices,) = np.nonzero(is_representative)
    values, counts = ascending[indices].astype(np.float64), np.diff(indices, prepend=-1)
    return _thinned(values, counts, num_cells=MERGED_CELLS, is_exact=is_exact)


def _groups(values: NDArray[Any]) -> NDArray[np.int64]:
    """The group of each value: one for each number with nine significant bits, one for all values between two."""
    bits = values.astype(np.float64).view(np.int64)
    groups: NDArray[np.int64] = (bits >> _REST << 1) | ((bits & ((1 << _REST) - 1)) != 0)
    return groups


def _thinned(values: NDArray[np.float64], counts: NDArray[np.int64], *, num_cells: int, is_exact: bool) -> Summary:
    """The summary of ascending values, which may repeat."""
    if not values.size:
        return Summary(values, counts, is_exact)
    # Zeros of both signs become one 0.
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    distinct, sums = values[starts] + 0.0, np.add.reduceat(counts, starts)
    if starts.size <= 2 * num_cells:
        return Summary(distinct, sums, is_exact)
    num_values, num_merged = thin(distinct, sums, _groups(distinct), num_cells)
    return Summary(distinct[:num_values], sums[:num_values].copy(), is_exact and not num_merged)
