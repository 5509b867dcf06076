"""The named metrics of a tensor, which any question can use."""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.digest import Digest, Digests, exponents_of, numbers_of_patterns
from ranktape.analyze.numerics.formats import FORMATS, Format
from ranktape.analyze.table import Column, Kind
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import numpy_dtype
from ranktape.storage.format.record_info import EXTREMES

PERCENTILES = ("0.1", "1", "5", "25", "50", "75", "95", "99", "99.9")
"""The percentiles that have a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number that is computed from a digest."""

    name: str
    """Its name everywhere; the name in the catalogue if it is there."""
    kind: Kind
    """The kind of number, which determines the format in text."""
    head: str
    """Heading of its column in text."""
    compute: Callable[[Digests], NDArray[np.float64]]
    """Computes the metric of each of many digests; NaN if it has none."""
    needs_values: bool = False
    """Whether it depends on the distinct numbers, not only on sums and counts."""

    def of(self, digest: Digest) -> float | None:
        """The metric of one digest; None if it has none."""
        value = float(self.compute(Digests.of(digest))[0])
        if math.isnan(value):
            return None
        return int(value) if self.kind is Kind.INTEGER else value

    def column(self, *, is_detail: bool = False) -> Column:
        """The column of a table for the metric."""
        return Column(name=self.name, kind=self.kind, head=self.head, is_detail=is_detail)


def parse_metric(name: str) -> Metric:
    """The metric with a name: one of `METRICS` or any percentile, such as `p99.5`.

    Raises:
        UsageError: there is no such metric. The message names the nearest ones.
    """
    if name in METRICS:
        return METRICS[name]
    percent = re.fullmatch(r"p(\d+(?:\.\d+)?)", name)
    if percent is not None and float(percent[1]) <= 100:  # noqa: PLR2004 - percent
        return _percentile(percent[1])
    nearest = difflib.get_close_matches(name, METRICS, n=3) or [metric for metric in METRICS if name and name in metric]
    hint = f"use {' or '.join(nearest)}" if nearest else f"use one of {', '.join(METRICS)}, or any percentile as p99.5"
    raise UsageError(f"no metric {name!r}: {hint}")


def is_percentile(name: str) -> bool:
    """Whether a metric is a percentile, which is not exact if the digest is not."""
    return re.fullmatch(r"p[\d.]+", name) is not None


def _finite_or_nan(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.isfinite(values), values, math.nan)


