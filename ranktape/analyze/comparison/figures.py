"""Names the metrics of a pair, and which end of each is the worse one."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ranktape.analyze.numerics.differences.differences import Differences
from ranktape.analyze.numerics.distributions.distances import Distances
from ranktape.analyze.table import Column, Kind
from ranktape.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFigure:
    """One number that is made of what sets a pair apart."""

    name: str
    """Its name everywhere."""
    kind: Kind
    """What it is, and so how text shows it."""
    of: Callable[[Differences, Distances | None], float | None]
    """The figure; None where there is none."""
    head: str = ""
    """What text writes above a column of it."""
    unit: str = ""
    """Its unit, if it has one of its own."""
    is_shown: bool = False
    """Whether text shows it without being asked for everything."""
    is_judged: bool = False
    """Whether it is 0 between equal tensors and grows from there: what a divergence can be judged by."""
    is_good: bool = False
    """Whether more is better."""

    @property
    def column(self) -> Column:
        """The column of a table with one row for each pair."""
        return Column(name=self.name, kind=self.kind, unit=self.unit, head=self.head, is_detail=not self.is_shown)

    def worst(self, values: Sequence[float]) -> float | None:
        """The worst of several; None of none."""
        return (min if self.is_good else max)(values, default=None)


def _difference(name: str, kind: Kind = Kind.FLOAT, **fields: object) -> PairFigure:
    return PairFigure(name=name, kind=kind, of=lambda differences, _: getattr(differences, name), **fields)  # type: ignore[arg-type]


def _count(name: str, field: str, head: str) -> PairFigure:
    return PairFigure(name=name, kind=Kind.INTEGER, head=head, of=lambda differences, _: getattr(differences, field))


def _distance(name: str, head: str, *, is_shown: bool = False) -> PairFigure:
    return PairFigure(
        name=name,
        kind=Kind.FLOAT,
        head=head,
        is_shown=is_shown,
        of=lambda _, distances: None if distances is None else getattr(distances, name),
    )


_ALL = (
    _difference("relative_norm", head="relative norm", is_shown=True, is_judged=True),
    _difference("sqnr", head="SQNR", unit="dB", is_shown=True, is_good=True),
    _difference("max_abs", head="max |a-b|", is_shown=True, is_judged=True),
    _difference("mean_abs", head="mean |a-b|", is_judged=True),
    _difference("max_rel", head="max relative", is_shown=True, is_judged=True),
    _difference("mean_rel", head="mean relative", is_judged=True),
    _difference("cosine", Kind.COSINE, is_shown=True, is_good=True),
    _difference("correlation", Kind.COSINE, is_good=True),
    _difference("ulp_max", Kind.INTEGER, head="max ulp", is_judged=True),
    _count("differing.count", "num_differing", "differing count"),
    PairFigure(
        name="differing.ratio",
        kind=Kind.RATIO,
        head="differing",
        is_shown=True,
        is_judged=True,
        of=lambda differences, _: differences.num_differing / max(1, differences.num_elements),
    ),
    PairFigure(
        name="zero.ratio",
        kind=Kind.RATIO,
        head="zero in a",
        of=lambda differences, _: differences.num_zeros / max(1, differences.num_compared),
    ),
    _count("compared", "num_compared", "compared"),
    _count("nan.both", "nan_both", "NaN in both"),
    _count("nan.one", "nan_one", "NaN in one"),
    _count("inf.equal", "inf_equal", "Inf in both"),
    _count("inf.differing", "inf_differing", "Inf in one"),
    _distance("kolmogorov_smirnov", "KS"),
    _distance("wasserstein", "Wasserstein"),
    _distance("relative_wasserstein", "relative Wasserstein"),
    _distance("total_variation", "total variation"),
    _distance("jensen_shannon", "JS divergence", is_shown=True),
)

PAIR_FIGURES = {one.name: one for one in _ALL}
"""Every figure of a pair by its name: of its differences, element by element, and of its distributions."""

DISTANCES = ("kolmogorov_smirnov", "wasserstein", "relative_wasserstein", "total_variation", "jensen_shannon")
"""Those of the distributions."""

JUDGED = tuple(one.name for one in _ALL if one.is_judged)
"""The figures that a divergence can be judged by."""


def judged_figure(name: str) -> PairFigure:
    """The figure of that name, by which a divergence can be judged.

    Raises:
        UsageError: there is none; the message names the nearest.
    """
    if name not in JUDGED:
        nearest = difflib.get_close_matches(name, JUDGED, n=2) or JUDGED
        raise UsageError(f"a divergence cannot be judged by {name!r}: use {' or '.join(nearest)}")
    return PAIR_FIGURES[name]


def judged_value(figure: PairFigure, differences: Differences) -> float | None:
    """The figure: 0 where no bit differs, infinite where one of the two is NaN or infinite alone."""
    if not differences.num_differing:
        return 0.0
    return math.inf if differences.num_apart else figure.of(differences, None)


def figures_of(differences: Differences | None, distances: Distances | None) -> tuple[float | None, ...]:
    """Every figure of a pair, in the order of `PAIR_FIGURES`; None where it is not known."""
    return tuple(
        one.of(differences, distances)  # type: ignore[arg-type]  # distances need no differences
        if differences is not None or one.name in DISTANCES
        else None
        for one in _ALL
    )
