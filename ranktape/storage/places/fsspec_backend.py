"""Keeps a run in any file system that fsspec knows, and in S3 through the client of s3fs.

In a file system objects are its files: as atomic as it makes them. Reads never trust a cached listing, and every
request ends by the caller's deadline where the file system can be waited for with one (those with an event loop can).
A process that was forked gets a file system of its own: connections do not survive a fork.

In S3 the requests are S3's own, through the client that s3fs sets up from the storage options, the
environment and the usual files: one request per verb, no HEAD before a GET, and a server's answer is seen as it is.
A PUT is atomic; it is conditional (`If-None-Match: *`) where an object must not be replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import datetime as dt
import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.core import url_to_fs

from ranktape.errors import UsageError
from ranktape.storage.places.backend import Backend, ObjectInfo, RangeFile, answered, range_within, seconds_left
from ranktape.storage.places.failures import answer_of, store_error
from ranktape.storage.places.store import PART_NBYTES, PARTS_AT_ONCE, StoreBackend


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


_JOINED_NBYTES = 2**20
"""Up to this an object is sent as one piece of memory; of a larger one neither we nor the client hold a copy."""

_DELETE_AT_ONCE = 1000
"""Keys in one request: S3's limit."""

_CONFIG: dict[str, Any] = {
    # Of silence, not of the whole request: that has the caller's deadline.
    "connect_timeout": 5,
    "read_timeout": 15,
    "max_pool_connections": 64,
    # Every object of ours carries a CRC-32C inside, so a second sum over the body is spent CPU; and servers that are
    # not AWS answer ranges with sums of the whole.
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    # One who retries is enough: `retry.py`.
    "retries": {"mode": "standard", "total_max_attempts": 1},
}

_HTTP_PRECONDITION_FAILED = 412

