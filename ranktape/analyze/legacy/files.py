"""Reads a folder of `.pt` files as records, which can be used like those of a run.

Opening a folder lists the file names. A file is opened when a field is read that its name does not contain, and its
values are read on access; only files in the selection are opened.

Names take precedence, since users see and change them. Other fields come from the metadata that the legacy tools
embedded, or from the record that our own export embedded under `RECORD_KEY`. None of it is trusted: if an embedded
record has a value that is invalid in a record, its file cannot be read.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from ranktape.analyze.legacy.names import (
    METADATA,
    STATISTICS,
    TensorFileName,
    name_seconds,
    parse_layer_output_name,
    parse_tensor_file_name,
    recorded_tensor_name,
)
from ranktape.analyze.legacy.payload import TensorFile, read_header, read_plain, read_values
from ranktape.analyze.numerics.histograms.histogram import measure
from ranktape.errors import DataError, StorageError, UsageError
from ranktape.fields import JSON_FIELDS
from ranktape.storage.format.arrays import checksum, split
from ranktape.storage.format.catalogue import Catalogue, empty_catalogue
from ranktape.storage.format.documents import for_each
from ranktape.storage.format.dtypes import DTYPES
from ranktape.storage.format.record_info import (
    MAX_TERM_LENGTH,
    Keep,
    Mode,
    Operation,
    Overflow,
    is_parameter,
)
from ranktape.storage.query.columns import Column, StringColumn
from ranktape.storage.records.record import Record
from ranktape.storage.records.records import SOURCE, Listing, Records, source_name

RECORD_KEY = "ranktape"
"""The key in the tensor's metadata under which our export embeds the record."""

TAGS = ("layer_type", "operation", "phase", "component", "quant_type", "tensor_name")
"""The text fields of a record that the legacy tool embeds under the same names."""

NUMBERS = ("iteration", "rank", "layer_idx")
"""The numeric fields of a record that the legacy tool embeds."""

_FIELD_KEYS = frozenset({*TAGS, *NUMBERS, "sample_idx", RECORD_KEY})
"""The embedded keys that become fields of the record."""

_QUANT_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
"""The quantization tag of each plain dtype, for files without a tag."""

LAST_SECOND = 253402300799
"""The end of the year 9999, in seconds since the epoch."""

_MAX_NUMBER = 2**53
"""The exclusive limit of integers in files, so that the catalogue's columns represent them exactly."""

_OF_ALL_OUTPUTS = ("iteration", "rank", "microbatch", "call", "quant_type")
"""The fields that our export writes once for all layer outputs of a folder."""

_HIDDEN_LAYOUT = "BTH"
"""The dimensions of the output of a layer."""

_UNTAGGED: dict[str, Any] = {
    "layer_type": "unknown",
    "operation": Operation.FORWARD.value,
    "phase": "unknown",
    "component": "unknown",
    "iteration": 0,
    "rank": 0,
    "layer_idx": -1,
}
"""The default fields of a file without any description."""


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_NUMBER


def _is_term(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TERM_LENGTH and value.isprintable()


def _is_sample_ids(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(type(entry) in {int, str} for entry in value))


_EMBEDDED_FIELDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("iteration", "rank", "microbatch", "call", "counter"), _is_number),
    "layer_idx": lambda value: _is_number(value) or (type(value) is int and value == -1),
    **dict.fromkeys(("sample_dim", "batch_size"), lambda value: value is None or _is_number(value)),
    **dict.fromkeys(("layer_type", "phase", "component", "quant_type", "tensor_name"), _is_term),
    "operation": lambda value: value in tuple(Operation),
    "mode": lambda value: value in tuple(Mode),
    **dict.fromkeys(("module", "layer_stack", "record_checksum"), lambda value: isinstance(value, str)),
    # The layout becomes part of a name in the store.
    "layout": lambda value: isinstance(value, str) and re.fullmatch("[A-Za-z]{0,32}", value) is not None,
    "compute_dtype": lambda value: isinstance(value, str) and value in DTYPES,
    **dict.fromkeys(("placement", "metadata"), lambda value: value is None or isinstance(value, dict)),
    "sample_ids": _is_sample_ids,
    "timestamp": lambda value: type(value) in {int, float} and 0 <= value <= LAST_SECOND,
}
"""The fields that our export embeds, with a check of the value of each."""


