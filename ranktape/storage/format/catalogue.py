"""The records of an iteration as columns, which can be filtered without parsing a document for each.

The catalogue of an iteration is an npz archive: one array for each field, strings as codes into a table, which is a
JSON list. Fields are read from the archive when a question first needs them. Every rank writes one of what it
recorded; that of the iteration has the rows of all ranks. It is stored as an array of bytes (`arrays.py`), so that
plain Zarr can read it too. `KINDS` says of each column what it holds; what is stored of a record and what comes back
follow from it.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import operator
import re
import zipfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol

import msgspec
import numpy as np

from ranktape.errors import RunFormatError
from ranktape.fields import INT_FIELDS, JSON_FIELDS, OPTIONAL_INT_FIELDS, RECORD_FIELDS, STRING_FIELDS, FieldKind
from ranktape.storage.format.arrays import crc_of, crc_text
from ranktape.storage.format.documents import MAX_INTEGER, SHOWN, Count, check_shape, parse_json
from ranktape.storage.format.dtypes import DTYPES
from ranktape.storage.format.layout import SITE_FIELDS, TensorSite, rank_iteration_path, site_path
from ranktape.storage.format.record_info import (
    EXTREMES,
    TALLY_KINDS,
    ElementTally,
    Keep,
    Mode,
    Operation,
    Overflow,
    RecordInfo,
)
from ranktape.storage.query.columns import Column, ColumnSource, StringColumn, narrowed, rows_of, values_of, widened


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


KINDS = {
    **dict.fromkeys(INT_FIELDS, FieldKind.INTEGER),
    **dict.fromkeys(OPTIONAL_INT_FIELDS, FieldKind.OPTIONAL_INTEGER),
    "numel": FieldKind.INTEGER,
    "index": FieldKind.INTEGER,
    "timestamp": FieldKind.REAL,
    "checksum": FieldKind.CHECKSUM,
    **{f"overflow.{kind}.count": FieldKind.INTEGER for kind in TALLY_KINDS},
    **{f"overflow.{name}": FieldKind.OPTIONAL_REAL for name in EXTREMES},
    **dict.fromkeys(STRING_FIELDS, FieldKind.TEXT),
    **dict.fromkeys(JSON_FIELDS, FieldKind.JSON),
    "overflow.per_sample": FieldKind.JSON,
    "site": FieldKind.TEXT,
    "stack": FieldKind.TEXT,
}
"""What each stored column holds, in the order in which they are stored."""

_DERIVED = {
    **{f"overflow.{kind}.ratio": FieldKind.REAL for kind in TALLY_KINDS},
    "overflow.total": FieldKind.INTEGER,
    "overflow.ratio": FieldKind.REAL,
}
"""What the columns hold that follow from others."""

COLUMNS = {**KINDS, **_DERIVED}
"""The names that filters may use, and what is there."""

_DTYPES: dict[FieldKind, Any] = {
    FieldKind.INTEGER: np.int64,
    FieldKind.OPTIONAL_INTEGER: np.float64,  # None is NaN
    FieldKind.REAL: np.float64,
    FieldKind.OPTIONAL_REAL: np.float64,
    FieldKind.CHECKSUM: np.uint32,
}
"""Of columns of numbers; the others are of texts."""

_LOW = {"layer_idx": -1, "index": -1}
"""The lowest value of a column of whole numbers, where it is not 0."""

_PATHS = {"numel": "info.shape", "index": "index", "site": "site", "stack": "stack"}
"""Where an entry has what a column holds, if it is not below `info` under the column's name."""

_values = operator.attrgetter(*(_PATHS.get(name, f"info.{name}") for name in KINDS))
"""All of an entry's values at once: asking for one after the other takes far longer."""


def _json(value: Any) -> str:
    return "null" if value is None else json.dumps(value, separators=(",", ":"))


@functools.lru_cache(maxsize=1 << 14)
def _json_of_tuple(value: tuple[int, ...]) -> str:
    return _json(list(value))


def _json_of_counts(value: Any) -> str:
    # The same text as that of `_json`, in a fifth of the time.
    return msgspec.json.encode(value).decode()


