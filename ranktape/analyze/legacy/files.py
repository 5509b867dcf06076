"""Reads a folder of `.pt` files as records, which answer the same questions as those of a run.

Names are listed when the folder is opened. A file is opened when something is asked that its name does not say, and
its values are read when they are asked for; always only of the files that are still in the selection.

Names come first, as they are what people see and change; what a name does not say is taken from what the tools before
us embedded, or from the record that our own export embedded under `RECORD_KEY`. A stranger may have written any of
it: what no record can hold ends the reading of that file.
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
"""Under which our export embeds the record among what it says of the tensor."""

TAGS = ("layer_type", "operation", "phase", "component", "quant_type", "tensor_name")
"""The fields of a record that are words; the legacy tool embeds them under the same names."""

NUMBERS = ("iteration", "rank", "layer_idx")
"""The fields of a record that are numbers, and that the legacy tool embeds."""

_SAID_ELSEWHERE = frozenset({*TAGS, *NUMBERS, "sample_idx", RECORD_KEY})
"""What is embedded and becomes fields of the record."""

_QUANT_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
"""The tags of plain types, for files that have none."""

LAST_SECOND = 253402300799
"""The end of the last year that has four digits, in seconds since the epoch."""

_MAX_NUMBER = 2**53
"""Numbers in files are whole and below this: a catalogue's columns hold them exactly."""

_OF_ALL_OUTPUTS = ("iteration", "rank", "microbatch", "call", "quant_type")
"""What our export says of the outputs of layers together."""

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
"""What a file is taken for that says nothing."""


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_NUMBER


def _is_term(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TERM_LENGTH and value.isprintable()


def _is_sample_ids(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(type(entry) in {int, str} for entry in value))


_OWN_FIELDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("iteration", "rank", "microbatch", "call", "counter"), _is_number),
    "layer_idx": lambda value: _is_number(value) or (type(value) is int and value == -1),
    **dict.fromkeys(("sample_dim", "batch_size"), lambda value: value is None or _is_number(value)),
    **dict.fromkeys(("layer_type", "phase", "component", "quant_type", "tensor_name"), _is_term),
    "operation": lambda value: value in tuple(Operation),
    "mode": lambda value: value in tuple(Mode),
    **dict.fromkeys(("module", "layer_stack", "record_checksum"), lambda value: isinstance(value, str)),
    # It becomes part of a name in the store.
    "layout": lambda value: isinstance(value, str) and re.fullmatch("[A-Za-z]{0,32}", value) is not None,
    "compute_dtype": lambda value: isinstance(value, str) and value in DTYPES,
    **dict.fromkeys(("placement", "metadata"), lambda value: value is None or isinstance(value, dict)),
    "sample_ids": _is_sample_ids,
    "timestamp": lambda value: type(value) in {int, float} and 0 <= value <= LAST_SECOND,
}
"""The fields that our export embeds, and what each may hold."""


def _given_fields(words: Any, *, stem: str) -> dict[str, Any]:
    """The fields of one output of a layer that the `metadata.pt` of its folder says; none that no record can hold.

    Our export writes those of all outputs together, and under `RECORD_KEY` those of each.
    """
    known = words if isinstance(words, Mapping) else {}
    of_each = known.get(RECORD_KEY)
    own = of_each.get(stem) if isinstance(of_each, Mapping) else None
    found = {name: known[name] for name in _OF_ALL_OUTPUTS if name in known}
    found |= own if isinstance(own, Mapping) else {}
    return {name: value for name, value in found.items() if name in _OWN_FIELDS and _OWN_FIELDS[name](value)}


