"""Compares two runs, or two kinds of tensors of one run, and locates the first difference."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from ranktape.analyze.comparison.matching import Matching, Pairing, Parts, match, parse_pairs, site_name, twins_of
from ranktape.analyze.comparison.pair_metrics import PAIR_METRICS, ComparedPair, Judge, distances_of, execution_order
from ranktape.analyze.comparison.tensors import PairTasks, compare_pairs
from ranktape.analyze.engine.engine import Engine, next_step, steps
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import (
    IDENTITY,
    answer_by_source,
    group_columns,
    group_row,
    identity_columns,
    identity_fields,
    identity_rows,
    with_stacks,
)
from ranktape.analyze.numerics.distributions import Distances
from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import NoRecordsError, UsageError
from ranktape.storage import Records
from ranktape.storage.places.failures import printable


def compare(
    records: Records,
    other: Records | None = None,
    *,
    pair: str | Sequence[str] = (),
    neighbours: bool = False,
    noise: Records | None = None,
    metric: str = "relative_norm",
    tolerance: float = 0.0,
    margin: float = 3.0,
    allow_unmatched: bool = False,
    distances: bool = True,
    in_order: bool = False,
    view: View | None = None,
    by: Sequence[str] = (),
    engine: Engine | None = None,
) -> Table:
    """Compare a run with other runs, or tensors of one run with each other.

    The first run is the reference. Tensors are compared if all fields of their identity agree, except those of `pair`;
    element by element if the values of both are stored. Rows with the largest differences come first. The last line
    names the first tensor that differs, in execution order.

    Args:
        pair (FIELD=SIDES): Field that differs, with both values: operation=forward:backward, iteration=20:40;
            repeatable.
        neighbours: Compare each layer with the next one.
        noise (RUN): Second run for the noise floor.
        metric (NAME): Metric that decides on a divergence: relative_norm, max_abs, mean_abs, max_rel, mean_rel,
            ulp_max, differing.ratio.
        tolerance (X): Largest tolerated metric.
        margin (X): Largest tolerated multiple of the noise floor.
        allow_unmatched: Leave out records without a counterpart.
        distances: Also compare distributions.
        in_order: Sort rows by execution order.

    Note:
        Filters apply to all runs. If ranks hold different parts of a tensor, the parts are assembled first. A record
        without a counterpart is an error unless `allow_unmatched` is given, or two kinds of layers are compared. Pairs
        without values, or of different shapes, are compared only by their distributions; `distances` reads values a
        second time unless their counts are cached. If an element is NaN or infinite in only one tensor of a pair, the
        pair diverges whatever the tolerance. Tensors without elements do not differ.

    Raises:
        DataError: bytes or parts of a tensor are missing, or damaged.
        NoRecordsError: a side is empty, or no record has a counterpart.
        StorageError: a store cannot be read.
        UnknownFieldError: `by` names an unknown field.
        UsageError: the sides are not specified, records have no counterpart, or a value is not allowed.
    """
    pairing = Pairing(fields=parse_pairs(pair), neighbours=neighbours)
    limits: dict[str, Any] = {"metric": metric, "tolerance": tolerance, "margin": margin}
    judge = Judge(**limits, has_noise=noise is not None, is_same_tensor=pairing.is_same_tensor)

    def compare_one(one: Records) -> Table:
        first, second = (one, None) if other is None else (records, one)
        matching = _match(first, second, pairing, allow_unmatched=allow_unmatched)
        rows = _PairRows(matching, judge, by=by)
        pairs = _compared(matching, noise, judge, view=view, with_distances=distances, engine=engine or Engine())
        pairs.sort(key=lambda one: one.order if in_order else (-one.badness, one.order))
        return rows.table(pairs)

    compared, each = (records, "within itself") if other is None else (other, f"with {printable(records.reader.url)}")
    if other is not None and len(records.sources) > 1:
        named = ", ".join(map(printable, records.sources))
        raise UsageError(f"the reference must be a single source, but there are {len(records.sources)}: {named}")
    if len(compared.sources) <= 1:
        return compare_one(compared)
    return answer_by_source(compared, compare_one, title=f"{len(compared.sources)} sources, each compared {each}")


def _match(a: Records, b: Records | None, pairing: Pairing, *, allow_unmatched: bool) -> Matching:
    if b is None and not pairing.names:
        raise UsageError(
            "it is not specified what to compare: give a second run, or for a single run --pair FIELD=LEFT:RIGHT "
            "(such as operation=forward:backward) or --neighbours"
        )
    if pairing.neighbours and (b is not None or pairing.fields):
        raise UsageError("--neighbours compares the layers of one run: give neither a second run nor --pair with it")
    for records in (a, b):
        if records is not None and not len(records):
            raise NoRecordsError(f"{records!r} has no record to compare")
    matching = match(*pairing.sides(a, a if b is None else b), pairing, is_one_run=b is None)
    # One kind of layers has sites that the other one lacks, such as the head of a model.
    if not (matching.is_complete or allow_unmatched or pairing.is_of_kinds):
        raise UsageError("; ".join(matching.unmatched()) + ": leave them out with a filter, or give --allow-unmatched")
    return matching


def _compared(
    matching: Matching,
    noise: Records | None,
    judge: Judge,
    *,
    view: View | None,
    with_distances: bool,
    engine: Engine,
) -> list[ComparedPair]:
    """The differences between the tensors of each pair."""
    tasks = PairTasks(matching, twins=() if noise is None else twins_of(matching, noise), noise=noise)
    work = functools.partial(compare_pairs, view=view or View.SEEN)
    distances: list[Distances | None] = [None] * len(matching.pairs)
    with steps(2) if with_distances else contextlib.nullcontext():
        if with_distances:
            next_step()
        differences = [answer for batch in engine.map(work, tasks, sizes=tasks.sizes) for answer in batch]
        if with_distances:
            next_step()
            distances = distances_of(matching, view=view, engine=engine)
    orders = execution_order(matching.a, [one.rows[0] for one, _ in matching.pairs])
    return [
        ComparedPair(sides, judge, order=order, differences=difference, twin=twin, distances=distance)
        for sides, order, (difference, twin), distance in zip(
            matching.pairs, orders, differences, distances, strict=True
        )
    ]


SUMMARISED = ("relative_norm", "sqnr", "max_abs", "max_rel", "cosine", "jensen_shannon")
"""The metrics of which groups show the worst value and the median."""

_AGAINST = tuple(field for field in IDENTITY if field not in {"rank", "compute_dtype", "shape"})

_ANSWERS = {True: "yes", False: "no", None: None}


class _PairRows:
    """Creates the table of compared pairs, with one row for each pair, or with `by`, for each group of pairs."""

    def __init__(self, matching: Matching, judge: Judge, *, by: Sequence[str]) -> None:
        self._matching, self._judge = matching, judge
        self._by = with_stacks(by, matching.a)
        self._sides = (matching.a, matching.b)
        self._fields = [identity_fields(records) for records in self._sides]
        self._identities = [identity_rows(records) for records in self._sides]
        self._ranks = [records.column("rank").tolist() for records in self._sides]

    def table(self, pairs: Sequence[ComparedPair]) -> Table:
        """The table, in the order of the pairs."""
        return Table(
            title=self._title(pairs),
            columns=self._group_columns() if self._by else self._pair_columns(),
            rows=tuple(self._group_rows(pairs) if self._by else map(self._pair_row, pairs)),
            notes=tuple(self._notes(pairs)),
            is_verdict=True,
        )

    def _title(self, pairs: Sequence[ComparedPair]) -> str:
        num_differing = sum(pair.differs for pair in pairs)
        counted = f"{len(pairs)} pairs compared, {num_differing} differ"
        if not self._judge.is_same_tensor:
            return counted
        diverging = [pair for pair in pairs if pair.diverges]
        if not diverging:
            return f"no divergence: {counted}" + (", none beyond the tolerance" if num_differing else "")
        first = min(diverging, key=lambda pair: pair.order)
        return f"first divergence: {self._place(first)} ({counted}, {len(diverging)} diverge)"

    def _notes(self, pairs: Sequence[ComparedPair]) -> Iterator[str]:
        yield from map(printable, self._matching.unmatched())
        alone = sum(pair.differences is None for pair in pairs)
        if alone:
            yield f"{alone} pairs are compared only by their distributions: shapes differ, or values are not stored"
        copies = sum(pair.a.has_differing_copies or pair.b.has_differing_copies for pair in pairs)
        if copies:
            yield (
                f"in {copies} pairs, ranks that should have equal copies recorded different bits: "
                "see 'ranktape analyze findings'"
            )
        unknown = sum(pair.diverges is None for pair in pairs) if self._judge.is_same_tensor else 0
        if unknown:
            yield f"whether {unknown} pairs diverge is unknown: they have no noise floor, or no {self._judge.metric}"

    def _pair_columns(self) -> tuple[Column, ...]:
        noise = (
            Column(name="noise.floor", kind=Kind.FLOAT, head=f"noise floor of {self._judge.metric}", is_detail=False),
            Column(name="noise.ratio", kind=Kind.FLOAT, head="over noise floor"),
        )
        ours, theirs = map(identity_columns, self._sides)
        return (
            Column(name="order", kind=Kind.INTEGER, is_detail=True),
            *ours,
            Column(name="against", kind=Kind.TEXT, is_key=True),
            Column(name="diverges", kind=Kind.TEXT),
            *(one.column for one in PAIR_METRICS.values()),
            *(noise if self._judge.has_noise else ()),
            Column(name="max_abs_at", kind=Kind.LIST, head="at", is_detail=True),
            Column(name="copies", kind=Kind.INTEGER, is_detail=True),
            Column(name="ranks", kind=Kind.LIST, is_detail=True),
            Column(name="b.ranks", kind=Kind.LIST, is_detail=True),
            *(Column(name=f"b.{column.name}", kind=column.kind, is_detail=True) for column in theirs),
        )

    def _pair_row(self, pair: ComparedPair) -> tuple[Any, ...]:
        at = None if pair.differences is None else pair.differences.max_abs_at
        mine, theirs = self._identity(0, pair.a), self._identity(1, pair.b)
        ranks = [[of[row] for row in parts.rows] for of, parts in zip(self._ranks, (pair.a, pair.b), strict=True)]
        against = [f"{field}={theirs[field]}" for field in _AGAINST if mine[field] != theirs[field]]
        if ranks[0] != ranks[1]:
            against.append("rank=" + ",".join(map(str, ranks[1][:4])) + (",..." if len(ranks[1]) > 4 else ""))  # noqa: PLR2004
        if mine["shape"] != theirs["shape"]:
            against.append(f"shape={theirs['shape']}".replace(" ", ""))
        return (
            pair.order,
            *mine.values(),
            " ".join(against),
            _ANSWERS[pair.diverges],
            *pair.metrics().values(),
            *((pair.floor, pair.ratio) if self._judge.has_noise else ()),
            None if at is None else list(at),
            min(pair.a.copies, pair.b.copies),
            *ranks,
            *theirs.values(),
        )

    def _group_columns(self) -> tuple[Column, ...]:
        summaries = [
            Column(name=f"{name}.{which}", kind=of.kind, unit=of.unit, head=f"{which} {of.head or name}")
            for name, of in ((name, PAIR_METRICS[name].column) for name in SUMMARISED)
            for which in ("worst", "median")
        ]
        counts = (Column(name=name, kind=Kind.INTEGER) for name in ("pairs", "differing", "diverging"))
        return (*group_columns(self._by)[:-1], *counts, *summaries)

    def _group_rows(self, pairs: Sequence[ComparedPair]) -> Iterator[tuple[Any, ...]]:
        """The rows of groups. For an even number of values, the median is the lower of the two in the middle."""
        keys = list(zip(*(self._matching.a.column(field).tolist() for field in self._by), strict=True))
        groups: dict[tuple[Any, ...], list[ComparedPair]] = {}
        for pair in pairs:
            # A missing value is NaN, which equals nothing.
            key = tuple(None if value != value else value for value in keys[pair.a.rows[0]])  # noqa: PLR0124
            groups.setdefault(key, []).append(pair)
        for key, members in groups.items():
            judged = [pair.diverges for pair in members if pair.diverges is not None]
            cells: list[Any] = [len(members), sum(pair.differs for pair in members), sum(judged) if judged else None]
            rows = [pair.metrics() for pair in members]
            for name in SUMMARISED:
                known = sorted(value for row in rows if (value := row[name]) is not None)
                worst = (min if PAIR_METRICS[name].is_good else max)(known, default=None)
                cells += [worst, known[(len(known) - 1) // 2] if known else None]
            yield (*group_row(dict(zip(self._by, key, strict=True)), num_records=0)[:-1], *cells)

    def _place(self, pair: ComparedPair) -> str:
        """The location of a pair and the size of its difference, in one line."""
        mine = self._identity(0, pair.a)
        is_mixed = len(set(self._sides[0].column("quant_type").tolist())) > 1
        fields = ("operation", "phase", *(["quant_type"] if is_mixed else []), "tensor_name")
        what = site_name(mine["module"], mine["layer_type"], mine["layer_idx"], *(mine[field] for field in fields))
        where = f"iteration {mine['iteration']} microbatch {mine['microbatch']} rank {mine['rank']}"
        if pair.differences is None:
            return printable(f"{where}: {what} (distributions only)")
        apart = pair.differences.num_apart
        how = f"NaN or Inf on one side in {apart} elements" if apart else f"{self._judge.metric} {pair.value:.4g}"
        return printable(f"{where}: {what}, {how}")

    def _identity(self, side: int, parts: Parts) -> dict[str, Any]:
        identity = dict(zip(self._fields[side], self._identities[side][parts.rows[0]], strict=True))
        return identity | ({"shape": list(parts.shape)} if parts.is_assembled else {})
