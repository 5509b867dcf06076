"""Gives the summary of a tensor that questions are answered from, and its finite values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.numerics.histograms.histogram import Limits, Tallies

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    """Whether `values` are all that were recorded, and none stands for others: `quantile_summary`."""
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

    def quantiles(self, probabilities: Sequence[float]) -> list[float | None]:
        """The smallest numbers below or at which such a part of all numbers lies; None where there is no number.

        NaN is no number, infinities are. As `numpy.quantile(..., method="inverted_cdf")`.
        """
        if not self.counts.size:
            return [None] * len(probabilities)
        ends = np.cumsum(self.counts)
        total = int(ends[-1])
        places = [min(max(math.ceil(part * total), 1), total) for part in probabilities]
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

    Where the digest is not exact, each of `values` stands for those just below it, too: `quantile_summary`.
    """
    is_finite = np.isfinite(digest.values) if digest.has_values else np.zeros(digest.values.size, dtype=bool)
    return Finite(values=digest.values[is_finite], counts=digest.counts[is_finite])
