"""Opens several runs and folders of `.pt` files, or all that lie below a folder, as one source of records."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ranktape.analyze.legacy.open import RecordSource, local_path, open_source
from ranktape.errors import RunNotFoundError, UsageError
from ranktape.storage.format import layout
from ranktape.storage.records.records import Records, unite

MAX_DEPTH = 3
"""Levels of folders that are looked through for runs and `.pt` files."""

MAX_SOURCES = 1000
"""Sources that are opened together."""


class Sources:
    """Several runs and folders, by short names that their paths tell apart; `select` answers as that of a run does."""

    def __init__(self, members: Mapping[str, RecordSource]) -> None:
        """Take the sources by name."""
        self.members = dict(members)
        """Each source by its name."""
        self.url = " and ".join(source.url for source in self.members.values())
        """Where they are."""

    def __repr__(self) -> str:
        return f"<Sources {', '.join(self.members)}>"

    @property
    def iterations(self) -> list[int]:
        """The iterations that are there in any of them, ascending."""
        return sorted({iteration for source in self.members.values() for iteration in source.iterations})

    @property
    def foreign(self) -> list[str]:
        """Names in folders that no tool wrote whose files we read."""
        return [name for source in self.members.values() for name in getattr(source, "foreign", ())]

    @property
    def unreadable(self) -> dict[str, str]:
        """For each file that was left out of a folder the reason."""
        return {
            f"{name}/{file}": why
            for name, source in self.members.items()
            for file, why in getattr(source, "unreadable", {}).items()
        }

    def select(self, **filters: Any) -> Records:
        """The records of all sources whose fields have the values asked for; `source` is the name of theirs."""
        # A run decides by the attempt which iterations it shows.
        early = {name: value for name, value in filters.items() if name in {"iteration", "attempt"}}
        rest = {name: value for name, value in filters.items() if name not in early}
        return unite({name: source.select(**early) for name, source in self.members.items()}).select(**rest)


def open_sources(
    urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    storage_options: Mapping[str, Any] | None = None,
    *,
    skip_unreadable: bool = False,
    any_name: bool = False,
) -> RecordSource:
    """What lies at some places as one source: runs, folders of `.pt` files, such files, or folders of all these.

    Of a folder of sources each one counts. One source is given as it is; of several each record says in `source` which
    it is of, by a name that is short: `bf16` and `mxfp8` of runs/bf16 and runs/mxfp8.

    Raises:
        RunNotFoundError: at a place is nothing of the kind.
        RunFormatError: a run is of a later schema, or damaged.
        DataError: a file cannot be read, and `skip_unreadable` was not given.
        StorageError: a store cannot be reached or read.
        UsageError: a URL or the options are not usable; there are far too many sources.
    """
    given = [os.fspath(url) for url in ([urls] if isinstance(urls, str | os.PathLike) else urls)]
    places = list(dict.fromkeys(place for url in given for place in places_of(url, storage_options, any_name=any_name)))
    if not places:
        raise UsageError("there is nothing to open: give a run, a folder of .pt files, or several of them")
    if len(places) > MAX_SOURCES:
        raise UsageError(f"{len(places)} sources are too many: give {MAX_SOURCES} at most, or a folder further down")
    opened = [open_source(one, storage_options, skip_unreadable=skip_unreadable, any_name=any_name) for one in places]
    return opened[0] if len(opened) == 1 else Sources(dict(zip(short_names(places), opened, strict=True)))


def places_of(url: str, storage_options: Mapping[str, Any] | None = None, *, any_name: bool = False) -> list[str]:
    """The sources at a place: itself, unless it is a folder that holds none, and some lie below it."""
    path = local_path(url)
    if path is not None:
        try:
            is_folder = path.is_dir() and not _is_source(path)
            return (list(_below(path, depth=MAX_DEPTH)) or [url]) if is_folder else [url]
        except (OSError, ValueError):  # opening it says what is wrong
            return [url]
    try:
        open_source(url, storage_options, any_name=any_name)
    except RunNotFoundError:
        from ranktape.storage.maintenance.runs import find_runs

        try:
            found = find_runs(url, storage_options=storage_options, max_depth=MAX_DEPTH)
        except RunNotFoundError:
            return [url]
        return [f"{url.rstrip('/')}/{one.path}" for one in found if one.path] or [url]
    return [url]


def _is_source(folder: Path) -> bool:
    """Whether a folder is a run, or holds `.pt` files."""
    if (folder / layout.DOCUMENT).exists():
        return True
    with os.scandir(folder) as entries:
        return any(entry.name.endswith(".pt") and not entry.is_dir() for entry in entries)


def _below(folder: Path, *, depth: int) -> Iterator[str]:
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for name in names:
        path = folder / name
        if name.startswith(".") or (name.endswith(".analysis") and _is_cache(path)):
            continue
        if _is_source(path):
            yield str(path)
        elif depth > 1:
            yield from _below(path, depth=depth - 1)


def _is_cache(folder: Path) -> bool:
    """Whether a folder holds what was counted of the run beside it, and is no run itself."""
    try:
        document = json.loads((folder / layout.DOCUMENT).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("node_type") == "array"


def short_names(paths: Sequence[str]) -> list[str]:
    """What to call each of several places: its path without the folders that begin or end all of them.

    `bf16` and `mxfp8` for runs/bf16 and runs/mxfp8, of one place its last name. Places are different, and so are
    their names.
    """
    split = [
        [word for word in path.replace("://", "/").split("/") if word not in {"", "."}] or [path] for path in paths
    ]
    if len(split) == 1:
        return [split[0][-1]]
    head = _num_alike(split)
    tail = _num_alike([words[head:][::-1] for words in split])
    # Of what lies in another one nothing would be left.
    head -= any(len(words) == head for words in split) and head > 0
    names = ["/".join(words[head : len(words) - tail]) for words in split]
    if not all(names) or len(set(names)) < len(names):
        names = ["/".join(words[head:]) for words in split]
    return names if len(set(names)) == len(names) else list(paths)


def _num_alike(paths: Sequence[Sequence[str]]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda words: len(set(words)) == 1, zip(*paths, strict=False)))
