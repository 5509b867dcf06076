"""Selections of records: lazy sequences that filters and expressions reduce."""

from __future__ import annotations

import itertools
import math
import operator
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np

from ranktape.errors import NoRecordsError, UsageError
from ranktape.fields import FieldKind
from ranktape.storage.format.catalogue import COLUMNS, WORDS, RecordTable, concatenate, read_rows
from ranktape.storage.format.record_info import WIDE
from ranktape.storage.places.backend import nbytes_text
from ranktape.storage.places.failures import printable
from ranktape.storage.query.columns import Column, StringColumn, encode, equal_rows, is_text, rows_of
from ranktape.storage.query.filters import Filter, check_fields, parse_filter, split_texts
from ranktape.storage.query.where import parse_where
from ranktape.storage.records.record import Location, Record, RecordOrigin, RecordReader
from ranktape.storage.records.tables import MAX_SHOWN_ROWS, clipped, html_table

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]  # it has no types
    import pyarrow as pa
    import xarray

    from ranktape.storage.records.assemble import GlobalView


SOURCE = "source"
"""The field with the name of a record's run or folder. It is not stored."""

KNOWN_COLUMNS = {**COLUMNS, SOURCE: FieldKind.TEXT}
"""The kind of each column that filters may use."""

_NUM_THREADS = 16
"""The number of catalogues from which a column is read concurrently."""

_LISTED = ("iteration", "rank", "microbatch", "module", "operation", "phase", "tensor_name", "dtype", "shape", "nbytes")
"""The fields that a notebook shows."""

_OPERANDS = ("query", "key", "value", "input", "weight", "bias", "output")

_OWN_WORDS: Mapping[str, Collection[str]] = {
    **WORDS,
    "compute_dtype": WORDS["dtype"],
    "layer_type": ("attention", "linear", "embedding", "hidden"),
    "phase": ("pre", "post", "unknown"),
    "component": ("FA", "linear", "embedding", "hidden", "unknown"),
    "tensor_name": [
        f"{before}{name}{after}"
        for before in ("", "grad_", WIDE, "master_")
        for name in _OPERANDS
        for after in ("", "_codes", "_scales")
    ],
}
"""The values of a capture's vocabulary, by field. A filter for one of them is not a typo, even if the run has none."""

_MAX_NAMED = 8
"""The number of values of a field that a message names before the rest is counted."""

_ROWS_AT_ONCE = 1024
"""The number of records that an iteration makes from the columns at a time."""


class LazyTable(RecordTable, RecordReader, Protocol):
    """A table of files, which reads each file for some columns, and which also reads values."""

    files: Sequence[Any]
    """The file of each record."""

    def narrow(self, rows: np.ndarray[Any, Any], /) -> LazyTable:
        """The table with some of the rows."""
        ...

    def cost(self, field: str, /) -> int:
        """The relative cost of reading the column of a field. Cheaper filters are applied first."""
        ...


class _TableRows:
    """Some rows of another table, without a reference to it."""

    def __init__(self, table: RecordTable, rows: np.ndarray[Any, Any]) -> None:
        self.num_rows = len(rows)
        self._columns = {name: _compact(rows_of(table.column(name), rows)) for name in COLUMNS}
        self._groups = [table.group_of(row) for row in rows.tolist()]

    def column(self, name: str) -> Column:
        """The values of a column."""
        return self._columns[name]

    def group_of(self, row: int) -> str:
        """The path of the group of a record."""
        return self._groups[row]


