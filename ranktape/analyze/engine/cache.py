"""Keeps what was counted beside the run, and finds it again.

In the run itself, below `layout.ANALYSIS`; of a run that cannot be written, beside it; else, and of files, in the
user's cache directory. For each version, each measure and each iteration of a rank there are objects of many payloads
(`cache_object`), each named after the records in it: two processes that count the same write the same. What is read
back is known by the record's identity and its checksum. Whatever goes wrong here costs time and no answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ranktape.analyze.engine.cache_object import (
    MAX_OBJECT_NBYTES,
    CacheObject,
    DamagedObjectError,
    Payload,
    pack,
)
from ranktape.errors import ObjectTooLargeError, StorageError
from ranktape.lazy_names import __version__
from ranktape.storage.format import layout
from ranktape.storage.format.blob import blob_document
from ranktape.storage.places.backend import Backend
from ranktape.storage.places.urls import open_backend
from ranktape.storage.records.record import RecordReader

VERSION = f"{__version__}_3"
"""Of all that is counted: that of the package, and a number that is one more whenever anything kept changes.

What another version has kept is not found."""

BESIDE = ".analysis"
"""Behind the path of a run that cannot be written: the directory beside it."""

FOLDER_VARIABLE = "RANKTAPE_CACHE_DIR"
"""Names another directory than the user's own for caches."""

_SUFFIX = ".counts"
_NAME = re.compile(r"[0-9a-f]{32}\.counts")
_NUM_THREADS = 8
"""Prefixes that are listed at once."""

_MAX_LISTS = 16
"""Ranks that are listed one by one; of more the attempt is listed as a whole."""

