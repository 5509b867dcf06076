"""Opens several runs and folders of `.pt` files, or all of them below a folder, as one source of records."""

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
"""Maximum depth of the folders that are searched for runs and `.pt` files."""

MAX_SOURCES = 1000
"""Maximum number of sources that are opened together."""


class Sources:
    """Several runs and folders with short unique names. `select` works like that of a run."""

    def __init__(self, members: Mapping[str, RecordSource]) -> None:
        """Take the sources by name."""
        self.members = dict(members)
        """Each source by its name."""
        self.url = " and ".join(source.url for source in self.members.values())
        """The URLs of all sources, as text."""

    def __repr__(self) -> str:
        return f"<Sources {', '.join(self.members)}>"

    @property
    def iterations(self) -> list[int]:
        """The iterations of all sources, in ascending order."""
        return sorted({iteration for source in self.members.values() for iteration in source.iterations})

    @property
    def foreign(self) -> list[str]:
        """Names of files in folders that were not written by a supported tool."""
        return [name for source in self.members.values() for name in getattr(source, "foreign", ())]

    @property
    def unreadable(self) -> dict[str, str]:
        """The reason for each file that was left out of a folder."""
        return {
            f"{name}/{file}": why
            for name, source in self.members.items()
            for file, why in getattr(source, "unreadable", {}).items()
        }

    def select(self, **filters: Any) -> Records:
        """The records of all sources that match the filters. Their field `source` is the name of the source."""
        # The attempt determines which iterations a run shows.
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
    """Open one or several locations as one source: runs, folders of `.pt` files, such files, or folders of all these.

    In a folder of sources, each one is opened. A single source is returned itself. With several, the field `source` of
    each record is the short name of its source, such as `bf16` and `mxfp8` for runs/bf16 and runs/mxfp8.

    Raises:
        RunNotFoundError: a location has no source.
        RunFormatError: a run has a later schema or is damaged.
        DataError: a file cannot be read and `skip_unreadable` is not set.
        StorageError: a store cannot be reached or read.
        UsageError: a URL or the options are invalid, or there are too many sources.
    """
    given = [os.fspath(url) for url in ([urls] if isinstance(urls, str | os.PathLike) else urls)]
    places = list(dict.fromkeys(place for url in given for place in places_of(url, storage_options, any_name=any_name)))
    if not places:
        raise UsageError("there is nothing to open: give a run, a folder of .pt files, or several of them")
    if len(places) > MAX_SOURCES:
        raise UsageError(f"{len(places)} sources are too many: give at most {MAX_SOURCES}, or a subfolder")
    opened = [open_source(one, storage_options, skip_unreadable=skip_unreadable, any_name=any_name) for one in places]
    return opened[0] if len(opened) == 1 else Sources(dict(zip(short_names(places), opened, strict=True)))


def places_of(url: str, storage_options: Mapping[str, Any] | None = None, *, any_name: bool = False) -> list[str]:
    """The sources at a location: the location itself, or the sources below it if it is a folder but no source."""
    path = local_path(url)
    if path is not None:
        try:
            is_folder = path.is_dir() and not _is_source(path)
            return (list(_below(path, depth=MAX_DEPTH)) or [url]) if is_folder else [url]
        except (OSError, ValueError):  # the error is reported when it is opened
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
    """Whether a folder is a run or contains `.pt` files."""
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
    """Whether a folder is the cache of a run beside it, and not a run itself."""
    try:
        document = json.loads((folder / layout.DOCUMENT).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("node_type") == "array"


def short_names(paths: Sequence[str]) -> list[str]:
    """Short names of several locations: their paths without the folders that all of them start or end with.

    For example, `bf16` and `mxfp8` for runs/bf16 and runs/mxfp8. The name of a single location is its last segment. The
    locations are distinct, and so are the names.
    """
    split = [
        [word for word in path.replace("://", "/").split("/") if word not in {"", "."}] or [path] for path in paths
    ]
    if len(split) == 1:
        return [split[0][-1]]
    head = _num_alike(split)
    tail = _num_alike([words[head:][::-1] for words in split])
    # If one path contains another, its name would be empty.
    head -= any(len(words) == head for words in split) and head > 0
    names = ["/".join(words[head : len(words) - tail]) for words in split]
    if not all(names) or len(set(names)) < len(names):
        names = ["/".join(words[head:]) for words in split]
    return names if len(set(names)) == len(names) else list(paths)


def _num_alike(paths: Sequence[Sequence[str]]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda words: len(set(words)) == 1, zip(*paths, strict=False)))