_STORE = {
    FieldKind.JSON: _json,
    FieldKind.CHECKSUM: crc_of,
    "numel": math.prod,
    "shape": _json_of_tuple,
    "overflow.per_sample": _json_of_counts,
}
"""From a value of an entry to that of a column, by the column's name or its kind; others stay what they are."""


def _check_column(name: str, column: np.ndarray[Any, Any]) -> None:
    kind = KINDS[name]
    high = {"high": np.iinfo(np.uint32).max} if kind is FieldKind.CHECKSUM else {}
    check_numbers(column, kind, low=_LOW.get(name, 0), **high)


_DAMAGE = (
    *(EOFError, LookupError, OSError, OverflowError, RuntimeError, TypeError, ValueError),
    *(zipfile.BadZipFile, zlib.error),
)
"""What reading an archive that is damaged, or that somebody made up, raises."""

_SPARE_NBYTES = 64 << 20
_MAX_RATIO = 256
"""The members of an archive take no more, unpacked, than this many times its bytes and some to spare: each row has a
time and a checksum, which hardly pack."""

_PACKING_LEVEL = 1
"""Of zlib: more takes far longer and gains little."""

_MAGIC = np.lib.format.magic(1, 0)
_HEADER = re.compile(rb"\{'descr': '([<|][iuf][1248])', 'fortran_order': False, 'shape': \((\d{1,18}),\), \} *\n")
"""Of an npy file of ours, after its length: matching it takes a twentieth of the time that numpy's parser takes."""

_CODES, _TABLE = "codes:", "table:"
"""Before the name of a column of text, of which two arrays are stored."""


