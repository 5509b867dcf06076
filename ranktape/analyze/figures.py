"""Which figures of a tensor have a name, under which any question can ask for them?"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ranktape.analyze.table import Column, Kind
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from ranktape.analyze.engine.digest import Digest

PERCENTILES = (0.1, 1.0, 5.0, 25.0, 50.0, 75.0, 95.0, 99.0, 99.9)
"""The percentiles that have a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number that is made of a digest."""

    name: str
    """Its name everywhere; that of the catalogue where it has one."""
    kind: Kind
    """What it is, and so how text shows it."""
    head: str
    """What text writes above a column of it."""
    of: Callable[[Digest], float | None]
    """The figure; None where there is none."""

    def column(self, *, is_detail: bool = False) -> Column:
        """The column of a table that holds it."""
        return Column(name=self.name, kind=self.kind, head=self.head, is_detail=is_detail)


def figure(name: str) -> Figure:
    """The figure of that name.

    Raises:
        UsageError: there is none; the message names the nearest.
    """
    if name not in FIGURES:
        nearest = difflib.get_close_matches(name, FIGURES, n=3) or list(FIGURES)
        raise UsageError(f"no figure {name!r}: use {' or '.join(nearest)}")
    return FIGURES[name]


def _statistic(name: str, *, head: str = "") -> Figure:
    return Figure(name=name, kind=Kind.FLOAT, head=head or name, of=lambda digest: getattr(digest.statistics, name))


def _percentile(percent: float) -> Figure:
    def quantile(digest: Digest) -> float | None:
        return digest.quantiles([percent / 100])[0]

    return Figure(name=f"p{percent:g}", kind=Kind.FLOAT, head=f"p{percent:g}", of=quantile)


def _tally(kind: str, head: str) -> tuple[Figure, Figure]:
    def count(digest: Digest) -> float:
        tallies = digest.tallies
        return tallies.upper + tallies.lower if kind == "total" else getattr(tallies, kind)

    def ratio(digest: Digest) -> float:
        return count(digest) / max(1, digest.tallies.num_elements)

    names = (
        ("overflow.total", "overflow.ratio")
        if kind == "total"
        else (f"overflow.{kind}.count", f"overflow.{kind}.ratio")
    )
    return (
        Figure(name=names[0], kind=Kind.INTEGER, head=f"{head} count", of=count),
        Figure(name=names[1], kind=Kind.RATIO, head=head, of=ratio),
    )


def _extreme(name: str) -> Figure:
    def extreme(digest: Digest) -> float | None:
        found: float | None = getattr(digest.tallies, name)
        return found

    return Figure(name=f"overflow.{name}", kind=Kind.FLOAT, head=f"{name} with Inf", of=extreme)


def _log2_range(digest: Digest) -> float | None:
    tallies = digest.tallies
    if not tallies.largest_finite or not tallies.smallest_nonzero:
        return None
    return math.log2(tallies.largest_finite) - math.log2(tallies.smallest_nonzero)


_ALL = (
    Figure(name="elements", kind=Kind.INTEGER, head="elements", of=lambda digest: digest.tallies.num_elements),
    *map(_statistic, ("mean", "std", "variance", "minimum", "maximum", "absmax", "mean_magnitude", "rms", "norm")),
    *map(_statistic, ("skewness", "kurtosis")),
    *map(_percentile, PERCENTILES),
    Figure(
        name="smallest_nonzero",
        kind=Kind.FLOAT,
        head="smallest nonzero",
        of=lambda digest: digest.tallies.smallest_nonzero,
    ),
    Figure(name="log2_range", kind=Kind.FLOAT, head="range in bits", of=_log2_range),
    *_tally("total", "overflow"),
    *_tally("upper", "upper"),
    *_tally("lower", "lower"),
    *_tally("underflow", "subnormal"),
    *_tally("nan", "NaN"),
    *_tally("inf", "Inf"),
    *_tally("zero", "zero"),
    *map(_extreme, ("minimum", "maximum", "absmax")),
)

FIGURES = {one.name: one for one in _ALL}
"""Every figure by its name. Those of `Statistics` are of finite values; those named `overflow` are of all numbers,
against the limits of the dtype."""
