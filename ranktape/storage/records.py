"""What was captured: the records of a selection, and the values of each, read when asked for."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np

from ranktape.errors import UsageError
from ranktape.storage.block_counts import BLOCK_AXES, NUM_CODES
from ranktape.storage.catalogue import COLUMNS, concatenate
from ranktape.storage.kept import block_counts_in, expect, statistics_in
from ranktape.storage.record import Keep
from ranktape.storage.rows import read_rows
from ranktape.storage.selection.columns import StringColumn, widened
from ranktape.storage.selection.filters import check_fields, filter_from_text, parse_filter, parse_where

if TYPE_CHECKING:
    import torch
    import xarray
    import zarr

    from ranktape.storage.assemble import GlobalView
    from ranktape.storage.block_counts import BlockCounts
    from ranktape.storage.catalogue import RecordTable
    from ranktape.storage.record import Overflow, RecordInfo
    from ranktape.storage.selection.columns import Column
    from ranktape.storage.statistics import Statistics


_NUM_THREADS = 16
"""Catalogues in which a column is looked up at once."""

_ROWS_AT_ONCE = 1024
"""Records that are taken from the columns together, where one after the other is asked for."""


class RecordReader(Protocol):
    """Where the values of records come from: a run, or a folder of files."""

    url: str
    """What it is called in messages."""

    def read(self, record: Record, *, sample: int | None) -> np.ndarray[Any, Any]:
        """What is kept of a record; with `sample` of one sample, without the dimension of samples."""
        ...

    def open_array(self, path: str) -> zarr.Array[Any]:
        """The Zarr array at a path."""
        ...

    def siblings(self, record: Record) -> Iterable[Record]:
        """What all ranks recorded at the place of a record, in its iteration and attempt; itself among it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where the values of a record lie."""

    group: str
    """Path of the group of its rank's iteration, below the run."""
    site: str
    """Path of the tensor below it, which is also its name."""
    stack: str
    """The array below the group that holds it with others; empty where it has one of its own."""
    index: int
    """Its place in that array; -1 where it has one of its own."""

    @property
    def array_path(self) -> str:
        """Path, below the run, of the array that holds the values."""
        return f"{self.group}/{self.stack or self.site}"


