"""Rows of numbers that take long to make, and follow from more than digests: kept in the cache as columns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.cache import Cache, Columns, Keys, name_of_text
from ranktape.analyze.engine.engine import Engine, WorkPlan, warn_once
from ranktape.errors import RanktapeError
from ranktape.storage import Records
from ranktape.storage.records.record import RecordOrigin

NOTHING = float(np.array([0x7FF8_0000_0000_0A01], dtype="<u8").view("<f8")[0])
"""Represents None in a row: a NaN that no arithmetic makes."""


class SheetRow(NamedTuple):
    """The numbers of one record."""

    numbers: Sequence[float | None]
    """As many for each record."""
    parts: NDArray[np.float64] | None = None
    """Rows of as many columns for each record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """The rows of several records."""

    numbers: NDArray[np.float64]
    """A row for each record; None is `NOTHING`."""
    sizes: NDArray[np.int64]
    """How many parts each record has."""
    parts: NDArray[np.float64]
    """The parts of all records, one record after the other."""
    errors: dict[int, RanktapeError] = field(default_factory=dict)
    """By the place of a record why it has no row; its numbers are `NOTHING`."""

    @classmethod
    def of(cls, columns: Columns, *, errors: dict[int, RanktapeError] | None = None) -> Sheet:
        """The rows that `SheetForm.columns` made columns of."""
        sizes = columns.sizes("parts")
        return cls(numbers=columns["numbers"], sizes=sizes, parts=columns["parts"], errors=errors or {})

    def cells(self, place: int, *, is_whole: bool) -> list[Any]:
        """A column of numbers as Python has them, None where there is none."""
        column = np.ascontiguousarray(self.numbers[:, place])
        is_nothing = column.view(np.int64) == np.float64(NOTHING).view(np.int64)
        kind: Callable[[float], Any] = int if is_whole else float
        return [None if gone else kind(value) for value, gone in zip(column.tolist(), is_nothing.tolist(), strict=True)]

    @property
    def owners(self) -> NDArray[np.int64]:
        """For each part the place of its record."""
        return np.repeat(np.arange(self.sizes.size), self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SheetForm:
    """The shape of rows, and the name under which they are kept."""

    name: str
    """As that of a `Measure`: with a version and every parameter."""
    width: int
    """Numbers of a row."""
    part_width: int = 0
    """Numbers of a part."""
    max_rows: int = 1 << 13
    """Of one object: who ends a question early loses no more."""

    @property
    def cache_name(self) -> str:
        """The name in the cache."""
        return f"{self.name}_{self.width}x{self.part_width}"

    def columns(self, rows: Sequence[SheetRow]) -> Columns:
        """The rows of several records."""
        none = np.zeros((0, self.part_width))
        parts = [none if row.parts is None else row.parts for row in rows]
        numbers = [[NOTHING if one is None else one for one in row.numbers] for row in rows]
        return Columns(
            {
                "numbers": np.array(numbers, dtype=np.float64).reshape(len(rows), self.width),
                "parts": np.concatenate([none, *parts]),
            },
            sizes={"parts": np.array([len(one) for one in parts], dtype=np.int64)},
            num_records=len(rows),
        )

    def sheet(self, rows: Sequence[SheetRow | RanktapeError]) -> Sheet:
        """The rows of several records, some of which may have failed."""
        errors = {place: row for place, row in enumerate(rows) if isinstance(row, RanktapeError)}
        nothing = SheetRow([NOTHING] * self.width)
        columns = self.columns([nothing if isinstance(row, RanktapeError) else row for row in rows])
        return Sheet.of(columns, errors=errors)


Compute = Callable[["Records"], Iterator[SheetRow | RanktapeError]]
"""Makes the rows of a selection, in its order."""


def sheet_of(records: Records, form: SheetForm, compute: Compute, *, engine: Engine) -> Sheet:
    """The rows of all records; those that are not kept are made, and kept.

    Raises:
        RanktapeError: what `compute` raises.
    """
    if not engine.use_cache or not len(records):
        return form.sheet(list(compute(records)))
    rows: list[SheetRow | RanktapeError] = [SheetRow([NOTHING] * form.width)] * len(records)
    for part in records.by_source():
        plan, own = WorkPlan(part.records), part.records

        def make(places: Sequence[int], own: Records = own) -> Iterator[SheetRow | RanktapeError]:
            return compute(own if len(places) == len(own) else own.take(places))

        found = _kept_rows(own.reader, plan.groups, plan.keys, form, make)
        for place, row in zip(part.places.tolist(), found, strict=True):
            rows[place] = row
    return form.sheet(rows)


def kept_sheet(
    reader: RecordOrigin,
    groups: Sequence[tuple[str, slice]],
    keys: Keys,
    form: SheetForm,
    make: Callable[[Sequence[int]], Iterator[SheetRow | RanktapeError]],
) -> Sheet:
    """The rows of all places of groups; those that are not kept are made, in their order, and kept.

    Args:
        reader: What they are kept with.
        groups: The paths of the groups, and which places each has.
        keys: The key of each place.
        form: The shape of rows.
        make: Makes the rows of some places.

    Raises:
        RanktapeError: what `make` raises.
    """
    return form.sheet(_kept_rows(reader, groups, keys, form, make))


def _kept_rows(
    reader: RecordOrigin,
    groups: Sequence[tuple[str, slice]],
    keys: Keys,
    form: SheetForm,
    make: Callable[[Sequence[int]], Iterator[SheetRow | RanktapeError]],
) -> list[SheetRow | RanktapeError]:
    cache = Cache(reader, name=form.cache_name, groups={path for path, _ in groups}, warn=warn_once)
    rows: list[SheetRow | RanktapeError | None] = [None] * len(keys)
    for path, places in groups:
        for one in cache.find(path).objects:
            looked = one.look_up(keys[places])
            (known,) = np.nonzero(looked >= 0)
            found = one.columns.take(looked[known])
            own_parts = np.split(found["parts"], np.cumsum(found.sizes("parts"))[:-1])
            for place, numbers, part in zip(known.tolist(), found["numbers"].tolist(), own_parts, strict=False):
                rows[int(places.start) + place] = SheetRow(numbers, part)
    missing = [place for place, row in enumerate(rows) if row is None]
    made = make(missing) if missing else iter(())
    for path, places in groups:
        own = [place for place in range(int(places.start), int(places.stop)) if rows[place] is None]
        for start in range(0, len(own), form.max_rows):
            chosen = own[start : start + form.max_rows]
            fresh = list(itertools.islice(made, len(chosen)))
            for place, row in zip(chosen, fresh, strict=True):
                rows[place] = row
            good = [place for place, row in zip(chosen, fresh, strict=True) if not isinstance(row, RanktapeError)]
            if good:
                cache.keep(path, keys[good], form.columns([row for row in fresh if not isinstance(row, RanktapeError)]))
    return [row for row in rows if row is not None]


class KeptAnswer:
    """The columns of an answer about records together, kept under the keys of these and all that was asked."""

    def __init__(self, records: Sequence[Records], about: Sequence[str], *, name: str) -> None:
        """Take the records, all that was asked, and the name with its version; it is kept with the first records."""
        words = [word for one in records for word in (str(len(one)), WorkPlan(one).keys.tobytes().hex())]
        self._path = f"together/{name_of_text(chr(0).join([*words, *about]))}"
        self._cache = Cache(records[0].reader, name=name, groups=[self._path], warn=warn_once)

    def find(self) -> Columns | None:
        """The columns, if they were kept."""
        return next((found.columns for found in self._cache.find(self._path).objects), None)

    def keep(self, columns: Columns) -> None:
        """Keep them."""
        self._cache.keep(self._path, np.zeros((columns.num_records, 2), dtype=np.uint64), columns)
