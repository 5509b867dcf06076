"""Counts the elements of a tensor: how often each bit pattern occurs, and how many are beyond a limit.

Every element is read once, by kernels that release the GIL and count in integers, so that the counts are the same for
any memory layout. The writer process loads this module, so it imports neither torch nor zarr.

A complex element is counted once, by the part with the larger magnitude (the real part on a tie) and against the limits
of the dtype of its parts. It is NaN if either part is.
"""

# Shapes: O = all dimensions before that of samples, S = samples, I = all after it, P = patterns, K = kinds of tallies.

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.kernels import BLOCK, compiled
from ranktape.analyze.numerics.pieces import contiguous, frozen, map_in_threads, memory_order, num_threads, pieces
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import HALF_NBYTES, dtype_name, dtype_row
from ranktape.storage.format.record_info import TALLY_KINDS, ElementTally, Overflow

if TYPE_CHECKING:
    from ranktape.analyze.numerics.formats import Format

AnyArray = NDArray[Any]
Extremes = tuple[float | None, float | None, float | None, float | None]
"""`minimum`, `maximum`, `largest_finite` and `smallest_nonzero` of `Tallies`."""

KINDS = ("upper", "lower", "underflow", "flushed", "nan", "inf", "zero")
"""The counts of a scan, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits against which elements are counted, as magnitudes."""

    overflow_start: float
    """Smallest magnitude that overflows."""
    min_normal: float
    """Smallest magnitude that is not subnormal; 0 if there are no subnormals."""
    flush_limit: float
    """Largest magnitude that becomes zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tallies:
    """The counts and extremes of one pass over a tensor; an extreme is None if there is no such number."""

    num_elements: int
    """Number of all elements."""
    upper: int
    """Number of positive elements at or beyond `Limits.overflow_start`, infinities included."""
    lower: int
    """Number of negative elements at or beyond `Limits.overflow_start` in magnitude, infinities included."""
    underflow: int
    """Number of nonzero elements below `Limits.min_normal` in magnitude."""
    flushed: int
    """Number of nonzero elements at or below `Limits.flush_limit` in magnitude; part of `underflow`."""
    nan: int
    """Number of NaN, which are in no other count."""
    inf: int
    """Number of infinities of either sign."""
    zero: int
    """Number of zeros of either sign."""
    minimum: float | None
    """Smallest number, infinities included."""
    maximum: float | None
    """Largest number, infinities included."""
    largest_finite: float | None
    """Largest finite magnitude."""
    smallest_nonzero: float | None
    """Smallest finite magnitude that is not zero."""
    per_sample: dict[str, list[int]] | None
    """For each of `KINDS`, the count of each sample; None if there is no dimension of samples."""

    @property
    def absmax(self) -> float | None:
        """Largest magnitude, infinities included."""
        if self.minimum is None or self.maximum is None:
            return None
        return max(abs(self.minimum), abs(self.maximum))

    @property
    def num_finite(self) -> int:
        """Number of elements that are neither NaN nor infinite."""
        return self.num_elements - self.nan - self.inf


@compiled
def _count(patterns_OSI: NDArray[Any], counts_SP: NDArray[np.int64]) -> None:
    """Add the number of occurrences of each pattern to the counts of each sample."""
    for before in range(patterns_OSI.shape[0]):
        for sample in range(patterns_OSI.shape[1]):
            counts = counts_SP[sample]
            for pattern in patterns_OSI[before, sample]:
                counts[pattern] += 1


@compiled
def _scan_keys(keys_OSI: NDArray[Any], marks: NDArray[Any], counts_SK: NDArray[np.int64], ends: NDArray[Any]) -> None:
    """Count the elements of each sample by kind, and extend the ends to include all elements.

    Elements are the bit patterns of an IEEE type as signed integers. `marks` are the result of `_marks`. Counts are in
    the order of `KINDS`. The ends are the smallest and the largest key, and the largest finite and the smallest nonzero
    magnitude.
    """
    as_key = keys_OSI.dtype.type
    infinity, overflow, normal, unflushed, top = marks
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
                    flushed = as_key(flushed + (magnitude < unflushed))
                    nan = as_key(nan + (not is_number))
                    inf = as_key(inf + (magnitude == infinity))
                    zero = as_key(zero + is_zero)
                    # Keys in the order of the values; zeros of both signs are 0.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How often each bit pattern of an 8- or 16-bit dtype occurs in a tensor."""

    dtype: np.dtype[Any]
    """The dtype of the elements."""
    counts: NDArray[np.int64]
    """Number of elements for each pattern, as an unsigned integer; shape (256,) or (65536,)."""

    def __add__(self, other: Histogram) -> Histogram:
        """The histogram of the elements of both, which must have the same dtype."""
        assert self.dtype == other.dtype
        return Histogram(dtype=self.dtype, counts=self.counts + other.counts)

    def pairs(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The values that occur and their counts, in the order of their patterns, NaN patterns included."""
        (patterns,) = np.nonzero(self.counts)
        return pattern_values(self.dtype)[patterns], self.counts[patterns]

    def magnitudes(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The magnitudes that occur and their counts; values of either sign are merged if the dtype has a sign bit."""
        half = self.counts.size // 2
        if not _has_sign_bit(self.dtype):
            values, counts = self.pairs()
            return np.abs(values), counts
        merged = self.counts[:half] + self.counts[half:]
        (patterns,) = np.nonzero(merged)
        return pattern_values(self.dtype)[patterns], merged[patterns]


def count_values(array: AnyArray, *, threads: int | None = 1) -> Histogram:
    """The histogram of an array of any shape and layout with a dtype of at most 16 bits, without a copy of the array.

    `threads` does not change the counts. If it is None, there is one thread per core.

    Raises:
        UsageError: the dtype is wider or not one of records, the byte order is big-endian, or `threads` is less than 1.
    """
    dtype_name(array.dtype)  # raises if it is not in `DTYPES`
    if array.dtype.itemsize > HALF_NBYTES:
        raise UsageError(f"{array.dtype} has too many patterns to count: use a type of at most 16 bits")
    unsigned = np.uint8 if array.dtype.itemsize == 1 else np.uint16
    ordered, _ = memory_order(array.reshape(1) if array.ndim == 0 else array, axis=0)
    parts = pieces(ordered, axis=0, block_size=1)
    num_workers = max(1, min(num_threads(threads), len(parts)))
    shares = [parts[number::num_workers] for number in range(num_workers)]

    def count_share(share: list[AnyArray]) -> NDArray[np.int64]:
        counts: NDArray[np.int64] = np.zeros((1, 1 << 8 * array.dtype.itemsize), dtype=np.int64)
        for part in share:
            _count(frozen(contiguous(part).view(unsigned), shape=(1, 1, part.size)), counts)
        return counts.reshape(-1)

    return Histogram(dtype=array.dtype, counts=np.sum(map_in_threads(count_share, shares, threads=num_workers), axis=0))


@functools.cache
def pattern_values(dtype: np.dtype[Any]) -> NDArray[np.float64]:
    """The value of every bit pattern of an 8- or 16-bit dtype, in the order of the patterns as unsigned integers."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    patterns = np.arange(1 << 8 * dtype.itemsize, dtype=unsigned)
    with np.errstate(invalid="ignore"):
        values: NDArray[np.float64] = (patterns != 0 if dtype == np.bool_ else patterns.view(dtype)).astype(np.float64)
    values.flags.writeable = False
    return values


@functools.cache
def _has_sign_bit(dtype: np.dtype[Any]) -> bool:
    values = pattern_values(dtype)
    half = values.size // 2
    return np.array_equal(values[:half], -values[half:], equal_nan=True)


@functools.cache
def dtype_limits(dtype: np.dtype[Any]) -> Limits:
    """The limits of a dtype: only infinities overflow, nothing is flushed, and integers have no subnormals.

    Raises:
        UsageError: the dtype is not one of records.
    """
    row = dtype_row(dtype_name(dtype))
    if not row.is_floating and not row.is_complex:
        return Limits(overflow_start=np.inf, min_normal=0.0, flush_limit=0.0)
    smallest_normal = ml_dtypes.finfo(dtype).smallest_normal  # type: ignore[no-untyped-call]
    return Limits(overflow_start=np.inf, min_normal=float(smallest_normal), flush_limit=0.0)


def format_limits(row: Format, *, exponent: int = 0) -> Limits:
    """The limits of a format for values that are divided by 2**`exponent`, as limits of the undivided values.

    A limit outside the range of float64 becomes infinity or 0.
    """
    with np.errstate(over="ignore", under="ignore"):
        ends = np.ldexp([row.overflow_start, row.min_normal, row.flush_limit], exponent).tolist()
    return Limits(overflow_start=ends[0], min_normal=ends[1], flush_limit=ends[2])


def measure(array: AnyArray, *, sample_dim: int | None) -> Overflow:
    """Count the elements of an array of any shape and layout against the limits of its dtype, also for each sample.

    NaN counts only as NaN. An empty array has counts and ratios of 0 and no extremes. Extremes of 64-bit integers are
    rounded to float64.

    Raises:
        UsageError: the dtype is not one of records, or the array has no dimension `sample_dim`.
    """
    tallies = scan(array, limits=dtype_limits(array.dtype), sample_dim=sample_dim)
    total = max(1, tallies.num_elements)
    per_sample = tallies.per_sample
    return Overflow(
        **{
            kind: ElementTally(count=getattr(tallies, kind), ratio=getattr(tallies, kind) / total)
            for kind in TALLY_KINDS
        },
        minimum=tallies.minimum,
        maximum=tallies.maximum,
        absmax=tallies.absmax,
        per_sample=None if per_sample is None else {kind: per_sample[kind] for kind in TALLY_KINDS},
    )


def scan(array: AnyArray, *, limits: Limits, sample_dim: int | None = None) -> Tallies:
    """Count the elements of an array of any shape and layout against limits, in one pass.

    NaN counts only as NaN. Infinities are beyond every limit.

    Raises:
        UsageError: the dtype is not one of records, or the array has no dimension `sample_dim`.
    """
    row = dtype_row(dtype_name(array.dtype))
    if sample_dim is not None and not 0 <= sample_dim < array.ndim:
        raise UsageError(f"sample_dim={sample_dim} is not a dimension of an array of shape {array.shape}")
    shape_OSI = _shape_by_sample(array.shape, sample_dim=sample_dim)
    if row.itemsize == 1:
        tallies = _scan_bytes(array, shape_OSI=shape_OSI, limits=limits)
    elif row.is_floating:
        tallies = _scan_floats(array, shape_OSI=shape_OSI, limits=limits)
    elif row.is_complex:
        tallies = _scan_floats(larger_part(array), shape_OSI=shape_OSI, limits=limits)
    else:
        tallies = _scan_floats(array.astype(np.float64), shape_OSI=shape_OSI, limits=limits)
    return tallies if sample_dim is not None else dataclasses.replace(tallies, per_sample=None)


def scan_histogram(histogram: Histogram, *, limits: Limits) -> Tallies:
    """The result of `scan` for the array of the histogram, without counts of samples."""
    tallies = _scan_counts(histogram.counts.reshape(1, -1), dtype=histogram.dtype, limits=limits)
    return dataclasses.replace(tallies, per_sample=None)


def _shape_by_sample(shape: tuple[int, ...], *, sample_dim: int | None) -> tuple[int, int, int]:
    """The three-dimensional shape (before, samples, after) of an array in C order."""
    if sample_dim is None:
        return 1, 1, int(np.prod(shape, dtype=np.int64))
    before, after = shape[:sample_dim], shape[sample_dim + 1 :]
    return int(np.prod(before, dtype=np.int64)), shape[sample_dim], int(np.prod(after, dtype=np.int64))


def larger_part(array: AnyArray) -> AnyArray:
    """The part of each complex element with the larger magnitude, the real part on a tie; NaN if either part is."""
    real, imaginary = array.real, array.imag
    larger = np.where(np.abs(real) >= np.abs(imaginary), real, imaginary)
    return np.where(np.isnan(real) | np.isnan(imaginary), real.dtype.type(np.nan), larger)


def _tallies(counts_SK: NDArray[np.int64], *, num_elements: int, extremes: Extremes) -> Tallies:
    minimum, maximum, largest_finite, smallest_nonzero = extremes
    return Tallies(
        **dict(zip(KINDS, counts_SK.sum(axis=0).tolist(), strict=True)),
        num_elements=num_elements,
        minimum=minimum,
        maximum=maximum,
        largest_finite=largest_finite,
        smallest_nonzero=smallest_nonzero,
        per_sample=dict(zip(KINDS, counts_SK.T.tolist(), strict=True)),
    )


def _extremes(values: NDArray[np.float64]) -> Extremes:
    numbers = values[~np.isnan(values)]
    finite = np.abs(numbers[np.isfinite(numbers)])
    nonzero = finite[finite > 0]
    return (
        float(numbers.min()) if numbers.size else None,
        float(numbers.max()) if numbers.size else None,
        float(finite.max()) if finite.size else None,
        float(nonzero.min()) if nonzero.size else None,
    )


def _scan_bytes(array: AnyArray, *, shape_OSI: tuple[int, int, int], limits: Limits) -> Tallies:
    counts_SP = np.zeros((shape_OSI[1], pattern_values(array.dtype).size), dtype=np.int64)
    _count(frozen(contiguous(array).view(np.uint8), shape=shape_OSI), counts_SP)
    return _scan_counts(counts_SP, dtype=array.dtype, limits=limits)


def _scan_counts(counts_SP: NDArray[np.int64], *, dtype: np.dtype[Any], limits: Limits) -> Tallies:
    values_P = pattern_values(dtype)
    magnitude_P, is_nan_P = np.abs(values_P), np.isnan(values_P)
    is_over_P = ~is_nan_P & (magnitude_P >= limits.overflow_start)
    is_nonzero_P = ~is_nan_P & (magnitude_P > 0)
    kinds_PK = np.column_stack(
        (
            is_over_P & (values_P > 0),
            is_over_P & (values_P < 0),
            is_nonzero_P & (magnitude_P < limits.min_normal),
            is_nonzero_P & (magnitude_P <= limits.flush_limit),
            is_nan_P,
            np.isinf(values_P),
            values_P == 0,
        )
    ).astype(np.int64)
    occurs_P = counts_SP.any(axis=0)
    extremes = _extremes(values_P[occurs_P])
    return _tallies(counts_SP @ kinds_PK, num_elements=int(counts_SP.sum()), extremes=extremes)


def _scan_floats(array: AnyArray, *, shape_OSI: tuple[int, int, int], limits: Limits) -> Tallies:
    signed = np.dtype(f"i{array.dtype.itemsize}")
    marks = _marks(array.dtype, limits)
    top = np.iinfo(signed).max
    counts_SK = np.zeros((shape_OSI[1], len(KINDS)), dtype=np.int64)
    ends = np.array([top, ~top, -1, top], dtype=signed)
    _scan_keys(frozen(contiguous(array).view(signed), shape=shape_OSI), marks, counts_SK, ends)
    smallest, largest, largest_finite, smallest_nonzero = ends.tolist()
    has_numbers = smallest <= largest

    def value(key: int) -> float:
        magnitude = float(np.array([abs(key)], dtype=signed).view(array.dtype).astype(np.float64)[0])
        return -magnitude if key < 0 else magnitude

    return _tallies(
        counts_SK,
        num_elements=array.size,
        extremes=(
            value(smallest) if has_numbers else None,
            value(largest) if has_numbers else None,
            value(largest_finite) if largest_finite >= 0 else None,
            value(smallest_nonzero) if smallest_nonzero < top else None,
        ),
    )


@functools.lru_cache(maxsize=256)
def _marks(dtype: np.dtype[Any], limits: Limits) -> AnyArray:
    """The lowest patterns that are infinite, overflow, are normal and are not flushed, and the mask of the magnitude.

    The patterns of an IEEE type are in the order of their magnitudes, so that a pattern can represent a limit.
    """
    signed = np.dtype(f"i{dtype.itemsize}")

    def first_pattern(limit: float, *, is_beyond: bool = False) -> int:
        """The pattern of the smallest magnitude at or beyond the limit; beyond it if `is_beyond`."""
        with np.errstate(over="ignore"):
            nearest = np.array([limit], dtype=np.float64).astype(dtype)
        value = float(nearest.astype(np.float64)[0])
        return int(nearest.view(signed)[0]) + (value < limit or (is_beyond and value == limit))

    marks = np.array(
        [
            first_pattern(np.inf),
            first_pattern(limits.overflow_start),
            max(1, first_pattern(limits.min_normal)),
            first_pattern(limits.flush_limit, is_beyond=True),
            np.iinfo(signed).max,
        ],
        dtype=signed,
    )
    marks.flags.writeable = False
    return marks
