"""Gives how far apart the distributions of the two tensors of each pair are, whatever was kept of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ranktape.analyze.engine.digests import digests, merge_digests
from ranktape.analyze.engine.values import View
from ranktape.analyze.numerics.distributions.distances import Distances, distance
from ranktape.storage.format.record_info import Keep
from ranktape.storage.records.placement import AxisKind, parse_placement

if TYPE_CHECKING:
    from ranktape.analyze.comparison.layouts import Parts
    from ranktape.analyze.comparison.matching import Matching
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.numerics.digests.digest import Digest
    from ranktape.storage import Records


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