class Record:
    """One captured tensor; every field of `RecordInfo` is an attribute, and values are read when asked for."""

    iteration: int
    rank: int
    attempt: int
    microbatch: int
    call: int
    sample_dim: int | None
    sample_ids: list[int | str] | None
    batch_size: int | None
    module: str
    layer_type: str
    layer_idx: int
    operation: str
    phase: str
    component: str
    quant_type: str
    tensor_name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str
    compute_dtype: str
    placement: dict[str, Any] | None
    metadata: dict[str, Any] | None
    overflow: Overflow
    counter: int
    timestamp: float
    nbytes: int
    checksum: str
    keep: str
    mode: str

    def __init__(self, info: RecordInfo, *, location: Location, reader: RecordReader) -> None:
        self.info = info
        """The identity, as one value."""
        self.location = location
        """Where the values lie."""
        self._reader = reader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "info":
            raise AttributeError(name)
        return getattr(self.info, name)

    def __repr__(self) -> str:
        info = self.info
        place = f"iteration={info.iteration} rank={info.rank} microbatch={info.microbatch} call={info.call}"
        what = f"{info.module or '(no module)'} {info.operation} {info.phase} {info.tensor_name}"
        return f"<Record {what} {place} {info.dtype}{list(info.shape)}>"

    @property
    def path(self) -> str:
        """The record's name below the run; the path of its array, where it has one of its own."""
        return f"{self.location.group}/{self.location.site}"

    @property
    def array(self) -> zarr.Array[Any]:
        """The Zarr array that holds the values: its own, or one of many records, where it is at `location.index`.

        What is read through it is not compared with the record's checksum, and zarr gives zeros for an
        object that was lost: `read` tells.
        """
        return self._reader.open_array(self.location.array_path)

    def read(self, sample: int | None = None) -> np.ndarray[Any, Any]:
        """The values as numpy array of the captured dtype (from ml_dtypes where numpy has none).

        With `sample` those of one sample, without the dimension of samples: two small requests where samples are
        of 1 kB and more. NaN payloads, infinities and signed zeros are those captured.

        Raises:
            DataError: bytes are missing, or are not those captured.
            UsageError: there is no such sample, the tensor has no samples, or its values were not kept.
        """
        expect(self, Keep.VALUES)
        return self._reader.read(self, sample=None if sample is None else self._checked_sample(sample))

    def counts(self) -> np.ndarray[Any, Any]:
        """How often each bit pattern of a 16-bit value occurs, where the histogram was kept: 65,536 integers.

        Raises:
            DataError: bytes are missing, or are not those written.
            UsageError: something else was kept.
        """
        expect(self, Keep.HISTOGRAM)
        return self._reader.read(self, sample=None)[:NUM_CODES]

    def block_counts(self, *, axis: str = BLOCK_AXES[0]) -> BlockCounts:
        """How often each magnitude occurs in blocks of each kind, where the histogram was kept.

        Blocks lie along the last dimension (`features`), or along all others taken as one (`tokens`).

        Raises:
            DataError: bytes are missing, or are not those written.
            UsageError: something else was kept; blocks along that axis were not counted, as before schema 4.
        """
        expect(self, Keep.HISTOGRAM)
        return block_counts_in(self._reader.read(self, sample=None), record=self, axis=axis)

    def statistics(self) -> Statistics:
        """What the finite values add up to, where the statistics were kept: mean, deviation, extremes and others.

        Raises:
            DataError: bytes are missing, or are not those written.
            UsageError: something else was kept.
        """
        expect(self, Keep.STATISTICS)
        return statistics_in(self._reader.read(self, sample=None), record=self)

    def tensor(self) -> torch.Tensor:
        """The values as a torch tensor of the captured dtype, on the CPU.

        Raises:
            DataError: as `read`.
            UsageError: torch has no such dtype.
        """
        import torch

        values = self.read()
        dtype = getattr(torch, self.info.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"torch has no dtype {self.info.dtype}: use read() for a numpy array")
        if not values.size:
            return torch.empty(self.info.shape, dtype=dtype)
        raw = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8).copy())
        return raw.view(dtype).reshape(self.info.shape)

    def global_view(self, *, replicas: str = "check") -> GlobalView:
        """The tensor over all ranks of which this record is a part, from the parts that all of them recorded.

        Copies of one part must be the same bits, unless `replicas` is `"ignore"`: the first of them counts then.

        Raises:
            DataError: the placement is damaged.
            StorageError: the store cannot be read.
            UsageError: a folder of files does not say what other ranks recorded.
        """
        from ranktape.storage.assemble import view_of

        siblings = [self] if self.info.placement is None else self._reader.siblings(self)
        return view_of(self, siblings=siblings, replicas=replicas)

    def _checked_sample(self, sample: int) -> int:
        dim = self.info.sample_dim
        if dim is None:
            raise UsageError(f"{self!r} has no dimension of samples: read it as a whole")
        count = self.info.shape[dim]
        index = operator.index(sample)
        if not 0 <= index < count:
            raise UsageError(f"sample {sample} is not in {self!r}: it has samples 0 to {count - 1}")
        return index


