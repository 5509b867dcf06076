"""Reads a folder of `.pt` files as records, which answer the same questions as those of a run.

Names are listed when the folder is opened. A file is opened when something is asked that its name does not say, and
its values are read when they are asked for; always only of the files that are still in the selection.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ranktape.analyze.legacy.files import NUM_THREADS, RECORD_KEY, FileTable, SourceFile, given_fields
from ranktape.analyze.legacy.names import METADATA, STATISTICS, parse_layer_output_name, parse_tensor_file_name
from ranktape.analyze.legacy.payload import read_plain
from ranktape.errors import DataError, StorageError
from ranktape.storage.format.documents import for_each
from ranktape.storage.records.records import Listing, Records, source_name


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
        self._any_name = any_name
        self._said = self._descriptions(paths)
        files = list(filter(None, (self._file(entry, is_alone=path.is_file()) for entry in paths)))
        if skip_unreadable:
            files = self._readable(files)
        elif self.unreadable:
            raise DataError(next(iter(self.unreadable.values())))
        if any_name:
            self._readable(file for file in files if not file.named)
            files = [file for file in files if file.path.name not in self.unreadable]
        unnamed = [file for file in files if not {"iteration", "rank"} <= file.named.keys()]
        for_each(SourceFile.fields, unnamed, at_once=NUM_THREADS)
        foreign = set(self.foreign)
        self.paths = [entry for entry in paths if entry.name not in foreign]
        """Every file that was taken for one of ours, whether it can be read or not."""
        self.files: Sequence[SourceFile] = sorted(files, key=_order)
        """The files with a tensor, in the order of iteration, rank and writing."""
        _number_calls(self.files)
        _name_sites(self.files)
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

    def _file(self, path: Path, *, is_alone: bool) -> SourceFile | None:
        layer = parse_layer_output_name(path.name)
        if path.name in {STATISTICS, METADATA}:
            return None
        if layer is None:
            file_name = parse_tensor_file_name(path.name)
            if file_name is None and not is_alone and not (self._any_name and path.suffix == ".pt"):
                self.foreign.append(path.name)
                return None
            return SourceFile(path, file_name=file_name, layer=None, is_first_enough=self._any_name)
        statistics, words = self._said.get("statistics"), self._said.get("metadata")
        keys = (path.stem, path.stem.removesuffix("_output"), "layer_0" if path.stem.startswith("embedding") else "")
        known = statistics if isinstance(statistics, dict) else {}
        own = next((known[key] for key in keys if key in known), None)
        shown = {key: word for key, word in words.items() if key != RECORD_KEY} if isinstance(words, dict) else words
        said = {name: entry for name, entry in (("metadata", shown), ("statistics", own)) if entry is not None}
        fields = given_fields(words, stem=path.stem)
        return SourceFile(
            path, file_name=None, layer=layer, said=said or None, fields=fields, is_first_enough=self._any_name
        )

    def _readable(self, files: Iterable[SourceFile]) -> list[SourceFile]:
        """Those that can be read; why others cannot is noted."""

        def reason(file: SourceFile) -> str | None:
            try:
                file.fields()
            except (DataError, StorageError) as error:
                return str(error)
            return None

        listed = list(files)
        reasons = for_each(reason, listed, at_once=NUM_THREADS)
        self.unreadable |= {file.path.name: why for file, why in zip(listed, reasons, strict=True) if why is not None}
        return [file for file, why in zip(listed, reasons, strict=True) if why is None]


def _order(file: SourceFile) -> tuple[Any, ...]:
    written = ("", 0) if file.file_name is None else (file.file_name.timestamp, file.file_name.counter)
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
        file_name = file.file_name
        name = file.path.name if file_name is None else file_name.tensor_name
        key = (file.field("iteration"), file.field("rank"), name, *sorted(map(str, file.named.items())))
        file.call = seen[key]
        seen[key] += 1
