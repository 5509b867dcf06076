"""Keeps rows of numbers that follow from records, and gives them back as columns: no payload is looked at alone.

What a question makes of a record's counts is small beside the counts. It is kept as the counts are (`cache`), one
object for each iteration of a rank, whose one payload has a row for each record. An answer about records together is
kept under all that it is about.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.cache import Cache
from ranktape.analyze.engine.cache_object import DamagedObjectError, Payload
from ranktape.analyze.engine.engine import Engine, warn_once
from ranktape.analyze.engine.plan import WorkPlan
from ranktape.errors import RanktapeError, StorageError
from ranktape.storage import Records
from ranktape.storage.records.record import RecordReader

NOTHING = float(np.array([0x7FF8_0000_0000_0A01], dtype="<u8").view("<f8")[0])
"""Stands for None in a row: a NaN that no arithmetic makes."""

_NUM_THREADS = 8


class SheetRow(NamedTuple):
    """What is kept of one record."""

    numbers: Sequence[float | None]
    """As many for each record."""
    parts: NDArray[np.float64] | None = None
    """Of its samples, or cells: a row for each, of as many columns for each record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """The rows of several records."""

    numbers: NDArray[np.float64]
    """A row for each record; None is `NOTHING`."""
    sizes: NDArray[np.int64]
    """How many parts each record has."""
    parts: NDArray[np.float64]
    """The parts of all records, one after the other."""
    errors: dict[int, RanktapeError] = field(default_factory=dict)
    """By the place of a record why it has no row; its numbers are `NOTHING`."""

    def cells(self, place: int, *, is_whole: bool) -> list[Any]:
        """A column of numbers as Python has them, None where there is none."""
        column = np.ascontiguousarray(self.numbers[:, place])
        values: list[Any] = column.tolist()
        is_nothing = column.view(np.int64) == np.float64(NOTHING).view(np.int64)
        if not is_whole and not is_nothing.any():
            return values
        kind: Callable[[float], Any] = int if is_whole else float
        return [None if gone else kind(value) for value, gone in zip(values, is_nothing.tolist(), strict=True)]

    @property
    def owners(self) -> NDArray[np.int64]:
        """Of each part the place of its record."""
        return np.repeat(np.arange(self.sizes.size), self.sizes)

    @property
    def places(self) -> NDArray[np.int64]:
        """Of each part its place among those of its record."""
        return np.arange(len(self.parts)) - np.repeat(np.cumsum(self.sizes) - self.sizes, self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SheetForm:
    """What rows are, and under which name they are kept."""

    name: str
    """As that of a `Measure`: with every parameter."""
    width: int
    """Numbers of a row."""
    part_width: int = 0
    """Numbers of a part."""
    max_rows: int = 1 << 13
    """Of one object: whoever ends a question early loses no more."""

    def accepts(self, payload: Payload) -> bool:
        """Whether a payload is one of such rows; anybody may have put it into a cache."""
        if set(payload) != {"keys", "numbers", "sizes", "parts"}:
            return False
        keys, numbers, sizes, parts = (payload[name] for name in ("keys", "numbers", "sizes", "parts"))
        return (
            [one.dtype.str for one in (keys, numbers, sizes, parts)] == ["<u8", "<f8", "<i8", "<f8"]
            and numbers.shape == (len(numbers), self.width)
            and keys.shape == (len(numbers), 2)
            and sizes.shape == (len(numbers),)
            and bool((sizes >= 0).all())
            and parts.shape == (sizes.sum(), self.part_width)
        )

    def sheet(self, rows: Sequence[SheetRow | RanktapeError]) -> Sheet:
        """The rows of several records as columns."""
        nothing, no_parts = [NOTHING] * self.width, np.zeros((0, self.part_width))
        known = [SheetRow(nothing) if isinstance(row, RanktapeError) else row for row in rows]
        parts = [no_parts if row.parts is None else row.parts for row in known]
        numbers = [[NOTHING if one is None else one for one in row.numbers] for row in known]
        return Sheet(
            numbers=np.array(numbers, dtype=np.float64).reshape(len(rows), self.width),
            sizes=np.array([len(one) for one in parts], dtype=np.int64),
            parts=np.concatenate([no_parts, *parts]),
            errors={place: row for place, row in enumerate(rows) if isinstance(row, RanktapeError)},
        )


Compute = Callable[["Records"], Iterator[SheetRow | RanktapeError]]
"""Makes the rows of a selection, in its order."""


def sheet_of(records: Records, form: SheetForm, compute: Compute, *, engine: Engine) -> Sheet:
    """The rows of all records; those that are not kept are made, and kept.

    Raises:
        RanktapeError: what `compute` raises.
    """
    if not engine.use_cache or not len(records):
        return form.sheet(list(compute(records)))
    parts = records.by_source()
    if len(parts) > 1 or parts[0].records.reader is not records.reader:
        # What is known of a source is kept with it.
        places = np.concatenate([part.places for part in parts])
        whole = _together([sheet_of(part.records, form, compute, engine=engine) for part in parts], form)
        errors = {int(places[place]): error for place, error in whole.errors.items()}
        return replace(_taken(whole, np.argsort(places)), errors=errors)
    plan = WorkPlan(records)

    def make(places: Sequence[int]) -> Iterator[SheetRow | RanktapeError]:
        return compute(records if len(places) == len(records) else records.take(places))

    return kept_sheet(records.reader, plan.groups, plan.keys, form, make)


def kept_sheet(
    reader: RecordReader,
    groups: Sequence[tuple[str, slice]],
    keys_of: Callable[[slice], Sequence[str]],
    form: SheetForm,
    make: Callable[[Sequence[int]], Iterator[SheetRow | RanktapeError]],
) -> Sheet:
    """The rows of all places of groups; those that are not kept are made, in their order, and kept.

    Args:
        reader: What they are kept with.
        groups: The paths of the groups, and which places each has.
        keys_of: What the places of one group are known by.
        form: What rows are.
        make: Makes the rows of some places.

    Raises:
        RanktapeError: what `make` raises.
    """
    paths = list(dict.fromkeys(path for path, _ in groups))
    cache = Cache(reader, name=form.name, groups=paths, warn=warn_once)
    spans = [
        (path, range(start, min(start + form.max_rows, places.stop)))
        for path, places in groups
        for start in range(places.start, places.stop, form.max_rows)
    ]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        stored = list(pool.map(lambda path: list(_stored(cache, path, form)), paths))
    by_path = dict(zip(paths, stored, strict=True))
    keys = {span: _packed(keys_of(slice(span.start, span.stop))) for _, span in spans}
    found = [_looked_up(keys[span], by_path[path], form) for path, span in spans]
    missing: list[int] = []
    for (_, span), (_, known) in zip(spans, found, strict=True):
        missing += (span.start + np.flatnonzero(~known)).tolist()
    rows = make(missing) if missing else iter(())
    sheets = []
    for (path, span), (sheet, known) in zip(spans, found, strict=True):
        places = np.flatnonzero(~known)
        if places.size:
            fresh = form.sheet(list(itertools.islice(rows, int(places.size))))
            _keep(cache, path, keys[span][places], fresh)
            sheet = _merged(sheet, fresh, places)  # noqa: PLW2901 - with what was missing
        sheets.append(sheet)
    return _together(sheets, form)


def answer_of(
    reader: RecordReader,
    about: Sequence[str],
    form: SheetForm,
    compute: Callable[[], Sequence[SheetRow]],
    *,
    engine: Engine,
) -> Sheet:
    """The rows of an answer about records together, `about` being the keys of these and all that was asked.

    Raises:
        RanktapeError: what `compute` raises.
    """
    if not engine.use_cache:
        return form.sheet(compute())
    kept = KeptAnswer(reader, about, name=form.name)
    for payload in kept.payloads(form.accepts):
        return Sheet(numbers=payload["numbers"], sizes=payload["sizes"], parts=payload["parts"])
    sheet = form.sheet(compute())
    if len(sheet.numbers):
        keys = np.zeros((len(sheet.numbers), 2), dtype="<u8")
        kept.keep([{"keys": keys, "numbers": sheet.numbers, "sizes": sheet.sizes, "parts": sheet.parts}])
    return sheet


class KeptAnswer:
    """An answer about records together, as payloads in their order, kept under all that it is about."""

    def __init__(self, reader: RecordReader, about: Sequence[str], *, name: str) -> None:
        """Take what the records are of, their keys with all that was asked, and the name of what is kept."""
        self._path = f"together/{hashlib.blake2b(chr(0).join(about).encode(), digest_size=16).hexdigest()}"
        self._cache = Cache(reader, name=name, groups=[self._path], warn=warn_once)

    def payloads(self, accepts: Callable[[Payload], bool]) -> list[Payload]:
        """What was kept; nothing where there is none, or one is none of these."""
        for content in self._cache.find(self._path).objects.values():
            try:
                found = [content.payload(key) for key in sorted(content.keys)]
            except DamagedObjectError:
                continue  # it is made again
            if all(map(accepts, found)):
                return found
        return []

    def keep(self, payloads: Sequence[Payload]) -> None:
        """Keep them, where a place takes them."""
        shelf = self._cache.shelf(self._path, damaged=())
        if shelf is None or not payloads:
            return
        try:
            shelf.put([f"{place:08x}" for place in range(len(payloads))], payloads)
        except StorageError as error:
            self._cache.give_up(str(error))


def record_keys_of(records: Records) -> list[str]:
    """What each record is known by."""
    plan = WorkPlan(records)
    return list(itertools.chain.from_iterable(plan.keys(places) for _, places in plan.groups))


def _stored(cache: Cache, path: str, form: SheetForm) -> Iterator[Payload]:
    for key, content in cache.find(path).objects.items():
        try:
            payload = content.payload(key)
        except DamagedObjectError:
            continue  # it is made again
        if form.accepts(payload):
            yield payload


def _packed(keys: Sequence[str]) -> NDArray[np.uint64]:
    return np.frombuffer(bytes.fromhex("".join(keys)), dtype="<u8").reshape(-1, 2)


def _looked_up(keys: NDArray[np.uint64], stored: Sequence[Payload], form: SheetForm) -> tuple[Sheet, NDArray[np.bool_]]:
    """The rows with these keys, and which of them there are."""
    for payload in stored:
        if np.array_equal(payload["keys"], keys):
            sheet = Sheet(numbers=payload["numbers"], sizes=payload["sizes"], parts=payload["parts"])
            return sheet, np.ones(len(keys), dtype=np.bool_)
    whole = _together([Sheet(numbers=one["numbers"], sizes=one["sizes"], parts=one["parts"]) for one in stored], form)
    pairs = np.concatenate([np.zeros((0, 2), dtype="<u8"), *(one["keys"] for one in stored)]).tolist()
    places = {(first, second): place for place, (first, second) in enumerate(pairs)}
    chosen = np.array([places.get((first, second), -1) for first, second in keys.tolist()], dtype=np.int64)
    known = chosen >= 0
    sheet = Sheet(
        numbers=np.full((len(keys), form.width), NOTHING),
        sizes=np.zeros(len(keys), dtype=np.int64),
        parts=np.zeros((0, form.part_width)),
    )
    return _merged(sheet, _taken(whole, chosen[known]), np.flatnonzero(known)), known


def _taken(sheet: Sheet, places: NDArray[np.int64]) -> Sheet:
    starts, sizes = np.cumsum(sheet.sizes) - sheet.sizes, sheet.sizes[places]
    firsts = np.repeat(starts[places] - np.cumsum(sizes) + sizes, sizes)
    return Sheet(numbers=sheet.numbers[places], sizes=sizes, parts=sheet.parts[firsts + np.arange(sizes.sum())])


def _merged(sheet: Sheet, fresh: Sheet, places: NDArray[np.int64]) -> Sheet:
    """The sheet with fresh rows at those places, which had none."""
    numbers, sizes = sheet.numbers.copy(), sheet.sizes.copy()
    numbers[places], sizes[places] = fresh.numbers, fresh.sizes
    owners = np.concatenate([sheet.owners, places[fresh.owners]])
    return Sheet(
        numbers=numbers,
        sizes=sizes,
        parts=np.concatenate([sheet.parts, fresh.parts])[np.argsort(owners, kind="stable")],
        errors={int(places[place]): error for place, error in fresh.errors.items()},
    )


def _together(sheets: Sequence[Sheet], form: SheetForm) -> Sheet:
    starts = itertools.accumulate((len(one.sizes) for one in sheets), initial=0)
    return Sheet(
        numbers=np.concatenate([np.zeros((0, form.width)), *(one.numbers for one in sheets)]),
        sizes=np.concatenate([np.zeros(0, dtype=np.int64), *(one.sizes for one in sheets)]),
        parts=np.concatenate([np.zeros((0, form.part_width)), *(one.parts for one in sheets)]),
        errors={
            start + place: error
            for start, one in zip(starts, sheets, strict=False)
            for place, error in one.errors.items()
        },
    )


def _keep(cache: Cache, path: str, keys: NDArray[np.uint64], sheet: Sheet) -> None:
    good = np.setdiff1d(np.arange(len(keys)), list(sheet.errors))
    shelf = cache.shelf(path, damaged=())
    if shelf is None or not good.size:
        return
    kept = _taken(sheet, good)
    payload = {"keys": keys[good], "numbers": kept.numbers, "sizes": kept.sizes, "parts": kept.parts}
    try:
        shelf.put([hashlib.blake2b(keys[good].tobytes(), digest_size=16).hexdigest()], [payload])
    except StorageError as error:
        cache.give_up(str(error))
