"""Records as labelled arrays of xarray, whose values are read on use.

Each field in which the records differ is a dimension, before those of the tensors. A chunk is one record; indexing one
sample reads that sample only. Imports xarray.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import xarray
from xarray.backends import BackendArray
from xarray.core import indexing

from ranktape.errors import RunFormatError, UsageError
from ranktape.fields import SAMPLE
from ranktape.storage.format.catalogue import parse_column
from ranktape.storage.format.dtypes import numpy_dtype
from ranktape.storage.format.record_info import Keep
from ranktape.storage.records.assemble import ReadableRecord


class RecordColumns(Protocol):
    """A selection of records as columns."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> ReadableRecord: ...

    def __iter__(self) -> Iterator[ReadableRecord]: ...

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """One field of all records."""
        ...

    @property
    def files(self) -> Sequence[Any]:
        """The file of each record; empty unless all records are files."""
        ...


_SITE_DIMS = (
    *("layer_idx", "layer_stack", "module", "layer_type", "operation"),
    *("phase", "component", "quant_type", "tensor_name"),
)
"""The fields that describe a tensor. Some follow from others."""

_IDENTITY = ("iteration", "attempt", "rank", "microbatch", "call", "mode", *_SITE_DIMS)
"""The fields in which records may differ, in the order of dimensions."""

_ALIKE = ("keep", "dtype", "shape", "layout", "sample_dim")
"""The fields that must be equal in stacked records."""

_MAX_NAMED = 4
"""The number of values of a kind that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dim:
    """A field with several values."""

    name: str
    values: list[Any]
    """The values: numbers in ascending order, texts in the order of their records."""
    places: np.ndarray[Any, Any]
    """Index of each record's value."""


class RecordGrid:
    """The records as an array that dask can slice. A slice reads only its own records."""

    def __init__(self, records: RecordColumns | Sequence[ReadableRecord], positions: np.ndarray[Any, Any]) -> None:
        first = records[0]
        self._records = records
        self._positions = positions
        self._sample_dim = first.info.sample_dim
        self.dtype = numpy_dtype(first.info.dtype)
        self.shape = (*positions.shape, *first.info.shape)
        self.ndim = len(self.shape)

    def __getitem__(self, key: tuple[Any, ...]) -> np.ndarray[Any, Any]:
        for axis, part in enumerate(key):
            if not isinstance(part, int | np.integer | slice):
                # Some versions of dask pass one list of indices beside slices.
                whole = self[(*key[:axis], slice(None), *key[axis + 1 :])]
                return whole[(*(slice(None) for _ in key[:axis]), part)]
        positions = np.asarray(self._positions[key[: self._positions.ndim]])
        inner = key[self._positions.ndim :]
        values = [self._read(self._records[int(position)], inner) for position in positions.flat]
        if len(values) == 1:
            return values[0].reshape((*positions.shape, *values[0].shape))
        return np.stack(values).reshape(*positions.shape, *values[0].shape)

    def __getstate__(self) -> dict[str, Any]:
        # Pickle the records without the catalogues of the run.
        return {**self.__dict__, "_records": list(self._records)}

    def _read(self, record: ReadableRecord, inner: tuple[Any, ...]) -> np.ndarray[Any, Any]:
        dim = self._sample_dim
        if dim is None:
            return np.asarray(record.read()[inner])
        # A range, because the extent in a catalogue is not trusted as the length of an array.
        wanted = range(record.info.shape[dim])[inner[dim]]
        if not isinstance(wanted, range):
            return np.asarray(record.read(sample=wanted)[(*inner[:dim], *inner[dim + 1 :])])
        if len(wanted) != 1:
            return np.asarray(record.read()[inner])
        values = np.expand_dims(record.read(sample=wanted[0]), dim)
        return values[(*inner[:dim], slice(None), *inner[dim + 1 :])]


class _LazyRecord(BackendArray):
    """The values of a record as a lazily read array of xarray."""

    def __init__(self, record: ReadableRecord) -> None:
        self._grid = RecordGrid([record], np.zeros((), dtype=np.int64))
        self.dtype, self.shape = self._grid.dtype, self._grid.shape

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        # Only integers and slices reach the reader; lists of indices are applied after reading.
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, self._grid.__getitem__
        )


