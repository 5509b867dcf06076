"""Reads the files of a folder, and gives their records as columns; only files that are asked about are opened."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.legacy.described import described_fields, named_fields
from ranktape.analyze.legacy.payload import TensorFile, read_header, read_values
from ranktape.analyze.numerics.histograms.histogram import measure
from ranktape.errors import DataError, UsageError
from ranktape.fields import JSON_FIELDS, OPTIONAL_INT_FIELDS
from ranktape.storage.format.arrays import checksum, split
from ranktape.storage.format.catalogue import Catalogue, empty_catalogue
from ranktape.storage.format.documents import for_each
from ranktape.storage.format.record_info import EXTREMES, Keep, Overflow
from ranktape.storage.query.columns import Column, StringColumn
from ranktape.storage.records.record import Record
from ranktape.storage.records.records import SOURCE

if TYPE_CHECKING:
    from ranktape.analyze.legacy.names import LayerOutputName, TensorFileName

NUM_THREADS = min(8, os.cpu_count() or 1)
"""Files that are read at once: the kernels and the system calls leave Python's lock."""

_FIXED: dict[str, Any] = {"attempt": 0, "index": -1, "stack": "", "keep": Keep.VALUES.value}
"""Columns that are the same for every file."""

_LARGE_NBYTES = 1 << 26
"""Values of which only one tensor at a time is in memory to be counted: the threads would hold one each."""

_large = threading.Lock()


class SourceFile:
    """One file with one tensor; what has been read of it stays."""

    def __init__(
        self,
        path: Path,
        *,
        file_name: TensorFileName | None,
        layer: LayerOutputName | None,
        said: Any = None,
        fields: Mapping[str, Any] | None = None,
        is_first_enough: bool = False,
    ) -> None:
        """What its name and its folder say: in the folder's own words as `said`, and as fields of the record."""
        self.path = path
        """Where it is."""
        self.file_name = file_name
        """What its name says, if it is one of a single tensor."""
        self.named = named_fields(file_name, layer, fields or {})
        """The fields of the record that need not be looked up in the file."""
        self.call = 0
        """How many tensors of the same fields were written before it."""
        self.site = path.name
        """What the record says of where it is: the name, or where that is not plain ASCII what stands for it."""
        self._layer, self._said, self._given = layer, said, fields or {}
        self._is_first_enough = is_first_enough
        self._header: TensorFile | None = None
        self._fields: dict[str, Any] | None = None
        self._measured: tuple[Overflow, str] | None = None

    def __repr__(self) -> str:
        return f"<SourceFile {self.path}>"

    def field(self, name: str) -> Any:
        """One of the record's fields, from the name where that says it."""
        return self.named[name] if name in self.named else self.fields()[name]

    def fields(self) -> dict[str, Any]:
        """Every field of the record that takes no values.

        Raises:
            DataError: the file holds no tensor that a record can hold.
            StorageError: it cannot be read.
        """
        if self._fields is None:
            header = read_header(self.path, is_first_enough=self._is_first_enough)
            described = described_fields(
                header, path=self.path, file_name=self.file_name, layer=self._layer, said=self._said, given=self._given
            )
            # Many files say the same at length.
            self._header = dataclasses.replace(header, metadata=None, tensor_info=None)
            self._fields = {"call": self.call} | described | self.named
        return self._fields

    def values(self) -> Any:
        """The values, read from the file.

        Raises:
            DataError: they are not what was listed.
            StorageError: the file cannot be read.
        """
        self.fields()
        assert self._header is not None
        return read_values(self.path, self._header)

    def measured(self) -> tuple[Overflow, str]:
        """What the values do at the limits of their dtype, and their checksum.

        Raises:
            DataError: they are not what the file says of them.
            StorageError: the file cannot be read.
        """
        if self._measured is None:
            with _large if self.fields()["nbytes"] > _LARGE_NBYTES else nullcontext():
                self.values_measured()
        assert self._measured is not None
        return self._measured

    def values_measured(self) -> tuple[Any, Overflow, str]:
        """The values, what they do at the limits of their dtype, and their checksum: all three of one reading.

        Raises:
            DataError: they are not what the file says of them.
            StorageError: the file cannot be read.
        """
        values = self.values()
        found, said = checksum(values), self.fields()["record_checksum"]
        if said and said != found:
            raise DataError(f"the values in {self.path} are damaged: their checksum is {found}, not {said}")
        if self._measured is None or self._measured[1] != found:
            self._measured = measure(values, sample_dim=self.fields()["sample_dim"]), found
        return values, *self._measured


class FileTable:
    """The records of some files as columns, and where they get their values; what names do not say is read."""

    def __init__(self, url: str, files: Sequence[SourceFile]) -> None:
        self.url = url
        """The folder."""
        self.files = files
        """One for each row."""
        self.num_rows = len(files)

    def narrow(self, rows: np.ndarray[Any, Any]) -> FileTable:
        """The table of some of the rows."""
        return FileTable(self.url, [self.files[row] for row in rows.tolist()])

    def cost(self, field: str) -> int:
        """0 for what names say, 1 for what files say, 2 for what values say."""
        if field.startswith("overflow") or field == "checksum":
            return 2
        is_named = field in {*_FIXED, "site", SOURCE} or all(field in file.named for file in self.files)
        return 0 if is_named else 1

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
        return StringColumn.of(values)

    def _values(self, name: str) -> list[Any]:
        if name in _FIXED:
            return [_FIXED[name]] * self.num_rows
        if name == "site":
            return [file.site for file in self.files]
        if name == "checksum" or name.startswith("overflow."):
            measured = for_each(SourceFile.measured, self.files, at_once=NUM_THREADS)
            if name == "checksum":
                return [int(text.partition(":")[2], 16) for _, text in measured]
            _, *path = name.split(".")
            found = [functools.reduce(getattr, path, overflow) for overflow, _ in measured]
            return [_number(value) for value in found] if path[0] in EXTREMES else found
        if name == "numel":
            return [int(np.prod(shape, dtype=np.int64)) for shape in self._values("shape")]
        for_each(SourceFile.fields, [file for file in self.files if name not in file.named], at_once=NUM_THREADS)
        values = [file.field(name) for file in self.files]
        return [_number(value) for value in values] if name in OPTIONAL_INT_FIELDS else values

    def read(self, record: Record, *, sample: int | None) -> Any:
        """The values of a record; with `sample` of one sample, without the dimension of samples.

        Raises:
            DataError: the file has changed since it was listed, or is damaged.
            StorageError: it cannot be read.
        """
        file = next(file for file in self.files if file.site == record.location.site)
        values = file.values()
        if checksum(values) != record.checksum:
            raise DataError(f"{file.path} has changed since it was listed: its checksum is not {record.checksum} now")
        return values if sample is None else values.take(sample, axis=record.sample_dim)

    def parts(self, record: Record) -> Iterator[Any]:
        """The values of a record in parts, of which all are in memory.

        Raises:
            DataError: the file has changed since it was listed, or is damaged.
            StorageError: it cannot be read.
        """
        return split(self.read(record, sample=None), sample_dim=record.sample_dim)

    def siblings(self, record: Record) -> Any:
        """Nothing.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{self.url} holds files, and {record.location.site} does not say which other ones are parts of the same "
            f"tensor: select them and use assemble(), or 'ranktape import' the folder first"
        )


@functools.cache
def _empty() -> Catalogue:
    """What has every column in the type that a run's catalogue has."""
    return empty_catalogue()


def _number(value: Any) -> Any:
    return float("nan") if value is None else value