class Records(Sequence[Record]):
    """A selection of records, in the order of iteration, rank and recording; a lazy, immutable sequence."""

    def __init__(self, reader: RecordReader, catalogues: Sequence[RecordTable], rows: np.ndarray[Any, Any]) -> None:
        self._reader = reader
        self._catalogues = catalogues
        self._rows = rows
        self._columns: dict[str, Column] = {}
        self._starts = np.cumsum([0, *(catalogue.num_rows for catalogue in catalogues)])

    def __len__(self) -> int:
        return len(self._rows)

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
        # Of each catalogue its own columns: those of all are many times as large.
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        firsts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(rows)]
        for first, last in itertools.pairwise(firsts):
            number = int(numbers[first])
            catalogue, places = self._catalogues[number], rows[first:last] - self._starts[number]
            for place, row in zip(places.tolist(), read_rows(catalogue, places, place=self._reader.url), strict=True):
                group = catalogue.group_of(place)
                location = Location(group=group, site=row.site, stack=row.stack, index=row.index)
                yield Record(row.info, location=location, reader=self._reader)

    def __repr__(self) -> str:
        return f"<Records: {len(self)} in {self._reader.url}>"

    def select(self, **filters: Any) -> Records:
        """The records whose fields have the values asked for.

        A field takes one value, a list of alternatives, for numbers a range (`"0-3"`, `"10:20:2"`, `range`),
        for text a glob. Fields inside of fields are written with two underscores: `overflow__ratio=0`.

        Raises:
            UnknownFieldError: a filter names no field.
            UsageError: a field cannot have such a value.
        """
        rows = self._rows
        for field, value in filters.items():
            parsed = parse_filter(field.replace("__", "."), value, known=COLUMNS)
            rows = rows[parsed.mask(self._source(rows), len(rows))]
        return self._take(rows)

    def select_text(self, filters: Sequence[tuple[str, str]]) -> Records:
        """As `select`, with filters as a command line has them: texts, where commas separate alternatives."""
        rows = self._rows
        for field, text in filters:
            parsed = filter_from_text(field, text, known=COLUMNS)
            rows = rows[parsed.mask(self._source(rows), len(rows))]
        return self._take(rows)

    def where(self, expression: str) -> Records:
        """The records for which an expression holds: `overflow.ratio > 0 and layer_type == 'attention'`.

        Raises:
            UnknownFieldError: the expression names no field.
            UsageError: it is not an expression; the message says where.
        """
        parsed = parse_where(expression)
        check_fields(parsed.names, known=COLUMNS)
        return self._take(self._rows[parsed.mask(self._source(self._rows), len(self))])

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """One field of all records as an array: numbers (NaN where there is none), or text as objects.

        Raises:
            UnknownFieldError: records have no such field.
        """
        check_fields([name], known=COLUMNS)
        column = self._source(self._rows)(name)
        if isinstance(column, StringColumn):
            return np.array(column.table, dtype=object)[column.codes] if len(column) else np.empty(0, dtype=object)
        return column

    def group_by(self, fields: Sequence[str]) -> list[tuple[dict[str, Any], Records]]:
        """The records in groups of equal values of the fields, sorted by them; one group of all without fields.

        Raises:
            UnknownFieldError: records have no such field.
        """
        if not fields:
            return [({}, self)]
        # A missing value is None, in one group of its own, the last one.
        columns = [
            [None if value != value else value for value in self.column(field).tolist()]  # noqa: PLR0124  (NaN)
            for field in fields
        ]
        groups: dict[tuple[Any, ...], list[int]] = {}
        for position, key in enumerate(zip(*columns, strict=True)):
            groups.setdefault(key, []).append(position)
        return [
            (dict(zip(fields, key, strict=True)), self._take(self._rows[positions]))
            for key, positions in sorted(
                groups.items(), key=lambda item: [(value is None, 0 if value is None else value) for value in item[0]]
            )
        ]

    def assemble(self, *, replicas: str = "check") -> list[GlobalView]:
        """The tensors over all ranks of which the records of this selection are parts; a whole one is one itself.

        Parts that are not in the selection are missing. Copies of one part must be the same bits when a tensor is
        read, unless `replicas` is `"ignore"`.

        Raises:
            DataError: a placement is damaged.
            StorageError: the store cannot be read.
        """
        from ranktape.storage.assemble import assemble_records

        return assemble_records(self, replicas=replicas)

    def stack(self) -> xarray.DataArray:
        """The records as one array: over the fields in which they differ, then over the tensors' own dimensions.

        Values are read by dask when they are computed with, one record at a time.

        Raises:
            UsageError: dask or xarray is not installed, the records are not of one form, or one is missing.
        """
        from ranktape.storage.xarray_stack import stack_records

        return stack_records(self)

    def _take(self, rows: np.ndarray[Any, Any]) -> Records:
        taken = Records(self._reader, self._catalogues, rows)
        # The columns are those of all catalogues: selections of one run share them.
        taken._columns = self._columns
        return taken

    def _all(self, name: str) -> Column:
        if name not in self._columns:
            # Each catalogue may have to be asked for it in the store.
            with ThreadPoolExecutor(_NUM_THREADS) as pool:
                columns = pool.map(lambda catalogue: catalogue.column(name), self._catalogues)
                self._columns[name] = concatenate(columns)
        return self._columns[name]

    def _source(self, rows: np.ndarray[Any, Any]) -> Callable[[str], Column]:
        return lambda name: widened(_rows_of(self._all(name), rows))


def _rows_of(column: Column, rows: np.ndarray[Any, Any]) -> Column:
    if isinstance(column, StringColumn):
        return StringColumn(codes=column.codes[rows], table=column.table)
    taken: np.ndarray[Any, Any] = column[rows]
    return taken