def _own_fields(own: Mapping[str, Any], header: TensorFile, *, place: Path) -> dict[str, Any]:
    """The fields that our export embedded; one that no record can hold is an error."""
    found = {field: own[field] for field in _OWN_FIELDS if field in own}
    for field, value in found.items():
        if not _OWN_FIELDS[field](value):
            raise DataError(f"{place} says {field}={str(value)[:60]!r} of its tensor, which no record can hold")
    dim, ids = found.get("sample_dim"), found.get("sample_ids")
    if dim is not None and dim >= len(header.shape):
        raise DataError(f"{place} says sample_dim={dim} of a tensor of {len(header.shape)} dimensions")
    if dim is not None and ids is not None and len(ids) != header.shape[dim]:
        raise DataError(f"{place} names {len(ids)} samples of a tensor of {header.shape[dim]}")
    return found


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
        layer: int | None,
        said: Any = None,
        given: Mapping[str, Any] | None = None,
        is_first_enough: bool = False,
    ) -> None:
        """What its name and its folder say: in the folder's own words as `said`, and as fields of the record."""
        self.path = path
        """Where it is."""
        self.file_name = file_name
        """What its name says, if it is one of a single tensor."""
        self.call = 0
        """How many tensors of the same fields were written before it."""
        self.site = path.name
        """What the record says of where it is: the name, or where that is not plain ASCII what stands for it."""
        self._layer, self._said, self._given = layer, said, given or {}
        self._is_first_enough = is_first_enough
        self.named = self._named()
        """The fields of the record that need not be looked up in the file."""
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

        `metadata` comes as JSON text. With `record_checksum` comes what our export says of the values, "" if nothing.
        """
        if self._fields is None:
            header = read_header(self.path, is_first_enough=self._is_first_enough)
            described = self._described(header)
            # Many files say the same at length.
            self._header = dataclasses.replace(header, metadata=None, tensor_info=None)
            self._fields = {"call": self.call} | described | self.named
        return self._fields

    def values(self) -> Any:
        """The values, read from the file."""
        self.fields()
        assert self._header is not None
        return read_values(self.path, self._header)

    def measured(self) -> tuple[Overflow, str]:
        """What the values do at the limits of their dtype, and their checksum."""
        if self._measured is None:
            with _large if self.fields()["nbytes"] > _LARGE_NBYTES else nullcontext():
                return self.values_measured()[1:]
        return self._measured

    def values_measured(self) -> tuple[Any, Overflow, str]:
        """The values, what they do at the limits of their dtype, and their checksum: all three of one reading."""
        values = self.values()
        found, said = checksum(values), self.fields()["record_checksum"]
        if said and said != found:
            raise DataError(f"the values in {self.path} are damaged: their checksum is {found}, not {said}")
        if self._measured is None or self._measured[1] != found:
            self._measured = measure(values, sample_dim=self.fields()["sample_dim"]), found
        return values, *self._measured

    def _named(self) -> dict[str, Any]:
        """What the name settles; what that of the output of a layer does not say is what its folder gives for it."""
        named, layer = self.file_name, self._layer
        if layer is not None:
            layer_type = "embedding" if layer < 0 else "hidden"
            fixed = {"layer_type": layer_type, "layer_idx": layer, "phase": "post", "tensor_name": "output"}
            return _UNTAGGED | {field: value for field, value in self._given.items() if field in _UNTAGGED} | fixed
        if named is None:
            return {}
        fields: dict[str, Any] = {tag: str(getattr(named, tag)) for tag in TAGS[:-1]}
        numbers = {"iteration": named.iteration, "rank": named.rank}
        fields |= {number: value for number, value in numbers.items() if value is not None}
        fields["layer_idx"] = -1 if named.layer_idx is None else named.layer_idx
        # A name of theirs that is another one of ours may stand in a file of ours, which says so inside.
        if recorded_tensor_name(named) == named.tensor_name:
            fields["tensor_name"] = named.tensor_name
        return fields

    def _described(self, header: TensorFile) -> dict[str, Any]:
        known = header.metadata if isinstance(header.metadata, Mapping) else {}
        own, named = known.get(RECORD_KEY), self.file_name
        stem = "".join(character if character.isprintable() else "?" for character in self.path.stem)
        # What somebody else's file says beyond the fields.
        rest = {key: value for key, value in known.items() if key not in _SAID_ELSEWHERE}
        more = {"tensor_info": header.tensor_info, "group_idx": named and named.group_idx, "folder": self._said}
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
            # What no record can hold of what the legacy tool embedded is left out.
            **{name: known[name] for name in (*TAGS, *NUMBERS) if name in known and _OWN_FIELDS[name](known[name])},
            **({} if named is None else {"tensor_name": recorded_tensor_name(named)}),
        }
        sample_idx = known.get("sample_idx") if named is None or named.sample_idx is None else named.sample_idx
        if is_one := _is_number(sample_idx):
            fields["sample_ids"] = [sample_idx]
        fields |= self._samples(header.shape, known.get("batch_size"), is_one=is_one, tensor_name=fields["tensor_name"])
        if isinstance(own, Mapping):
            fields |= _own_fields(own, header, place=self.path)
        elif self._given:
            rest = (self._given.get("metadata") or {}) | rest
            fields |= _own_fields(self._given, header, place=self.path) | {"metadata": rest or None}
        fields["metadata"] = json.dumps(fields["metadata"], separators=(",", ":"))
        return fields | {"dtype": header.dtype, "shape": header.shape, "nbytes": header.nbytes}

    def _samples(self, shape: tuple[int, ...], size: Any, *, is_one: bool, tensor_name: str) -> dict[str, Any]:
        """Where the samples of a tensor of somebody else are, and how many its batch has, as far as its shape shows it.

        Outputs of layers count them first. Of others the batch size is what the tool was told, else the smaller one of
        the two first dimensions of three or more: batches came first or second there, and the other one counts tokens
        or heads.
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
        return int(field not in {*_FIXED, "site", SOURCE} and any(field not in file.named for file in self.files))

    def group_of(self, row: int) -> str:  # noqa: ARG002 - the Protocol's signature
        """The folder itself: files lie side by side."""
        return "."

    def column(self, name: str) -> Column:
        """The values of a column of the catalogue, one for each file."""
        values = self._values(name)
        if name in JSON_FIELDS or name == "overflow.per_sample":
            values = [json.dumps(value, separators=(",", ":")) if name != "metadata" else value for value in values]
        like = _empty().column(name)
        if isinstance(like, StringColumn):
            return StringColumn.of(values)
        with np.errstate(over="ignore"):  # an extreme beyond the column's type is infinite there
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
        """The values of a record; with `sample` of one sample, without the dimension of samples."""
        file = next(file for file in self.files if file.site == record.location.site)
        values = file.values()
        if checksum(values) != record.checksum:
            raise DataError(f"{file.path} has changed since it was listed: its checksum is not {record.checksum} now")
        return values if sample is None else values.take(sample, axis=record.sample_dim)

    def parts(self, record: Record) -> Iterator[Any]:
        """The values of a record in parts, of which all are in memory."""
        return split(self.read(record, sample=None), sample_dim=record.sample_dim)

    def siblings(self, record: Record) -> Any:
        """Nothing."""
        raise UsageError(
            f"{self.url} holds files, and {record.location.site} does not say which other ones are parts of the same "
            f"tensor: select them and use assemble(), or 'ranktape import' the folder first"
        )


