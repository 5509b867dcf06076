"""Which tensors are in a folder of `.pt` files? The same questions as of a run are asked of it.

Names are listed when the folder is opened. A file is opened when something is asked that its name does not say, and
its values are read when they are asked for; always only of the files that are still in the selection.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ranktape.analyze.legacy.described import RECORD_KEY, About, described_fields, named_fields, told_fields
from ranktape.analyze.legacy.payload import TensorFile, read_header, read_plain, read_values
from ranktape.analyze.legacy.table import FileRecords, FileTable, for_each
from ranktape.analyze.numerics.histograms.histogram import measure
from ranktape.errors import DataError, StorageError, UsageError
from ranktape.storage.format.encode import checksum
from ranktape.storage.format.legacy_names import (
    LayerFile,
    LayerOutputName,
    SeedName,
    parse_layer_output_name,
    parse_seed_name,
)
from ranktape.storage.format.parts import split
from ranktape.storage.format.record_info import Overflow
from ranktape.storage.records.record import Record
from ranktape.storage.records.records import Records

_LARGE_NBYTES = 1 << 26
"""Values of which only one tensor at a time is in memory to be counted: the threads would hold one each."""

_large = threading.Lock()


class SourceFile:
    """One file with one tensor; what has been read of it stays."""

    def __init__(
        self,
        path: Path,
        *,
        seed: SeedName | None,
        layer: LayerOutputName | None,
        about: About | None = None,
        is_first_enough: bool = False,
    ) -> None:
        self.path = path
        """Where it is."""
        self.seed = seed
        """What its name says, if it is one of a single tensor."""
        self.about = about or About()
        """What its folder says of it."""
        self.named = named_fields(seed, layer, self.about.told)
        """The fields of the record that need not be looked up in the file."""
        self.call = 0
        """How many tensors of the same fields were written before it."""
        self.site = path.name
        """What the record says of where it is: the name, or where that is not plain ASCII what stands for it."""
        self._layer = layer
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
            fields = described_fields(
                header,
                seed=self.seed,
                layer=self._layer,
                stem=self.path.stem,
                about=self.about,
                place=str(self.path),
            )
            self._header, self._fields = header.without_words(), {"call": self.call} | fields
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


class FolderReader:
    """Where the records of a folder get their values."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.files: dict[str, SourceFile] = {}

    def read(self, record: Record, *, sample: int | None) -> Any:
        """The values of a record; with `sample` of one sample, without the dimension of samples.

        Raises:
            DataError: the file has changed since it was listed, or is damaged.
            StorageError: it cannot be read.
        """
        file = self.files[record.location.site]
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

    def only(self, files: Iterable[SourceFile]) -> FolderReader:
        """A reader of some files, which is sent to another process with less."""
        narrow = FolderReader(self.url)
        narrow.files = {file.site: file for file in files}
        return narrow

    def open_array(self, path: str) -> Any:
        """Nothing.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{self.url}/{path} is a .pt file, not a Zarr array: use read(), or 'ranktape import'")

    def siblings(self, record: Record) -> Any:
        """Nothing.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{self.url} holds files, and {record.location.site} does not say which other ones are parts of the same "
            f"tensor: select them and use assemble(), or 'ranktape import' the folder first"
        )


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
        paths = [path] if path.is_file() else self._list(path)
        about = _Folder(paths)
        self._any_name = any_name
        files = list(filter(None, (self._file(entry, about=about, is_alone=path.is_file()) for entry in paths)))
        if skip_unreadable:
            files = self._readable(files)
            self.unreadable |= about.unreadable
        elif about.unreadable:
            raise DataError(next(iter(about.unreadable.values())))
        if any_name:
            self._readable(file for file in files if not file.named)
            files = [file for file in files if file.path.name not in self.unreadable]
        unnamed = [file for file in files if not {"iteration", "rank"} <= file.named.keys()]
        for_each(unnamed, SourceFile.fields)
        foreign = set(self.foreign)
        self.paths = [entry for entry in paths if entry.name not in foreign]
        """Every file that was taken for one of ours, whether it can be read or not."""
        self._files = sorted(files, key=_order)
        _number_calls(self._files)
        _name_sites(self._files)
        self.iterations = sorted({file.field("iteration") for file in self._files})
        """The iterations that files are of, ascending."""
        self._reader = FolderReader(self.url)
        self._reader.files = {file.site: file for file in self._files}

    def __repr__(self) -> str:
        return f"<Folder {self.url}: {len(self)} files>"

    def __len__(self) -> int:
        """Files with a tensor."""
        return len(self._files)

    @property
    def files(self) -> Sequence[SourceFile]:
        """The files with a tensor, in the order of iteration, rank and writing."""
        return self._files

    def select(self, **filters: Any) -> Records:
        """The records whose fields have the values asked for, as `Run.select` gives them.

        Raises:
            UnknownFieldError: a filter names no field.
            UsageError: a field cannot have such a value.
            DataError: a file that must be opened for it cannot be.
        """
        return FileRecords(self._reader, FileTable(self._files)).select(**filters)

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

    def _file(self, path: Path, *, about: _Folder, is_alone: bool) -> SourceFile | None:
        layer = parse_layer_output_name(path.name)
        seed = parse_seed_name(path.name) if layer is None else None
        if layer is None and seed is None and not is_alone and not (self._any_name and path.suffix == ".pt"):
            self.foreign.append(path.name)
            return None
        if layer is not None and layer.file in {LayerFile.STATISTICS, LayerFile.METADATA}:
            return None
        return SourceFile(
            path,
            seed=seed,
            layer=layer,
            about=None if layer is None else about.of(path.stem),
            is_first_enough=self._any_name,
        )

    def _readable(self, files: Iterable[SourceFile]) -> list[SourceFile]:
        def reason(file: SourceFile) -> str | None:
            try:
                file.fields()
            except (DataError, StorageError) as error:
                return str(error)
            return None

        listed = list(files)
        reasons = for_each(listed, reason)
        self.unreadable |= {file.path.name: why for file, why in zip(listed, reasons, strict=True) if why is not None}
        return [file for file, why in zip(listed, reasons, strict=True) if why is None]


