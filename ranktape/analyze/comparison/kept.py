"""Keeps what sets the pairs of a comparison apart, under the contents of all records that are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ranktape.analyze.engine.sheet import SheetForm, SheetRow, answer_of, record_keys_of
from ranktape.analyze.numerics.differences import Differences
from ranktape.analyze.numerics.distances import Distances

if TYPE_CHECKING:
    from ranktape.analyze.comparison.matching import Matching
    from ranktape.analyze.engine.engine import Engine
    from ranktape.storage import Records

VERSION = 1
"""Of what is kept; one more whenever metrics of differences or distances change."""

_PLACE = "max_abs_at"
_DIFFERENCES = tuple(field.name for field in dataclasses.fields(Differences) if field.name != _PLACE)
_DISTANCES = tuple(field.name for field in dataclasses.fields(Distances))
_WHOLE = {place for place, field in enumerate(_DIFFERENCES) if "int" in str(Differences.__annotations__[field])}
_WIDTH = 2 * len(_DIFFERENCES) + len(_DISTANCES)
_THERE = -1
"""Stands before a place: that of a scalar is empty."""

_EXACT = 1 << 53
"""Whole numbers up to here are floats."""


class Apart(NamedTuple):
    """What sets the tensors of a pair apart, None where it is not known: their values, a twin's, and distributions."""

    differences: Differences | None
    twin: Differences | None
    distances: Distances | None


def kept_apart(
    matching: Matching,
    noise: Records | None,
    compute: Callable[[], Sequence[Apart]],
    *,
    about: Sequence[str],
    engine: Engine,
) -> list[Apart]:
    """What `compute` makes of the pairs, or made of the same ones before; `about` is what else was asked.

    Raises:
        RanktapeError: what `compute` raises.
    """
    if not engine.use_cache:
        return list(compute())
    sides = [record_keys_of(records) for records in (matching.a, matching.b, noise) if records is not None]
    pairs = [str([(one.rows, one.is_assembled) for one in pair]) for pair in matching.pairs]
    known = [*about, *map(str, map(len, sides)), *(key for keys in sides for key in keys), *pairs]
    form = SheetForm(name=f"pairs_v{VERSION}", width=_WIDTH, part_width=2)
    fresh: list[Apart] = []

    def rows() -> list[SheetRow]:
        fresh.extend(compute())
        # Of 64-bit floats a distance in units of the last place may be beyond: such an answer is not kept.
        return [_row(one) for one in fresh] if all(map(_can_be_kept, fresh)) else []

    sheet = answer_of(matching.a.reader, known, form, rows, engine=engine)
    if fresh or len(sheet.numbers) != len(matching.pairs):
        return fresh or list(compute())
    columns = [
        sheet.cells(place, is_whole=place < 2 * len(_DIFFERENCES) and place % len(_DIFFERENCES) in _WHOLE)
        for place in range(_WIDTH)
    ]
    places: list[tuple[list[int], list[int]]] = [([], []) for _ in matching.pairs]
    for owner, (side, index) in zip(sheet.owners.tolist(), sheet.parts.astype(np.int64).tolist(), strict=True):
        places[owner][side].append(index)
    return [_apart(row, own) for row, own in zip(zip(*columns, strict=True), places, strict=True)]


def _can_be_kept(one: Apart) -> bool:
    found = [getattr(side, name) for side in one[:2] if side is not None for name in _DIFFERENCES]
    return all(not isinstance(value, int) or abs(value) < _EXACT for value in found)


def _row(one: Apart) -> SheetRow:
    numbers: list[float | None] = []
    parts: list[tuple[int, int]] = []
    for number, side in enumerate(one[:2]):
        numbers += [None] * len(_DIFFERENCES) if side is None else [getattr(side, name) for name in _DIFFERENCES]
        place = getattr(side, _PLACE, None)
        parts += [] if place is None else [(number, index) for index in (_THERE, *place)]
    distances = one.distances
    numbers += [None] * len(_DISTANCES) if distances is None else [getattr(distances, name) for name in _DISTANCES]
    return SheetRow(numbers, np.array(parts, dtype=np.float64).reshape(-1, 2))


def _apart(row: Sequence[Any], places: tuple[list[int], list[int]]) -> Apart:
    sides = []
    for number, place in enumerate(places):
        values = dict(zip(_DIFFERENCES, row[number * len(_DIFFERENCES) :], strict=False))
        at = tuple(place[1:]) if place else None
        sides.append(None if values["num_elements"] is None else Differences(**values, max_abs_at=at))
    ends = dict(zip(_DISTANCES, row[-len(_DISTANCES) :], strict=True))
    distances = None if ends["is_exact"] is None else Distances(**ends | {"is_exact": bool(ends["is_exact"])})
    return Apart(sides[0], sides[1], distances)