def _folder_fields(metadata: Any, *, stem: str) -> dict[str, Any]:
    """The valid fields of one layer output in the `metadata.pt` of its folder.

    Our export writes the common fields once, and those of each output under `RECORD_KEY`.
    """
    entries = metadata if isinstance(metadata, Mapping) else {}
    of_each = entries.get(RECORD_KEY)
    own_entries = of_each.get(stem) if isinstance(of_each, Mapping) else None
    fields = {name: entries[name] for name in _OF_ALL_OUTPUTS if name in entries}
    fields |= own_entries if isinstance(own_entries, Mapping) else {}
    return {name: value for name, value in fields.items() if name in _EMBEDDED_FIELDS and _EMBEDDED_FIELDS[name](value)}


def _embedded_fields(embedded: Mapping[str, Any], header: TensorFile, *, path: Path) -> dict[str, Any]:
    """The fields that our export embedded.

    Raises:
        DataError: a field has an invalid value, or the samples do not fit the shape.
    """
    fields = {field: embedded[field] for field in _EMBEDDED_FIELDS if field in embedded}
    for field, value in fields.items():
        if not _EMBEDDED_FIELDS[field](value):
            raise DataError(f"{path} has an invalid description: {field}={str(value)[:60]!r}")
    dim, ids = fields.get("sample_dim"), fields.get("sample_ids")
    if dim is not None and dim >= len(header.shape):
        raise DataError(f"{path} has sample_dim={dim}, but its tensor has {len(header.shape)} dimensions")
    if dim is not None and ids is not None and len(ids) != header.shape[dim]:
        raise DataError(f"{path} lists {len(ids)} samples, but its tensor has {header.shape[dim]}")
    return fields


NUM_THREADS = min(8, os.cpu_count() or 1)
"""The number of files that are read at once. Kernels and system calls release the GIL."""

_FIXED: dict[str, Any] = {"attempt": 0, "index": -1, "stack": "", "keep": Keep.VALUES.value}
"""The columns that are the same for every file."""

_LARGE_NBYTES = 1 << 26
"""Tensors above this size, in bytes, are measured one at a time, not one in each thread, to limit memory."""

_large = threading.Lock()


