"""Names the metrics of a pair of tensors, measures its distributions, and judges whether it diverges."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ranktape.analyze.engine.digests import digests, merge_digests
from ranktape.analyze.engine.values import View
from ranktape.analyze.numerics.differences.differences import Differences
from ranktape.analyze.numerics.distributions.distances import Distances, distance
from ranktape.analyze.table import Column, Kind
from ranktape.errors import UsageError
from ranktape.storage.format.record_info import Keep
from ranktape.storage.records.placement import AxisKind, parse_placement

if TYPE_CHECKING:
    from ranktape.analyze.comparison.matching import Matching, Parts
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.numerics.differences.differences import Differences
    from ranktape.analyze.numerics.digests.digest import Digest
    from ranktape.analyze.numerics.distributions.distances import Distances
    from ranktape.storage import Records


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPair:
    """Two tensors, and what sets them apart."""

    a: Parts
    """Where in the first side the reference is."""
    b: Parts
    """Where in the second side what is compared with it is."""
    order: int
    """Its place in the order of execution, from 1."""
    differences: Differences | None
    """Element by element; None where the distributions alone are compared."""
    distances: Distances | None
    """Between the distributions; None where they were not asked for."""
    floor: float | None
    """The judged figure between the reference and its twin in an equal run; None without one."""
    ratio: float | None
    """The judged figure over the floor; infinite where the floor is 0 and the figure is not; None without a floor."""
    diverges: bool | None
    """Whether the difference is larger than what is tolerated; None where that cannot be judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Says which pairs diverge."""

    figure: PairFigure
    """What is compared with the limits."""
    tolerance: float
    """The figure may be as large as this."""
    margin: float
    """It may be as many times as large as the noise floor."""
    has_noise: bool
    """Whether there is an equal run to know the floor from."""
    is_same_tensor: bool
    """Whether both sides are the same tensors of a model: others do not diverge, they are different."""

    def judge(
        self, differences: Differences | None, twin: Differences | None, distances: Distances | None
    ) -> tuple[float | None, float | None, bool | None]:
        """The floor, the figure over the floor, and whether the pair diverges.

        Distributions alone diverge where they are not the same at all, if nothing is tolerated and no noise is known.
        """
        if differences is None:
            return None, None, self._judge_alone(distances) if self.is_same_tensor else None
        value = judged_value(self.figure, differences)
        floor = None if twin is None else judged_value(self.figure, twin)
        if self.has_noise and floor is None:
            return None, None, None
        limit = max(self.tolerance, self.margin * (floor or 0.0))
        ratio = None if value is None or floor is None else _ratio(value, floor)
        return floor, ratio, None if value is None or not self.is_same_tensor else value > limit

    def _judge_alone(self, distances: Distances | None) -> bool | None:
        return None if distances is None or self.tolerance or self.has_noise else distances.differ


def execution_order(records: Records, rows: list[int]) -> list[int]:
    """For each row its place in the order of execution, from 1: by iteration, microbatch, counter and rank."""
    columns = [records.column(field).tolist() for field in ("iteration", "microbatch", "counter", "rank")]
    ordered = sorted(range(len(rows)), key=lambda place: [column[rows[place]] for column in columns])
    places = [0] * len(rows)
    for order, place in enumerate(ordered, start=1):
        places[place] = order
    return places


def _ratio(value: float, floor: float) -> float | None:
    if math.isinf(floor):
        return None
    return value / floor if floor else (math.inf if value else None)


def distances_of(matching: Matching, *, view: View | None, engine: Engine) -> list[Distances | None]:
    """The distances of each pair; None where the digests of parts do not add up to that of the whole.

    Without a view, values are looked at as they were captured, unless of one of the two a histogram or statistics
    were kept: these are of what was computed with.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: a histogram was kept that is rounded already, and is to be looked at as it was seen.
    """
    kept_a, kept_b = (records.column("keep").tolist() for records in (matching.a, matching.b))
    is_kept = [
        all(kept_a[row] == Keep.VALUES for row in a.rows) and all(kept_b[row] == Keep.VALUES for row in b.rows)
        for a, b in matching.pairs
    ]
    views = [view or (View.SEEN if kept else View.COMPUTE) for kept in is_kept]
    rows = [
        tuple(_distinct(records, parts) for records, parts in zip((matching.a, matching.b), pair, strict=True))
        for pair in matching.pairs
    ]
    found: list[Distances | None] = [None] * len(rows)
    for one in sorted(set(views)):
        places = [place for place, rows_of in enumerate(rows) if views[place] is one and all(rows_of)]
        sides = [
            _merged(records, [rows[place][side] for place in places], view=one, engine=engine)
            for side, records in enumerate((matching.a, matching.b))
        ]
        for place, a, b in zip(places, *sides, strict=True):
            found[place] = distance(a, b)
    return found


def _distinct(records: Records, parts: Parts) -> tuple[int, ...]:
    """Of the parts of a tensor one copy each; none where they are summands, whose values are not those of the sum."""
    if not parts.is_assembled:
        return parts.rows
    first_copies: dict[tuple[int | None, ...], int] = {}
    for row in parts.rows:
        placement = parse_placement(records[row].info)
        assert placement is not None
        if placement.is_partial:
            return ()
        first_copies.setdefault(placement.fixed(AxisKind.REPLICATE), row)
    return tuple(first_copies.values())


def _merged(records: Records, rows: Sequence[tuple[int, ...]], *, view: View, engine: Engine) -> Iterator[Digest]:
    """The digest of each tensor, of which the records are in those rows."""
    found = digests(records.take([row for parts in rows for row in parts]), view=view, engine=engine)
    for parts in rows:
        of_parts = list(itertools.islice(found, len(parts)))
        yield of_parts[0] if len(of_parts) == 1 else merge_digests(of_parts)
