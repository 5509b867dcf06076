"""A run in S3, through the client of s3fs.

Objects are objects. The requests are S3's own, through the client that s3fs sets up from the storage options, the
environment and the usual files: one request per verb, no HEAD before a GET, and a server's answer is seen as it is.
A PUT is atomic; it is conditional (`If-None-Match: *`) where an object must not be replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import io
import os
import uuid
import weakref
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from fsspec.asyn import sync

from ranktape.storage.places.backend import (
    Backend,
    Debris,
    ObjectInfo,
    answered,
    byte_view,
    range_file,
    refuse_escape,
    seconds_left,
    too_large,
)
from ranktape.storage.places.failures import answer_of
from ranktape.storage.places.remote import RemoteBackend

if TYPE_CHECKING:
    from ranktape.storage.places.backend import Buffer

Result = TypeVar("Result")

_PART_NBYTES = 64 * 2**20
"""Above twice this an object is sent in parts of this size."""

_PARTS_AT_ONCE = 4

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

_CREATOR = "ranktape-creator"
"""Names the metadata of an object that says which request created it."""

_HTTP_NOT_FOUND = 404
_HTTP_PRECONDITION_FAILED = 412
_HTTP_RANGE_NOT_SATISFIABLE = 416


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
        self._bucket, _, self._prefix = self._root.partition("/")

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """Write an object of the joined parts."""
        views = [view for view in (byte_view(part) for part in parts) if view.nbytes]
        try:
            self._wait("write", key, self._put, key, views)
        finally:
            # A request that was given up must not send what lies there later.
            views.clear()

    def create(self, key: str, data: bytes) -> bool:
        """Write an object if there is none; False if there was one."""
        return self._wait("write", key, self._create, key, data)

    def get(self, key: str, *, max_nbytes: int | None = None) -> bytes | None:
        """The bytes of an object; None where there is none."""
        return self._wait("read", key, self._get, key, max_nbytes)

    def get_range(self, key: str, start: int, nbytes: int) -> bytes | None:
        """Some bytes of an object, clipped to what it has; None where there is none."""
        if nbytes <= 0:
            return b"" if self.exists(key) else None
        wanted = f"bytes={start}" if start < 0 else f"bytes={start}-{start + nbytes - 1}"
        return self._wait("read", key, self._get_range, key, wanted, start, nbytes)

    def size(self, key: str) -> int | None:
        """The bytes that an object has; None where there is none."""
        return self._wait("read", key, self._head, key)

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        """All objects below a prefix with size and time, sorted by key."""
        skipped = len(self._below(prefix))
        found = [
            ObjectInfo(key=item["Key"][skipped:], nbytes=int(item["Size"]), modified=item["LastModified"].timestamp())
            for page in self._pages(prefix)
            for item in page.get("Contents", [])
            if len(item["Key"]) > skipped
        ]
        return sorted(found, key=lambda info: info.key)

    def list_names(self, prefix: str) -> list[str]:
        """The first segments of all keys below a prefix, sorted."""
        skipped = len(self._below(prefix))
        names = set()
        for page in self._pages(prefix, Delimiter="/"):
            names |= {item["Prefix"][skipped:].rstrip("/") for item in page.get("CommonPrefixes", [])}
            names |= {item["Key"][skipped:] for item in page.get("Contents", [])}
        return sorted(names - {""})

    delete = Backend.delete

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Remove many objects, a thousand in a request."""
        for first in range(0, len(keys), _DELETE_AT_ONCE):
            objects = [{"Key": self._key(key)} for key in keys[first : first + _DELETE_AT_ONCE]]
            self._wait("delete", keys[first], self._delete_objects, objects)
            answered()

    def list_debris(self) -> list[Debris]:
        """Multipart uploads that were begun and neither completed nor given up."""
        below = self._below("")
        found: list[Debris] = []
        markers: dict[str, str] = {}
        while True:
            request = partial(self._request, "list_multipart_uploads", Prefix=below, **markers)
            page = self._wait("list", "", request)
            answered()
            for item in page.get("Uploads", []):
                name = f"{item['Key'][len(below) :]}?{item['UploadId']}"
                found.append(Debris(name=name, nbytes=None, modified=item["Initiated"].timestamp()))
            if not page.get("IsTruncated"):
                return sorted(found, key=lambda one: one.name)
            markers = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def remove_debris(self, debris: Sequence[Debris]) -> None:
        """Give up multipart uploads."""
        for one in debris:
            self._wait("delete", one.name.rpartition("?")[0], self._abort_upload, one.name)
            answered()

    def _key(self, key: str) -> str:
        refuse_escape(self.url, key)
        return "/".join(part for part in (self._prefix, key) if part)

    def _below(self, prefix: str) -> str:
        """What all keys below a prefix begin with."""
        top = self._key(prefix)
        return f"{top}/" if top else ""

    def _wait(self, verb: str, key: str, work: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any) -> Result:
        """What a coroutine returns that runs on s3fs's loop, by the caller's deadline."""

        def run() -> Result:
            result: Result = sync(self._file_system().loop, work, *arguments, timeout=seconds_left())
            return result

        return self._call(verb, key, run)

    def _open(self) -> Exception | None:
        failure = super()._open()
        if failure is None:
            self._fs.retries = 1  # as _CONFIG: it is an instance of our own
            _open_clients[id(self._fs)] = self._fs
        return failure

    async def _request(self, method: str, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await self._fs._call_s3(method, Bucket=self._bucket, **arguments)  # noqa: SLF001  # its public form blocks the loop
        return answer

    async def _put(self, key: str, views: list[memoryview]) -> None:
        nbytes = sum(view.nbytes for view in views)
        if nbytes <= _JOINED_NBYTES:
            await self._request("put_object", Key=self._key(key), Body=b"".join(views))
        elif nbytes <= 2 * _PART_NBYTES:
            await self._request("put_object", Key=self._key(key), Body=_joined(views, 0, nbytes))
        else:
            await self._put_parts(self._key(key), views, nbytes)

    async def _put_parts(self, key: str, views: list[memoryview], nbytes: int) -> None:
        upload = (await self._request("create_multipart_upload", Key=key))["UploadId"]
        gate = asyncio.Semaphore(_PARTS_AT_ONCE)

        async def send(number: int) -> dict[str, Any]:
            async with gate:
                part = _joined(views, (number - 1) * _PART_NBYTES, min(number * _PART_NBYTES, nbytes))
                answer = await self._request("upload_part", Key=key, UploadId=upload, PartNumber=number, Body=part)
                return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(send(number)) for number in range(1, -(-nbytes // _PART_NBYTES) + 1)]
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

    async def _create(self, key: str, data: bytes) -> bool:
        # The HTTP client below sends a PUT again by itself when the connection breaks: one that was done already is
        # then refused. The mark tells whether what is in the way is ours.
        mark = {_CREATOR: uuid.uuid4().hex}
        try:
            await self._request("put_object", Key=self._key(key), Body=data, IfNoneMatch="*", Metadata=mark)
        except Exception as error:
            if answer_of(error)[0] != _HTTP_PRECONDITION_FAILED:
                raise
            found = await self._found("head_object", key)
            return found is not None and found.get("Metadata", {}).get(_CREATOR) == mark[_CREATOR]
        return True

    async def _get(self, key: str, max_nbytes: int | None) -> bytes | None:
        answer = await self._found("get_object", key)
        if answer is None:
            return None
        async with answer["Body"] as body:
            if max_nbytes is not None and answer["ContentLength"] > max_nbytes:
                raise too_large(f"{self.url}/{key}", max_nbytes)
            data: bytes = await body.read()
            return data

    async def _get_range(self, key: str, wanted: str, start: int, nbytes: int) -> bytes | None:
        try:
            answer = await self._found("get_object", key, Range=wanted)
        except Exception as error:
            if answer_of(error)[0] == _HTTP_RANGE_NOT_SATISFIABLE:
                return b""
            raise
        if answer is None:
            return None
        async with answer["Body"] as body:
            data: bytes = await body.read()
        if "ContentRange" not in answer:  # a server that gave the whole
            data = data[start:]
        return data[:nbytes]

    async def _head(self, key: str) -> int | None:
        answer = await self._found("head_object", key)
        if answer is None:
            # The answer to a HEAD has no body that could say what is missing; a listing says it of the bucket.
            await self._request("list_objects_v2", Prefix=self._key(key), MaxKeys=1)
            return None
        return int(answer["ContentLength"])

    async def _found(self, method: str, key: str, **arguments: Any) -> dict[str, Any] | None:
        """The answer about an object; None where there is none."""
        try:
            return await self._request(method, Key=self._key(key), **arguments)
        except Exception as error:
            status, code = answer_of(error)
            if code == "NoSuchKey" or (method == "head_object" and status == _HTTP_NOT_FOUND):
                return None
            raise

    def _pages(self, prefix: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        below = self._below(prefix)
        token: dict[str, str] = {}
        while True:
            request = partial(self._request, "list_objects_v2", Prefix=below, **arguments, **token)
            page = self._wait("list", prefix, request)
            answered()
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    async def _delete_objects(self, objects: Sequence[Mapping[str, str]]) -> None:
        answer = await self._request("delete_objects", Delete={"Objects": objects, "Quiet": True})
        for error in answer.get("Errors", []):
            if error.get("Code") != "NoSuchKey":
                raise PartlyDeletedError(error)

    async def _abort_upload(self, name: str) -> None:
        key, _, upload = name.rpartition("?")
        try:
            await self._request("abort_multipart_upload", Key=self._key(key), UploadId=upload)
        except Exception as error:
            if answer_of(error)[1] != "NoSuchUpload":
                raise


class PartlyDeletedError(Exception):
    """A request that removes many objects was answered, but not for all of them."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(f"{error.get('Key')}: {error.get('Message') or error.get('Code')}")
        self.response = {"Error": {"Code": error.get("Code", "")}}


def _joined(views: list[memoryview], start: int, stop: int) -> io.RawIOBase:
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

    return range_file(stop - start, fill)