class _Folder:
    """What a folder of layer outputs says beside its tensors."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.unreadable: dict[str, str] = {}
        self._said: dict[str, Any] = {}
        for path in paths:
            if path.name in {LayerFile.STATISTICS.value, LayerFile.METADATA.value}:
                try:
                    self._said[path.stem] = read_plain(path)
                except (DataError, StorageError) as error:
                    self.unreadable[path.name] = str(error)

    def of(self, stem: str) -> About:
        """What it says of the output in the file of that name."""
        statistics = self._said.get("statistics")
        keys = (stem, stem.removesuffix("_output"), "layer_0" if stem.startswith("embedding") else "")
        known = statistics if isinstance(statistics, dict) else {}
        own = next((known[key] for key in keys if key in known), None)
        words = self._said.get("metadata")
        shown = {key: word for key, word in words.items() if key != RECORD_KEY} if isinstance(words, dict) else words
        said = {name: entry for name, entry in (("metadata", shown), ("statistics", own)) if entry is not None}
        return About(said=said or None, told=told_fields(words, stem=stem))


def _order(file: SourceFile) -> tuple[Any, ...]:
    written = ("", 0) if file.seed is None else (file.seed.timestamp, file.seed.counter)
    return (file.field("iteration"), file.field("rank"), *written, file.field("layer_idx"), file.path.name)


def _name_sites(files: Sequence[SourceFile]) -> None:
    """Give each file a name that a record may have, and no other file has: other letters than ASCII's are escaped."""
    taken = {file.path.name for file in files}
    for file in files:
        name = file.path.name
        if not (name.isascii() and name.isprintable()):
            file.site = quote(os.fsencode(name))
            while file.site in taken:
                file.site += "~"
            taken.add(file.site)


def _number_calls(files: Sequence[SourceFile]) -> None:
    """Tell apart what the names do not: the nth file of the same fields is its nth call."""
    seen: Counter[tuple[Any, ...]] = Counter()
    for file in files:
        seed = file.seed
        name = file.path.name if seed is None else seed.tensor_name
        key = (file.field("iteration"), file.field("rank"), name, *sorted(map(str, file.named.items())))
        file.call = seen[key]
        seen[key] += 1