def record_array(record: ReadableRecord) -> xarray.DataArray:
    """The values with named dimensions. `attrs` are the record's fields; samples have their identifiers.

    Values are read on use. Indexing one sample reads that sample only.
    """
    info = record.info
    fields = info.to_json()
    ids = fields.pop("sample_ids")
    values = xarray.Variable(own_names(record), indexing.LazilyIndexedArray(_LazyRecord(record)))
    is_labelled = ids is not None and info.sample_dim is not None and len(ids) == info.shape[info.sample_dim]
    coordinates = {SAMPLE: (SAMPLE, labels_of(ids))} if is_labelled else {}
    return xarray.DataArray(values, coords=coordinates, name=info.tensor_name, attrs=fields)


def stack_records(records: RecordColumns) -> xarray.DataArray:
    """The records as one array over the fields in which they differ and the dimensions of the tensors.

    Fields that follow from others are coordinates; fields that all records share are attributes. No values are read.

    Raises:
        UsageError: dask or xarray is not installed, the records differ in shape or dtype, or one is missing.
    """
    try:
        import dask.array
    except ImportError as error:
        raise UsageError(f"stack() needs dask and xarray ({error}): pip install 'ranktape[dask]'") from error
    if not len(records):
        raise UsageError("there is nothing to stack: no record is selected")
    _check_alike(records)
    fields = {name: _dim(records, name) for name in _IDENTITY}
    dims, following = _independent([dim for dim in fields.values() if len(dim.values) > 1])
    positions = _positions(dims, num_records=len(records))
    grid = RecordGrid(records, positions)
    chunks = (*(1 for _ in dims), *grid.shape[len(dims) :])
    empty = np.empty((0,) * grid.ndim, dtype=grid.dtype)
    values = dask.array.from_array(  # type: ignore[no-untyped-call]  # dask is typed in part
        grid, chunks=chunks, name=False, asarray=False, meta=empty
    )
    names = [*(dim.name for dim in dims), *own_names(records[0])]
    coordinates: dict[str, Any] = {dim.name: (dim.name, labels_of(dim.values)) for dim in dims}
    for dim, leading in following:
        rows = np.unique(leading.places, return_index=True)[1]
        coordinates[dim.name] = (leading.name, labels_of([dim.values[place] for place in dim.places[rows]]))
    coordinates |= _sample_coordinate(records, positions, dims)
    shared = {name: dim.values[0] for name, dim in fields.items() if len(dim.values) == 1}
    shared |= {name: getattr(records[0].info, name) for name in ("dtype", "layout")}
    name = shared.get("tensor_name")
    return xarray.DataArray(values, dims=names, coords=coordinates, name=name, attrs=shared)


def _check_alike(records: RecordColumns) -> None:
    for name in _ALIKE:
        values = _dim(records, name).values
        if len(values) > 1:
            shown = ", ".join(repr(value) for value in values[:_MAX_NAMED]) + ", ..." * (len(values) > _MAX_NAMED)
            raise UsageError(
                f"records of several values of {name} cannot be stacked ({shown}): "
                f"select one of them first, such as .select({name}={values[0]!r})"
            )
    if records[0].info.keep != Keep.VALUES:
        raise UsageError(f"of these records {Keep(records[0].info.keep).not_kept(Keep.VALUES)} of each")


def _dim(records: RecordColumns, name: str) -> _Dim:
    column = records.column(name).tolist()
    # Missing values are NaN, which is not equal to itself.
    plain = [None if value != value else value for value in column]  # noqa: PLR0124
    values = list(dict.fromkeys(plain))
    if all(isinstance(value, int) for value in values):
        values.sort()
    places = {value: place for place, value in enumerate(values)}
    return _Dim(name=name, values=values, places=np.array([places[value] for value in plain], dtype=np.int64))


