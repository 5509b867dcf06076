"""The records of an iteration as columns, which can be filtered without parsing a document for each.

The catalogue of an iteration is an npz archive: one array for each field, strings as codes into a table.
Fields are read from the archive when a question first needs them. Every rank writes one of what it recorded; that
of the iteration has the rows of all ranks. It is stored as an array of bytes (`blob.py`), so that plain Zarr can
read it too.
"""

from __future__ import annotations

import functools
import io
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy as np

from ranktape.errors import RunFormatError
from ranktape.fields import INT_FIELDS, JSON_FIELDS, OPTIONAL_INT_FIELDS, STRING_FIELDS
from ranktape.storage.format.archive import ARCHIVE_DAMAGE, ColumnArchive, pack_columns
from ranktape.storage.format.encode import crc_of
from ranktape.storage.format.layout import rank_iteration_path
from ranktape.storage.format.record_info import EXTREMES, TALLY_KINDS, RecordInfo
from ranktape.storage.format.validation import check_floats, check_integers, check_optional_integers
from ranktape.storage.query.columns import StringColumn, narrowed, widened

if TYPE_CHECKING:
    from ranktape.storage.query.columns import Column, ColumnSource


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One record as a rank committed it."""

    site: str
    """The tensor's path below its iteration."""
    stack: str
    """The name of the array that holds it with others, below its iteration; empty where it has one of its own."""
    index: int
    """Its place in that array; -1 where it has one of its own."""
    info: RecordInfo
    """What is known of it."""


class RecordTable(Protocol):
    """Records as columns: what a selection needs of the place that they come from."""

    num_rows: int
    """Records."""

    def column(self, name: str) -> Column:
        """The values of a column of `COLUMNS`, one for each record, in any type that holds them."""
        ...

    def group_of(self, row: int) -> str:
        """The path, below the run, of the group that a record is in."""
        ...


@functools.lru_cache(maxsize=1 << 14)
def _json_of_tuple(value: tuple[int, ...]) -> str:
    return _json(list(value))