_MAX_NAME_LENGTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlace:
    """Somewhere payloads may lie; it can be pickled."""

    backend: Backend
    """The store."""
    prefix: str
    """Below it; empty where the store holds nothing else."""

    def prepare(self) -> None:
        """Make sure that something can be written, and that plain Zarr passes by what will be.

        Raises:
            StorageError: it cannot be written.
        """
        key = layout.document_key(self.prefix)
        document = blob_document(b"", attributes={"holds": "what analysis has counted; it can be deleted"})
        self.backend.put(key, [json.dumps(document).encode()])

    def key(self, *names: str) -> str:
        """The key of an object, or a prefix of keys."""
        return "/".join(filter(None, (self.prefix, *names)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """Where the payloads of one measure and group are written to; it can be pickled."""

    place: CachePlace
    """Somewhere that can be written."""
    path: str
    """The prefix of the objects."""
    damaged: tuple[str, ...] = ()
    """Keys of objects that lie there and cannot be read."""

    def put(self, keys: Sequence[str], payloads: Sequence[Payload]) -> None:
        """Write one object, atomically, and take away those that are damaged.

        Raises:
            StorageError: it cannot be written.
        """
        key = f"{self.path}/{_digest(*keys)}{_SUFFIX}"
        self.place.backend.put(key, [pack(keys, payloads)])
        if damaged := [other for other in self.damaged if other != key]:
            self.place.backend.delete_keys(damaged)


@dataclass(slots=True)
class Found:
    """What is known of the records of a group already."""

    objects: dict[str, CacheObject] = field(default_factory=dict)
    """By the key of a record, the object with its payload."""
    damaged: list[str] = field(default_factory=list)
    """Keys of objects that cannot be read, where they could be replaced."""


class Cache:
    """What is known of a measure in a run, or in a folder of files."""

    def __init__(self, reader: RecordReader, *, name: str, groups: Iterable[str], warn: Callable[[str], None]) -> None:
        """List what is there.

        Args:
            reader: Where the records come from.
            name: That of the measure.
            groups: The paths of the groups that will be asked about.
            warn: Told in one line what keeps the cache from being read or written.
        """
        self._warn = warn
        self._measure = f"{VERSION}/{_path_name(name)}"
        self._places = list(_places(reader))
        self._target: CachePlace | None = None
        self._is_tried = False
        paths = sorted(set(groups))
        self._listed = [(place, self._list(place, paths)) for place in self._places]

    def find(self, group: str) -> Found:
        """What is known of the records of a group."""
        found = Found()
        for place, listed in self._listed:
            for key in listed.get(group, ()):
                content = self._open(place, key)
                if content is not None:
                    found.objects.update(dict.fromkeys(content.keys, content))
                elif place is self._places[0]:
                    found.damaged.append(key)
        return found

    def shelf(self, group: str, *, damaged: Sequence[str]) -> Shelf | None:
        """Where the payloads of a group can be written to; None, with one warning, where no place takes them."""
        target = self._writable()
        if target is None:
            return None
        own = tuple(damaged) if target is self._places[0] else ()
        return Shelf(place=target, path=target.key(self._measure, group), damaged=own)

    def give_up(self, reason: str) -> None:
        """Write nothing more: a worker could not. Others, who were asked before it failed, may fail as well."""
        if self._target is not None:
            self._target = None
            self._warn(f"what is counted now is not kept: {reason}")

    def _writable(self) -> CachePlace | None:
        if not self._is_tried:
            self._is_tried = True
            reason = "there is no place for it"
            for place in self._places:
                try:
                    place.prepare()
                except StorageError as error:
                    reason = str(error)
                    continue
                self._target = place
                return place
            self._warn(f"what is counted now is not kept: {reason}")
        return self._target

    def _list(self, place: CachePlace, groups: Sequence[str]) -> Mapping[str, list[str]]:
        """The keys of the objects of each group; one LIST for each rank, or one for all of many."""
        parents = sorted({group.rpartition("/")[0] for group in groups})
        if len(parents) > _MAX_LISTS:
            parents = sorted({parent.rpartition("/")[0] for parent in parents})
        prefixes = [place.key(self._measure, parent) for parent in parents]
        listed: dict[str, list[str]] = {}
        try:
            with ThreadPoolExecutor(_NUM_THREADS) as pool:
                for parent, prefix, keys in zip(
                    parents, prefixes, pool.map(place.backend.list_keys, prefixes), strict=True
                ):
                    for key in keys:
                        path, _, name = key.rpartition("/")
                        if _NAME.fullmatch(name):
                            listed.setdefault("/".join(filter(None, (parent, path))), []).append(f"{prefix}/{key}")
        except StorageError as error:
            self._warn(f"what was counted before cannot be looked up: {error}")
        return listed

    def _open(self, place: CachePlace, key: str) -> CacheObject | None:
        try:
            data = place.backend.get(key, max_nbytes=MAX_OBJECT_NBYTES)
            return None if data is None else CacheObject(data)
        except (DamagedObjectError, ObjectTooLargeError):
            return None
        except StorageError as error:
            self._warn(f"what was counted before cannot be read: {error}")
            return None


def record_keys(columns: Sequence[Sequence[Any]]) -> list[str]:
    """What each record is known by, from the columns that tell it from others."""
    return [_digest(*map(str, values)) for values in zip(*columns, strict=True)]


def _digest(*words: str) -> str:
    return hashlib.blake2b("\0".join(words).encode(errors="surrogateescape"), digest_size=16).hexdigest()


def _path_name(name: str) -> str:
    """The name of a measure as a part of a key."""
    quoted = quote(name, safe="=,+")
    return quoted if len(quoted) <= _MAX_NAME_LENGTH else f"{quoted[: _MAX_NAME_LENGTH - 33]}-{_digest(name)}"


def _places(reader: RecordReader) -> Iterable[CachePlace]:
    """Where payloads may lie, the first choice first."""
    backend = getattr(reader, "backend", None)
    if backend is not None:
        yield CachePlace(backend=backend, prefix=layout.ANALYSIS)
        if "://" not in backend.url:
            yield CachePlace(backend=open_backend(f"{backend.url.rstrip('/')}{BESIDE}"), prefix="")
    folder = _user_folder()
    if folder is not None:
        source = reader.url if "://" in reader.url else os.path.realpath(reader.url)
        yield CachePlace(backend=open_backend(folder / _digest(source)), prefix="")


def _user_folder() -> Path | None:
    """The directory for caches of this user, if there is one."""
    if own := os.environ.get(FOLDER_VARIABLE, ""):
        return Path(own)
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # A relative one counts for nothing, as the XDG specification has it.
        return (Path(named) if named.startswith("/") else Path.home() / ".cache") / "ranktape"
    except RuntimeError:  # nobody's home
        return None
