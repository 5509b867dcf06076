"""The catalogue: the records of an iteration as columns, which are filtered without parsing a document for each record.

A catalogue is an npz archive with one array for each field. Strings are codes into a table, which is a JSON list. A
field is read from the archive when it is first needed. Each rank writes the catalogue of its own records; the catalogue
of the iteration has the rows of all ranks. A catalogue is stored as an array of bytes (`arrays.py`), so that any Zarr
library can read it. `KINDS` gives the kind of each column.
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
    """One record of a rank's commit."""

    site: str
    """Path of the tensor below its iteration."""
    stack: str
    """Name of the array below its iteration that it shares with other tensors; empty if it has its own array."""
    index: int
    """Index in the shared array; -1 if it has its own array."""
    info: RecordInfo
    """Metadata of the tensor."""


class RecordTable(Protocol):
    """A source of records as columns."""

    num_rows: int
    """Number of records."""

    def column(self, name: str) -> Column:
        """The values of a column of `COLUMNS`, one for each record, in any type that can represent them."""
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
"""The kind of each stored column, in the order in which they are stored."""

_DERIVED = {
    **{f"overflow.{kind}.ratio": FieldKind.REAL for kind in TALLY_KINDS},
    "overflow.total": FieldKind.INTEGER,
    "overflow.ratio": FieldKind.REAL,
}
"""The kind of each column that is computed from other columns."""

COLUMNS = {**KINDS, **_DERIVED}
"""The kind of each column that filters may use."""

_DTYPES: dict[FieldKind, Any] = {
    FieldKind.INTEGER: np.int64,
    FieldKind.OPTIONAL_INTEGER: np.float64,  # None is NaN
    FieldKind.REAL: np.float64,
    FieldKind.OPTIONAL_REAL: np.float64,
    FieldKind.CHECKSUM: np.uint32,
}
"""The dtype of each kind of numeric column; the other kinds are text."""

_LOW = {"layer_idx": -1, "index": -1}
"""The lowest value of each column of integers whose lowest value is not 0."""

_PATHS = {"numel": "info.shape", "index": "index", "site": "site", "stack": "stack"}
"""The attribute of an entry for each column that is not the field of `info` with the column's name."""

_values = operator.attrgetter(*(_PATHS.get(name, f"info.{name}") for name in KINDS))
"""Gets all values of an entry in one call, which is much faster than one call for each."""


def _json(value: Any) -> str:
    return "null" if value is None else json.dumps(value, separators=(",", ":"))


@functools.lru_cache(maxsize=1 << 14)
def _json_of_tuple(value: tuple[int, ...]) -> str:
    return _json(list(value))


def _json_of_counts(value: Any) -> str:
    # Gives the same text as `_json` in a fifth of the time.
    return msgspec.json.encode(value).decode()


_STORE = {
    FieldKind.JSON: _json,
    FieldKind.CHECKSUM: crc_of,
    "numel": math.prod,
    "shape": _json_of_tuple,
    "overflow.per_sample": _json_of_counts,
}
"""The conversion from an entry's value to a column's, by the name of the column or its kind; identity by default."""


def _check_column(name: str, column: np.ndarray[Any, Any]) -> None:
    kind = KINDS[name]
    high = {"high": np.iinfo(np.uint32).max} if kind is FieldKind.CHECKSUM else {}
    check_numbers(column, kind, low=_LOW.get(name, 0), **high)


_DAMAGE = (
    *(EOFError, LookupError, OSError, OverflowError, RuntimeError, TypeError, ValueError),
    *(zipfile.BadZipFile, zlib.error),
)
"""The exceptions that a damaged or forged archive raises when it is read."""

_SPARE_NBYTES = 64 << 20
_MAX_RATIO = 256
"""Bounds the decompressed size of an archive: at most `_MAX_RATIO` times its size plus `_SPARE_NBYTES`. Real archives
stay far below, because each row has a time and a checksum, which hardly compress."""

_PACKING_LEVEL = 1
"""The level of zlib. Higher levels take much longer and gain little."""

_MAGIC = np.lib.format.magic(1, 0)
_HEADER = re.compile(rb"\{'descr': '([<|][iuf][1248])', 'fortran_order': False, 'shape': \((\d{1,18}),\), \} *\n")
"""The header, after its length, of an npy file of ranktape. A match is twenty times as fast as numpy's parser."""

_CODES, _TABLE = "codes:", "table:"
"""The prefixes of the two arrays in which a column of text is stored."""


