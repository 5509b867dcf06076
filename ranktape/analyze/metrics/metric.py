"""Names the metrics of a tensor, under which any question can ask for them."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING

from ranktape.analyze.table import Column, Kind
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from ranktape.analyze.numerics.digest import Digest

PERCENTILES = ("0.1", "1", "5", "25", "50", "75", "95", "99", "99.9")
"""The percentiles that have a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number that is made of a digest."""

    name: str
    """Its name everywhere; that of the catalogue where it has one."""
    kind: Kind
    """What it is, and so how text shows it."""
    head: str
    """What text writes above a column of it."""
    of: Callable[[Digest], float | None]
    """The metric; None where there is none."""

    def column(self, *, is_detail: bool = False) -> Column:
        """The column of a table that holds it."""
        return Column(name=self.name, kind=self.kind, head=self.head, is_detail=is_detail)


def parse_metric(name: str) -> Metric:
    """The metric of that name; besides those of `METRICS` any percentile has one: `p99.5`.

    Raises:
        UsageError: there is none; the message names the nearest.
    """
    if name in METRICS:
        return METRICS[name]
    percent = re.fullmatch(r"p(\d+(?:\.\d+)?)", name)
    if percent is not None and float(percent[1]) <= 100:  # noqa: PLR2004 - percent
        return _percentile(percent[1])
    nearest = difflib.get_close_matches(name, METRICS, n=3) or [one for one in METRICS if name and name in one]
    hint = f"use {' or '.join(nearest)}" if nearest else f"use one of {', '.join(METRICS)}, or any percentile as p99.5"
    raise UsageError(f"no metric {name!r}: {hint}")


def is_percentile(name: str) -> bool:
    """Whether a metric is one, and so not exact where the digest is not."""
    return re.fullmatch(r"p[\d.]+", name) is not None


def _statistic(name: str, *, head: str = "") -> Metric:
    return Metric(name=name, kind=Kind.FLOAT, head=head or name, of=lambda digest: getattr(digest.statistics, name))


def _percentile(percent: str) -> Metric:
    name = f"p{Decimal(percent).normalize():f}"

    def quantile(digest: Digest) -> float | None:
        # Of complex values single parts are known, and of statistics that were kept nothing.
        if not digest.has_values or "complex" in digest.dtype:
            return None
        return digest.quantiles([Fraction(percent) / 100])[0]

    return Metric(name=name, kind=Kind.FLOAT, head=name, of=quantile)


def count_names(kind: str) -> tuple[str, str]:
    """What the count of a kind is called, and its part of all elements: of the total, as the catalogue has it."""
    if kind == "total":
        return "overflow.total", "overflow.ratio"
    return f"overflow.{kind}.count", f"overflow.{kind}.ratio"


def _tally(kind: str, head: str) -> tuple[Metric, Metric]:
    def count(digest: Digest) -> float:
        tallies = digest.tallies
        return tallies.upper + tallies.lower if kind == "total" else getattr(tallies, kind)

    def ratio(digest: Digest) -> float:
        return count(digest) / max(1, digest.tallies.num_elements)

    names = count_names(kind)
    return (
        Metric(name=names[0], kind=Kind.INTEGER, head=f"{head} count", of=count),
        Metric(name=names[1], kind=Kind.RATIO, head=head, of=ratio),
    )


def _extreme(name: str) -> Metric:
    def extreme(digest: Digest) -> float | None:
        found: float | None = getattr(digest.tallies, name)
        return found

    return Metric(name=f"overflow.{name}", kind=Kind.FLOAT, head=f"{name} with Inf", of=extreme)


def _smallest_nonzero(digest: Digest) -> float | None:
    # What is known of some parts alone says nothing of all.
    return digest.tallies.smallest_nonzero if digest.has_values else None


def _log2_range(digest: Digest) -> float | None:
    largest, smallest = digest.tallies.largest_finite, _smallest_nonzero(digest)
    return math.log2(largest) - math.log2(smallest) if largest and smallest else None


def _crest_factor(digest: Digest) -> float | None:
    statistics = digest.statistics
    return statistics.absmax / statistics.rms if statistics.absmax is not None and statistics.rms else None


def _distinct(digest: Digest) -> float | None:
    is_known = digest.has_values and digest.is_exact and "complex" not in digest.dtype
    return digest.values.size if is_known else None


_ALL = (
    Metric(name="elements", kind=Kind.INTEGER, head="elements", of=lambda digest: digest.tallies.num_elements),
    Metric(name="finite", kind=Kind.INTEGER, head="finite", of=lambda digest: digest.tallies.num_finite),
    *map(_statistic, ("mean", "std", "variance", "minimum", "maximum", "absmax", "mean_magnitude", "rms", "norm")),
    *map(_statistic, ("skewness", "kurtosis")),
    *map(_percentile, PERCENTILES),
    Metric(name="smallest_nonzero", kind=Kind.FLOAT, head="smallest nonzero", of=_smallest_nonzero),
    Metric(name="log2_range", kind=Kind.FLOAT, head="range in bits", of=_log2_range),
    Metric(name="crest_factor", kind=Kind.FLOAT, head="absmax / rms", of=_crest_factor),
    Metric(name="distinct", kind=Kind.INTEGER, head="distinct values", of=_distinct),
    *_tally("total", "overflow"),
    *_tally("upper", "upper"),
    *_tally("lower", "lower"),
    *_tally("underflow", "subnormal"),
    *_tally("nan", "NaN"),
    *_tally("inf", "Inf"),
    *_tally("zero", "zero"),
    *map(_extreme, ("minimum", "maximum", "absmax")),
)

METRICS = {one.name: one for one in _ALL}
"""Every metric by its name. Those of `Statistics` are of finite values; those named `overflow` are of all numbers,
against the limits of the dtype."""

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
"""The metrics that text shows, unless others are asked for."""


def metric_columns(metrics: Sequence[Metric], *, are_named: bool) -> tuple[Column, ...]:
    """The columns of metrics: all in sight if the user named them, else those that text has room for."""
    return tuple(one.column(is_detail=not are_named and one.name not in SHOWN) for one in metrics)
