"""Keeps a run in any file system that fsspec knows.

Objects are the file system's files: as atomic as it makes them. Reads never trust a cached listing, and every
request ends by the caller's deadline where the file system can be waited for with one (those with an event loop can).
A process that was forked gets a file system of its own: connections do not survive a fork.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.core import url_to_fs

from ranktape.errors import UsageError
from ranktape.storage.places.backend import range_within, seconds_left
from ranktape.storage.places.failures import store_error
from ranktape.storage.places.store import StoreBackend


class RemoteBackend(StoreBackend):
    """A run behind a URL; the `Backend` over fsspec."""

    def __init__(self, url: str, *, storage_options: Mapping[str, Any]) -> None:
        super().__init__(url, secrets=storage_options)
        self.is_shared = "memory" not in url.partition("://")[0].split("::")
        self._address = url
        self._options = dict(storage_options)
        failure = self._open()
        if isinstance(failure, OSError):
            raise store_error(failure, verb="open", place=self.url, redact=self._redact)
        if failure is not None:
            known = ", ".join(sorted({"s3", "gs", "az", "memory"} & set(fsspec.available_protocols())))
            raise UsageError(
                f"{self.url} cannot be opened: {self._redact(str(failure))}: give a directory, or a "
                f"URL of a protocol that is installed (such as {known}), and storage options that it takes"
            )

    def delete(self, prefix: str) -> None:
        """Remove every object below a prefix."""
        self._call("delete", prefix, lambda: self._remove("rm", self._path(prefix), recursive=True))

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self._address, "storage_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"], storage_options=state["storage_options"])  # type: ignore[misc]

    def _put(self, path: str, views: list[memoryview]) -> None:
        self._run("pipe_file", path, b"".join(views))

    def _create(self, path: str, data: bytes) -> bool:
        try:
            self._run("pipe_file", path, data, mode="create")
        except FileExistsError:
            return False
        return True

    def _get(self, path: str, check: Callable[[int], None]) -> bytes:
        check(self._size(path) or 0)
        return bytes(self._run("cat_file", path))

    def _get_range(self, path: str, start: int, nbytes: int) -> bytes:
        size = self._size(path)
        if size is None:
            raise FileNotFoundError(path)
        begin, stop = range_within(size, start, nbytes)
        return bytes(self._run("cat_file", path, start=begin, end=stop)) if begin < stop else b""

    def _size(self, path: str) -> int | None:
        self._file_system().invalidate_cache()
        try:
            info = self._run("info", path)
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def _list(self, path: str) -> Iterator[tuple[str, int, float]]:
        self._file_system().invalidate_cache()
        for name, info in self._run("find", path, detail=True).items():
            yield str(name), int(info.get("size") or 0), _modified(info)

    def _list_level(self, path: str) -> list[str]:
        self._file_system().invalidate_cache()
        return [str(name) for name in self._run("ls", path, detail=False)]

    def _delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            self._remove("rm_file", path)

    def _remove(self, method: str, path: str, **options: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._run(method, path, **options)

    def _run(self, method: str, *arguments: Any, **options: Any) -> Any:
        """What a method of the file system returns, waited for no longer than the caller's deadline."""
        file_system = self._file_system()
        if isinstance(file_system, AsyncFileSystem):
            coroutine = getattr(file_system, f"_{method}")
            return sync(file_system.loop, coroutine, *arguments, timeout=seconds_left(), **options)
        return getattr(file_system, method)(*arguments, **options)

    def _file_system(self) -> Any:
        if os.getpid() != self._pid and (failure := self._open()) is not None:
            raise failure
        return self._fs

    def _open(self) -> Exception | None:
        """Make the file system; why it cannot be made, if so."""
        try:
            self._fs, root = url_to_fs(self._address, **self._options)
        except Exception as error:  # noqa: BLE001  # what a file system's constructor raises is its own affair
            return error
        self._set_root(root.rstrip("/") + "/")
        self._pid = os.getpid()
        return None

    def _set_root(self, root: str) -> None:
        self._root = root


def _modified(info: Mapping[str, Any]) -> float:
    for name in ("LastModified", "mtime", "last_modified", "updated", "created", "timeModified"):
        value = info.get(name)
        if isinstance(value, dt.datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0
