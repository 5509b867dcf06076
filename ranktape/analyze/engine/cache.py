"""The cache of measurements. One object has the columns of many records.

The cache of a run is in the run itself, below `layout.ANALYSIS`. If the run cannot be written, it is in a directory
beside the run, and otherwise, as for files, in the user's cache directory. Each version, measure and iteration of a
rank has its own objects. An object is named after its records, so that two processes that measure the same records
write the same object. A record is identified by its fields and its checksum. A damaged object is measured again. Errors
of the cache cost time but never change an answer.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from ranktape._version import __version__
from ranktape.errors import ObjectTooLargeError, StorageError
from ranktape.storage.format import layout
from ranktape.storage.format.arrays import blob_document
from ranktape.storage.places.backend import Backend
from ranktape.storage.places.urls import open_backend
from ranktape.storage.query.columns import Column, StringColumn
from ranktape.storage.records.record import RecordOrigin

VERSION = f"{__version__}_4"
"""Version of the format of objects and of the keys of records. A measure has its own version in its name."""

SIBLING_SUFFIX = ".analysis"
"""Suffix of the directory beside a run that cannot be written."""

FOLDER_VARIABLE = "RANKTAPE_CACHE_DIR"
"""The environment variable that names a directory to use instead of the user's cache directory."""

MAX_OBJECT_NBYTES = 256 << 20
"""Maximum size of an object that is read, in bytes."""

Payload = dict[str, NDArray[Any]]
"""The measurements of one record, as named arrays."""

Keys = NDArray[np.uint64]
"""Keys of records, of shape (records, 2)."""

_SUFFIX = ".counts"
_NAME = re.compile(r"[0-9a-f]{32}\.counts")
_NUM_THREADS = 8
"""Number of prefixes that are listed concurrently."""

_MAX_LISTS = 16
"""Maximum number of ranks that are listed one by one. With more, the whole attempt is listed."""

_MAX_NAME_LENGTH = 120
_MAGIC = b"rtcolum1"
_HEAD = struct.Struct("<8sII")
"""Magic, CRC-32C of all bytes after it, size of the index in bytes."""

_CHECKSUM_START = 12
_ZSTD_LEVEL = 1
"""The level of Zstandard. Higher levels take much longer and gain little."""


class DamagedObjectError(Exception):
    """An object was not written by `pack`."""