class SourceFile:
    """A file with one tensor. Its fields and measurements are cached once they are read."""

    def __init__(
        self,
        path: Path,
        *,
        file_name: TensorFileName | None,
        layer: int | None,
        description: Any = None,
        folder_fields: Mapping[str, Any] | None = None,
        allow_longer_lists: bool = False,
    ) -> None:
        """Take the parsed name, the description in the folder, and the fields of the record that it contains."""
        self.path = path
        """Path of the file."""
        self.file_name = file_name
        """The parsed name, if it is the name of a single tensor's file."""
        self.call = 0
        """Number of files with the same fields that precede it."""
        self.site = path.name
        """The record's site: the file name, escaped if it is not printable ASCII."""
        self._layer, self._description, self._folder_values = layer, description, folder_fields or {}
        self._allow_longer_lists = allow_longer_lists
        self.named = self._named()
        """The fields of the record that do not have to be read from the file."""
        self._header: TensorFile | None = None
        self._fields: dict[str, Any] | None = None
        self._measured: tuple[Overflow, str] | None = None

    def __repr__(self) -> str:
        return f"<SourceFile {self.path}>"

    def field(self, name: str) -> Any:
        """A field of the record, from the name if that contains it."""
        return self.named[name] if name in self.named else self.fields()[name]

    def fields(self) -> dict[str, Any]:
        """All fields of the record that do not require reading the values.

        `metadata` is JSON text. `record_checksum` is the checksum that our export embedded, "" if there is none.
        """
        if self._fields is None:
            header = read_header(self.path, allow_longer_lists=self._allow_longer_lists)
            described = self._described(header)
            # Not kept, since many files can have the same long metadata.
            self._header = dataclasses.replace(header, metadata=None, tensor_info=None)
            self._fields = {"call": self.call} | described | self.named
        return self._fields

    def values(self) -> Any:
        """The values, read from the file."""
        self.fields()
        assert self._header is not None
        return read_values(self.path, self._header)

    def measured(self) -> tuple[Overflow, str]:
        """The overflow statistics of the values, and their checksum."""
        if self._measured is None:
            with _large if self.fields()["nbytes"] > _LARGE_NBYTES else nullcontext():
                return self.values_measured()[1:]
        return self._measured

    def values_measured(self) -> tuple[Any, Overflow, str]:
        """The values, their overflow statistics, and their checksum, from reading the file once.

        Raises:
            DataError: the checksum differs from the embedded one.
        """
        values = self.values()
        actual, expected = checksum(values), self.fields()["record_checksum"]
        if expected and expected != actual:
            raise DataError(f"the values in {self.path} are damaged: their checksum is {actual}, not {expected}")
        if self._measured is None or self._measured[1] != actual:
            self._measured = measure(values, sample_dim=self.fields()["sample_dim"]), actual
        return values, *self._measured

    def _named(self) -> dict[str, Any]:
        """The fields from the name; for the output of a layer, also those from the description of its folder."""
        named, layer = self.file_name, self._layer
        if layer is not None:
            layer_type = "embedding" if layer < 0 else "hidden"
            fixed = {"layer_type": layer_type, "layer_idx": layer, "phase": "post", "tensor_name": "output"}
            return (
                _UNTAGGED | {field: value for field, value in self._folder_values.items() if field in _UNTAGGED} | fixed
            )
        if named is None:
            return {}
        fields: dict[str, Any] = {tag: str(getattr(named, tag)) for tag in TAGS[:-1]}
        numbers = {"iteration": named.iteration, "rank": named.rank}
        fields |= {number: value for number, value in numbers.items() if value is not None}
        fields["layer_idx"] = -1 if named.layer_idx is None else named.layer_idx
        # If the legacy name has another name in ours, the file can be from our export, which embeds the name.
        if recorded_tensor_name(named) == named.tensor_name:
            fields["tensor_name"] = named.tensor_name
        return fields

    def _described(self, header: TensorFile) -> dict[str, Any]:
        known = header.metadata if isinstance(header.metadata, Mapping) else {}
        own, named = known.get(RECORD_KEY), self.file_name
        stem = "".join(character if character.isprintable() else "?" for character in self.path.stem)
        # Metadata of other tools that does not become fields.
        rest = {key: value for key, value in known.items() if key not in _FIELD_KEYS}
        more = {"tensor_info": header.tensor_info, "group_idx": named and named.group_idx, "folder": self._description}
        rest |= {key: value for key, value in more.items() if value is not None}
        fields: dict[str, Any] = {
            **dict.fromkeys(("sample_dim", "sample_ids", "batch_size", "placement")),
            **dict.fromkeys(("module", "layer_stack", "layout", "record_checksum"), ""),
            "microbatch": 0,
            "compute_dtype": header.dtype,
            "mode": Mode.TRAIN.value,
            "metadata": rest or None,
            "counter": 0 if named is None else named.counter,
            "timestamp": 0.0 if named is None else name_seconds(named),
            "quant_type": _QUANT_TYPES.get(header.dtype, header.dtype),
            "tensor_name": stem[:MAX_TERM_LENGTH] or "tensor",
            **_UNTAGGED,
            # Invalid values that the legacy tool embedded are ignored.
            **{
                name: known[name] for name in (*TAGS, *NUMBERS) if name in known and _EMBEDDED_FIELDS[name](known[name])
            },
            **({} if named is None else {"tensor_name": recorded_tensor_name(named)}),
        }
        sample_idx = known.get("sample_idx") if named is None or named.sample_idx is None else named.sample_idx
        if is_one := _is_number(sample_idx):
            fields["sample_ids"] = [sample_idx]
        fields |= self._samples(header.shape, known.get("batch_size"), is_one=is_one, tensor_name=fields["tensor_name"])
        if isinstance(own, Mapping):
            fields |= _embedded_fields(own, header, path=self.path)
        elif self._folder_values:
            rest = (self._folder_values.get("metadata") or {}) | rest
            fields |= _embedded_fields(self._folder_values, header, path=self.path) | {"metadata": rest or None}
        fields["metadata"] = json.dumps(fields["metadata"], separators=(",", ":"))
        return fields | {"dtype": header.dtype, "shape": header.shape, "nbytes": header.nbytes}

    def _samples(self, shape: tuple[int, ...], size: Any, *, is_one: bool, tensor_name: str) -> dict[str, Any]:
        """The sample dimension and batch size of a tensor from another tool, as far as its shape shows them.

        In outputs of layers, samples are the first dimension. For other tensors, the batch size is the embedded one,
        else the smaller of the first two of at least three dimensions: one of them is the batch, and the other counts
        tokens or heads.
        """
        is_hidden = len(shape) == len(_HIDDEN_LAYOUT)
        if self._layer is not None:
            return {"sample_dim": 0, "batch_size": shape[0], "layout": _HIDDEN_LAYOUT} if is_hidden else {}
        if is_parameter(tensor_name):
            return {}
        if not _is_number(size):
            return {"batch_size": min(shape[:2])} if len(shape) >= len(_HIDDEN_LAYOUT) else {}
        dim = next((dim for dim in range(min(2, len(shape) - 1)) if shape[dim] == size), None)
        return {"sample_dim": None if is_one else dim, "batch_size": size}


