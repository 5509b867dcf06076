"""Stores in any file system of fsspec, and in S3 through s3fs.

In a file system, objects are files, and writes are as atomic as the file system makes them. Reads do not use cached
listings. If the file system has an event loop, every request ends by the caller's deadline.

In S3, `call_s3` of s3fs sends each request: one request for each method, without a HEAD before a GET. s3fs takes
credentials from the storage options, the environment and AWS's files. A PUT is atomic, and conditional
(`If-None-Match: *`) if an object must not be replaced. Bodies are sent from the memory of the caller.

A forked process gets its own file system, because connections do not survive a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.core import url_to_fs

from ranktape.errors import StorageError, UsageError
from ranktape.storage.places.backend import (
    Backend,
    Buffer,
    MemoryBudget,
    ObjectInfo,
    RangeFile,
    answered,
    byte_view,
    range_within,
    refuse_escape,
    seconds_left,
    too_large,
    without_credentials,
)
from ranktape.storage.places.failures import Redactor, answer_of, chain, store_error

Result = TypeVar("Result")

_HTTP_RANGE_NOT_SATISFIABLE = 416

_NO_OBJECT = {"", "NoSuchKey", "BlobNotFound"}
"""The error codes for an object that does not exist. Any other, such as a missing bucket, is a failure."""


class RemoteBackend(Backend):
    """The `Backend` over a file system of fsspec.

    Methods with an underscore send requests with absolute paths and raise the errors of the client, such as
    `FileNotFoundError` for an object that does not exist.
    """

    def __init__(self, url: str, *, storage_options: Mapping[str, Any]) -> None:
        self.url = without_credentials(url)
        self.is_shared = "memory" not in url.partition("://")[0].split("::")
        self._redact = Redactor(url, storage_options)
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

    def put(self, key: str, parts: Iterable[Buffer]) -> None:
        """Write an object from parts."""
        views = [view for view in (byte_view(part) for part in parts) if view.nbytes]
        try:
            self._call("write", key, lambda: self._put(self._path(key), views))
        finally:
            # A request that timed out must not send what is later written to this memory.
            views.clear()

    def create(self, key: str, data: bytes) -> bool:
        """Write an object if it does not exist; False if it exists."""
        return self._call("write", key, lambda: self._create(self._path(key), data))

    def get(self, key: str, *, max_nbytes: int | None = None) -> bytes | None:
        """The bytes of an object; None if it does not exist."""

        def check(nbytes: int) -> None:
            if max_nbytes is not None and nbytes > max_nbytes:
                raise too_large(f"{self.url}/{key}", max_nbytes)

        return self._call("read", key, lambda: _found(lambda: self._get(self._path(key), check)))

    def get_range(self, key: str, start: int, nbytes: int) -> bytes | None:
        """Some bytes of an object, clipped to its size; None if it does not exist."""
        if nbytes <= 0:
            return b"" if self.exists(key) else None

        def work() -> bytes:
            try:
                return self._get_range(self._path(key), start, nbytes)
            except Exception as error:
                if answer_of(error)[0] != _HTTP_RANGE_NOT_SATISFIABLE:
                    raise
                return b""

        return self._call("read", key, lambda: _found(work))

    def size(self, key: str) -> int | None:
        """The size of an object, in bytes; None if it does not exist."""

        def work() -> int | None:
            try:
                return self._size(self._path(key))
            except FileNotFoundError:
                # An answer without a body does not tell whether the bucket is missing; a listing does.
                next(iter(self._list(self._path(key))), None)
                return None

        return self._call("read", key, work)

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        """All objects below a prefix with size and time, sorted by key."""

        def work() -> list[ObjectInfo]:
            top = self._path(prefix)
            objects = (
                ObjectInfo(key=path[len(top) :].removeprefix("/"), nbytes=nbytes, modified=modified)
                for path, nbytes, modified in self._list(top)
            )
            return sorted((info for info in objects if info.key), key=lambda info: info.key)

        return self._call("list", prefix, lambda: _found(work)) or []

    def list_names(self, prefix: str) -> list[str]:
        """The first segments of all keys below a prefix, sorted."""

        def work() -> list[str]:
            top = self._path(prefix)
            return sorted({path[len(top) :].strip("/") for path in self._list_level(top)} - {""})

        return self._call("list", prefix, lambda: _found(work)) or []

    def delete(self, prefix: str) -> None:
        """Delete every object below a prefix."""
        self._call("delete", prefix, lambda: self._remove("rm", self._path(prefix), recursive=True))

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Delete many objects, with as many in one request as the store allows."""
        if keys:
            self._call("delete", keys[0], lambda: self._delete([self._path(key) for key in keys]))

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self._address, "storage_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"], storage_options=state["storage_options"])  # type: ignore[misc]

    def _path(self, key: str) -> str:
        refuse_escape(self.url, key)
        return f"{self._root}{key}".rstrip("/")

    def _call(self, verb: str, key: str, work: Callable[[], Result]) -> Result:
        """The result of `work`, with errors translated."""
        try:
            return work()
        except StorageError:
            raise
        except Exception as error:  # noqa: BLE001  # each client raises classes of its own, botocore's are no OSError
            place = f"{self.url}/{key}" if key else self.url
            failure = store_error(error, verb=verb, place=place, redact=self._redact)
            texts = (text for link in chain(error) for text in (str(link), repr(link.args)))
            cause = error if all(self._redact(text) == text for text in texts) else None
        # Raised outside the handler, so that a cause with a secret is not the context of the user's error.
        raise failure from cause

    def _put(self, path: str, views: list[memoryview]) -> None:
        # The file system needs one contiguous buffer. The copies of all threads share a budget.
        with self._copies.taken(sum(view.nbytes for view in views)):
            answered()  # the wait for the budget does not count
            self._run("pipe_file", path, b"".join(views))

    def _create(self, path: str, data: bytes) -> bool:
        try:
            self._run("pipe_file", path, data, mode="create")
        except FileExistsError:
            return False
        return True

    def _get(self, path: str, check: Callable[[int], None]) -> bytes:
        """The bytes of an object, after `check` has accepted their number."""
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
        """All paths below a path, each with size and time."""
        self._file_system().invalidate_cache()
        for name, info in self._run("find", path, detail=True).items():
            yield str(name), int(info.get("size") or 0), _modified(info)

    def _list_level(self, path: str) -> list[str]:
        """The objects and directories directly below a path."""
        self._file_system().invalidate_cache()
        return [str(name) for name in self._run("ls", path, detail=False)]

    def _delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            self._remove("rm_file", path)

    def _remove(self, method: str, path: str, **options: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._run(method, path, **options)

    def _run(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The result of a method of the file system, which ends by the caller's deadline."""
        file_system = self._file_system()
        if isinstance(file_system, AsyncFileSystem):
            # Methods with an underscore are fsspec's documented asynchronous interface.
            coroutine = getattr(file_system, f"_{method}")
            return sync(file_system.loop, coroutine, *arguments, timeout=seconds_left(), **options)
        return getattr(file_system, method)(*arguments, **options)

    def _file_system(self) -> Any:
        if os.getpid() != self._pid and (failure := self._open()) is not None:
            raise failure
        return self._fs

    def _open(self) -> Exception | None:
        """Create the file system, and return the error if this fails."""
        try:
            self._fs, root = url_to_fs(self._address, **self._options)
        except Exception as error:  # noqa: BLE001  # what a file system's constructor raises is its own affair
            return error
        self._set_root(root.rstrip("/") + "/")
        self._pid, self._copies = os.getpid(), MemoryBudget()
        return None

    def _set_root(self, root: str) -> None:
        """Set the prefix of all paths, which ends with a slash."""
        self._root = root


def _found(work: Callable[[], Result]) -> Result | None:
    """The result of `work`; None if the object does not exist."""
    try:
        return work()
    except FileNotFoundError as error:
        if answer_of(error)[1] not in _NO_OBJECT:
            raise
        return None


def _modified(info: Mapping[str, Any]) -> float:
    for name in ("LastModified", "mtime", "last_modified", "updated", "created", "timeModified"):
        value = info.get(name)
        if isinstance(value, dt.datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0


PART_NBYTES = 64 * 2**20
"""The size of the parts in which an object of more than twice this size is sent, in bytes."""

_JOINED_NBYTES = 2**20
"""The size up to which an object is copied into one buffer, in bytes."""

_DELETE_AT_ONCE = 1000
"""S3's limit of keys in one request."""

_CONFIG: dict[str, Any] = {
    # Timeouts of inactivity. The whole request has the caller's deadline.
    "connect_timeout": 5,
    "read_timeout": 15,
    "max_pool_connections": 64,
    # Objects contain a CRC-32C already, and servers other than AWS answer range requests with checksums of the whole
    # object.
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    # Only `RetryingBackend` retries.
    "retries": {"mode": "standard", "total_max_attempts": 1},
}

_HTTP_PRECONDITION_FAILED = 412

_open_clients: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _keep_inherited() -> None:
    """Keep a reference to the parent's clients in a forked process until it ends.

    The epoll instance of an event loop is shared with the parent. Closing a connection in the child would remove it
    from the instance, and the parent would miss the answer.
    """
    for client in list(_open_clients.values()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


os.register_at_fork(after_in_child=_keep_inherited)


class S3Backend(RemoteBackend):
    """The `Backend` over a bucket of S3."""

    def __init__(self, url: str, *, storage_options: Mapping[str, Any]) -> None:
        config = {**_CONFIG, **(storage_options.get("config_kwargs") or {})}
        options = {"use_listings_cache": False, "skip_instance_cache": True, **storage_options, "config_kwargs": config}
        super().__init__(url, storage_options=options)

    delete = Backend.delete

    def list_unfinished(self) -> list[ObjectInfo]:
        """Multipart uploads that were neither completed nor aborted."""
        uploads = self._call("list", "", lambda: list(self._uploads()))
        return sorted(uploads, key=lambda upload: upload.key)

    def remove_unfinished(self, debris: Sequence[ObjectInfo]) -> None:
        """Abort multipart uploads."""
        for upload in debris:
            self._call("delete", upload.key.rpartition("?")[0], partial(self._abort, upload.key))

    def _open(self) -> Exception | None:
        failure = super()._open()
        if failure is None:
            self._fs.retries = 1  # as in _CONFIG; the instance is not shared
            _open_clients[id(self._fs)] = self._fs
        return failure

    def _set_root(self, root: str) -> None:
        # Uses only the argument, because several threads of a forked process may run this at the same time.
        self._bucket, _, self._root = root.partition("/")

    def _put(self, path: str, views: list[memoryview]) -> None:
        nbytes = sum(view.nbytes for view in views)
        if nbytes > 2 * PART_NBYTES:
            self._put_parts(path, views, nbytes)
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

    def _abort(self, name: str) -> None:
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
        """The answer to one request, by the caller's deadline."""
        client = self._file_system()
        answer: dict[str, Any] = client.call_s3(method, Bucket=self._bucket, timeout=seconds_left(), **arguments)
        return answer

    def _read(self, path: str, check: Callable[[int], None] | None, **arguments: Any) -> tuple[bytes, bool]:
        """The bytes of an object, and whether they are the whole object."""
        answer = self._ask("get_object", Key=path, **arguments)
        body, loop = answer["Body"], self._file_system().loop
        try:
            if check is not None:
                check(answer["ContentLength"])
            data: bytes = sync(loop, body.read, timeout=seconds_left())
        finally:
            loop.call_soon_threadsafe(body.close)
        return data, "ContentRange" not in answer

    def _put_parts(self, key: str, views: list[memoryview], nbytes: int) -> None:
        upload = self._ask("create_multipart_upload", Key=key)["UploadId"]
        parts: list[dict[str, Any]] = []
        try:
            for start in range(0, nbytes, PART_NBYTES):
                body = _joined(views, start, min(start + PART_NBYTES, nbytes))
                number = len(parts) + 1
                answer = self._ask("upload_part", Key=key, UploadId=upload, PartNumber=number, Body=body)
                parts.append({"PartNumber": number, "ETag": answer["ETag"]})
                answered()
            self._ask("complete_multipart_upload", Key=key, UploadId=upload, MultipartUpload={"Parts": parts})
        except BaseException as error:
            # The store charges for parts until the upload is aborted. If this fails too, `repair` finds them.
            try:
                self._ask("abort_multipart_upload", Key=key, UploadId=upload)
            except Exception as failure:  # noqa: BLE001  # as many classes as there are clients
                error.add_note(f"the parts that were sent remain in the store: {type(failure).__name__}")
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