def _independent(dims: Sequence[_Dim]) -> tuple[list[_Dim], list[tuple[_Dim, _Dim]]]:
    """The fields that become dimensions, and those that follow from one of them, paired with it."""
    kept = list(dims)
    following: list[tuple[_Dim, _Dim]] = []
    for dim in reversed(dims):
        for leading in kept:
            if leading is not dim and _follows(dim, leading):
                kept.remove(dim)
                # Fields that followed from this field follow from the one that determines it.
                following = [(one, leading if its is dim else its) for one, its in following]
                following.append((dim, leading))
                break
    return kept, following


def _follows(dim: _Dim, leading: _Dim) -> bool:
    may_follow = {dim.name, leading.name} <= set(_SITE_DIMS) or (dim.name, leading.name) == ("attempt", "iteration")
    pairs = set(zip(leading.places.tolist(), dim.places.tolist(), strict=True)) if may_follow else ()
    return len(pairs) == len(leading.values)


def _positions(dims: Sequence[_Dim], *, num_records: int) -> np.ndarray[Any, Any]:
    """The index of the record for each combination of values."""
    shape = tuple(len(dim.values) for dim in dims)
    combinations = list(zip(*(dim.places.tolist() for dim in dims), strict=True)) if dims else [()] * num_records
    seen = set(combinations)
    if len(seen) < num_records:
        twice = Counter(combinations).most_common(1)[0][0]
        raise UsageError(f"several records are alike ({_fields_text(dims, twice)}): select one of them")
    names = ", ".join(dim.name for dim in dims)
    absent = (one for one in itertools.product(*map(range, shape)) if one not in seen)
    missing = list(itertools.islice(absent, _MAX_NAMED))
    if missing:
        shown = "; ".join(_fields_text(dims, one) for one in missing)
        raise UsageError(
            f"a stack has a record for every combination of {names}, and some are missing ({shown}): "
            f"select fewer values of {names.replace(', ', ' or ')}"
        )
    positions = np.empty(shape, dtype=np.int64)
    positions[tuple(dim.places for dim in dims)] = np.arange(num_records) if dims else 0
    return positions


def _fields_text(dims: Sequence[_Dim], combination: Sequence[int]) -> str:
    return " ".join(f"{dim.name}={dim.values[place]!r}" for dim, place in zip(dims, combination, strict=True))


def own_names(record: ReadableRecord) -> list[str]:
    """Distinct names of the tensors' dimensions, by the letters of the layout if there are any."""
    letters = list(record.info.layout)
    if len(letters) != len(record.info.shape) or len(set(letters)) < len(letters):
        letters = [f"dim{dim}" for dim in range(len(record.info.shape))]
    if record.info.sample_dim is not None:
        letters[record.info.sample_dim] = SAMPLE
    return letters


def labels_of(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """The values of a coordinate, as objects if they are of several types or some are missing."""
    if all(isinstance(value, int) for value in values) or all(isinstance(value, str) for value in values):
        return np.array(values)
    labels = np.empty(len(values), dtype=object)
    labels[:] = values
    return labels


def _sample_coordinate(records: RecordColumns, positions: np.ndarray[Any, Any], dims: Sequence[_Dim]) -> dict[str, Any]:
    """The identifiers of samples: along the sample dimension if all records agree, else also along other fields."""
    texts = np.asarray(records.column("sample_ids")[positions], dtype=object)
    dim = records[0].info.sample_dim
    if dim is None or "null" in set(texts.reshape(-1).tolist()):
        return {}
    names = [one.name for one in dims]
    for axis in reversed(range(len(names))):
        first = np.take(texts, [0], axis=axis)
        if np.array_equal(np.broadcast_to(first, texts.shape), texts):
            texts = first.squeeze(axis)
            del names[axis]
    try:
        lists = [parse_column("sample_ids", text) for text in texts.reshape(-1).tolist()]
    except ValueError as error:
        raise RunFormatError(f"the sample_ids of {records!r} are damaged: {error}: see 'ranktape check'") from error
    if {len(ids) for ids in lists} != {records[0].info.shape[dim]}:
        return {}
    labels = labels_of([label for ids in lists for label in ids]).reshape(*texts.shape, -1)
    return {SAMPLE if not names else "sample_ids": ([*names, SAMPLE], labels)}
