"""Keeps a run in an object store, through obstore.

A fifth of the CPU that botocore takes per request, and no copy of what is written. Its runtime does not survive a
fork, it does not read the AWS files, and it knows no unfinished uploads: for all of that the fsspec client is there.
"""

from __future__ import annotations

import datetime as dt
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import AlreadyExistsError, GenericError
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from ranktape.errors import StorageError, UsageError
from ranktape.storage.places.backend import ObjectInfo, answered, range_within, seconds_left
from ranktape.storage.places.failures import answer_of
from ranktape.storage.places.store import PART_NBYTES, PARTS_AT_ONCE, Result, StoreBackend

if TYPE_CHECKING:
    from ranktape.storage.places.fsspec_backend import RemoteBackend

_KINDS: dict[str, Any] = {"s3": S3Store, "s3a": S3Store, "gs": GCSStore, "gcs": GCSStore, "az": AzureStore}
"""By protocol."""

_OWNER = os.getpid()
"""The process whose runtime obstore's threads are in."""

_SILENCE_SECONDS = 15.0
_CONNECT_SECONDS = 5.0

_SLOWEST_NBYTES_PER_SECOND = 2**20
"""A server that takes less than this counts as one that hangs."""

_STEPS_PER_DOUBLING = 4
"""How finely timeouts are told apart: each has a client of its own, since obstore fixes it with the client."""

_KEYS_PER_PAGE = 1000

_PASSING_CONFLICTS = {"ConditionalRequestConflict", "OperationAborted"}


class ObstoreBackend(StoreBackend):
    """A run in a bucket; the `Backend` over obstore."""

    def __init__(
        self,
        url: str,
        *,
        config: Mapping[str, Any],
        storage_options: Mapping[str, Any],
        fsspec: Callable[[], RemoteBackend],
    ) -> None:
        super().__init__(url, secrets={**config, **storage_options})
        self._config = config
        self._fsspec = fsspec
        self._protocol, _, path = self.url.partition("://")
        self._bucket, _, prefix = path.partition("/")
        self._root = f"{prefix.strip('/')}/".lstrip("/")
        self._stores: dict[tuple[int, bool], ObjectStore] = {}
        if not self._bucket:
            raise UsageError(f"{self.url} names no bucket: give a URL such as s3://bucket/run")

    def list_debris(self) -> list[ObjectInfo]:
        """Multipart uploads that were begun and neither completed nor given up, where S3 is spoken."""
        return self._fsspec().list_debris() if _KINDS[self._protocol] is S3Store else []

    def remove_debris(self, debris: Sequence[ObjectInfo]) -> None:
        """Give up multipart uploads."""
        if debris:
            self._fsspec().remove_debris(debris)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stores": {}}

    def _call(self, verb: str, key: str, work: Callable[[], Result]) -> Result:
        if os.getpid() != _OWNER:
            raise StorageError(
                f"cannot {verb} {self.url}/{key} in a forked process: obstore would wait for ever: open the run "
                f"again there, or set the storage option client to fsspec"
            )
        return super()._call(verb, key, work)

    def _put(self, path: str, views: list[memoryview]) -> None:
        nbytes = sum(view.nbytes for view in views)
        if nbytes <= 2 * PART_NBYTES:
            obstore.put(self._store(upload_nbytes=nbytes), path, views or b"", use_multipart=False)
        else:
            store = self._store(upload_nbytes=PART_NBYTES * PARTS_AT_ONCE)
            obstore.put(store, path, views, use_multipart=True, chunk_size=PART_NBYTES, max_concurrency=PARTS_AT_ONCE)

    def _create(self, path: str, data: bytes) -> bool:
        try:
            obstore.put(self._store(upload_nbytes=len(data)), path, data, mode="create", use_multipart=False)
        except AlreadyExistsError as error:
            if answer_of(error)[1] in _PASSING_CONFLICTS:
                raise
            return False
        return True

    def _get(self, path: str, check: Callable[[int], None]) -> bytes:
        answer = obstore.get(self._store(), path)
        check(answer.meta["size"])
        return bytes(answer.bytes())

    def _get_range(self, path: str, start: int, nbytes: int) -> bytes:
        wanted: Any = {"suffix": -start} if start < 0 else (start, start + nbytes)
        try:
            return bytes(obstore.get(self._store(), path, options={"range": wanted}).bytes())[:nbytes]
        except GenericError as error:
            if "non-partial" not in str(error):
                raise
        # An empty object, or a server that knows no ranges.
        data = bytes(obstore.get(self._store(), path).bytes())
        begin, stop = range_within(len(data), start, nbytes)
        return data[begin:stop]

    def _size(self, path: str) -> int:
        return obstore.head(self._store(), path)["size"]

    def _list(self, path: str) -> Iterator[tuple[str, int, float]]:
        for page in obstore.list(self._store(), path or None, chunk_size=_KEYS_PER_PAGE):
            answered()
            yield from ((item["path"], item["size"], item["last_modified"].timestamp()) for item in page)

    def _list_level(self, path: str) -> list[str]:
        found = obstore.list_with_delimiter(self._store(), path or None)
        return [*found["common_prefixes"], *(item["path"] for item in found["objects"])]

    def _delete(self, paths: Sequence[str]) -> None:
        obstore.delete(self._store(), paths)

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
        client_options: dict[str, Any] = {
            "allow_http": str(self._config.get("endpoint")).startswith("http://"),
            "timeout": dt.timedelta(seconds=seconds),
            "connect_timeout": dt.timedelta(seconds=min(seconds, _CONNECT_SECONDS)),
        }
        if not is_upload:
            # obstore counts the time in which a body is sent as silence of the server.
            client_options["read_timeout"] = dt.timedelta(seconds=min(seconds, _SILENCE_SECONDS))
        store: ObjectStore = _KINDS[self._protocol](
            self._bucket,
            config=self._config,
            client_options=client_options,
            retry_config={"max_retries": 0},  # one who retries is enough: `retry.py`
        )
        return store


def is_usable_here() -> bool:
    """Whether obstore works in this process: not in one that was forked after it was loaded."""
    return os.getpid() == _OWNER
