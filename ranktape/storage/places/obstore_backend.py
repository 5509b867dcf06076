"""Keeps a run in an object store, through obstore.

A fifth of the CPU that botocore takes per request, and no copy of what is written. Its runtime does not survive a
fork, it does not read the AWS files, and it knows no unfinished uploads: for all of that the fsspec client is there.
"""

from __future__ import annotations

import datetime as dt
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, GenericError
from obstore.store import AzureStore, GCSStore, S3Store

from ranktape.errors import StorageError, UsageError
from ranktape.storage.places.backend import (
    Backend,
    Debris,
    ObjectInfo,
    answered,
    byte_view,
    range_within,
    refuse_escape,
    seconds_left,
    too_large,
    without_credentials,
)
from ranktape.storage.places.failures import Redactor, StoreFailures, answer_of
from ranktape.storage.places.obstore_options import StoreConfig

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from ranktape.storage.places.backend import Buffer
    from ranktape.storage.places.remote import RemoteBackend

Result = TypeVar("Result")

_OWNER = os.getpid()
"""The process whose runtime obstore's threads are in."""

_PART_NBYTES = 64 * 2**20
_PARTS_AT_ONCE = 4

_SILENCE_SECONDS = 15.0
_CONNECT_SECONDS = 5.0

_SLOWEST_NBYTES_PER_SECOND = 2**20
"""A server that takes less than this counts as one that hangs."""

_STEPS_PER_DOUBLING = 4
"""How finely timeouts are told apart: each has a client of its own, since obstore fixes it with the client."""

_KEYS_PER_PAGE = 1000

_HTTP_RANGE_NOT_SATISFIABLE = 416

_PASSING_CONFLICTS = {"ConditionalRequestConflict", "OperationAborted"}


