"""What was captured: the records of a selection, and the values of each, read when asked for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ranktape.errors import DataError, UsageError
from ranktape.storage.catalogue import COLUMNS, concatenate, record_info
from ranktape.storage.columns import StringColumn
from ranktape.storage.documents import chunk_key
from ranktape.storage.encode import checksum
from ranktape.storage.filters import check_fields, filter_from_text, parse_filter, parse_where

if TYPE_CHECKING:
    import torch
    import zarr

    from ranktape.storage.backend import Backend
    from ranktape.storage.catalogue import Catalogue
    from ranktape.storage.columns import Column
    from ranktape.storage.record import Overflow, RecordInfo


class RunReader:
    """What the records of a run share: its backend and, once a value is read, its Zarr store."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._store: Any = None

    def open_array(self, path: str) -> zarr.Array[Any]:
        """The Zarr array at a path below the run; no value is read."""
        import zarr

        if self._store is None:
            self._store = self.backend.zarr_store()
        try:
            return zarr.open_array(self._store, path=path, mode="r", zarr_format=3)
        except (FileNotFoundError, KeyError) as error:
            raise DataError(f"{self.backend.url}/{path} is committed, but its document is missing") from error


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

    def __init__(self, info: RecordInfo, *, path: str, reader: RunReader) -> None:
        self.info = info
        """The identity, as one value."""
        self.path = path
        """Of the array, below the run."""
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
    def array(self) -> zarr.Array[Any]:
        """The Zarr array; nothing is read yet.

        What is read through it is not compared with the record's checksum, and zarr gives zeros for an
        object that was lost: `read` tells.
        """
        return self._reader.open_array(self.path)

    def read(self, sample: int | None = None) -> np.ndarray[Any, Any]:
        """The values as numpy array of the captured dtype (from ml_dtypes where numpy has none).

        With `sample` those of one sample, without the dimension of samples: one request where samples are
        of 1 kB and more. NaN payloads, infinities and signed zeros are those captured.

        Raises:
            DataError: bytes are missing, or are not those captured.
            UsageError: there is no such sample, or the tensor has no samples.
        """
        place: Any = ... if sample is None else self._sample_index(sample)
        try:
            values = np.asarray(self.array[place])
        except (ValueError, OSError) as error:
            raise DataError(f"{self!r} in {self._reader.backend.url}/{self.path} is damaged: {error}") from error
        if sample is None:
            if checksum(values) != self.info.checksum:
                raise DataError(
                    f"{self!r} in {self._reader.backend.url}/{self.path} is not what was captured: "
                    f"its checksum is {checksum(values)}, {self.info.checksum} was recorded"
                )
        elif values.size and not values.view(_BITS[values.dtype.itemsize]).any():
            self._check_presence()
        return values

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

    def _sample_index(self, sample: int) -> tuple[Any, ...]:
        dim = self.info.sample_dim
        if dim is None:
            raise UsageError(f"{self!r} has no dimension of samples: read it as a whole")
        count = self.info.shape[dim]
        index = operator.index(sample)
        if not 0 <= index < count:
            raise UsageError(f"sample {sample} is not in {self!r}: it has samples 0 to {count - 1}")
        return (slice(None),) * dim + (index,)

    def _check_presence(self) -> None:
        key = f"{self.path}/{chunk_key(len(self.info.shape))}"
        if not self._reader.backend.exists(key):
            raise DataError(f"the values of {self!r} are lost: {self._reader.backend.url}/{key} is missing")


_BITS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)} | {16: np.dtype("u8")}


class Records(Sequence[Record]):
    """A selection of records, in the order of iteration, rank and path; a lazy, immutable sequence."""

    def __init__(self, reader: RunReader, catalogues: Sequence[Catalogue], rows: np.ndarray[Any, Any]) -> None:
        self._reader = reader
        self._catalogues = catalogues
        self._rows = rows
        self._columns: dict[str, Column] = {}

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
        row = int(self._rows[position])
        info = record_info(lambda name: _value(self._all(name), row))
        return Record(info, path=str(_value(self._all("path"), row)), reader=self._reader)

    def __iter__(self) -> Iterator[Record]:
        return (self[position] for position in range(len(self)))

    def __repr__(self) -> str:
        return f"<Records: {len(self)} in {self._reader.backend.url}>"

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
        column = _rows_of(self._all(name), self._rows)
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

    def _take(self, rows: np.ndarray[Any, Any]) -> Records:
        taken = Records(self._reader, self._catalogues, rows)
        # The columns are those of all catalogues: selections of one run share them.
        taken._columns = self._columns
        return taken

    def _all(self, name: str) -> Column:
        if name not in self._columns:
            self._columns[name] = concatenate(catalogue.column(name) for catalogue in self._catalogues)
        return self._columns[name]

    def _source(self, rows: np.ndarray[Any, Any]) -> Callable[[str], Column]:
        return lambda name: _rows_of(self._all(name), rows)


def _rows_of(column: Column, rows: np.ndarray[Any, Any]) -> Column:
    if isinstance(column, StringColumn):
        return StringColumn(codes=column.codes[rows], table=column.table)
    taken: np.ndarray[Any, Any] = column[rows]
    return taken


def _value(column: Column, row: int) -> Any:
    if isinstance(column, StringColumn):
        return column.table[column.codes[row]]
    return column[row].item()