def _compact(column: Column) -> Column:
    """The column without texts that no row uses."""
    if not isinstance(column, StringColumn):
        return column
    used, codes = np.unique(column.codes, return_inverse=True)
    return StringColumn(codes=codes.reshape(-1), table=[column.table[code] for code in used.tolist()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The records of one table: an iteration of a run, or a folder of files."""

    table: RecordTable
    """Their fields as columns."""
    reader: RecordReader
    """The source of their values."""
    source: str
    """Name of the source."""
    lazy: LazyTable | None = None
    """The table, if it reads files for its columns; it is reduced to the rows in use."""

    @classmethod
    def of_files(cls, table: LazyTable, *, source: str) -> Listing:
        """The records of a table that also reads values."""
        return cls(table=table, reader=table, source=source, lazy=table)

    def narrow(self, rows: np.ndarray[Any, Any]) -> Listing:
        """The records at some positions if this saves reading, else all records."""
        return self if self.lazy is None else Listing.of_files(self.lazy.narrow(rows), source=self.source)

    def detached(self, rows: np.ndarray[Any, Any]) -> Listing:
        """The records at some positions, without a reference to the others."""
        return replace(self, table=_TableRows(self.table, rows)) if self.lazy is None else self.narrow(rows)

    def column(self, name: str, rows: np.ndarray[Any, Any]) -> Column:
        """The values of a column at some positions."""
        return rows_of(self.table.column(name), rows) if self.lazy is None else self.lazy.narrow(rows).column(name)


@dataclass(frozen=True, slots=True)
class SourcePart:
    """The records of one source in a selection."""

    name: str
    """Name of the source."""
    places: np.ndarray[Any, Any]
    """Positions of the records in the selection."""
    records: Records
    """The records as a selection of their own."""


class Records(Sequence[Record]):
    """A selection of records, in the order of iteration, rank and recording; a lazy, immutable sequence."""

    def __init__(self, listings: Sequence[Listing], rows: np.ndarray[Any, Any] | None = None) -> None:
        """Select `rows` (by default all) from the concatenated rows of the tables."""
        self._listings = listings
        self._columns: dict[str, Column] = {}
        self._starts = np.cumsum([0, *(listing.table.num_rows for listing in listings)])
        self._rows = np.arange(int(self._starts[-1])) if rows is None else rows

    @classmethod
    def of(cls, reader: RecordReader, tables: Sequence[RecordTable]) -> Records:
        """All records of some tables that share a reader."""
        source = source_name(reader.url)
        return cls([Listing(table=table, reader=reader, source=source) for table in tables])

    def __getstate__(self) -> dict[str, Any]:
        """Keep only the selected rows, so that another process does not receive all records of the run."""
        return self._narrowed(self._rows, narrow=Listing.detached).__dict__

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_costly(self) -> bool:
        """Whether the metadata of a record is read from its file. Such records go to other processes as a selection."""
        return any(listing.lazy is not None for listing in self._listings)

    @property
    def files(self) -> Sequence[Any]:
        """The file of each record; empty unless all records are files."""
        tables = [listing.lazy for listing in self._listings]
        known = [file for table in tables if table is not None for file in table.files]
        return [] if None in tables else [known[row] for row in self._rows.tolist()]

    @property
    def reader(self) -> RecordOrigin:
        """The source of the values; for several sources, an object with their names only."""
        readers = {id(listing.reader): listing.reader for listing in self._listings}
        if len(readers) == 1:
            return self._listings[0].reader
        return _Several(" and ".join(dict.fromkeys(reader.url for reader in readers.values())))

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the sources, in their order; for a single source, the last part of its path."""
        names = list(dict.fromkeys(listing.source for listing in self._listings))
        if len(names) == 1:
            return (names[0],)
        used = {self._listings[number].source for number in np.unique(self._numbers(self._rows)).tolist()}
        return tuple(name for name in names if name in used)

    def parts(self) -> list[SourcePart]:
        """Consecutive records of one source, with their positions in the selection."""
        return self._split(lambda numbers: np.split(np.arange(len(self)), np.flatnonzero(np.diff(numbers)) + 1))

    def by_source(self) -> list[SourcePart]:
        """All records of each source, with their positions in the selection."""
        return self._split(lambda numbers: [np.flatnonzero(numbers == number) for number in np.unique(numbers)])

    def _split(self, split: Callable[[np.ndarray[Any, Any]], Iterable[np.ndarray[Any, Any]]]) -> list[SourcePart]:
        kinds = self._kinds()
        if len(set(kinds)) == 1:
            return [SourcePart(self._listings[0].source, np.arange(len(self)), self)]
        numbers = np.array(kinds)[self._numbers(self._rows)]
        return [self._part(positions, int(numbers[positions[0]])) for positions in split(numbers) if len(positions)]

    def _kinds(self) -> list[int]:
        """The number of the source of each listing."""
        known: dict[tuple[str, int], int] = {}
        return [known.setdefault((listing.source, id(listing.reader)), len(known)) for listing in self._listings]

    def _part(self, positions: np.ndarray[Any, Any], kind: int) -> SourcePart:
        chosen = [number for number, listing_kind in enumerate(self._kinds()) if listing_kind == kind]
        listings = [self._listings[number] for number in chosen]
        rows = self._rows[positions]
        numbers = self._numbers(rows)
        starts = np.cumsum([0, *(listing.table.num_rows for listing in listings)])
        moved = starts[np.searchsorted(chosen, numbers)] + rows - self._starts[numbers]
        return SourcePart(listings[0].source, positions, Records(listings, moved).take(range(len(moved))))

    def groups(self) -> list[tuple[str, slice]]:
        """Consecutive records of one iteration of one rank: the path of its group, and their slice."""
        numbers = self._numbers(self._rows)
        keys = np.stack([numbers, self.column("rank"), self.column("iteration")])
        starts = [0, *(np.flatnonzero((np.diff(keys) != 0).any(axis=0)) + 1).tolist()] if len(self) else []
        paths_and_slices = []
        for start, stop in zip(starts, [*starts[1:], len(self)], strict=False):
            number = int(numbers[start])
            row = int(self._rows[start] - self._starts[number])
            paths_and_slices.append((self._listings[number].table.group_of(row), slice(start, stop)))
        return paths_and_slices

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> Records: ...

    def __getitem__(self, index: int | slice) -> Record | Records:
        if isinstance(index, slice):
            return self._take(self._rows[index])
        position = operator.index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(f"record {index} is not in a selection of {len(self)} records")
        position %= len(self)
        return next(self._read(self._rows[position : position + 1]))

    def __iter__(self) -> Iterator[Record]:
        for start in range(0, len(self), _ROWS_AT_ONCE):
            yield from self._read(self._rows[start : start + _ROWS_AT_ONCE])

    def _read(self, rows: np.ndarray[Any, Any]) -> Iterator[Record]:
        # Columns of each table are used, because those of the whole selection are many times as large.
        for full_listing, _, positions in self._runs(rows):
            listing = full_listing.narrow(positions)
            known = positions if listing is full_listing else np.arange(len(positions))
            table, url = listing.table, listing.reader.url
            for position, row in zip(known.tolist(), read_rows(table, known, place=url), strict=True):
                location = Location(group=table.group_of(position), site=row.site, stack=row.stack, index=row.index)
                # Each file has its own reader, so that it can be sent to another process without the others.
                reader = listing.reader if listing.lazy is None else listing.lazy.narrow(np.array([position]))
                yield Record(row.info, location=location, reader=reader)

    def _numbers(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The index of the listing of each row."""
        return np.searchsorted(self._starts, rows, side="right") - 1

    def _runs(self, rows: np.ndarray[Any, Any]) -> Iterator[tuple[Listing, slice, np.ndarray[Any, Any]]]:
        """Consecutive rows of one listing: the listing, their slice of `rows`, and their positions in the listing."""
        numbers = self._numbers(rows)
        firsts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(rows)] if len(rows) else []
        for first, last in itertools.pairwise(firsts):
            number = int(numbers[first])
            yield self._listings[number], slice(first, last), rows[first:last] - self._starts[number]

    def __repr__(self) -> str:
        return f"<Records: {len(self)} in {printable(self.reader.url)}>"

    def _repr_html_(self) -> str:
        first = self[:MAX_SHOWN_ROWS]
        shown = [first.column(name).tolist() for name in _LISTED]
        shown[_LISTED.index("nbytes")] = [nbytes_text(nbytes) for nbytes in first.column("nbytes").tolist()]
        num_more = len(self) - len(first)
        return html_table(
            _LISTED,
            [[clipped(str(value)) for value in row] for row in zip(*shown, strict=True)],
            is_left=[name not in {"iteration", "rank", "microbatch", "nbytes"} for name in _LISTED],
            heading=[f"Records: {len(self)} in {clipped(self.reader.url)}", nbytes_text(self.column("nbytes").sum())],
            notes=[f"the first {len(first)} of {len(self)}"] if num_more else [],
        )

    def select(self, **filters: Any) -> Records:
        """The records whose fields have the given values.

        A field takes a value, a list of alternatives, or a text in the syntax of the command line: `"0-3,7"`,
        `"10:20:2"`, `"grad_*,output"`. Nested fields are written with two underscores: `overflow__ratio=0`. A selection
        may be empty. A text that is not in a capture's vocabulary and that no record has is an error, because it may be
        misspelt; `where` does not check this.

        Raises:
            NoRecordsError: a text may be misspelt. The message lists the existing values and the nearest one.
            UnknownFieldError: a filter names a field that records do not have.
            UsageError: a field cannot have the value.
        """
        chosen = self
        conditions = [
            parse_filter(name.replace("__", "."), value, known=KNOWN_COLUMNS) for name, value in filters.items()
        ]
        lazy = [listing.lazy for listing in self._listings if listing.lazy is not None]
        conditions.sort(key=lambda condition: max((table.cost(condition.field) for table in lazy), default=0))
        for condition in conditions:
            chosen = chosen.fitting(condition)
        if len(self) and not len(chosen):
            every, _ = self.unfiltered()
            for condition in conditions:
                texts = [text for text in condition.alternatives if isinstance(text, str)]
                column = every.stored(condition.field)
                if texts and is_text(column):
                    known = StringColumn.of({*encode(column).table, *_OWN_WORDS.get(condition.field, ())})
                    if not condition.mask(lambda _, known=known: known, len(known)).any():
                        raise nothing_matches(every, condition.field, ",".join(texts))
        return chosen

    def fitting(self, condition: Filter) -> Records:
        """The records that match a filter.

        Raises:
            UsageError: the field cannot have the value.
        """
        return self._take(self._rows[condition.mask(self._source(self._rows), len(self))])

    def where(self, expression: str) -> Records:
        """The records for which an expression is true, such as `overflow.ratio > 0 and layer_type == 'attention'`.

        Raises:
            UnknownFieldError: the expression names a field that records do not have.
            UsageError: the expression is not valid. The message gives the position of the error.
        """
        parsed = parse_where(expression)
        check_fields(parsed.names, known=KNOWN_COLUMNS)
        return self._take(self._rows[parsed.mask(self._source(self._rows))])

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """One field of all records as an array: numbers (NaN if missing), or text as objects.

        Raises:
            UnknownFieldError: records do not have the field.
        """
        check_fields([name], known=KNOWN_COLUMNS)
        column = self.stored(name)
        if isinstance(column, StringColumn):
            return np.array(column.table, dtype=object)[column.codes] if len(column) else np.empty(0, dtype=object)
        return column

    def stored(self, name: str) -> Column:
        """Like `column`, but text is encoded as codes into a table."""
        return self._source(self._rows)(name)

    def take(self, positions: Sequence[int]) -> Records:
        """The records at some positions of the selection, in the given order. A position may be repeated.

        Raises:
            IndexError: a position is out of range.
        """
        return self._take(self._rows[np.asarray(positions, dtype=np.int64)])

    def listed(self) -> tuple[Sequence[Listing], np.ndarray[Any, Any]]:
        """The tables of the records, and the selected rows of the concatenated tables."""
        return self._listings, self._rows

    def unfiltered(self) -> tuple[Records, np.ndarray[Any, Any]]:
        """All records of the iterations of this selection, and the positions of the selected ones among them.

        For files, these are the selected records.
        """
        return self._take(np.arange(int(self._starts[-1]))), self._rows

    def group_by(self, fields: Sequence[str]) -> list[tuple[dict[str, Any], Records]]:
        """The records in groups of equal values of the fields, sorted by the values; without fields, one group.

        Raises:
            UnknownFieldError: records do not have a field.
        """
        if not fields:
            return [({}, self)]
        check_fields(fields, known=KNOWN_COLUMNS)
        return [
            (dict(zip(fields, key, strict=True)), self._take(self._rows[positions]))
            for key, positions in equal_rows([self.stored(field) for field in fields])
        ]

    def assemble(self, *, replicas: str = "check") -> list[GlobalView[Record]]:
        """The tensors over all ranks, assembled from the records of this selection.

        Shards outside the selection are missing. Replicas of a shard must have equal bits when a tensor is read, unless
        `replicas` is `"ignore"`.

        Raises:
            DataError: a placement is damaged.
            StorageError: the store cannot be read.
        """
        from ranktape.storage.records.assemble import assemble_records

        # A tensor is assembled from shards of one source.
        assembled = (assemble_records(part.records, replicas=replicas) for part in self.by_source())
        return list(itertools.chain.from_iterable(assembled))

    def stack(self) -> xarray.DataArray:
        """The records as one array, with a dimension for each field in which they differ, then the tensors' dimensions.

        dask reads the values on use, one record at a time.

        Raises:
            UsageError: dask or xarray is not installed, the records differ in shape or dtype, or one is missing.
        """
        try:
            from ranktape.storage.records.labelled import stack_records
        except ImportError as error:
            raise UsageError(f"stack() needs dask and xarray ({error}): pip install 'ranktape[dask]'") from error
        return stack_records(self)

    def to_xarray(self) -> xarray.DataArray:
        """The same as `stack`."""
        return self.stack()

    def to_pandas(self) -> pd.DataFrame:
        """The metadata as a data frame, with a row for each record and a column for each field. No values are read.

        Integers that may be missing are `Int64` and text is `string`. Shapes are lists. Placements, identifiers of
        samples and the user's metadata are JSON. Counts at the limits are columns such as `overflow.nan.count`. For
        files, the first column is `file`.

        Raises:
            DataError: a field is damaged.
            StorageError: a catalogue cannot be read.
            UsageError: pandas is not installed.
        """
        from ranktape.storage.records.tables import records_frame

        return records_frame(self)

    def to_arrow(self) -> pa.Table:
        """The metadata as an Arrow table, with a row for each record and a column for each field. No values are read.

        The columns are those of `to_pandas`. Missing values are null and shapes are lists of integers. Placements,
        identifiers of samples and the user's metadata are JSON. DuckDB, polars and pandas read the table in place.

        Raises:
            DataError: a field is damaged.
            StorageError: a catalogue cannot be read.
            UsageError: pyarrow is not installed.
        """
        from ranktape.storage.records.tables import records_table

        return records_table(self)

    def _take(self, rows: np.ndarray[Any, Any]) -> Records:
        if self.is_costly:
            return self._narrowed(rows)
        selection = Records(self._listings, rows)
        # Columns are those of whole tables, so that selections of one run share them.
        selection._columns = self._columns
        return selection

    def _narrowed(
        self, rows: np.ndarray[Any, Any], *, narrow: Callable[[Listing, np.ndarray[Any, Any]], Listing] = Listing.narrow
    ) -> Records:
        """The selection of some rows, in tables without other files."""
        listings, moved, start = [], np.empty_like(rows), 0
        numbers = self._numbers(rows)
        for number, listing in enumerate(self._listings):
            at = np.flatnonzero(numbers == number)
            positions = rows[at] - self._starts[number]
            narrowed = narrow(listing, positions)
            moved[at] = start + (positions if narrowed is listing else np.arange(len(at)))
            listings.append(narrowed)
            start += narrowed.table.num_rows
        return Records(listings, moved)

    def _source(self, rows: np.ndarray[Any, Any]) -> Callable[[str], Column]:
        return lambda name: self._column(name, rows)

    def _column(self, name: str, rows: np.ndarray[Any, Any]) -> Column:
        if name == SOURCE:
            source_names = StringColumn.of([listing.source for listing in self._listings])
            return rows_of(source_names, self._numbers(rows))
        if not self.is_costly:
            return rows_of(self._all(name), rows)
        if not len(rows):
            return self._listings[0].column(name, rows)
        order = np.argsort(rows, kind="stable")
        columns = (listing.column(name, positions) for listing, _, positions in self._runs(rows[order]))
        return rows_of(concatenate(columns), np.argsort(order, kind="stable"))

    def _all(self, name: str) -> Column:
        if name not in self._columns:
            # Each table may send a request to the store.
            with ThreadPoolExecutor(_NUM_THREADS) as pool:
                columns = pool.map(lambda listing: listing.table.column(name), self._listings)
                self._columns[name] = concatenate(columns)
        return self._columns[name]


@dataclass(frozen=True, slots=True)
class _Several:
    """The common name of several sources."""

    url: str


def source_name(url: str) -> str:
    """The name of a single run or folder: the last part of its path."""
    path = url if "://" in url else os.path.realpath(url)
    return path.rstrip("/").rpartition("/")[2] or path


def unite(sources: Mapping[str, Records]) -> Records:
    """The records of several selections as one selection, in the order of the selections.

    Records keep their fields; `source` is the name of the selection in `sources`. Records of different sources are
    never shards or replicas of one tensor.

    Raises:
        UsageError: there is no selection.
    """
    if not sources:
        raise UsageError("there is nothing to unite: give one selection of records or more")
    listings: list[Listing] = []
    rows, start = [], 0
    for name, records in sources.items():
        source_listings, row_numbers = records.listed()
        listings += [replace(listing, source=name) for listing in source_listings]
        rows.append(start + row_numbers)
        start += sum(listing.table.num_rows for listing in source_listings)
    return Records(listings, np.concatenate(rows))


def nothing_matches(records: Records, field: str, text: str, *, name: str = "") -> NoRecordsError:
    """The error for a filter that no record matches: it lists the existing values of the field and the nearest one.

    Args:
        records: The records that were filtered.
        field: The field of the filter.
        text: The value of the filter.
        name: The name of the option or argument; the name of the field if empty.
    """
    counts = Counter(map(_shown, records.column(field).tolist()))
    existing = [f"{value} ({count} records)" for value, count in counts.most_common(_MAX_NAMED)]
    num_more = len(counts) - len(existing)
    # No nearest value is suggested for numbers.
    parts = [part for part in split_texts([text]) if any(map(str.isalpha, part))]
    near = [match for part in parts for match in get_close_matches(part, counts, n=1)]
    hint = f"; did you mean {','.join(near)}?" if near else ""
    more = f" and {num_more} more" if num_more else ""
    return NoRecordsError(
        printable(f"no records match {name or field} {text}: {field} is {', '.join(existing)}{more}{hint}")
    )


def _shown(value: Any) -> str:
    """A value in the syntax of filters. Optional integers are floats in the catalogue, with NaN for missing values."""
    if isinstance(value, float):
        return "none" if math.isnan(value) else f"{value:g}"
    return "none" if value is None else str(value)