def _pack(columns: Iterable[tuple[str, Column]]) -> bytes:
    """The npz archive that holds the columns under their names, in the fewest bytes."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=_PACKING_LEVEL) as members:
        for name, wide in columns:
            column = narrowed(wide)
            arrays = {name: column}
            if isinstance(column, StringColumn):
                table = np.frombuffer(json.dumps(column.table).encode(), dtype=np.uint8)
                arrays = {_CODES + name: column.codes, _TABLE + name: table}
            for member, array in arrays.items():
                with members.open(f"{member}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)
    return archive.getvalue()


class _Archive:
    """The arrays in an npz archive; what is not as it is packed here raises one of `_DAMAGE`."""

    def __init__(self, file: IO[bytes]) -> None:
        nbytes = file.seek(0, io.SEEK_END)
        self._members = zipfile.ZipFile(file)
        unpacked_nbytes = sum(member.file_size for member in self._members.infolist())
        if unpacked_nbytes > _SPARE_NBYTES + _MAX_RATIO * nbytes:
            raise ValueError(f"it has {nbytes} bytes and says that they unpack to {unpacked_nbytes}")

    def numbers(self, name: str) -> np.ndarray[Any, Any]:
        """A column of numbers."""
        info = self._members.getinfo(f"{name}.npy")
        with self._members.open(info) as packed:
            # No more than it says: what unpacks to more than that takes no memory for it.
            data = packed.read(info.file_size)
        if data[: len(_MAGIC)] != _MAGIC:
            raise ValueError(f"format {data[: len(_MAGIC)]!r}")
        start = len(_MAGIC) + 2 + int.from_bytes(data[len(_MAGIC) : len(_MAGIC) + 2], "little")
        header = _HEADER.fullmatch(data, len(_MAGIC) + 2, start)
        if header is None:
            raise ValueError(f"the header {data[len(_MAGIC) + 2 : start][:60]!r}")
        array = np.frombuffer(data, dtype=header[1].decode(), offset=start)
        if len(array) != int(header[2]):
            raise ValueError(f"{len(array)} rows instead of {int(header[2])}")
        return array

    def text(self, name: str) -> StringColumn:
        """A column of text."""
        codes = self.numbers(_CODES + name)
        table = parse_json(self.numbers(_TABLE + name).tobytes())
        if not isinstance(table, list) or not all(isinstance(text, str) for text in table):
            raise TypeError("its table is no list of texts")
        check_numbers(codes, FieldKind.INTEGER, high=len(table) - 1)
        return StringColumn(codes=codes, table=table)


def encode_catalogue(entries: Sequence[CatalogueEntry]) -> bytes:
    """The npz archive that holds the entries as columns, in their order."""
    found = zip(*map(_values, entries), strict=True) if entries else itertools.repeat(())
    return _pack((name, _column(name, values)) for name, values in zip(KINDS, found, strict=False))


def _column(name: str, values: Sequence[Any]) -> Column:
    stored = _stored(name, values)
    dtype = _DTYPES.get(KINDS[name])
    return StringColumn.of(stored) if dtype is None else np.array(stored, dtype=dtype)


def _stored(name: str, values: Sequence[Any]) -> list[Any]:
    """What a column holds of values that records have."""
    store: Any = _STORE.get(name) or _STORE.get(KINDS[name])
    return list(values if store is None else map(store, values))


def documented_columns(attributes: Mapping[str, Any], *, name: str) -> dict[str, list[Any]]:
    """What the document of the array of that name says of its records: the values of every column, None where missing.

    Raises:
        ArithmeticError, AttributeError, LookupError, TypeError, ValueError: it says what no document does.
    """
    is_stack = "captures" in attributes
    common, captures = (attributes["common"], attributes["captures"]) if is_stack else ({}, [attributes])
    number = len(captures)
    columns: dict[str, list[Any]] = {
        "stack": [name if is_stack else ""] * number,
        "index": [*range(number)] if is_stack else [-1],
    }
    for column, kind in KINDS.items():
        first, *inner = ("shape" if column == "numel" else column).split(".")
        if column in {"stack", "index", "site"}:
            continue
        is_shared = not any(first in capture for capture in captures)
        values = [common[first]] if is_shared else [(one if first in one else common)[first] for one in captures]
        for step in inner:
            values = [one[step] for one in values]
        if column in {"shape", "numel"}:
            values = [*map(tuple, values)]
        elif kind is FieldKind.OPTIONAL_REAL:
            values = [float(one) if isinstance(one, str) else one for one in values]
        stored = _stored(column, values)
        columns[column] = stored * number if is_shared else stored
    fields = (columns[field] for field in SITE_FIELDS)
    columns["site"] = [_site_path(*one) for one in zip(*fields, strict=True)] if is_stack else [name]
    return columns


@functools.lru_cache(maxsize=1 << 14)
def _site_path(*fields: Any) -> str:
    return site_path(TensorSite(**dict(zip(SITE_FIELDS, fields, strict=True))))


def catalogued_columns(table: RecordTable) -> dict[str, list[Any]]:
    """The values of every column, None where missing; in the order of the records."""
    columns = {name: values_of(table.column(name)) for name in KINDS}
    for name, kind in KINDS.items():
        if kind in {FieldKind.OPTIONAL_INTEGER, FieldKind.OPTIONAL_REAL}:
            columns[name] = [None if math.isnan(value) else value for value in columns[name]]
    return columns


def merge_catalogues(sources: Sequence[ColumnSource]) -> bytes:
    """The npz archive that holds the rows of all sources, one after the other; no record is parsed for it."""
    return _pack((name, concatenate(source(name) for source in sources)) for name in KINDS)


class Catalogue:
    """The records of one iteration as columns; a column is unpacked when it is first asked for."""

    def __init__(self, file: IO[bytes], *, place: str, attempt: str) -> None:
        """Read what columns there are.

        Args:
            file: The archive.
            place: Where it lies, for messages.
            attempt: The path of the attempt that the iteration belongs to.
        """
        self._place = place
        self._attempt = attempt
        self._columns: dict[str, Column] = {}
        try:
            self._archive = _Archive(file)
            # The column that every catalogue has: how long it is all others are.
            self._columns["iteration"] = iterations = self._checked("iteration")
            self.num_rows = len(iterations)
        except _DAMAGE as error:
            raise RunFormatError(f"the catalogue {place} is damaged: {error}: see 'ranktape check'") from error

    @classmethod
    def from_bytes(cls, data: bytes, *, place: str, attempt: str) -> Catalogue:
        """The catalogue in an archive that is at hand."""
        return cls(io.BytesIO(data), place=place, attempt=attempt)

    def column(self, name: str) -> Column:
        """The values of a column of `COLUMNS`, one for each record, in the types that they are stored in.

        These are as small as the values allow (`columns.widened` gives those to compute with).
        """
        if name not in self._columns:
            self._columns[name] = self._load(name, is_parsed=True)
        return self._columns[name]

    def load(self, name: str) -> Column:
        """As `column`, without remembering it, and without a look at what JSON in it says: for who passes it on."""
        return self._load(name, is_parsed=False)

    def _load(self, name: str, *, is_parsed: bool) -> Column:
        if name in _DERIVED:
            return self._derive(name)
        column: Column
        try:
            if KINDS[name] in _DTYPES:
                column = self._checked(name)
            else:
                column = texts = self._archive.text(name)
                for text in texts.table if is_parsed and KINDS[name] is FieldKind.JSON else ():
                    parse_column(name, str(text))
            if len(column) != self.num_rows:
                raise ValueError(f"{len(column)} rows; {self.num_rows} are expected")
        except _DAMAGE as error:
            message = f"column {name} of the catalogue {self._place} is damaged: {error}: see 'ranktape check'"
            raise RunFormatError(message) from error
        return column

    def group_of(self, row: int) -> str:
        """The path, below the run, of the group that a record is in."""
        rank, iteration = self.column("rank"), self.column("iteration")
        assert not isinstance(rank, StringColumn)
        assert not isinstance(iteration, StringColumn)
        return rank_iteration_path(self._attempt, int(rank[row]), int(iteration[row]))

    def _checked(self, name: str) -> np.ndarray[Any, Any]:
        column = self._archive.numbers(name)
        _check_column(name, column)
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


_NO_TALLY = ElementTally(count=0, ratio=0.0)
"""Of most kinds, in most tensors."""


def read_rows(table: RecordTable, rows: np.ndarray[Any, Any], *, place: str) -> Iterator[CatalogueEntry]:
    """The records in some rows of a catalogue; `place` names it in messages."""
    columns = {name: rows_of(table.column(name), rows) for name in KINDS}
    try:
        check_records(columns.__getitem__)
        values = {name: _restored(name, column) for name, column in columns.items()}
        sizes = values_of(columns["numel"])
        tallies = {kind: map(_tally, values[f"overflow.{kind}.count"], sizes) for kind in TALLY_KINDS}
        others = {name: values[f"overflow.{name}"] for name in (*EXTREMES, "per_sample")}
        overflows = _frozen(Overflow, {**tallies, **others}, len(rows))
        fields = {field.name: values[field.name] for field in RECORD_FIELDS}
        infos = _frozen(RecordInfo, {**fields, "overflow": overflows}, len(rows))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise RunFormatError(f"a catalogue of {place} is damaged: {error}: see 'ranktape check'") from error
    for info, site, stack, index in zip(infos, *(values[name] for name in ("site", "stack", "index")), strict=True):
        yield CatalogueEntry(info=info, site=site, stack=stack, index=index)


def _restored(name: str, column: Column) -> Iterable[Any]:
    """The values of a column as a record has them."""
    values = values_of(column)
    match KINDS[name]:
        case FieldKind.OPTIONAL_INTEGER:
            return (None if math.isnan(value) else int(value) for value in values)
        case FieldKind.OPTIONAL_REAL:
            return (None if math.isnan(value) else value for value in values)
        case FieldKind.CHECKSUM:
            return map(crc_text, values)
        case FieldKind.JSON:
            return _all_parsed(name, values)
    return values


def _all_parsed(name: str, texts: Iterable[str]) -> Iterator[Any]:
    """What each of several texts says, each different one looked at once."""
    known: set[str] = set()
    shapes: dict[str, Any] = {}
    for text in texts:
        if name == "shape":
            if text not in shapes:
                shapes[text] = parse_column(name, text)
            yield shapes[text]
        elif text in known:
            # Made anew for each record: whoever changes what one of them says changes no other.
            yield json.loads(text)
        else:
            yield parse_column(name, text)
            known.add(text)


def _tally(count: int, size: int) -> ElementTally:
    return ElementTally(count=count, ratio=count / size if size else 0.0) if count else _NO_TALLY


def _frozen(cls: Any, values: Mapping[str, Iterable[Any]], number: int) -> list[Any]:
    """Frozen instances of a class, made field by field: one by one takes several times as long."""
    items = [object.__new__(cls) for _ in range(number)]
    for name, column in values.items():
        deque(map(getattr(cls, name).__set__, items, column), maxlen=0)
    return items


WORDS = {
    "dtype": frozenset(DTYPES),
    "operation": frozenset(operation.value for operation in Operation),
    "keep": frozenset(keep.value for keep in Keep),
    "mode": frozenset(mode.value for mode in Mode),
}
"""What may stand in columns of closed vocabularies."""

_JSON = {
    "sample_ids": list[int | str],
    "placement": dict[str, Any],
    "metadata": dict[str, Any],
    "overflow.per_sample": dict[str, list[Count]],
}
"""What JSON in a column says, where it does not say null."""


def check_numbers(values: np.ndarray[Any, Any], kind: FieldKind, *, low: int = 0, high: int = MAX_INTEGER) -> None:
    """Make sure that a column holds what a field of that kind can; whole numbers lie between two.

    Raises:
        ValueError: it does not; its dtype or the number is in the text.
    """
    is_whole = kind in {FieldKind.INTEGER, FieldKind.CHECKSUM}
    if values.dtype.kind not in ("iu" if is_whole else "f"):
        raise ValueError(f"{values.dtype} instead of {'whole numbers' if is_whole else 'floats'}")
    if is_whole and len(values) and not low <= int(values.min()) <= int(values.max()) <= high:
        raise ValueError(f"numbers from {values.min()} to {values.max()}, allowed are {low} to {high}")
    if kind is FieldKind.OPTIONAL_INTEGER:
        # As the widest: in 16 bits there is no number to compare with.
        present = values[~np.isnan(values)].astype(np.float64)
        if not ((present >= 0) & (present < 2.0**53) & (present == np.floor(present))).all():
            raise ValueError("numbers that are not whole, or negative, or too large")


def check_records(source: ColumnSource) -> None:
    """Make sure that records in columns say what records can, and that their fields fit together.

    Names of sites and stacks are written in ASCII, and none leads upwards. Columns of numbers have been looked at one
    by one; what is JSON in a column is left to `parse_column`.

    Raises:
        ValueError: one does not.
    """
    for name, words in WORDS.items():
        if unknown := used_texts(source, name) - words:
            raise ValueError(f"{name} {min(unknown)!r:.{SHOWN}}")
    for name in ("site", "stack"):
        for path in used_texts(source, name) - ({""} if name == "stack" else set()):
            if not (path.isascii() and path.isprintable()) or not {"", ".", ".."}.isdisjoint(path.split("/")):
                raise ValueError(f"the path {path!r:.{SHOWN}}")
    shapes, sample_dim = _text(source, "shape"), source("sample_dim")
    assert not isinstance(sample_dim, StringColumn)
    used = set(np.unique(shapes.codes).tolist())
    num_dims = np.array(
        [len(parse_shape(text)) if code in used else 0 for code, text in enumerate(shapes.table)], dtype=np.float64
    )
    if (sample_dim >= num_dims[shapes.codes]).any():
        raise ValueError("a sample_dim that is none of the tensor's dimensions")


def _text(source: ColumnSource, name: str) -> StringColumn:
    column = source(name)
    assert isinstance(column, StringColumn)
    return column


def used_texts(source: ColumnSource, name: str) -> set[str]:
    """The texts that rows of a column have."""
    column = _text(source, name)
    return {str(column.table[code]) for code in np.unique(column.codes).tolist()}


@functools.lru_cache(maxsize=1 << 12)
def parse_shape(text: str) -> tuple[int, ...]:
    """The shape of a tensor, from the JSON list in a catalogue.

    Raises:
        ValueError: no tensor has such a shape.
    """
    shape = parse_json(text)
    if not isinstance(shape, list):
        raise TypeError(f"shape {text[:SHOWN]}")
    check_shape(shape)
    return tuple(shape)


def parse_column(name: str, text: str) -> Any:
    """What JSON in a column of that name says, if a record can say it.

    Raises:
        TypeError, ValueError: it cannot.
    """
    if name == "shape":
        return parse_shape(text)
    value = None if text == "null" else msgspec.convert(parse_json(text), _JSON[name])
    if name == "overflow.per_sample" and value is not None and set(value) != set(TALLY_KINDS):
        raise ValueError(f"counts of single samples of {', '.join(value)}, not of {', '.join(TALLY_KINDS)}")
    return value