class FileTable:
    """The records of files as columns, and the source of their values. Fields not in the names are read from files."""

    def __init__(self, url: str, files: Sequence[SourceFile]) -> None:
        self.url = url
        """Path of the folder."""
        self.files = files
        """The file of each row."""
        self.num_rows = len(files)

    def narrow(self, rows: np.ndarray[Any, Any]) -> FileTable:
        """The table of the given rows."""
        return FileTable(self.url, [self.files[row] for row in rows.tolist()])

    def cost(self, field: str) -> int:
        """The cost of reading a field: 0 if it is in all names, 1 if files are opened, 2 if values are read."""
        if field.startswith("overflow") or field == "checksum":
            return 2
        return int(field not in {*_FIXED, "site", SOURCE} and any(field not in file.named for file in self.files))

    def group_of(self, row: int) -> str:  # noqa: ARG002 - the Protocol's signature
        """The folder itself, which has no groups."""
        return "."

    def column(self, name: str) -> Column:
        """A column of the catalogue, with one value for each file."""
        values = self._values(name)
        if name in JSON_FIELDS or name == "overflow.per_sample":
            values = [json.dumps(value, separators=(",", ":")) if name != "metadata" else value for value in values]
        like = _empty().column(name)
        if isinstance(like, StringColumn):
            return StringColumn.of(values)
        with np.errstate(over="ignore"):  # an extreme outside of the column's dtype becomes infinite
            return np.array([math.nan if value is None else value for value in values], dtype=like.dtype)

    def _values(self, name: str) -> list[Any]:
        if name in _FIXED:
            return [_FIXED[name]] * self.num_rows
        if name == "site":
            return [file.site for file in self.files]
        if name == "checksum" or name.startswith("overflow."):
            measured = for_each(SourceFile.measured, self.files, at_once=NUM_THREADS)
            if name == "checksum":
                return [int(text.partition(":")[2], 16) for _, text in measured]
            return [functools.reduce(getattr, name.split(".")[1:], overflow) for overflow, _ in measured]
        if name == "numel":
            return [math.prod(shape) for shape in self._values("shape")]
        for_each(SourceFile.fields, [file for file in self.files if name not in file.named], at_once=NUM_THREADS)
        return [file.field(name) for file in self.files]

    def read(self, record: Record, *, sample: int | None) -> Any:
        """The values of a record, or of one sample without the sample dimension if `sample` is given.

        Raises:
            DataError: the file has changed since it was listed.
        """
        file = next(file for file in self.files if file.site == record.location.site)
        values = file.values()
        if checksum(values) != record.checksum:
            raise DataError(f"{file.path} has changed since it was listed: its checksum is no longer {record.checksum}")
        return values if sample is None else values.take(sample, axis=record.sample_dim)

    def parts(self, record: Record) -> Iterator[Any]:
        """The values of a record in parts, all of which are in memory."""
        return split(self.read(record, sample=None), sample_dim=record.sample_dim)

    def siblings(self, record: Record) -> Any:
        """Raise `UsageError`: files do not name the other parts of their tensors."""
        raise UsageError(
            f"{self.url} is a folder of files, and {record.location.site} does not name the other parts of its "
            f"tensor: select them and use assemble(), or 'ranktape import' the folder first"
        )