@functools.cache
def _empty() -> Catalogue:
    """What has every column in the type that a run's catalogue has."""
    return empty_catalogue()


class Folder:
    """The tensors of a folder, or of one file; `select` answers as that of a run does."""

    def __init__(self, path: Path, *, skip_unreadable: bool = False, any_name: bool = False) -> None:
        """List the names; files whose names say neither iteration nor rank are opened.

        With `any_name` a `.pt` file under any other name is taken too, and a list in a file may hold more than its
        tensor; of such files those that cannot be read are left out.

        Raises:
            DataError: a file that must be opened cannot be, and `skip_unreadable` was not given. With it, every file
                is opened now.
            StorageError: the folder cannot be read.
        """
        self.url = str(path)
        """Where it is."""
        self.foreign: list[str] = []
        """Names that no tool wrote whose files we read, and links that lead out of the folder."""
        self.unreadable: dict[str, str] = {}
        """For each file that was left out the reason."""
        self._any_name, is_alone = any_name, path.is_file()
        paths = [path] if is_alone else self._list(path)
        said = self._descriptions(paths)
        files = list(filter(None, (self._file(entry, said, is_alone=is_alone) for entry in paths)))
        if self.unreadable and not skip_unreadable:
            raise DataError(next(iter(self.unreadable.values())))
        if skip_unreadable or any_name:
            self._open(file for file in files if skip_unreadable or not file.named)
            files = [file for file in files if file.path.name not in self.unreadable]
        unnamed = [file for file in files if not {"iteration", "rank"} <= file.named.keys()]
        for_each(SourceFile.fields, unnamed, at_once=NUM_THREADS)
        foreign = set(self.foreign)
        self.paths = [entry for entry in paths if entry.name not in foreign]
        """Every file that was taken for one of ours, whether it can be read or not."""
        self.files: Sequence[SourceFile] = sorted(files, key=_order)
        """The files with a tensor, in the order of iteration, rank and writing."""
        _tell_apart(self.files)
        self.iterations = sorted({file.field("iteration") for file in self.files})
        """The iterations that files are of, ascending."""

    def __repr__(self) -> str:
        return f"<Folder {self.url}: {len(self)} files>"

    def __len__(self) -> int:
        """Files with a tensor."""
        return len(self.files)

    def select(self, **filters: Any) -> Records:
        """The records whose fields have the values asked for, as `Run.select` gives them.

        Raises:
            UnknownFieldError: a filter names no field.
            UsageError: a field cannot have such a value.
            DataError: a file that must be opened for it cannot be.
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
        """What a folder of layer outputs says beside its tensors, by the stem of the file that says it."""
        found = {}
        for path in paths:
            if path.name in {STATISTICS, METADATA}:
                try:
                    found[path.stem] = read_plain(path)
                except (DataError, StorageError) as error:
                    self.unreadable[path.name] = str(error)
        return found

    def _file(self, path: Path, folder_said: Mapping[str, Any], *, is_alone: bool) -> SourceFile | None:
        if path.name in {STATISTICS, METADATA}:
            return None
        layer = parse_layer_output_name(path.name)
        first: dict[str, Any] = {"is_first_enough": self._any_name}
        if layer is None:
            file_name = parse_tensor_file_name(path.name)
            if file_name is None and not is_alone and not (self._any_name and path.suffix == ".pt"):
                self.foreign.append(path.name)
                return None
            return SourceFile(path, file_name=file_name, layer=None, **first)
        statistics, words = folder_said.get("statistics"), folder_said.get("metadata")
        keys = (path.stem, path.stem.removesuffix("_output"), "layer_0" if path.stem.startswith("embedding") else "")
        known = statistics if isinstance(statistics, dict) else {}
        own = next((known[key] for key in keys if key in known), None)
        shown = {key: word for key, word in words.items() if key != RECORD_KEY} if isinstance(words, dict) else words
        said = {name: entry for name, entry in (("metadata", shown), ("statistics", own)) if entry is not None}
        given = _given_fields(words, stem=path.stem)
        return SourceFile(path, file_name=None, layer=layer, said=said or None, given=given, **first)

    def _open(self, files: Iterable[SourceFile]) -> None:
        """Read what files say; why one cannot be read is noted."""

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


def _tell_apart(files: Sequence[SourceFile]) -> None:
    """Give each file what no other one has: the nth of the same fields is their nth call, and sites are unlike.

    A site is a name that a record may have: other letters than ASCII's are escaped.
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