def _json(value: Any) -> str:
    return "null" if value is None else json.dumps(value, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Where a column's values come from."""

    path: str
    """Dotted path of the attribute of an `CatalogueEntry`."""
    dtype: Any = None
    """Of the column; None for text."""
    convert: Callable[[Any], Any] | None = None
    """From the attribute to what is stored."""


_NUMBERS: dict[str, _Source] = {
    **{name: _Source(path=f"info.{name}", dtype=np.int64) for name in INT_FIELDS},
    # None becomes NaN.
    **{name: _Source(path=f"info.{name}", dtype=np.float64) for name in OPTIONAL_INT_FIELDS},
    "numel": _Source(path="info.shape", dtype=np.int64, convert=math.prod),
    "index": _Source(path="index", dtype=np.int64),
    "timestamp": _Source(path="info.timestamp", dtype=np.float64),
    "checksum": _Source(path="info.checksum", dtype=np.uint32, convert=crc_of),
    **{f"overflow.{kind}.count": _Source(path=f"info.overflow.{kind}.count", dtype=np.int64) for kind in TALLY_KINDS},
    **{f"overflow.{name}": _Source(path=f"info.overflow.{name}", dtype=np.float64) for name in EXTREMES},
}
"""Columns of numbers."""

_STRINGS: dict[str, _Source] = {
    **{name: _Source(path=f"info.{name}") for name in STRING_FIELDS},
    **{name: _Source(path=f"info.{name}", convert=_json) for name in JSON_FIELDS},
    "shape": _Source(path="info.shape", convert=_json_of_tuple),
    "overflow.per_sample": _Source(path="info.overflow.per_sample", convert=_json),
    "site": _Source(path="site"),
    "stack": _Source(path="stack"),
}
"""Columns of strings."""

SOURCES = {**_NUMBERS, **_STRINGS}
"""Columns that are stored."""

_values = operator.attrgetter(*(source.path for source in SOURCES.values()))
"""All of an entry's values at once: asking for one after the other takes far longer."""

_DERIVED = (*(f"overflow.{kind}.ratio" for kind in TALLY_KINDS), "overflow.total", "overflow.ratio")

COLUMNS = (*_NUMBERS, *_STRINGS, *_DERIVED)
"""The names that filters may use."""

_LOW = {"layer_idx": -1, "index": -1}
"""The lowest value of a column of whole numbers, where it is not 0."""


def encode_catalogue(entries: Sequence[CatalogueEntry]) -> bytes:
    """The npz archive that holds the entries as columns, in their order."""
    columns: dict[str, Column] = {}
    values_of = dict(zip(SOURCES, zip(*map(_values, entries), strict=True), strict=False))
    for name, source in SOURCES.items():
        values = values_of.get(name, ())
        if source.convert is not None:
            values = tuple(map(source.convert, values))
        columns[name] = encode_text(values) if source.dtype is None else np.array(values, dtype=source.dtype)
    return pack_columns(columns.items())


def encode_text(values: Sequence[str]) -> StringColumn:
    """A column of texts, each different one written once."""
    codes = {text: code for code, text in enumerate(dict.fromkeys(values))}
    return StringColumn(codes=np.array([*map(codes.__getitem__, values)], dtype=np.uint32), table=list(codes))


def merge_catalogues(sources: Sequence[ColumnSource]) -> bytes:
    """The npz archive that holds the rows of all sources, one after the other; no record is parsed for it."""
    return pack_columns((name, concatenate(source(name) for source in sources)) for name in SOURCES)


class Catalogue:
    """The records of one iteration as columns; a column is unpacked when it is first asked for."""

    def __init__(self, file: IO[bytes] | Mapping[str, Column], *, place: str, attempt: str) -> None:
        """Read what columns there are.

        Args:
            file: The archive; or all of `SOURCES` themselves, looked at.
            place: Where it lies, for messages.
            attempt: The path of the attempt that the iteration belongs to.

        Raises:
            RunFormatError: it is not a catalogue.
        """
        self._place = place
        self._attempt = attempt
        self._columns: dict[str, Column] = {}
        if isinstance(file, Mapping):
            self._columns |= file
            self.num_rows = len(file["iteration"])
            return
        try:
            self._archive = ColumnArchive(file)
            # The column that every catalogue has: how long it is all others are.
            self._columns["iteration"] = iterations = self._checked("iteration")
            self.num_rows = len(iterations)
            self._archive.expect_rows(self.num_rows)
        except ARCHIVE_DAMAGE as error:
            raise RunFormatError(f"the catalogue {place} is damaged: {error}: see 'ranktape check'") from error

    @classmethod
    def from_bytes(cls, data: bytes, *, place: str, attempt: str) -> Catalogue:
        """The catalogue in an archive that is at hand."""
        return cls(io.BytesIO(data), place=place, attempt=attempt)

    def column(self, name: str) -> Column:
        """The values of a column of `COLUMNS`, one for each record, in the types that they are stored in.

        These are as small as the values allow (`columns.widened` gives those to compute with).

        Raises:
            RunFormatError: it is missing or damaged.
        """
        if name not in self._columns:
            self._columns[name] = self.load(name)
        return self._columns[name]

    def load(self, name: str) -> Column:
        """As `column`, without remembering it: for who needs each column once."""
        return self._derive(name) if name in _DERIVED else self._load(name)

    def group_of(self, row: int) -> str:
        """The path, below the run, of the group that a record is in."""
        rank, iteration = self.column("rank"), self.column("iteration")
        assert not isinstance(rank, StringColumn)
        assert not isinstance(iteration, StringColumn)
        return rank_iteration_path(self._attempt, int(rank[row]), int(iteration[row]))

    def _load(self, name: str) -> Column:
        try:
            return self._archive.text(name) if name in _STRINGS else self._checked(name)
        except ARCHIVE_DAMAGE as error:
            message = f"column {name} of the catalogue {self._place} is damaged: {error}: see 'ranktape check'"
            raise RunFormatError(message) from error

    def _checked(self, name: str) -> np.ndarray[Any, Any]:
        """A column of numbers, each of which can be what the column says."""
        column = self._archive.numbers(name)
        check_numbers(name, column)
        return column

    def _derive(self, name: str) -> Column:
        total = name in {"overflow.total", "overflow.ratio"}
        kinds = ("upper", "lower") if total else (name.split(".")[1],)
        counts = sum((self._numbers(f"overflow.{kind}.count") for kind in kinds), start=np.int64(0))
        ratios: np.ndarray[Any, Any] = counts / np.maximum(self._numbers("numel"), 1)
        return np.asarray(counts) if name == "overflow.total" else ratios

    def _numbers(self, name: str) -> np.ndarray[Any, Any]:
        column = widened(self.column(name))
        assert not isinstance(column, StringColumn), name
        return column


def check_numbers(name: str, column: np.ndarray[Any, Any]) -> None:
    """Make sure that a column holds what numbers of that name can be.

    Raises:
        ValueError: it does not.
    """
    if name in OPTIONAL_INT_FIELDS:
        check_optional_integers(column)
    elif _NUMBERS[name].dtype is np.float64:
        check_floats(column)
    else:
        check_integers(column, low=_LOW.get(name, 0), high=np.iinfo(_NUMBERS[name].dtype).max)


def empty_catalogue() -> Catalogue:
    """No records, and yet every column of `COLUMNS` in its type."""
    return Catalogue.from_bytes(encode_catalogue([]), place="of no iteration", attempt="")


def concatenate(columns: Iterable[Column]) -> Column:
    """The rows of several columns of one name, one after the other; strings share one table."""
    # What was read of a column is let go before the next one is: the texts of many ranks are alike.
    codes: dict[str | None, int] = {}
    texts: list[np.ndarray[Any, Any]] = []
    numbers: list[np.ndarray[Any, Any]] = []
    for column in columns:
        if isinstance(column, StringColumn):
            renumber = np.array([codes.setdefault(text, len(codes)) for text in column.table], dtype=np.uint32)
            texts.append(renumber[column.codes] if len(column) else column.codes)
        else:
            numbers.append(column)
    if texts:
        return narrowed(StringColumn(codes=np.concatenate(texts), table=list(codes)))
    return np.concatenate(numbers) if numbers else np.empty(0, dtype=np.int64)