def _size(digests: Digests, divided: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale `divided` by 2**exponent and limit it to the largest magnitude; NaN if there is none."""
    absmax = digests.statistic("absmax")
    with np.errstate(over="ignore"):
        scaled = np.fmin(np.ldexp(divided, exponents_of(absmax)), absmax)
    return np.where(np.isnan(absmax) | ~np.isfinite(divided), math.nan, scaled)


def _per_finite(digests: Digests, name: str) -> NDArray[np.float64]:
    return digests.statistic(name) / np.maximum(1, digests.statistic("num_finite"))


def _mean(digests: Digests) -> NDArray[np.float64]:
    sums, minimum, maximum = (digests.statistic(name) for name in ("sum", "minimum", "maximum"))
    with np.errstate(over="ignore"):
        mean = np.ldexp(_per_finite(digests, "sum"), exponents_of(digests.statistic("absmax")))
    return np.where(np.isfinite(sums), np.minimum(np.maximum(mean, minimum), maximum), math.nan)


def _divided_std(digests: Digests) -> NDArray[np.float64]:
    return np.sqrt(_per_finite(digests, "moment_2"))


def _variance(digests: Digests) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):
        variance = np.ldexp(_per_finite(digests, "moment_2"), 2 * exponents_of(digests.statistic("absmax")))
    is_representable = np.isfinite(variance) & ((variance >= _MIN_NORMAL) | (digests.statistic("moment_2") == 0))
    return np.where(is_representable & (digests.statistic("num_finite") > 0), variance, math.nan)


def _rms(digests: Digests) -> NDArray[np.float64]:
    return _size(digests, np.hypot(_divided_std(digests), _per_finite(digests, "sum")))


def _norm(digests: Digests) -> NDArray[np.float64]:
    finite = digests.statistic("num_finite")
    with np.errstate(over="ignore"):
        return np.where(finite > 0, _finite_or_nan(_rms(digests) * np.sqrt(finite)), 0.0)


def _standardised(digests: Digests, *, power: int) -> NDArray[np.float64]:
    std = _divided_std(digests)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        parts = _per_finite(digests, f"moment_{power}") / std / std**2 / std ** (power - 3)
    return np.where(std > 0, _finite_or_nan(parts), math.nan)


_STATISTICS: dict[str, Callable[[Digests], NDArray[np.float64]]] = {
    "mean": _mean,
    "std": lambda digests: _size(digests, _divided_std(digests)),
    "variance": _variance,
    **{
        name: functools.partial(lambda digests, name: digests.statistic(name), name=name)
        for name in ("minimum", "maximum", "absmax")
    },
    "mean_magnitude": lambda digests: _size(digests, _per_finite(digests, "sum_magnitudes")),
    "rms": _rms,
    "norm": _norm,
    "skewness": functools.partial(_standardised, power=3),
    "kurtosis": functools.partial(_standardised, power=4),
}
"""The properties of `Statistics` as functions of columns."""

_MIN_NORMAL = 2.0**-1022


def has_percentiles(digests: Digests) -> NDArray[np.bool_]:
    """Whether each record has known real values: false for complex values and for stored statistics."""
    return digests.has_values & np.array(["complex" not in name for name in digests.dtypes], dtype=np.bool_)


def _percentile(percent: str) -> Metric:
    name = f"p{Decimal(percent).normalize():f}"

    def quantile(digests: Digests) -> NDArray[np.float64]:
        return np.where(has_percentiles(digests), digests.quantiles(Fraction(percent) / 100), math.nan)

    return Metric(name=name, kind=Kind.FLOAT, head=name, compute=quantile, needs_values=True)


def count_names(kind: str) -> tuple[str, str]:
    """The names of the count of a kind and of its ratio to all elements. Those of the total are as in the catalogue."""
    if kind == "total":
        return "overflow.total", "overflow.ratio"
    return f"overflow.{kind}.count", f"overflow.{kind}.ratio"


def _counts(digests: Digests, kind: str) -> NDArray[np.float64]:
    counts = digests.tally("upper") + digests.tally("lower") if kind == "total" else digests.tally(kind)
    return counts.astype(np.float64)


def _tally(kind: str, head: str) -> tuple[Metric, Metric]:
    def ratio(digests: Digests) -> NDArray[np.float64]:
        return _counts(digests, kind) / np.maximum(1, digests.tally("num_elements"))

    names = count_names(kind)
    count = functools.partial(_counts, kind=kind)
    return (
        Metric(name=names[0], kind=Kind.INTEGER, head=f"{head} count", compute=count),
        Metric(name=names[1], kind=Kind.RATIO, head=head, compute=ratio),
    )


def _extreme(digests: Digests, name: str) -> NDArray[np.float64]:
    if name == "absmax":
        return np.maximum(np.abs(digests.end("minimum")), np.abs(digests.end("maximum")))
    return digests.end(name)


def _smallest_nonzero(digests: Digests) -> NDArray[np.float64]:
    # If only some parts have known values, the metric of the whole is unknown.
    return np.where(digests.has_values, digests.end("smallest_nonzero"), math.nan)


def _log2_range(digests: Digests) -> NDArray[np.float64]:
    largest, smallest = digests.end("largest_finite"), _smallest_nonzero(digests)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(largest > 0, np.log2(largest) - np.log2(smallest), math.nan)


def _crest_factor(digests: Digests) -> NDArray[np.float64]:
    rms = _rms(digests)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(rms > 0, digests.statistic("absmax") / rms, math.nan)


def _distinct(digests: Digests) -> NDArray[np.float64]:
    return np.where(has_percentiles(digests) & digests.is_exact, digests.sizes, math.nan)


def _finite(digests: Digests) -> NDArray[np.float64]:
    return _counts(digests, "num_elements") - _counts(digests, "nan") - _counts(digests, "inf")


_FLOAT, _INTEGER = Kind.FLOAT, Kind.INTEGER

_NAMED = (
    Metric(name="elements", kind=_INTEGER, head="elements", compute=lambda digests: _counts(digests, "num_elements")),
    Metric(name="finite", kind=_INTEGER, head="finite", compute=_finite),
    *(Metric(name=name, kind=_FLOAT, head=name, compute=of) for name, of in _STATISTICS.items()),
    *map(_percentile, PERCENTILES),
    Metric(name="smallest_nonzero", kind=_FLOAT, head="smallest nonzero", compute=_smallest_nonzero),
    Metric(name="log2_range", kind=_FLOAT, head="range in bits", compute=_log2_range),
    Metric(name="crest_factor", kind=_FLOAT, head="absmax / rms", compute=_crest_factor),
    Metric(name="distinct", kind=_INTEGER, head="distinct values", compute=_distinct, needs_values=True),
    *_tally("total", "overflow"),
    *_tally("upper", "upper"),
    *_tally("lower", "lower"),
    *_tally("underflow", "subnormal"),
    *_tally("nan", "NaN"),
    *_tally("inf", "Inf"),
    *_tally("zero", "zero"),
    *(
        Metric(
            name=f"overflow.{name}",
            kind=_FLOAT,
            head=f"{name} with Inf",
            compute=functools.partial(_extreme, name=name),
        )
        for name in EXTREMES
    ),
)

METRICS = {metric.name: metric for metric in _NAMED}
"""All named metrics. Those of `Statistics` cover finite values; those named `overflow` cover all numbers, with the
limits of the dtype."""

NARROW_FORMAT = "fp8_e5m2"
"""The 8-bit format with the widest range. What it flushes even with a scale, every other 8-bit format flushes, too."""

_GRID_TOLERANCE = 2.0**-6
"""Tolerance for the ratio of two numbers that were scaled and rounded."""

_COARSE_BITS = 4
"""Significant bits of fp8_e4m3, the largest number among 8-bit floating-point formats."""

_FINE_BITS = (1 << 53 - _COARSE_BITS) - 1
"""The bits of a float64 that are zero if its significand has at most `_COARSE_BITS` bits."""

_MIN_COARSE = 8
"""Minimum number of different magnitudes with so few bits. Fewer may come from a loss, such as multiples of 1/16 of a
mean."""

SATURATING = {"float8_e4m3fn": "fp8_e4m3"}
"""The dtypes whose conversions saturate at the largest number, and the formats that define that number."""


def _saturated(digests: Digests) -> NDArray[np.float64]:
    names = [SATURATING.get(dtype) for dtype in digests.dtypes]
    largest = np.array([math.inf if name is None else FORMATS[name].maximum for name in names])
    if not np.isfinite(largest).any():
        return np.zeros(len(digests))
    counts = digests.count_between(largest, largest) + digests.count_between(-largest, -largest)
    return np.where(np.isfinite(largest), counts, 0).astype(np.float64)


def _floored(digests: Digests) -> NDArray[np.float64]:
    zeros = np.zeros(len(digests))
    if not digests.sizes.any():
        return zeros
    below, above = digests.search(zeros, side="left"), digests.search(zeros, side="right")
    first, last = digests.starts[:-1], digests.starts[1:]

    def magnitudes(indices: NDArray[np.int64]) -> NDArray[np.float64]:
        is_valid = (indices >= first) & (indices < last)
        return np.where(is_valid, np.abs(digests.values_at(np.where(is_valid, indices, 0))), math.inf)

    neighbours = np.sort(
        np.stack([magnitudes(indices) for indices in (above, above + 1, below - 1, below - 2)]), axis=0
    )
    floor = neighbours[0]
    second = np.min(np.where(neighbours > floor, neighbours, math.inf), axis=0)
    with np.errstate(invalid="ignore", over="ignore"):
        is_grid = np.isinf(second) | (np.abs(second - 2 * floor) <= _GRID_TOLERANCE * np.maximum(second, 2 * floor))
    counts = digests.count_between(floor, floor) + digests.count_between(-floor, -floor)
    return np.where(is_grid, counts, 0).astype(np.float64)


def _is_coarse(magnitudes: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which finite positive magnitudes have at most `_COARSE_BITS` significant bits, so that the rest are zero."""
    is_short: NDArray[np.bool_] = magnitudes.view(np.int64) & _FINE_BITS == 0
    return is_short & (magnitudes > 0) & np.isfinite(magnitudes)


@functools.cache
def _coarse_patterns(dtype: str) -> NDArray[np.bool_]:
    """Which patterns of a type of at most 16 bits have such magnitudes."""
    return _is_coarse(np.abs(numbers_of_patterns(numpy_dtype(dtype))))


def _coarse(digests: Digests) -> NDArray[np.float64]:
    if digests.patterns is not None:
        (indices,) = np.nonzero(_coarse_patterns(digests.dtypes[0])[digests.patterns[0]])
    else:
        magnitudes = np.abs(digests.values)
        if (np.abs(digests.end("smallest_nonzero")) < _MIN_NORMAL).any():
            # Scale subnormal numbers up. Numbers that would overflow are not scaled.
            with np.errstate(over="ignore"):
                scaled = magnitudes * 2.0**100
            magnitudes = np.where(np.isfinite(scaled), scaled, magnitudes)
        (indices,) = np.nonzero(_is_coarse(magnitudes))
    owners = np.searchsorted(digests.starts, indices, side="right") - 1
    counts = np.bincount(owners, weights=digests.stored_counts[indices], minlength=len(digests))
    num_distinct = np.bincount(owners, minlength=len(digests))
    # A magnitude occurs with at most two signs. They are distinguished only if this affects the result.
    is_open = ((num_distinct >= _MIN_COARSE) & (num_distinct < 2 * _MIN_COARSE - 1))[owners]
    pairs = np.stack([owners[is_open].astype(np.float64), np.abs(digests.values_at(indices[is_open]))])
    pairs = pairs[:, np.lexsort(pairs[::-1])]
    with np.errstate(invalid="ignore"):
        is_again = ~np.any(np.diff(pairs, axis=1, prepend=math.nan) != 0, axis=0)
    num_distinct -= np.bincount(pairs[0, is_again].astype(np.int64), minlength=len(digests))
    return np.where(num_distinct >= _MIN_COARSE, counts, 0.0)


def _flushed(digests: Digests) -> NDArray[np.float64]:
    """The fraction of nonzero values that are flushed if the largest value is scaled to that of the narrow format."""
    limits = aligned_limits(FORMATS[NARROW_FORMAT], digests.end("largest_finite"))
    nonzero = np.maximum(1, digests.tally("num_elements") - digests.tally("zero") - digests.tally("nan"))
    flushed = digests.count(*limits)["flushed"]
    return np.where(digests.has_values, flushed / nonzero, math.nan)


def aligned_limits(element: Format, largest: NDArray[np.float64] | None) -> tuple[NDArray[np.float64], ...]:
    """Where numbers overflow, are subnormal and are flushed in a format, for each of several tensors.

    The largest finite magnitude of each tensor, `largest` (NaN if there is none), is aligned with the largest value of
    the format. If `largest` is None, nothing is scaled.
    """
    starts = [element.overflow_start, element.min_normal, element.flush_limit]
    if largest is None:
        return tuple(np.array([start]) for start in starts)
    mantissa, binade = np.frexp(np.nan_to_num(largest))
    limit_mantissa, limit_binade = math.frexp(element.maximum)
    exponents = np.where(largest > 0, binade.astype(np.int64) - limit_binade + (mantissa > limit_mantissa), 0)
    with np.errstate(over="ignore", under="ignore"):
        return tuple(np.ldexp(start, exponents) for start in starts)


def _number(name: str, compute: Callable[[Digests], NDArray[np.float64]], *, needs_values: bool = True) -> Metric:
    return Metric(name=name, kind=Kind.FLOAT, head=name, compute=compute, needs_values=needs_values)


_DERIVED = (
    _number("saturated", _saturated),
    _number("floored", _floored),
    _number("coarse", _coarse),
    _number("flushed", _flushed),
    _number("is_exact", lambda digests: digests.is_exact.astype(np.float64), needs_values=False),
    _number("has_percentiles", lambda digests: has_percentiles(digests).astype(np.float64), needs_values=False),
    _number("has_values", lambda digests: digests.has_values.astype(np.float64), needs_values=False),
)

NUMBERS: dict[str, Metric] = METRICS | {metric.name: metric for metric in _DERIVED}
"""All numbers that can be computed from digests: the named metrics, and further ones that findings use."""

CACHED_METRICS = tuple(name for name, metric in NUMBERS.items() if metric.needs_values)
"""The metrics that are cached with digests, so that the distinct numbers are not read for them again."""


def metric_column(metric: Metric, digests: Digests) -> NDArray[np.float64]:
    """The metric of each of many digests, cached or computed from the distinct numbers."""
    if digests.cached_metrics is not None and metric.name in CACHED_METRICS:
        column: NDArray[np.float64] = digests.cached_metrics[:, CACHED_METRICS.index(metric.name)]
        return column
    return metric.compute(digests)


SHOWN = (
    "elements",
    "mean",
    "std",
    "minimum",
    "p1",
    "p50",
    "p99",
    "maximum",
    "skewness",
    "kurtosis",
    "overflow.underflow.ratio",
    "overflow.nan.ratio",
    "overflow.inf.ratio",
    "overflow.zero.ratio",
)
"""The metrics that text shows by default."""


def metric_columns(metrics: Sequence[Metric], *, are_named: bool) -> tuple[Column, ...]:
    """The columns of metrics. If the user named them, all are shown; otherwise text shows those of `SHOWN`."""
    return tuple(metric.column(is_detail=not are_named and metric.name not in SHOWN) for metric in metrics)
