"""Defines the metrics of a pair of tensors, compares its distributions, and decides whether it diverges."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from ranktape.analyze.comparison.matching import Matching, Pair, Parts
from ranktape.analyze.engine.digests import digests, merge_digests
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.values import View
from ranktape.analyze.numerics.differences import Differences
from ranktape.analyze.numerics.digest import Digest
from ranktape.analyze.numerics.distributions import Distances, distance
from ranktape.analyze.table import Column, Kind
from ranktape.errors import UsageError
from ranktape.storage import Records
from ranktape.storage.format.record_info import Keep
from ranktape.storage.records.assemble import AxisKind, parse_placement


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMetric:
    """A metric of a pair."""

    column: Column
    of: Callable[[Any], float | None]
    """Computes the metric from the differences of a pair, or from its distances."""
    is_distance: bool = False
    """Whether it compares the distributions."""
    is_judged: bool = False
    """Whether it can decide a divergence: it is 0 for equal tensors and grows with the difference."""
    is_good: bool = False
    """Whether larger is better."""


def _metric(
    name: str,
    head: str = "",
    kind: Kind = Kind.FLOAT,
    *,
    of: str | Callable[[Any], float] = "",
    unit: str = "",
    is_shown: bool = False,
    **fields: bool,
) -> PairMetric:
    column = Column(name=name, kind=kind, unit=unit, head=head, is_detail=not is_shown)
    return PairMetric(column=column, of=of if callable(of) else attrgetter(of or name), **fields)


_ALL = (
    _metric("relative_norm", "relative norm", is_shown=True, is_judged=True),
    _metric("sqnr", "SQNR", unit="dB", is_shown=True, is_good=True),
    _metric("max_abs", "max |a-b|", is_shown=True, is_judged=True),
    _metric("mean_abs", "mean |a-b|", is_judged=True),
    _metric("max_rel", "max relative", is_shown=True, is_judged=True),
    _metric("mean_rel", "mean relative", is_judged=True),
    _metric("cosine", kind=Kind.COSINE, is_shown=True, is_good=True),
    _metric("correlation", kind=Kind.COSINE, is_good=True),
    _metric("ulp_max", "max ulp", Kind.INTEGER, is_judged=True),
    _metric("differing.count", "differing count", Kind.INTEGER, of="num_differing"),
    _metric(
        "differing.ratio",
        "differing",
        Kind.RATIO,
        is_shown=True,
        is_judged=True,
        of=lambda differences: differences.num_differing / max(1, differences.num_elements),
    ),
    _metric(
        "zero.ratio",
        "zero in a",
        Kind.RATIO,
        of=lambda differences: differences.num_zeros / max(1, differences.num_compared),
    ),
    _metric("compared", "compared", Kind.INTEGER, of="num_compared"),
    _metric("nan.both", "NaN in both", Kind.INTEGER, of="nan_both"),
    _metric("nan.one", "NaN in one", Kind.INTEGER, of="nan_one"),
    _metric("inf.equal", "Inf in both", Kind.INTEGER, of="inf_equal"),
    _metric("inf.differing", "Inf in one", Kind.INTEGER, of="inf_differing"),
    _metric("kolmogorov_smirnov", "KS", is_distance=True),
    _metric("wasserstein", "Wasserstein", is_distance=True),
    _metric("relative_wasserstein", "relative Wasserstein", is_distance=True),
    _metric("total_variation", "total variation", is_distance=True),
    _metric("jensen_shannon", "JS divergence", is_distance=True, is_shown=True),
)

PAIR_METRICS = {one.column.name: one for one in _ALL}
"""All metrics of a pair by name: of its elementwise differences, and of its distributions."""

JUDGED = tuple(name for name, one in PAIR_METRICS.items() if one.is_judged)
"""The metrics that can decide a divergence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """The criterion for a divergence."""

    metric: str
    tolerance: float
    """The largest value of the metric that is tolerated."""
    margin: float
    """The largest multiple of the noise floor that is tolerated."""
    has_noise: bool
    """Whether a second equal run gives the noise floor."""
    is_same_tensor: bool
    """Whether both sides are the same tensors of a model; others differ, but do not diverge."""

    def __post_init__(self) -> None:
        """Check the criterion.

        Raises:
            UsageError: the metric cannot decide a divergence, or a limit is negative, infinite or NaN.
        """
        if self.metric not in JUDGED:
            nearest = difflib.get_close_matches(self.metric, JUDGED, n=2) or JUDGED
            raise UsageError(f"a divergence cannot be judged by {self.metric!r}: use {' or '.join(nearest)}")
        for name, limit in (("tolerance", self.tolerance), ("margin", self.margin)):
            if not 0 <= limit < math.inf:
                raise UsageError(f"{name} {limit} is not allowed: give 0 or more")

    def value(self, differences: Differences | None) -> float | None:
        """The metric: 0 if no bit differs, infinite if an element is NaN or infinite in only one of the tensors."""
        if differences is None or not differences.num_differing:
            return None if differences is None else 0.0
        return math.inf if differences.num_apart else PAIR_METRICS[self.metric].of(differences)