def _pack(columns: Iterable[tuple[str, Column]]) -> bytes:
    """The npz archive of some columns, each in its narrowest dtype."""
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
    """The arrays of an npz archive. Anything that `_pack` does not write raises one of `_DAMAGE`."""

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
            # A member that decompresses to more than its stated size takes no more memory.
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
    """The npz archive of some entries, in their order."""
    columns = zip(*map(_values, entries), strict=True) if entries else itertools.repeat(())
    return _pack((name, _column(name, values)) for name, values in zip(KINDS, columns, strict=False))


def _column(name: str, values: Sequence[Any]) -> Column:
    stored = _stored(name, values)
    dtype = _DTYPES.get(KINDS[name])
    return StringColumn.of(stored) if dtype is None else np.array(stored, dtype=dtype)


def _stored(name: str, values: Sequence[Any]) -> list[Any]:
    """The stored form of the values of a column."""
    store: Any = _STORE.get(name) or _STORE.get(KINDS[name])
    return list(values if store is None else map(store, values))


def documented_columns(attributes: Mapping[str, Any], *, name: str) -> dict[str, list[Any]]:
    """The values of every column in the document of the array of that name; None for missing values.

    Raises:
        ArithmeticError, AttributeError, LookupError, TypeError, ValueError: ranktape never writes such a document.
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
        values = [common[first]] if is_shared else [(item if first in item else common)[first] for item in captures]
        for step in inner:
            values = [item[step] for item in values]
        if column in {"shape", "numel"}:
            values = [*map(tuple, values)]
        elif kind is FieldKind.OPTIONAL_REAL:
            values = [float(item) if isinstance(item, str) else item for item in values]
        stored = _stored(column, values)
        columns[column] = stored * number if is_shared else stored
    fields = (columns[field] for field in SITE_FIELDS)
    columns["site"] = [_site_path(*item) for item in zip(*fields, strict=True)] if is_stack else [name]
    return columns


@functools.lru_cache(maxsize=1 << 14)
def _site_path(*fields: Any) -> str:
    return site_path(TensorSite(**dict(zip(SITE_FIELDS, fields, strict=True))))


def catalogued_columns(table: RecordTable) -> dict[str, list[Any]]:
    """The values of every column in the order of the records; None for missing values."""
    columns = {name: values_of(table.column(name)) for name in KINDS}
    for name, kind in KINDS.items():
        if kind in {FieldKind.OPTIONAL_INTEGER, FieldKind.OPTIONAL_REAL}:
            columns[name] = [None if math.isnan(value) else value for value in columns[name]]
    return columns


def merge_catalogues(sources: Sequence[ColumnSource]) -> bytes:
    """The npz archive of the rows of all sources, one source after the other. No record is parsed."""
    return _pack((name, concatenate(source(name) for source in sources)) for name in KINDS)


class Catalogue:
    """The records of one iteration as columns. A column is decompressed when it is first used."""

    def __init__(self, file: IO[bytes], *, place: str, attempt: str) -> None:
        """Open the archive.

        Args:
            file: The archive.
            place: Its URL, for error messages.
            attempt: The path of the attempt that the iteration belongs to.
        """
        self._place = place
        self._attempt = attempt
        self._columns: dict[str, Column] = {}
        try:
            self._archive = _Archive(file)
            # Every catalogue has this column. Its length is that of all others.
            self._columns["iteration"] = iterations = self._checked("iteration")
            self.num_rows = len(iterations)
        except _DAMAGE as error:
            raise RunFormatError(f"the catalogue {place} is damaged: {error}: see 'ranktape check'") from error

    @classmethod
    def from_bytes(cls, data: bytes, *, place: str, attempt: str) -> Catalogue:
        """The catalogue in the bytes of an archive."""
        return cls(io.BytesIO(data), place=place, attempt=attempt)

    def column(self, name: str) -> Column:
        """The values of a column of `COLUMNS`, one for each record, in the dtype in which they are stored.

        This is the narrowest dtype that represents the values; `columns.widened` gives one for arithmetic.
        """
        if name not in self._columns:
            self._columns[name] = self._load(name, is_parsed=True)
        return self._columns[name]

    def load(self, name: str) -> Column:
        """Like `column`, but without caching and without validating JSON: for a copy to another catalogue."""
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
    """A catalogue without records, with every column of `COLUMNS` in its dtype."""
    return Catalogue.from_bytes(encode_catalogue([]), place="of no iteration", attempt="")


def concatenate(columns: Iterable[Column]) -> Column:
    """The rows of several columns of one name, one column after the other. Strings share one table."""
    # Each column is released before the next one is read, because many ranks have similar texts.
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
"""The tally of most kinds in most tensors."""


def read_rows(table: RecordTable, rows: np.ndarray[Any, Any], *, place: str) -> Iterator[CatalogueEntry]:
    """The records in some rows of a catalogue; `place` is its URL for error messages."""
    columns = {name: rows_of(table.column(name), rows) for name in KINDS}
    try:
        check_records(columns.__getitem__)
        values = {name: _restored(name, column) for name, column in columns.items()}
        sizes = values_of(columns["numel"])
        tallies = {kind: map(_tally, values[f"overflow.{kind}.count"], sizes) for kind in TALLY_KINDS}
        extremes = {name: values[f"overflow.{name}"] for name in (*EXTREMES, "per_sample")}
        overflows = _frozen(Overflow, {**tallies, **extremes}, len(rows))
        fields = {field.name: values[field.name] for field in RECORD_FIELDS}
        infos = _frozen(RecordInfo, {**fields, "overflow": overflows}, len(rows))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise RunFormatError(f"a catalogue of {place} is damaged: {error}: see 'ranktape check'") from error
    for info, site, stack, index in zip(infos, *(values[name] for name in ("site", "stack", "index")), strict=True):
        yield CatalogueEntry(info=info, site=site, stack=stack, index=index)


def _restored(name: str, column: Column) -> Iterable[Any]:
    """The values of a column in the form that a record has."""
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
    """The value of each JSON text; equal texts are validated once."""
    known: set[str] = set()
    shapes: dict[str, Any] = {}
    for text in texts:
        if name == "shape":
            if text not in shapes:
                shapes[text] = parse_column(name, text)
            yield shapes[text]
        elif text in known:
            # Parsed again for each record, so that a change to one record's value does not affect others.
            yield json.loads(text)
        else:
            yield parse_column(name, text)
            known.add(text)


def _tally(count: int, size: int) -> ElementTally:
    return ElementTally(count=count, ratio=count / size if size else 0.0) if count else _NO_TALLY


def _frozen(cls: Any, values: Mapping[str, Iterable[Any]], number: int) -> list[Any]:
    """Instances of a frozen dataclass, filled field by field, which is several times faster than one by one."""
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
"""The allowed values of each column with a closed vocabulary."""

_JSON = {
    "sample_ids": list[int | str],
    "placement": dict[str, Any],
    "metadata": dict[str, Any],
    "overflow.per_sample": dict[str, list[Count]],
}
"""The type of the JSON in each column, if it is not null."""


def check_numbers(values: np.ndarray[Any, Any], kind: FieldKind, *, low: int = 0, high: int = MAX_INTEGER) -> None:
    """Check that a column has values that a field of that kind can have; integers are from `low` to `high`.

    Raises:
        ValueError: it has others. The message gives the dtype or the number.
    """
    is_whole = kind in {FieldKind.INTEGER, FieldKind.CHECKSUM}
    if values.dtype.kind not in ("iu" if is_whole else "f"):
        raise ValueError(f"{values.dtype} instead of {'whole numbers' if is_whole else 'floats'}")
    if is_whole and len(values) and not low <= int(values.min()) <= int(values.max()) <= high:
        raise ValueError(f"numbers from {values.min()} to {values.max()}, allowed are {low} to {high}")
    if kind is FieldKind.OPTIONAL_INTEGER:
        # float16 cannot represent the limit of the comparison.
        present = values[~np.isnan(values)].astype(np.float64)
        if not ((present >= 0) & (present < 2.0**53) & (present == np.floor(present))).all():
            raise ValueError("numbers that are not whole, or negative, or too large")


def check_records(source: ColumnSource) -> None:
    """Check that the fields of records in columns are valid and consistent.

    Names of sites and stacks must be ASCII and must not contain `..`. Numeric columns have been checked one by one;
    `parse_column` checks JSON.

    Raises:
        ValueError: a record is not valid.
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
    """The texts that occur in the rows of a column."""
    column = _text(source, name)
    return {str(column.table[code]) for code in np.unique(column.codes).tolist()}


@functools.lru_cache(maxsize=1 << 12)
def parse_shape(text: str) -> tuple[int, ...]:
    """The shape of a tensor from the JSON list in a catalogue.

    Raises:
        ValueError: no tensor can have the shape.
    """
    shape = parse_json(text)
    if not isinstance(shape, list):
        raise TypeError(f"shape {text[:SHOWN]}")
    check_shape(shape)
    return tuple(shape)


def parse_column(name: str, text: str) -> Any:
    """The value of a JSON text in the column of that name.

    Raises:
        TypeError, ValueError: no record can have the value.
    """
    if name == "shape":
        return parse_shape(text)
    value = None if text == "null" else msgspec.convert(parse_json(text), _JSON[name])
    if name == "overflow.per_sample" and value is not None and set(value) != set(TALLY_KINDS):
        raise ValueError(f"counts of single samples of {', '.join(value)}, not of {', '.join(TALLY_KINDS)}")
    return value
