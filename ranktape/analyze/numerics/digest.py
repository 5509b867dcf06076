"""Gives the summary of a tensor that questions are answered from, its finite values, and the summary of its quantiles.

Values of a wide type are thinned to as many as can be kept. Each value that is kept occurs in the tensor, and stands
for those just below it. However many parts are merged, the part of the values at or below any number is known to
`MAX_RANK_ERROR`, and no value is moved past a number of nine significant bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.digest_kernels import thin
from ranktape.analyze.numerics.histograms.histogram import Limits, Tallies, larger_part
from ranktape.storage.format.parts import RUN
from ranktape.storage.format.statistics import Statistics

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
"""What is known of each sample: counts against the limits of the dtype, and metrics of its finite values."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Digest:
    """All that questions about single values need to know of a record, or of several together."""

    dtype: str
    """What the values were looked at as, in torch's words; several with spaces between, of several records."""
    statistics: Statistics
    """What the finite values add up to, exactly."""
    tallies: Tallies
    """Counts against the limits of their own dtype, exactly."""
    values: NDArray[np.float64]
    """The numbers that occur, infinities among them and NaN not, ascending; zeros of both signs are one."""
    counts: NDArray[np.int64]
    """How often each of `values` occurs."""
    is_exact: bool
    """Whether `values` are all that were recorded, and none stands for others: `Summary`."""
    has_values: bool = True
    """Whether `values` are known: where statistics alone were kept they are not."""
    samples: dict[str, NDArray[Any]] | None = None
    """For each of `SAMPLE_METRICS` one number for each sample, NaN where there is none; None without samples."""

    def count(self, limits: Limits) -> Tallies:
        """Counts against other limits: exact where `is_exact`, or where these have at most eight significant bits."""
        magnitudes = np.abs(self.values)
        is_over = magnitudes >= limits.overflow_start
        is_nonzero = magnitudes > 0

        def total(mask: NDArray[np.bool_]) -> int:
            return int(self.counts[mask].sum())

        return dataclasses.replace(
            self.tallies,
            upper=total(is_over & (self.values > 0)),
            lower=total(is_over & (self.values < 0)),
            underflow=total(is_nonzero & (magnitudes < limits.min_normal)),
            flushed=total(is_nonzero & (magnitudes <= limits.flush_limit)),
            per_sample=None,
        )

    def quantiles(self, probabilities: Sequence[float | Fraction]) -> list[float | None]:
        """The smallest numbers below or at which such a part of all numbers lies; None where there is no number.

        NaN is no number, infinities are. A float is the decimal number as which it is written: 0.999 of 1,000 are 999.
        As `numpy.quantile(..., method="inverted_cdf")`, which does without exact parts.
        """
        if not self.counts.size:
            return [None] * len(probabilities)
        ends = np.cumsum(self.counts)
        total = int(ends[-1])
        places = [min(max(math.ceil(Fraction(str(part)) * total), 1), total) for part in probabilities]
        return [float(self.values[index]) for index in np.searchsorted(ends, places)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finite:
    """The finite numbers of a digest; of complex values, the larger part of each."""

    values: NDArray[np.float64]
    """Those that occur, ascending."""
    counts: NDArray[np.int64]
    """How often each of `values` occurs."""

    @property
    def minimum(self) -> float:
        """The smallest; NaN where there is none."""
        return float(self.values[0]) if self.values.size else math.nan

    @property
    def maximum(self) -> float:
        """The largest; NaN where there is none."""
        return float(self.values[-1]) if self.values.size else math.nan

    @property
    def num_values(self) -> int:
        """How many numbers there are, each as often as it occurs."""
        return int(self.counts.sum())


def finite(digest: Digest) -> Finite:
    """The finite numbers of a digest: none where it has none, or where statistics alone were kept.

    Where the digest is not exact, each of `values` stands for those just below it, too: `Summary`.
    """
    is_finite = np.isfinite(digest.values) if digest.has_values else np.zeros(digest.values.size, dtype=bool)
    return Finite(values=digest.values[is_finite], counts=digest.counts[is_finite])


Part = TypeVar("Part")

KEPT_CELLS = 1 << 13
"""Of a record: up to twice as many different values are kept as they are."""

MERGED_CELLS = 1 << 16
"""The same while parts of a record, or records of a group, are put together."""

MAX_RANK_ERROR = 2.0**-10
"""2 / `KEPT_CELLS`, and 2 / `MERGED_CELLS` for each doubling of the parts: 2**10 runs of a record, 2**13 records."""

_REST = 44
"""Bits of a float64 behind the first nine of its significand."""

_STEP = 16
"""Neighbours in order that are looked at together."""


class Summary(NamedTuple):
    """Ascending numbers, how often each occurs, and whether none stands for another."""

    values: NDArray[np.float64]
    counts: NDArray[np.int64]
    is_exact: bool


def merge_summaries(parts: Sequence[Summary], *, num_cells: int = MERGED_CELLS) -> Summary:
    """The summary of all parts together, exact as long as there are no more than twice as many values as cells."""
    values = np.concatenate([part.values for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    order = np.argsort(values, kind="stable")
    return _thinned(values[order], counts[order], num_cells=num_cells, is_exact=all(part.is_exact for part in parts))


def push(stack: list[Part], part: Part, *, number: int, merge: Callable[[Sequence[Part]], Part]) -> None:
    """Put the part of that number, counted from 1, on a stack of merged ones, as a binary counter carries.

    No part is merged more often than the logarithm of their number says.
    """
    stack.append(part)
    while number % 2 == 0:
        stack[-2:] = [merge(stack[-2:])]
        number //= 2


class Summarizer:
    """Summarizes the values of arrays of any wide type; of complex values the larger part, as everywhere."""

    def __init__(self) -> None:
        self._waiting: list[NDArray[Any]] = []
        self._num_waiting = 0
        self._stack: list[Summary] = []
        self._num_parts = 0

    def add(self, values: NDArray[Any]) -> None:
        """Add the values of an array."""
        real = (larger_part(values) if values.dtype.kind == "c" else values).reshape(-1)
        # Not by the kind: a type of ml_dtypes may have that of a float, and numpy does not sort its NaN last.
        flat = real if real.dtype in (np.float32, np.float64) else real.astype(np.float64)
        for start in range(0, flat.size, RUN):
            piece = flat[start : start + RUN]
            if self._num_waiting + piece.size > RUN:
                self._sort()
            self._waiting.append(piece)
            self._num_waiting += piece.size

    def summary(self) -> Summary:
        """The summary of all that was added."""
        self._sort()
        return merge_summaries([_NOTHING, *self._stack], num_cells=KEPT_CELLS)

    def _sort(self) -> None:
        if not self._waiting:
            return
        ascending = np.sort(np.concatenate(self._waiting))
        self._waiting.clear()
        self._num_waiting = 0
        self._num_parts += 1
        numbers = ascending[: np.searchsorted(ascending, np.inf, side="right")]
        push(self._stack, _summary_of(numbers), number=self._num_parts, merge=merge_summaries)


_NOTHING = Summary(np.zeros(0), np.zeros(0, dtype=np.int64), is_exact=True)


def _summary_of(ascending: NDArray[Any]) -> Summary:
    """The summary of ascending numbers."""
    is_kept = np.append(ascending[1:] != ascending[:-1], np.ones(min(1, ascending.size), dtype=np.bool_))
    is_exact = int(np.count_nonzero(is_kept)) <= 2 * MERGED_CELLS
    if not is_exact:
        # A few at once where they are close: far fewer steps than one by one.
        rows = ascending[: ascending.size // _STEP * _STEP].reshape(-1, _STEP)
        is_close = _groups(rows[:, 0]) == _groups(rows[:, -1])
        is_kept[: rows.size].reshape(rows.shape)[is_close] = np.arange(_STEP) == _STEP - 1
        is_kept[:2] = True  # as `thin` does
    (places,) = np.nonzero(is_kept)
    values, counts = ascending[places].astype(np.float64), np.diff(places, prepend=-1)
    return _thinned(values, counts, num_cells=MERGED_CELLS, is_exact=is_exact)


def _groups(values: NDArray[Any]) -> NDArray[np.int64]:
    """The same number for all values between two neighbours of nine significant bits, another for each of these."""
    bits = values.astype(np.float64).view(np.int64)
    groups: NDArray[np.int64] = (bits >> _REST << 1) | ((bits & ((1 << _REST) - 1)) != 0)
    return groups


def _thinned(values: NDArray[np.float64], counts: NDArray[np.int64], *, num_cells: int, is_exact: bool) -> Summary:
    """The summary of ascending values, which are overwritten."""
    kept, num_merged = thin(values, counts, _groups(values), 0)
    if kept > 2 * num_cells:
        kept, num_merged = thin(values[:kept], counts[:kept], _groups(values[:kept]), num_cells)
    # Both zeros are one, and are written as 0.
    return Summary(values[:kept] + 0.0, counts[:kept].copy(), is_exact and not num_merged)
