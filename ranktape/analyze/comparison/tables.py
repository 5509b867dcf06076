"""Makes the tables of compared pairs: one row for each pair, or for each group of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ranktape.analyze.comparison.matching import site_name
from ranktape.analyze.comparison.pair_metrics import PAIR_METRICS, ComparedPair, Judge
from ranktape.analyze.identity import (
    IDENTITY,
    group_columns,
    group_row,
    identity_columns,
    identity_fields,
    identity_rows,
    with_stacks,
)
from ranktape.analyze.table import Column, Kind
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from ranktape.analyze.comparison.matching import Matching

SUMMARISED = ("relative_norm", "sqnr", "max_abs", "max_rel", "cosine", "jensen_shannon")
"""The metrics of which groups have the worst and the median."""

_AGAINST = tuple(field for field in IDENTITY if field not in {"rank", "compute_dtype", "shape"})

_ANSWERS = {True: "yes", False: "no", None: None}


class PairTable:
    """Makes the rows of pairs and of groups."""

    def __init__(self, matching: Matching, judge: Judge, *, by: Sequence[str]) -> None:
        """Take the sides; with `by` rows are of groups.

        Raises:
            UnknownFieldError: `by` names no field.
        """
        self._judge = judge
        self._by = with_stacks(by, matching.a)
        self._keys = list(zip(*(matching.a.column(field).tolist() for field in self._by), strict=True))
        self._sides = (matching.a, matching.b)
        self._fields = [identity_fields(records) for records in self._sides]
        self._identities = [identity_rows(records) for records in self._sides]
        self._ranks = [records.column("rank").tolist() for records in self._sides]

    def columns(self) -> tuple[Column, ...]:
        """The columns."""
        return self._group_columns() if self._by else self._pair_columns()

    def rows(self, pairs: Sequence[ComparedPair]) -> Iterator[tuple[Any, ...]]:
        """One row for each pair or group of them, in their order."""
        if not self._by:
            yield from map(self._pair_row, pairs)
            return
        groups: dict[tuple[Any, ...], list[ComparedPair]] = {}
        for pair in pairs:
            # A missing value is a NaN, which is equal to nothing.
            key = tuple(None if value != value else value for value in self._keys[pair.a.rows[0]])  # noqa: PLR0124
            groups.setdefault(key, []).append(pair)
        for key, members in groups.items():
            yield (*group_row(dict(zip(self._by, key, strict=True)), num_records=0)[:-1], *_group_cells(members))

    def _pair_columns(self) -> tuple[Column, ...]:
        noise = (
            Column(name="noise.floor", kind=Kind.FLOAT, head=f"floor of {self._judge.metric}", is_detail=False),
            Column(name="noise.ratio", kind=Kind.FLOAT, head="over floor"),
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
        differences = pair.differences
        mine, theirs = (self._identity(side, pair) for side in (0, 1))
        ranks = [[of[row] for row in parts.rows] for of, parts in zip(self._ranks, (pair.a, pair.b), strict=True)]
        return (
            pair.order,
            *mine.values(),
            " ".join(_against(mine, theirs, ranks=ranks)),
            _ANSWERS[pair.diverges],
            *pair.metrics().values(),
            *((pair.floor, pair.ratio) if self._judge.has_noise else ()),
            None if differences is None or differences.max_abs_at is None else list(differences.max_abs_at),
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

    def place(self, pair: ComparedPair) -> str:
        """Where a pair is, and how large its difference is, in one line."""
        mine = self._identity(0, pair)
        is_mixed = len(set(self._sides[0].column("quant_type").tolist())) > 1
        fields = ("operation", "phase", *(["quant_type"] if is_mixed else []), "tensor_name")
        what = site_name(mine["module"], mine["layer_type"], mine["layer_idx"], *(mine[field] for field in fields))
        where = f"iteration {mine['iteration']} microbatch {mine['microbatch']} rank {mine['rank']}"
        if pair.differences is None:
            return printable(f"{where}: {what} (distributions alone)")
        apart = pair.differences.num_apart
        how = f"NaN or Inf on one side in {apart} elements" if apart else f"{self._judge.metric} {pair.value:.4g}"
        return printable(f"{where}: {what}, {how}")

    def _identity(self, side: int, pair: ComparedPair) -> dict[str, Any]:
        parts = (pair.a, pair.b)[side]
        identity = dict(zip(self._fields[side], self._identities[side][parts.rows[0]], strict=True))
        if parts.is_assembled:
            identity["shape"] = list(parts.shape)
        return identity


def _against(mine: dict[str, Any], theirs: dict[str, Any], *, ranks: list[list[int]]) -> list[str]:
    """In which fields the second record differs from the first."""
    words = [f"{field}={theirs[field]}" for field in _AGAINST if mine[field] != theirs[field]]
    if ranks[0] != ranks[1]:
        words.append("rank=" + ",".join(map(str, ranks[1][:4])) + (",..." if len(ranks[1]) > 4 else ""))  # noqa: PLR2004
    if mine["shape"] != theirs["shape"]:
        words.append(f"shape={theirs['shape']}".replace(" ", ""))
    return words


def _group_cells(pairs: Sequence[ComparedPair]) -> list[Any]:
    """What is said of a group; the lower of two middle values is the median."""
    judged = [pair.diverges for pair in pairs if pair.diverges is not None]
    cells: list[Any] = [len(pairs), sum(pair.differs for pair in pairs), sum(judged) if judged else None]
    rows = [pair.metrics() for pair in pairs]
    for name in SUMMARISED:
        known = sorted(value for row in rows if (value := row[name]) is not None)
        cells += [PAIR_METRICS[name].worst(known), known[(len(known) - 1) // 2] if known else None]
    return cells