class Columns:
    """Measurements of several records: named arrays, in each of which a record has a number of rows.

    An array may be given as a function, which is called when the array is first used.
    """

    def __init__(
        self,
        arrays: Mapping[str, NDArray[Any] | Callable[[], NDArray[Any]]],
        *,
        sizes: Mapping[str, NDArray[np.int64]] | None = None,
        num_records: int,
    ) -> None:
        """Take the arrays, and the rows of each record for arrays in which records do not have one row each."""
        self._arrays = dict(arrays)
        self._sizes = dict(sizes or {})
        self.num_records = num_records

    @classmethod
    def of_payloads(cls, payloads: Sequence[Payload]) -> Columns:
        """The columns of records that were measured one by one. A record has no row in an array that it lacks."""
        names = dict.fromkeys(name for payload in payloads for name in payload)
        arrays, sizes = {}, {}
        for name in names:
            parts = [np.atleast_1d(payload[name]) for payload in payloads if name in payload]
            arrays[name] = np.concatenate(parts)
            counts = (np.atleast_1d(payload[name]).shape[0] if name in payload else 0 for payload in payloads)
            sizes[name] = np.fromiter(counts, dtype=np.int64, count=len(payloads))
        return cls(arrays, sizes=sizes, num_records=len(payloads))

    @property
    def names(self) -> list[str]:
        """The names of the arrays."""
        return list(self._arrays)

    @property
    def sized(self) -> list[str]:
        """The names of the arrays in which records do not have one row each."""
        return list(self._sizes)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """An array with the rows of all records, in the order of the records."""
        array = self._arrays[name]
        if not isinstance(array, np.ndarray):
            array = self._arrays[name] = array()
        return array

    def sizes(self, name: str) -> NDArray[np.int64]:
        """Number of rows of each record in an array."""
        return self._sizes[name] if name in self._sizes else np.ones(self.num_records, dtype=np.int64)

    def payloads(self) -> Iterable[Payload]:
        """The arrays of each record, in order."""
        ends = {name: np.cumsum(self.sizes(name)).tolist() for name in self._arrays}
        for record in range(self.num_records):
            payload = {}
            for name, stops in ends.items():
                payload[name] = self[name][stops[record - 1] if record else 0 : stops[record]]
                payload[name].flags.writeable = False
            yield payload

    def with_columns(self, arrays: Mapping[str, NDArray[Any]]) -> Columns:
        """These columns and further arrays in which each record has one row."""
        return Columns({**self._arrays, **arrays}, sizes=self._sizes, num_records=self.num_records)

    def take(self, indices: NDArray[np.int64]) -> Columns:
        """The columns of the records at these indices; `self` if they are all records in their order."""
        if np.array_equal(indices, np.arange(self.num_records)):
            return self
        arrays = {name: partial(self._rows, name, indices) for name in self._arrays}
        sizes = {name: counts[indices] for name, counts in self._sizes.items()}
        return Columns(arrays, sizes=sizes, num_records=len(indices))

    def _rows(self, name: str, indices: NDArray[np.int64]) -> NDArray[Any]:
        counts = self._sizes.get(name)
        if counts is None:
            return self[name][indices]
        starts, sizes = np.cumsum(counts) - counts, counts[indices]
        firsts = np.repeat(starts[indices] - np.cumsum(sizes) + sizes, sizes)
        return self[name][firsts + np.arange(int(sizes.sum()))]

    @staticmethod
    def join(parts: Sequence[Columns]) -> Columns:
        """The columns of the records of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        names = dict.fromkeys(name for part in parts for name in part.names)
        sized = {name for part in parts for name in part.sized}
        # A record has no row in an array that its part lacks.
        absent = {name for name in names if any(name not in part.names for part in parts)}

        def joined(name: str) -> NDArray[Any]:
            return np.concatenate([part[name] for part in parts if name in part.names])

        def part_sizes(part: Columns, name: str) -> NDArray[np.int64]:
            return part.sizes(name) if name in part.names else np.zeros(part.num_records, dtype=np.int64)

        return Columns(
            {name: partial(joined, name) for name in names},
            sizes={name: np.concatenate([part_sizes(part, name) for part in parts]) for name in sized | absent},
            num_records=sum(part.num_records for part in parts),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = {name: self[name] for name in self._arrays}
        return partial(Columns, sizes=self._sizes, num_records=self.num_records), (arrays,)


def pack(keys: Keys, columns: Columns) -> bytes:
    """The bytes of an object with the columns of the records with these keys."""
    from numcodecs import zstd

    named = {f"array/{name}": columns[name] for name in columns.names}
    named |= {f"sizes/{name}": columns.sizes(name) for name in columns.sized}
    entries, packed = [], []
    for name, array in {"keys": keys, **named}.items():
        stored = np.ascontiguousarray(array)
        packed.append(zstd.compress(stored.view(np.uint8).reshape(-1), _ZSTD_LEVEL) if stored.size else b"")
        entries.append([name, stored.dtype.str, list(stored.shape), len(packed[-1])])
    index = json.dumps(entries, separators=(",", ":")).encode()
    body = struct.pack("<I", len(index)) + index + b"".join(packed)
    return b"".join((_MAGIC, struct.pack("<I", google_crc32c.value(body)), body))


class CacheObject:
    """The keys of the records in an object, and their columns, each of which is decompressed when it is first used."""

    def __init__(self, data: bytes) -> None:
        """Read the index.

        Raises:
            DamagedObjectError: the object was not written by `pack`.
        """
        if len(data) < _HEAD.size or data[: len(_MAGIC)] != _MAGIC:
            raise DamagedObjectError("it is not an object of columns")
        _, crc, index_nbytes = _HEAD.unpack_from(data)
        if google_crc32c.value(memoryview(data)[_CHECKSUM_START:].tobytes()) != crc:
            raise DamagedObjectError("its checksum differs")
        start = _HEAD.size + index_nbytes
        arrays: dict[str, partial[NDArray[Any]]] = {}
        for name, dtype, shape, nbytes in json.loads(data[_HEAD.size : start]):
            arrays[name] = partial(_decompress, memoryview(data)[start : start + nbytes], dtype, tuple(shape))
            start += nbytes
        self.keys: Keys = arrays.pop("keys")()
        sizes = {name.removeprefix("sizes/"): load() for name, load in arrays.items() if name.startswith("sizes/")}
        columns = {name.removeprefix("array/"): load for name, load in arrays.items() if name.startswith("array/")}
        self.columns = Columns(columns, sizes=sizes, num_records=len(self.keys))

    def index_of(self, keys: Keys) -> NDArray[np.int64]:
        """The index of each key in the object, or -1 if it is not there."""
        if np.array_equal(keys, self.keys):
            return np.arange(len(keys))
        if not len(self.keys):
            return np.full(len(keys), -1)
        order = np.argsort(self.keys[:, 0])
        indices = order[np.minimum(np.searchsorted(self.keys[order, 0], keys[:, 0]), len(order) - 1)]
        return np.where((self.keys[indices] == keys).all(axis=1), indices, -1)


def _decompress(data: memoryview, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    from numcodecs import zstd

    array = np.empty(math.prod(shape), dtype=dtype)
    if array.size:
        zstd.decompress(data, array.view(np.uint8))
    return array.reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStore:
    """A store that may contain objects of the cache. It can be pickled."""

    backend: Backend
    """The store."""
    prefix: str
    """Prefix of all keys; empty if the store contains nothing else."""

    def prepare(self) -> None:
        """Check that the store can be written, and make plain Zarr ignore the objects."""
        key = layout.document_key(self.prefix)
        document = blob_document(b"", attributes={"holds": "what analysis has counted; it can be deleted"})
        self.backend.put(key, [json.dumps(document).encode()])

    def key(self, *names: str) -> str:
        """The key of an object, or a prefix of keys."""
        return "/".join(filter(None, (self.prefix, *names)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheWriter:
    """The location for the objects of one measure and group. It can be pickled."""

    store: CacheStore
    """A store that can be written."""
    path: str
    """Prefix of the objects."""
    damaged: tuple[str, ...] = ()
    """Keys of the objects there that cannot be read."""

    def put(self, keys: Keys, columns: Columns) -> None:
        """Write one object atomically and remove the damaged ones."""
        name = hashlib.blake2b(keys.tobytes(), digest_size=16).hexdigest()
        key = f"{self.path}/{name}{_SUFFIX}"
        self.store.backend.put(key, [pack(keys, columns)])
        if damaged := [stale for stale in self.damaged if stale != key]:
            self.store.backend.delete_keys(damaged)


class Cache:
    """The cached objects of one measure for a run, or for a folder of files."""

    def __init__(self, reader: RecordOrigin, *, name: str, groups: Iterable[str], warn: Callable[[str], None]) -> None:
        """List the objects.

        Args:
            reader: The origin of the records.
            name: The name of the measure, with its version and every parameter.
            groups: The paths of the groups that are looked up later.
            warn: Called with one line if the cache cannot be read or written.
        """
        self._warn = warn
        self._measure = f"{VERSION}/{_path_name(name)}"
        self._stores = list(_stores(reader))
        self._target: CacheStore | None = None
        self._has_tried = False
        paths = sorted(set(groups))
        self._listed = [(store, self._list(store, paths)) for store in self._stores]

    def find(self, group: str) -> tuple[Sequence[CacheObject], Sequence[str]]:
        """The objects of a group, and the keys of those that are damaged, if they can be replaced."""
        objects, damaged = [], []
        for store, listed in self._listed:
            for key in listed.get(group, ()):
                content = self._open(store, key)
                if content is not None:
                    objects.append(content)
                elif store is self._stores[0]:
                    damaged.append(key)
        return objects, damaged

    def writer(self, group: str, *, damaged: Sequence[str]) -> CacheWriter | None:
        """The location for the objects of a group. None, with one warning, if no store can be written."""
        target = self._writable()
        if target is None:
            return None
        replaced = tuple(damaged) if target is self._stores[0] else ()
        return CacheWriter(store=target, path=target.key(self._measure, group), damaged=replaced)

    def write(self, group: str, keys: Keys, columns: Columns) -> None:
        """Write one object of a group. If that fails, warn once and write nothing more."""
        writer = self.writer(group, damaged=())
        if writer is not None:
            try:
                writer.put(keys, columns)
            except StorageError as error:
                self.stop_writing(str(error))

    def stop_writing(self, reason: str) -> None:
        """Write nothing more, because an object could not be written."""
        if self._target is not None:
            self._target = None
            self._warn(f"new measurements are not cached: {reason}")

    def _writable(self) -> CacheStore | None:
        if not self._has_tried:
            self._has_tried = True
            reason = "no directory for the cache was found"
            for store in self._stores:
                try:
                    store.prepare()
                except StorageError as error:
                    reason = str(error)
                    continue
                self._target = store
                return store
            self._warn(f"new measurements are not cached: {reason}")
        return self._target

    def _list(self, store: CacheStore, groups: Sequence[str]) -> Mapping[str, list[str]]:
        """The keys of the objects of each group, from one LIST per rank, or one per attempt if there are many ranks."""
        parents = sorted({group.rpartition("/")[0] for group in groups})
        if len(parents) > _MAX_LISTS:
            parents = sorted({parent.rpartition("/")[0] for parent in parents})
        prefixes = [store.key(self._measure, parent) for parent in parents]
        listed: dict[str, list[str]] = {}
        try:
            with ThreadPoolExecutor(_NUM_THREADS) as pool:
                for parent, prefix, keys in zip(
                    parents, prefixes, pool.map(store.backend.list_keys, prefixes), strict=True
                ):
                    for key in keys:
                        path, _, name = key.rpartition("/")
                        if _NAME.fullmatch(name):
                            listed.setdefault("/".join(filter(None, (parent, path))), []).append(f"{prefix}/{key}")
        except StorageError as error:
            self._warn(f"cached measurements cannot be listed: {error}")
        return listed

    def _open(self, store: CacheStore, key: str) -> CacheObject | None:
        try:
            data = store.backend.get(key, max_nbytes=MAX_OBJECT_NBYTES)
            return None if data is None else CacheObject(data)
        except (DamagedObjectError, ObjectTooLargeError):
            return None
        except StorageError as error:
            self._warn(f"cached measurements cannot be read: {error}")
            return None


_FACTORS = (0x9E37_79B9_7F4A_7C15, 0xC2B2_AE3D_27D4_EB4F)
"""Odd numbers that mix the bits of both halves of a key."""


def record_keys(columns: Sequence[Column | Sequence[Any]]) -> Keys:
    """The key of each record, from the columns that identify it."""
    keys: Keys | None = None
    for column in columns:
        hashes = _hashes(column)
        keys = np.zeros_like(hashes) if keys is None else keys
        keys = (keys ^ hashes) * np.array(_FACTORS, dtype=np.uint64)
        keys ^= keys >> np.uint64(29)
    return np.zeros((0, 2), dtype=np.uint64) if keys is None else keys


def _hashes(column: Column | Sequence[Any]) -> Keys:
    """Two numbers for each value of a column: hashes of a text, or the bits of a number."""
    if isinstance(column, np.ndarray) and column.dtype.kind in "iuf":
        wide = column.astype(np.float64).view(np.uint64) if column.dtype.kind == "f" else column.astype(np.uint64)
        return np.stack([wide, wide], axis=1)
    if isinstance(column, StringColumn):
        used, indices = np.unique(column.codes, return_inverse=True)
        texts = [str(column.table[code]) for code in used.tolist()]
    else:
        numbers = {text: number for number, text in enumerate(dict.fromkeys(map(str, column)))}
        texts, indices = list(numbers), np.array([numbers[str(value)] for value in column], dtype=np.int64)
    digests = b"".join(
        hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).digest() for text in texts
    )
    return np.frombuffer(digests, dtype="<u8").reshape(-1, 2)[indices]


def text_digest(text: str) -> str:
    """A hash of a text as 32 hexadecimal digits."""
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def _path_name(name: str) -> str:
    """The name of a measure in the form that is used in keys."""
    quoted = quote(name, safe="=,+")
    return quoted if len(quoted) <= _MAX_NAME_LENGTH else f"{quoted[: _MAX_NAME_LENGTH - 33]}-{text_digest(name)}"


def _stores(reader: RecordOrigin) -> Iterable[CacheStore]:
    """The locations of the cache, in order of preference."""
    backend = getattr(reader, "backend", None)
    if backend is not None:
        yield CacheStore(backend=backend, prefix=layout.ANALYSIS)
        if "://" not in backend.url:
            yield CacheStore(backend=open_backend(f"{backend.url.rstrip('/')}{SIBLING_SUFFIX}"), prefix="")
    folder = _user_folder()
    if folder is not None:
        source = reader.url if "://" in reader.url else os.path.realpath(reader.url)
        yield CacheStore(backend=open_backend(folder / text_digest(source)), prefix="")


def _user_folder() -> Path | None:
    """The directory for caches of this user; None if there is none."""
    if configured := os.environ.get(FOLDER_VARIABLE, ""):
        return Path(configured)
    xdg_cache = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG specification ignores a relative path.
        return (Path(xdg_cache) if xdg_cache.startswith("/") else Path.home() / ".cache") / "ranktape"
    except RuntimeError:  # there is no home directory
        return None