class ObstoreBackend(Backend):
    """A run in a bucket; the `Backend` over obstore."""

    def __init__(
        self, url: str, *, config: StoreConfig, storage_options: Mapping[str, Any], fsspec: Callable[[], RemoteBackend]
    ) -> None:
        self.url = without_credentials(url)
        self.is_shared = True
        self._config = config
        self._fsspec = fsspec
        self._failures = StoreFailures(self.url, redact=Redactor(url, {**config.values, **storage_options}))
        self._bucket, _, prefix = self.url.partition("://")[2].partition("/")
        self._prefix = prefix.strip("/")
        self._stores: dict[tuple[int, bool], ObjectStore] = {}
        if not self._bucket:
            raise UsageError(f"{self.url} names no bucket: give a URL such as s3://bucket/run")

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """Write an object of the joined parts."""
        views = [view for view in (byte_view(part) for part in parts) if view.nbytes]
        nbytes = sum(view.nbytes for view in views)

        def work() -> None:
            if nbytes > 2 * _PART_NBYTES:
                obstore.put(
                    self._store(upload_nbytes=_PART_NBYTES * _PARTS_AT_ONCE),
                    self._path(key),
                    views,
                    use_multipart=True,
                    chunk_size=_PART_NBYTES,
                    max_concurrency=_PARTS_AT_ONCE,
                )
            else:
                store = self._store(upload_nbytes=nbytes)
                obstore.put(store, self._path(key), views or b"", use_multipart=False)

        self._call("write", key, work)

    def create(self, key: str, data: bytes) -> bool:
        """Write an object if there is none; False if there was one."""

        def work() -> bool:
            try:
                store = self._store(upload_nbytes=len(data))
                obstore.put(store, self._path(key), data, mode="create", use_multipart=False)
            except AlreadyExistsError as error:
                if answer_of(error)[1] in _PASSING_CONFLICTS:
                    raise
                return False
            return True

        return self._call("write", key, work)

    def get(self, key: str, *, max_nbytes: int | None = None) -> bytes | None:
        """The bytes of an object; None where there is none."""

        def work() -> bytes | None:
            try:
                answer = obstore.get(self._store(), self._path(key))
                if max_nbytes is not None and answer.meta["size"] > max_nbytes:
                    raise too_large(f"{self.url}/{key}", max_nbytes)
                return bytes(answer.bytes())
            except FileNotFoundError as error:
                self._raise_unless_missing(error)
                return None

        return self._call("read", key, work)

    def get_range(self, key: str, start: int, nbytes: int) -> bytes | None:
        """Some bytes of an object, clipped to what it has; None where there is none."""
        if nbytes <= 0:
            return b"" if self.exists(key) else None
        wanted: Any = {"suffix": -start} if start < 0 else (start, start + nbytes)

        def work() -> bytes | None:
            try:
                answer = obstore.get(self._store(), self._path(key), options={"range": wanted})
                return bytes(answer.bytes())[:nbytes]
            except FileNotFoundError as error:
                self._raise_unless_missing(error)
                return None
            except GenericError as error:
                if answer_of(error)[0] == _HTTP_RANGE_NOT_SATISFIABLE:
                    return b""
                if "non-partial" not in str(error):
                    raise
            # An empty object, or a server that knows no ranges.
            data = bytes(obstore.get(self._store(), self._path(key)).bytes())
            begin, stop = range_within(len(data), start, nbytes)
            return data[begin:stop]

        return self._call("read", key, work)

    def size(self, key: str) -> int | None:
        """The bytes that an object has; None where there is none."""

        def work() -> int | None:
            try:
                return obstore.head(self._store(), self._path(key))["size"]
            except FileNotFoundError:
                # The answer to a HEAD has no body that could say which is missing; a listing says it of the bucket.
                next(iter(obstore.list(self._store(), self._path(key))), None)
                return None

        return self._call("read", key, work)

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        """All objects below a prefix with size and time, sorted by key."""
        top = self._path(prefix)
        skipped = len(top) + 1 if top else 0

        def work() -> list[ObjectInfo]:
            found = []
            for page in obstore.list(self._store(), top or None, chunk_size=_KEYS_PER_PAGE):
                answered()
                found += [
                    ObjectInfo(
                        key=item["path"][skipped:], nbytes=item["size"], modified=item["last_modified"].timestamp()
                    )
                    for item in page
                ]
            return sorted(found, key=lambda info: info.key)

        return self._call("list", prefix, work)

    def list_names(self, prefix: str) -> list[str]:
        """The first segments of all keys below a prefix, sorted."""
        top = self._path(prefix)
        skipped = len(top) + 1 if top else 0

        def work() -> list[str]:
            found = obstore.list_with_delimiter(self._store(), top or None)
            paths = [*found["common_prefixes"], *(item["path"] for item in found["objects"])]
            return sorted({path[skipped:].rstrip("/") for path in paths} - {""})

        return self._call("list", prefix, work)

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Remove many objects, as many in a request as the store takes."""
        if keys:
            self._call("delete", "", lambda: obstore.delete(self._store(), [self._path(key) for key in keys]))

    def list_debris(self) -> list[Debris]:
        """Multipart uploads that were begun and neither completed nor given up, where S3 is spoken."""
        return self._fsspec().list_debris() if self._config.protocol == "s3" else []

    def remove_debris(self, debris: Sequence[Debris]) -> None:
        """Give up multipart uploads."""
        if debris:
            self._fsspec().remove_debris(debris)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stores": {}}

    def _path(self, key: str) -> str:
        refuse_escape(self.url, key)
        return "/".join(part for part in (self._prefix, key) if part)

    def _raise_unless_missing(self, error: FileNotFoundError) -> None:
        """An object that is not there is no failure; a bucket that is not there is one."""
        if answer_of(error)[1] not in {"", "NoSuchKey", "BlobNotFound"}:
            raise error

    def _call(self, verb: str, key: str, work: Callable[[], Result]) -> Result:
        if os.getpid() != _OWNER:
            raise StorageError(
                f"cannot {verb} {self.url}/{key} in a forked process: obstore would wait for ever: open the run "
                f"again there, or set the storage option client to fsspec"
            )
        return self._failures.call(verb, key, work)

    def _store(self, *, upload_nbytes: int | None = None) -> ObjectStore:
        """The store whose requests end within the caller's deadline."""
        seconds = seconds_left()
        if upload_nbytes is not None:
            seconds = min(seconds, _SILENCE_SECONDS + upload_nbytes / _SLOWEST_NBYTES_PER_SECOND)
        step = math.floor(math.log2(seconds) * _STEPS_PER_DOUBLING)
        store = self._stores.get((step, upload_nbytes is not None))
        if store is None:
            store = self._make(2 ** (step / _STEPS_PER_DOUBLING), is_upload=upload_nbytes is not None)
            self._stores[step, upload_nbytes is not None] = store
        return store

    def _make(self, seconds: float, *, is_upload: bool) -> ObjectStore:
        kinds: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
        client_options: dict[str, Any] = {
            "allow_http": self._config.allows_http,
            "timeout": dt.timedelta(seconds=seconds),
            "connect_timeout": dt.timedelta(seconds=min(seconds, _CONNECT_SECONDS)),
        }
        if not is_upload:
            # obstore counts the time in which a body is sent as silence of the server.
            client_options["read_timeout"] = dt.timedelta(seconds=min(seconds, _SILENCE_SECONDS))
        store: ObjectStore = kinds[self._config.protocol](
            self._bucket,
            config=self._config.values,
            client_options=client_options,
            retry_config={"max_retries": 0},  # one who retries is enough: `retry.py`
        )
        return store


def is_usable_here() -> bool:
    """Whether obstore works in this process: not in one that was forked after it was loaded."""
    return os.getpid() == _OWNER
