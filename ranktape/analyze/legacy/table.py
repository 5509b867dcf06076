"""Which columns do the records of a folder have, without reading more files than are asked about?"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ranktape.storage.format.catalogue import JSON_FIELDS, OPTIONAL_INT_FIELDS, Catalogue, empty_catalogue
from ranktape.storage.format.record_info import EXTREMES, Keep
from ranktape.storage.query.columns import StringColumn
from ranktape.storage.records.record import Record
from ranktape.storage.records.records import Records

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]  # it has no types

    from ranktape.analyze.legacy.folder import FolderReader, SourceFile
    from ranktape.storage.query.columns import Column

NUM_THREADS = min(8, os.cpu_count() or 1)
"""Files that are read at once: the kernels and the system calls leave Python's lock."""

_FIXED: dict[str, Any] = {"attempt": 0, "index": -1, "stack": "", "keep": Keep.VALUES.value}
"""Columns that are the same for every file."""


class FileTable:
    """The records of some files as columns; a file is opened for what its name does not say."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self.files = files
        """One for each row."""
        self.num_rows = len(files)

    def narrow(self, rows: np.ndarray[Any, Any]) -> FileTable:
        """The table of some of the rows."""
        return FileTable([self.files[row] for row in rows.tolist()])

    def group_of(self, row: int) -> str:  # noqa: ARG002 - the Protocol's signature
        """The folder itself: files lie side by side."""
        return "."

    def column(self, name: str) -> Column:
        """The values of a column of the catalogue, one for each file.

        Raises:
            DataError: a file that must be opened for it is damaged, or holds no tensor.
            StorageError: it cannot be read.
        """
        values = self._values(name)
        if name in JSON_FIELDS or name == "overflow.per_sample":
            values = [json.dumps(value, separators=(",", ":")) if name != "metadata" else value for value in values]
        like = _empty().column(name)
        if not isinstance(like, StringColumn):
            with np.errstate(over="ignore"):  # an extreme beyond the column's type is infinite there
                return np.array(values, dtype=like.dtype)
        codes: dict[str, int] = {}
        rows = [codes.setdefault(text, len(codes)) for text in values]
        return StringColumn(codes=np.array(rows, dtype=np.uint32), table=list(codes))

    def _values(self, name: str) -> list[Any]:
        if name in _FIXED:
            return [_FIXED[name]] * self.num_rows
        if name == "site":
            return [file.site for file in self.files]
        if name == "checksum":
            return [int(checksum.partition(":")[2], 16) for _, checksum in self._measured()]
        if name.startswith("overflow."):
            _, *path = name.split(".")
            found = [_inner(overflow, path) for overflow, _ in self._measured()]
            return [_number(value) for value in found] if path[0] in EXTREMES else found
        if name == "numel":
            return [int(np.prod(shape, dtype=np.int64)) for shape in self._values("shape")]
        return [_number(value) if name in OPTIONAL_INT_FIELDS else value for value in self._fields(name)]

    def _fields(self, name: str) -> list[Any]:
        for_each([file for file in self.files if name not in file.named], lambda file: file.fields())
        return [file.field(name) for file in self.files]

    def _measured(self) -> list[Any]:
        return for_each(self.files, lambda file: file.measured())


class FileRecords(Records):
    """The records of some files. A narrower selection has a table of its own, so that it opens no other files."""

    is_costly = True

    def __init__(self, reader: FolderReader, table: FileTable) -> None:
        super().__init__(reader, [table], np.arange(table.num_rows))
        self._folder = reader
        self._table = table

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> Records: ...

    def __getitem__(self, index: int | slice) -> Record | Records:
        if isinstance(index, slice) or len(self) == 1 or not -len(self) <= index < len(self):
            return super().__getitem__(index)
        return self._take(self._rows[[index]])[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return FileRecords, (self._folder.only(self._table.files), self._table)

    @property
    def files(self) -> Sequence[SourceFile]:
        """The file of each record."""
        return self._table.files

    def _read(self, rows: np.ndarray[Any, Any]) -> Iterator[Record]:
        # Each with a reader of its own file, so that it can be sent to another process without the others.
        for record, row in zip(super()._read(rows), rows.tolist(), strict=True):
            reader = self._folder.only([self._table.files[row]])
            yield Record(record.info, location=record.location, reader=reader)

    def select(self, **filters: Any) -> Records:
        """As of a run; what names say is asked first."""
        return super().select(**dict(sorted(filters.items(), key=lambda item: self._cost(item[0].replace("__", ".")))))

    def select_text(self, filters: Sequence[tuple[str, str]]) -> Records:
        """As of a run; what names say is asked first."""
        return super().select_text(sorted(filters, key=lambda item: self._cost(item[0])))

    def to_pandas(self) -> pd.DataFrame:
        """As of a run, and first the name of each file."""
        frame = super().to_pandas()
        frame.insert(0, "file", [file.site for file in self.files])
        return frame.astype({"file": "string"})

    def _cost(self, field: str) -> int:
        """0 for what names say, 1 for what files say, 2 for what values say."""
        if field.startswith("overflow") or field == "checksum":
            return 2
        return 0 if field in _FIXED or field == "site" or all(field in file.named for file in self._table.files) else 1

    def _take(self, rows: np.ndarray[Any, Any]) -> Records:
        return FileRecords(self._folder, self._table.narrow(rows))

    def _source(self, rows: np.ndarray[Any, Any]) -> Callable[[str], Column]:
        return self._table.narrow(rows).column


def for_each(files: Sequence[SourceFile], function: Callable[[SourceFile], Any]) -> list[Any]:
    """What the function gives for each file, several at once; the first failure ends it."""
    if len(files) <= 1:
        return [function(file) for file in files]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(function, files))


@functools.cache
def _empty() -> Catalogue:
    """What has every column in the type that a run's catalogue has."""
    return empty_catalogue()


def _inner(value: Any, path: Sequence[str]) -> Any:
    for name in path:
        value = getattr(value, name)
    return value


def _number(value: Any) -> Any:
    return float("nan") if value is None else value