@functools.cache
def _empty() -> Catalogue:
    """An empty catalogue, which gives the dtype of every column."""
    return empty_catalogue()


class Folder:
    """The tensors of a folder, or of one file; `select` works as for a run."""

    def __init__(self, path: Path, *, skip_unreadable: bool = False, any_name: bool = False) -> None:
        """List the names, and open the files whose names do not contain both iteration and rank.

        If `any_name` is true, readable `.pt` files with any other name are included, and a list in a file can have more
        entries than its tensor. If `skip_unreadable` is true, all files are opened now, and unreadable ones left out.

        Raises:
            DataError: a file that has to be opened cannot be read, and `skip_unreadable` is false.
            StorageError: the folder cannot be read.
        """
        self.url = str(path)
        """Path of the folder or file."""
        self.foreign: list[str] = []
        """Names that are unknown, and names of links that lead out of the folder."""
        self.unreadable: dict[str, str] = {}
        """The reason for each file that was left out."""
        self._any_name, is_alone = any_name, path.is_file()
        paths = [path] if is_alone else self._list(path)
        descriptions = self._descriptions(paths)
        files = list(filter(None, (self._file(entry, descriptions, is_alone=is_alone) for entry in paths)))
        if self.unreadable and not skip_unreadable:
            raise DataError(next(iter(self.unreadable.values())))
        if skip_unreadable or any_name:
            self._open(file for file in files if skip_unreadable or not file.named)
            files = [file for file in files if file.path.name not in self.unreadable]
        unnamed = [file for file in files if not {"iteration", "rank"} <= file.named.keys()]
        for_each(SourceFile.fields, unnamed, at_once=NUM_THREADS)
        foreign = set(self.foreign)
        self.paths = [entry for entry in paths if entry.name not in foreign]
        """Every file that was accepted by its name, readable or not."""
        self.files: Sequence[SourceFile] = sorted(files, key=_order)
        """The files with a tensor, ordered by iteration, rank and time of writing."""
        _make_unique(self.files)
        self.iterations = sorted({file.field("iteration") for file in self.files})
        """The iterations of the files in ascending order."""

    def __repr__(self) -> str:
        return f"<Folder {self.url}: {len(self)} files>"

    def __len__(self) -> int:
        """Number of files with a tensor."""
        return len(self.files)

    def select(self, **filters: Any) -> Records:
        """The records whose fields match all filters, as for `Run.select`.

        Raises:
            UnknownFieldError: a filter is not the name of a field.
            UsageError: a value is invalid for its field.
            DataError: a file that has to be opened cannot be read.
        """
        table = FileTable(self.url, self.files)
        return Records([Listing.of_files(table, source=source_name(self.url))]).select(**filters)

    def _list(self, folder: Path) -> list[Path]:
        try:
            with os.scandir(folder) as entries:
                found = [(entry.name, entry.is_symlink(), entry.is_dir(follow_symlinks=False)) for entry in entries]
        except OSError as error:
            raise StorageError(f"{folder} cannot be listed: {error.strerror or error}") from error
        inside = Path(os.path.realpath(folder))  # Path.resolve() fails on links in a circle
        paths = []
        for name, is_link, is_folder in sorted(found):
            if is_link and Path(os.path.realpath(folder / name)).parent != inside:
                self.foreign.append(name)
            elif not is_folder:
                paths.append(folder / name)
        return paths

    def _descriptions(self, paths: Iterable[Path]) -> dict[str, Any]:
        """The contents of the description files in a folder of layer outputs, by file stem."""
        descriptions = {}
        for path in paths:
            if path.name in {STATISTICS, METADATA}:
                try:
                    descriptions[path.stem] = read_plain(path)
                except (DataError, StorageError) as error:
                    self.unreadable[path.name] = str(error)
        return descriptions

    def _file(self, path: Path, descriptions: Mapping[str, Any], *, is_alone: bool) -> SourceFile | None:
        if path.name in {STATISTICS, METADATA}:
            return None
        layer = parse_layer_output_name(path.name)
        if layer is None:
            file_name = parse_tensor_file_name(path.name)
            if file_name is None and not is_alone and not (self._any_name and path.suffix == ".pt"):
                self.foreign.append(path.name)
                return None
            return SourceFile(path, file_name=file_name, layer=None, allow_longer_lists=self._any_name)
        statistics, metadata = descriptions.get("statistics"), descriptions.get("metadata")
        keys = (path.stem, path.stem.removesuffix("_output"), "layer_0" if path.stem.startswith("embedding") else "")
        all_statistics = statistics if isinstance(statistics, dict) else {}
        layer_statistics = next((all_statistics[key] for key in keys if key in all_statistics), None)
        shown_metadata = (
            {key: value for key, value in metadata.items() if key != RECORD_KEY}
            if isinstance(metadata, dict)
            else metadata
        )
        description = {
            name: entry
            for name, entry in (("metadata", shown_metadata), ("statistics", layer_statistics))
            if entry is not None
        }
        return SourceFile(
            path,
            file_name=None,
            layer=layer,
            description=description or None,
            folder_fields=_folder_fields(metadata, stem=path.stem),
            allow_longer_lists=self._any_name,
        )

    def _open(self, files: Iterable[SourceFile]) -> None:
        """Read the fields of files; note the reason for each that cannot be read."""

        def reason(file: SourceFile) -> str | None:
            try:
                file.fields()
            except (DataError, StorageError) as error:
                return str(error)
            return None

        listed = list(files)
        reasons = for_each(reason, listed, at_once=NUM_THREADS)
        self.unreadable |= {file.path.name: why for file, why in zip(listed, reasons, strict=True) if why is not None}


def _order(file: SourceFile) -> tuple[Any, ...]:
    written = ("", 0) if file.file_name is None else (file.file_name.timestamp, file.file_name.counter)
    return (file.field("iteration"), file.field("rank"), *written, file.field("layer_idx"), file.path.name)


def _make_unique(files: Sequence[SourceFile]) -> None:
    """Make files unique: number the calls of files with the same fields, and give each file its own site.

    In sites, characters other than printable ASCII are escaped.
    """
    taken, seen = {file.path.name for file in files}, Counter[tuple[Any, ...]]()
    for file in files:
        name = file.path.name
        if not (name.isascii() and name.isprintable()):
            file.site = quote(os.fsencode(name))
            while file.site in taken:
                file.site += "~"
            taken.add(file.site)
        tensor = name if file.file_name is None else file.file_name.tensor_name
        key = (file.field("iteration"), file.field("rank"), tensor, *sorted(map(str, file.named.items())))
        file.call = seen[key]
        seen[key] += 1
