"""Keeps a run in any file system that fsspec knows.

Objects are the file system's files: as atomic as it makes them. Reads never trust a cached listing, and every
request ends by the caller's deadline where the file system can be waited for with one (those with an event loop can).
A process that was forked gets a file system of its own: connections do not survive a fork.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.core import url_to_fs

from ranktape.errors import UsageError
from ranktape.storage.places.backend import (
    Backend,
    ObjectInfo,
    byte_view,
    range_within,
    refuse_escape,
    seconds_left,
    too_large,
    without_credentials,
)
from ranktape.storage.places.failures import Redactor, StoreFailures

if TYPE_CHECKING:
    from ranktape.storage.places.backend import Buffer

Result = TypeVar("Result")


class RemoteBackend(Backend):
    """A run behind a URL; the `Backend` over fsspec."""

    def __init__(self, url: str, *, storage_options: Mapping[str, Any]) -> None:
        self.url = without_credentials(url)
        self.is_shared = "memory" not in url.partition("://")[0].split("::")
        self._address = url
        self._options = dict(storage_options)
        redact = Redactor(url, storage_options)
        self._failures = StoreFailures(self.url, redact=redact)
        failure = self._open()
        if isinstance(failure, OSError):
            raise self._failures.translated(failure, verb="open", key="")
        if failure is not None:
            known = ", ".join(sorted({"s3", "gs", "az", "memory"} & set(fsspec.available_protocols())))
            raise UsageError(
                f"{self.url} cannot be opened: {redact(str(failure))}: give a directory, or a URL of a protocol that "
                f"is installed (such as {known}), and storage options that it takes"
            )

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """Write an object of the joined parts."""
        data = b"".join(byte_view(part) for part in parts)
        self._call("write", key, lambda: self._run("pipe_file", self._path(key), data))

    def create(self, key: str, data: bytes) -> bool:
        """Write an object if there is none; False if there was one."""

        def work() -> bool:
            try:
                self._run("pipe_file", self._path(key), data, mode="create")
            except FileExistsError:
                return False
            return True

        return self._call("write", key, work)

    def get(self, key: str, *, max_nbytes: int | None = None) -> bytes | None:
        """The bytes of an object; None where there is none."""

        def work() -> bytes | None:
            if max_nbytes is not None:
                size = self._size(key)
                if size is not None and size > max_nbytes:
                    raise too_large(f"{self.url}/{key}", max_nbytes)
            return bytes(self._run("cat_file", self._path(key)))

        return self._call("read", key, lambda: _none_if_missing(work))

    def get_range(self, key: str, start: int, nbytes: int) -> bytes | None:
        """Some bytes of an object, clipped to what it has; None where there is none."""

        def work() -> bytes | None:
            size = self._size(key)
            if size is None:
                return None
            begin, stop = range_within(size, start, nbytes)
            return bytes(self._run("cat_file", self._path(key), start=begin, end=stop)) if begin < stop else b""

        return self._call("read", key, lambda: _none_if_missing(work))

    def size(self, key: str) -> int | None:
        """The bytes that an object has; None where there is none."""
        return self._call("read", key, lambda: self._size(key))

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        """All objects below a prefix with size and time, sorted by key."""
        top = self._path(prefix)

        def work() -> list[ObjectInfo]:
            self._file_system().invalidate_cache()
            found: dict[str, dict[str, Any]] = self._run("find", top, detail=True)
            below = {str(path)[len(top) + 1 :]: info for path, info in found.items() if len(str(path)) > len(top)}
            return [
                ObjectInfo(key=key, nbytes=int(info.get("size") or 0), modified=_modified(info))
                for key, info in sorted(below.items())
            ]

        return self._call("list", prefix, lambda: _none_if_missing(work)) or []

    def list_names(self, prefix: str) -> list[str]:
        """The first segments of all keys below a prefix, sorted."""
        top = self._path(prefix)

        def work() -> list[str]:
            self._file_system().invalidate_cache()
            paths = [str(path).rstrip("/") for path in self._run("ls", top, detail=False)]
            return sorted({path[len(top) + 1 :] for path in paths if len(path) > len(top)})

        return self._call("list", prefix, lambda: _none_if_missing(work)) or []

    def delete(self, prefix: str) -> None:
        """Remove every object below a prefix."""
        self._call(
            "delete",
            prefix,
            lambda: _none_if_missing(lambda: self._run("rm", self._path(prefix), recursive=True)),
        )

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Remove many objects."""
        for key in keys:
            remove = partial(self._run, "rm_file", self._path(key))
            self._call("delete", key, partial(_none_if_missing, remove))

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self._address, "storage_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"], storage_options=state["storage_options"])  # type: ignore[misc]

    def _path(self, key: str) -> str:
        refuse_escape(self.url, key)
        return f"{self._root}/{key}".rstrip("/")

    def _size(self, key: str) -> int | None:
        self._file_system().invalidate_cache()
        info = _none_if_missing(lambda: self._run("info", self._path(key)))
        return int(info["size"]) if info is not None and info["type"] == "file" else None

    def _call(self, verb: str, key: str, work: Callable[[], Result]) -> Result:
        return self._failures.call(verb, key, work)

    def _run(self, method: str, *arguments: Any, **options: Any) -> Any:
        """What a method of the file system returns, waited for no longer than the caller's deadline."""
        file_system = self._file_system()
        if isinstance(file_system, AsyncFileSystem):
            coroutine = getattr(file_system, f"_{method}")
            return sync(file_system.loop, coroutine, *arguments, timeout=seconds_left(), **options)
        return getattr(file_system, method)(*arguments, **options)

    def _file_system(self) -> Any:
        if os.getpid() != self._pid:
            failure = self._open()
            if failure is not None:
                raise failure
        return self._fs

    def _open(self) -> Exception | None:
        """Make the file system; why it cannot be made, if so."""
        try:
            self._fs, root = url_to_fs(self._address, **self._options)
        except Exception as error:  # noqa: BLE001  # what a file system's constructor raises is its own affair
            return error
        self._root = root.rstrip("/")
        self._pid = os.getpid()
        return None


def _none_if_missing(work: Callable[[], Result]) -> Result | None:
    try:
        return work()
    except FileNotFoundError:
        return None


def _modified(info: Mapping[str, Any]) -> float:
    for name in ("LastModified", "mtime", "last_modified", "updated", "created", "timeModified"):
        value = info.get(name)
        if isinstance(value, dt.datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0