class ComparedPair:
    """Two tensors and their differences."""

    def __init__(
        self,
        sides: Pair,
        judge: Judge,
        *,
        order: int,
        differences: Differences | None,
        twin: Differences | None,
        distances: Distances | None,
    ) -> None:
        self.a, self.b = sides
        self.order = order
        """The position in the order of execution, from 1."""
        self.differences, self.distances = differences, distances
        """The elementwise differences, None if only distributions are compared; and the distances of distributions."""
        self.value = judge.value(differences)
        """The judged metric."""
        self.floor = None if differences is None else judge.value(twin)
        """The judged metric between the reference and its twin in a second equal run; None without a twin."""
        self.ratio: float | None = None
        """The judged metric over the floor; infinite if only the floor is 0; None if both are 0, or without a floor."""
        if self.value is not None and self.floor is not None and not math.isinf(self.floor):
            self.ratio = self.value / self.floor if self.floor else (math.inf if self.value else None)
        self.diverges: bool | None = None
        """Whether the difference is larger than what is tolerated; None if that cannot be decided.

        If only distributions are compared, any difference is a divergence; with a tolerance or noise, this is None.
        """
        if differences is None:
            if distances is not None and judge.is_same_tensor and not judge.tolerance and not judge.has_noise:
                self.diverges = distances.differ
        elif judge.is_same_tensor and self.value is not None and (self.floor is not None or not judge.has_noise):
            self.diverges = self.value > max(judge.tolerance, judge.margin * (self.floor or 0.0))

    @property
    def differs(self) -> bool:
        """Whether any element differs, or the distributions do if only they are compared."""
        if self.differences is not None:
            return self.differences.num_differing > 0
        return self.distances is not None and bool(self.distances.differ)

    @property
    def badness(self) -> float:
        """The judged metric; negative if there is none, or if only distributions are compared."""
        if self.differences is None:
            variation = None if self.distances is None else self.distances.total_variation
            return -2.0 if variation is None else variation - 1.5
        return -1.0 if self.value is None or math.isnan(self.value) else self.value

    def metrics(self) -> dict[str, float | None]:
        """All of `PAIR_METRICS`; None for those that were not computed."""
        values_of = {False: self.differences, True: self.distances}
        return {
            name: None if values_of[one.is_distance] is None else one.of(values_of[one.is_distance])
            for name, one in PAIR_METRICS.items()
        }


def execution_order(records: Records, rows: Sequence[int]) -> list[int]:
    """For each row, its position in the order of execution, from 1: by iteration, microbatch, counter and rank."""
    fields = ("rank", "counter", "microbatch", "iteration")
    ordered = np.lexsort([records.column(field)[list(rows)] for field in fields])
    numbers = np.empty(len(rows), dtype=np.int64)
    numbers[ordered] = np.arange(1, len(rows) + 1)
    return [int(number) for number in numbers]


def distances_of(matching: Matching, *, view: View | None, engine: Engine) -> list[Distances | None]:
    """The distances of each pair; None if the digests of the parts cannot be merged into that of the whole.

    If `view` is None, values are read as captured, unless a record of the pair stores only a histogram or statistics,
    which describe the values of the computation.
    """
    sides = (matching.a, matching.b)
    has_values = [(records.column("keep") == Keep.VALUES).tolist() for records in sides]
    views, rows = [], []
    for pair in matching.pairs:
        has_all_values = all(of[row] for of, parts in zip(has_values, pair, strict=True) for row in parts.rows)
        views.append(view or (View.SEEN if has_all_values else View.COMPUTE))
        rows.append([_distinct(records, parts) for records, parts in zip(sides, pair, strict=True)])
    distances: list[Distances | None] = [None] * len(rows)
    for one in sorted(set(views)):
        numbers = [number for number, rows_of in enumerate(rows) if views[number] is one and all(rows_of)]
        merged = [
            _merged(records, [rows[number][side] for number in numbers], view=one, engine=engine)
            for side, records in enumerate(sides)
        ]
        for number, a, b in zip(numbers, *merged, strict=True):
            distances[number] = distance(a, b)
    return distances


def _distinct(records: Records, parts: Parts) -> tuple[int, ...]:
    """One copy of each part of a tensor; empty if the parts are summands, whose values are not those of the sum."""
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
    """The digest of each tensor, whose records are in these rows."""
    part_digests = digests(records.take([row for parts in rows for row in parts]), view=view, engine=engine)
    for parts in rows:
        of_parts = list(itertools.islice(part_digests, len(parts)))
        yield of_parts[0] if len(of_parts) == 1 else merge_digests(of_parts)
