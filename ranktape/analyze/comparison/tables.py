"""The tables of compared pairs: one row for each pair, or for each group of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ranktape.analyze.comparison.matching import site_name
from ranktape.analyze.comparison.pair_metrics import PAIR_FIGURES, ComparedPair, PairFigure, figures_of, judged_value
from ranktape.analyze.identity import IDENTITY, group_columns, identity_columns, identity_fields, identity_rows
from ranktape.analyze.table import Column, Kind
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from ranktape.analyze.comparison.matching import Matching

SUMMARISED = ("relative_norm", "sqnr", "max_abs", "max_rel", "cosine", "jensen_shannon")
"""The figures of which groups have the worst and the median."""

_AGAINST = tuple(field for field in IDENTITY if field not in {"rank", "compute_dtype", "shape"})

_ANSWERS = {True: "yes", False: "no", None: None}


class PairTable:
    """Makes the rows of pairs and of groups."""

    def __init__(self, matching: Matching, *, figure: PairFigure, has_noise: bool) -> None:
        self._matching = matching
        self._figure = figure
        self._has_noise = has_noise
        self._fields = [identity_fields(records) for records in (matching.a, matching.b)]
        self._identities = [identity_rows(records) for records in (matching.a, matching.b)]
        self._ranks = [records.column("rank").tolist() for records in (matching.a, matching.b)]

    def worst_first(self, pairs: Sequence[ComparedPair]) -> list[ComparedPair]:
        """The pairs with the largest judged figure first, those of distributions alone last; equal ones in order."""
        return sorted(pairs, key=lambda pair: (-_badness(pair, self._figure), pair.order))

    def pair_columns(self) -> tuple[Column, ...]:
        """The columns of a table with one row for each pair."""
        noise = (
            Column(name="noise.floor", kind=Kind.FLOAT, head=f"floor of {self._figure.name}", is_detail=False),
            Column(name="noise.ratio", kind=Kind.FLOAT, head="over floor"),
        )
        return (
            Column(name="order", kind=Kind.INTEGER, is_detail=True),
            *identity_columns(self._matching.a),
            Column(name="against", kind=Kind.TEXT, is_key=True),
            Column(name="diverges", kind=Kind.TEXT),
            *(figure.column for figure in PAIR_FIGURES.values()),
            *(noise if self._has_noise else ()),
            Column(name="max_abs_at", kind=Kind.LIST, head="at", is_detail=True),
            Column(name="copies", kind=Kind.INTEGER, is_detail=True),
            Column(name="ranks", kind=Kind.LIST, is_detail=True),
            Column(name="b.ranks", kind=Kind.LIST, is_detail=True),
            *(
                Column(name=f"b.{column.name}", kind=column.kind, is_detail=True)
                for column in identity_columns(self._matching.b)
            ),
        )

    def pair_row(self, pair: ComparedPair) -> tuple[Any, ...]:
        """What those columns hold for a pair."""
        differences = pair.differences
        mine, theirs = (self._identity(side, pair) for side in (0, 1))
        ranks = [[of[row] for row in parts.rows] for of, parts in zip(self._ranks, (pair.a, pair.b), strict=True)]
        return (
            pair.order,
            *mine.values(),
            " ".join(_against(mine, theirs, ranks=ranks)),
            _ANSWERS[pair.diverges],
            *figures_of(differences, pair.distances),
            *((pair.floor, pair.ratio) if self._has_noise else ()),
            None if differences is None or differences.max_abs_at is None else list(differences.max_abs_at),
            min(pair.a.copies, pair.b.copies),
            *ranks,
            *theirs.values(),
        )

    def group_columns(self, by: Sequence[str]) -> tuple[Column, ...]:
        """The columns of a table with one row for each group."""
        summaries = [
            Column(name=f"{name}.{which}", kind=figure.kind, unit=figure.unit, head=f"{which} {figure.head or name}")
            for name, figure in PAIR_FIGURES.items()
            if name in SUMMARISED
            for which in ("worst", "median")
        ]
        return (
            *group_columns(by)[:-1],
            Column(name="pairs", kind=Kind.INTEGER),
            Column(name="differing", kind=Kind.INTEGER),
            Column(name="diverging", kind=Kind.INTEGER),
            *summaries,
        )

    def group_row(self, key: Sequence[Any], pairs: Sequence[ComparedPair]) -> tuple[Any, ...]:
        """What those columns hold for a group; the lower of two middle values is the median."""
        cells: list[Any] = [len(pairs), sum(map(is_differing, pairs)), _num_diverging(pairs)]
        figures = zip(*(figures_of(pair.differences, pair.distances) for pair in pairs), strict=True)
        columns = dict(zip(PAIR_FIGURES, figures, strict=True))
        for name in SUMMARISED:
            known = sorted(value for value in columns[name] if value is not None)
            cells += [PAIR_FIGURES[name].worst(known), known[(len(known) - 1) // 2] if known else None]
        return (*key, *cells)

    def place(self, pair: ComparedPair) -> str:
        """Where a pair is, and how large its difference is, in one line."""
        mine = self._identity(0, pair)
        is_mixed = len(set(self._matching.a.column("quant_type").tolist())) > 1
        fields = ("operation", "phase", *(["quant_type"] if is_mixed else []), "tensor_name")
        what = site_name(mine["module"], mine["layer_type"], mine["layer_idx"], *(mine[field] for field in fields))
        where = f"iteration {mine['iteration']} microbatch {mine['microbatch']} rank {mine['rank']}"
        if pair.differences is None:
            return printable(f"{where}: {what} (distributions alone)")
        value = judged_value(self._figure, pair.differences)
        apart = pair.differences.num_apart
        how = f"NaN or Inf on one side in {apart} elements" if apart else f"{self._figure.name} {value:.4g}"
        return printable(f"{where}: {what}, {how}")

    def _identity(self, side: int, pair: ComparedPair) -> dict[str, Any]:
        parts = (pair.a, pair.b)[side]
        identity = dict(zip(self._fields[side], self._identities[side][parts.rows[0]], strict=True))
        if parts.is_assembled:
            identity["shape"] = list(parts.shape)
        return identity


def is_differing(pair: ComparedPair) -> bool:
    """Whether anything differs: an element, or where distributions alone are known, these."""
    if pair.differences is not None:
        return pair.differences.num_differing > 0
    return pair.distances is not None and bool(pair.distances.differ)


def _num_diverging(pairs: Sequence[ComparedPair]) -> int | None:
    """How many pairs diverge; None where that is judged of none."""
    known = [pair.diverges for pair in pairs if pair.diverges is not None]
    return sum(known) if known else None


def _badness(pair: ComparedPair, figure: PairFigure) -> float:
    if pair.differences is None:
        variation = None if pair.distances is None else pair.distances.total_variation
        # Below every pair of which more is known.
        return -2.0 if variation is None else variation - 1.5
    value = judged_value(figure, pair.differences)
    return -1.0 if value is None or math.isnan(value) else value


def _against(mine: dict[str, Any], theirs: dict[str, Any], *, ranks: list[list[int]]) -> list[str]:
    """In which fields the second record differs from the first."""
    words = [f"{field}={theirs[field]}" for field in _AGAINST if mine[field] != theirs[field]]
    if ranks[0] != ranks[1]:
        words.append("rank=" + ",".join(map(str, ranks[1][:4])) + (",..." if len(ranks[1]) > 4 else ""))  # noqa: PLR2004
    if mine["shape"] != theirs["shape"]:
        words.append(f"shape={theirs['shape']}".replace(" ", ""))
    return words