_open_clients: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _keep_inherited() -> None:
    """In a forked process: never let go of the parent's clients, not even at its end.

    The kernel's list of what an event loop waits for is shared with the parent. Closing a connection here would take
    it off that list, and the parent would wait for an answer that it is not told of.
    """
    for client in list(_open_clients.values()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


os.register_at_fork(after_in_child=_keep_inherited)


class S3Backend(RemoteBackend):
    """A run in a bucket; the `Backend` over S3."""

    def __init__(self, url: str, *, storage_options: Mapping[str, Any]) -> None:
        config = {**_CONFIG, **(storage_options.get("config_kwargs") or {})}
        options = {"use_listings_cache": False, "skip_instance_cache": True, **storage_options, "config_kwargs": config}
        super().__init__(url, storage_options=options)

    delete = Backend.delete

    def list_debris(self) -> list[ObjectInfo]:
        """Multipart uploads that were begun and neither completed nor given up."""
        found = self._call("list", "", lambda: list(self._uploads()))
        return sorted(found, key=lambda one: one.key)

    def remove_debris(self, debris: Sequence[ObjectInfo]) -> None:
        """Give up multipart uploads."""
        for one in debris:
            self._call("delete", one.key.rpartition("?")[0], partial(self._give_up, one.key))

    def _open(self) -> Exception | None:
        failure = super()._open()
        if failure is None:
            self._fs.retries = 1  # as _CONFIG: it is an instance of our own
            _open_clients[id(self._fs)] = self._fs
        return failure

    def _set_root(self, root: str) -> None:
        # From what is given alone: several threads of a forked process may do it at once.
        self._bucket, _, self._root = root.partition("/")

    def _put(self, path: str, views: list[memoryview]) -> None:
        nbytes = sum(view.nbytes for view in views)
        if nbytes > 2 * PART_NBYTES:
            sync(self._file_system().loop, self._put_parts, path, views, nbytes, timeout=seconds_left())
        else:
            body = b"".join(views) if nbytes <= _JOINED_NBYTES else _joined(views, 0, nbytes)
            self._ask("put_object", Key=path, Body=body)

    def _create(self, path: str, data: bytes) -> bool:
        try:
            self._ask("put_object", Key=path, Body=data, IfNoneMatch="*")
        except Exception as error:
            if answer_of(error)[0] != _HTTP_PRECONDITION_FAILED:
                raise
            return False
        return True

    def _get(self, path: str, check: Callable[[int], None]) -> bytes:
        return self._read(path, check)[0]

    def _get_range(self, path: str, start: int, nbytes: int) -> bytes:
        wanted = f"bytes={start}" if start < 0 else f"bytes={start}-{start + nbytes - 1}"
        data, is_whole = self._read(path, None, Range=wanted)
        return data[start:][:nbytes] if is_whole else data[:nbytes]

    def _size(self, path: str) -> int:
        return int(self._ask("head_object", Key=path)["ContentLength"])

    def _list(self, path: str) -> Iterator[tuple[str, int, float]]:
        for page in self._pages(path):
            for item in page.get("Contents", []):
                yield item["Key"], int(item["Size"]), item["LastModified"].timestamp()

    def _list_level(self, path: str) -> list[str]:
        pages = self._pages(path, Delimiter="/")
        return [
            item.get("Prefix") or item["Key"]
            for page in pages
            for item in (*page.get("CommonPrefixes", []), *page.get("Contents", []))
        ]

    def _delete(self, paths: Sequence[str]) -> None:
        for first in range(0, len(paths), _DELETE_AT_ONCE):
            objects = [{"Key": path} for path in paths[first : first + _DELETE_AT_ONCE]]
            answer = self._ask("delete_objects", Delete={"Objects": objects, "Quiet": True})
            for error in answer.get("Errors", []):
                if error.get("Code") != "NoSuchKey":
                    raise PartlyDeletedError(error)
            answered()

    def _uploads(self) -> Iterator[ObjectInfo]:
        markers: dict[str, str] = {}
        while True:
            page = self._ask("list_multipart_uploads", Prefix=self._root, **markers)
            answered()
            for item in page.get("Uploads", []):
                name = f"{item['Key'][len(self._root) :]}?{item['UploadId']}"
                yield ObjectInfo(key=name, nbytes=0, modified=item["Initiated"].timestamp())
            if not page.get("IsTruncated"):
                return
            markers = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _give_up(self, name: str) -> None:
        key, _, upload = name.rpartition("?")
        try:
            self._ask("abort_multipart_upload", Key=self._path(key), UploadId=upload)
            answered()
        except Exception as error:
            if answer_of(error)[1] != "NoSuchUpload":
                raise

    def _pages(self, path: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        token: dict[str, str] = {}
        while True:
            page = self._ask("list_objects_v2", Prefix=f"{path}/" if path else "", **arguments, **token)
            answered()
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def _ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one request, which ends by the caller's deadline."""
        loop = self._file_system().loop
        answer: dict[str, Any] = sync(loop, self._request, method, timeout=seconds_left(), **arguments)
        return answer

    def _read(self, path: str, check: Callable[[int], None] | None, **arguments: Any) -> tuple[bytes, bool]:
        """The bytes of an object, and whether they are the whole of it."""

        async def read() -> tuple[bytes, bool]:
            answer = await self._request("get_object", Key=path, **arguments)
            async with answer["Body"] as body:
                if check is not None:
                    check(answer["ContentLength"])
                return await body.read(), "ContentRange" not in answer

        result: tuple[bytes, bool] = sync(self._file_system().loop, read, timeout=seconds_left())
        return result

    async def _request(self, method: str, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await self._fs._call_s3(method, Bucket=self._bucket, **arguments)  # noqa: SLF001  # its public form blocks the loop
        return answer

    async def _put_parts(self, key: str, views: list[memoryview], nbytes: int) -> None:
        upload = (await self._request("create_multipart_upload", Key=key))["UploadId"]
        gate = asyncio.Semaphore(PARTS_AT_ONCE)

        async def send(number: int) -> dict[str, Any]:
            async with gate:
                part = _joined(views, (number - 1) * PART_NBYTES, min(number * PART_NBYTES, nbytes))
                answer = await self._request("upload_part", Key=key, UploadId=upload, PartNumber=number, Body=part)
                return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(send(number)) for number in range(1, -(-nbytes // PART_NBYTES) + 1)]
            parts = {"Parts": [task.result() for task in tasks]}
            await self._request("complete_multipart_upload", Key=key, UploadId=upload, MultipartUpload=parts)
        except BaseException as error:
            # Its parts would be paid for until somebody looks; where this fails too, `repair` finds them.
            with contextlib.suppress(Exception):
                await asyncio.shield(self._request("abort_multipart_upload", Key=key, UploadId=upload))
            if isinstance(error, ExceptionGroup):
                # What the first part that failed was answered, which is its cause, says whether to try again.
                raise error.exceptions[0] from error.exceptions[0].__cause__
            raise


class PartlyDeletedError(Exception):
    """A request that removes many objects was answered, but not for all of them."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(f"{error.get('Key')}: {error.get('Message') or error.get('Code')}")
        self.response = {"Error": {"Code": error.get("Code", "")}}


def _joined(views: list[memoryview], start: int, stop: int) -> RangeFile:
    """The bytes from `start` to `stop` of joined parts as a file, which a client reads in pieces while it sends."""
    ends = list(accumulate(view.nbytes for view in views))

    def fill(position: int, target: memoryview) -> int:
        at = start + position
        done = 0
        while done < len(target):
            index = bisect_right(ends, at + done)
            view = views[index]
            first = view.nbytes - (ends[index] - at - done)
            piece = view[first : first + len(target) - done]
            target[done : done + len(piece)] = piece
            done += len(piece)
        return done

    return RangeFile(stop - start, fill)
