"""Gives every client of a store the verbs of `Backend`: keys, errors and absence are one for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ranktape.errors import StorageError
from ranktape.storage.places.backend import (
    Backend,
    Buffer,
    ObjectInfo,
    byte_view,
    refuse_escape,
    too_large,
    without_credentials,
)
from ranktape.storage.places.failures import Redactor, answer_of, chain, store_error

Result = TypeVar("Result")

PART_NBYTES = 64 * 2**20
"""Above twice this an object is sent in parts of this size."""

PARTS_AT_ONCE = 4

_HTTP_RANGE_NOT_SATISFIABLE = 416

_NO_OBJECT = {"", "NoSuchKey", "BlobNotFound"}
"""What the code of an answer is where an object is not there; of any other, such as a bucket, it is a failure."""


class StoreBackend(Backend):
    """A run behind a URL. A subclass makes the requests, of whole paths, and raises what its client raises.

    An object that is not there is a `FileNotFoundError`.
    """

    def __init__(self, url: str, *, secrets: Mapping[str, Any]) -> None:
        self.url = without_credentials(url)
        self.is_shared = True
        self._root = ""
        """What all paths begin with; empty, or with a slash at its end."""
        self._redact = Redactor(url, secrets)

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """Write an object of the joined parts."""
        views = [view for view in (byte_view(part) for part in parts) if view.nbytes]
        try:
            self._call("write", key, lambda: self._put(self._path(key), views))
        finally:
            # A request that was given up must not send what lies there later.
            views.clear()

    def create(self, key: str, data: bytes) -> bool:
        """Write an object if there is none; False if there was one."""
        return self._call("write", key, lambda: self._create(self._path(key), data))

    def get(self, key: str, *, max_nbytes: int | None = None) -> bytes | None:
        """The bytes of an object; None where there is none."""

        def check(nbytes: int) -> None:
            if max_nbytes is not None and nbytes > max_nbytes:
                raise too_large(f"{self.url}/{key}", max_nbytes)

        return self._call("read", key, lambda: _found(lambda: self._get(self._path(key), check)))

    def get_range(self, key: str, start: int, nbytes: int) -> bytes | None:
        """Some bytes of an object, clipped to what it has; None where there is none."""
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
        """The bytes that an object has; None where there is none."""

        def work() -> int | None:
            try:
                return self._size(self._path(key))
            except FileNotFoundError:
                # An answer without a body cannot say what is missing; a listing says it of the bucket.
                next(iter(self._list(self._path(key))), None)
                return None

        return self._call("read", key, work)

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        """All objects below a prefix with size and time, sorted by key."""

        def work() -> list[ObjectInfo]:
            top = self._path(prefix)
            found = (
                ObjectInfo(key=path[len(top) :].removeprefix("/"), nbytes=nbytes, modified=modified)
                for path, nbytes, modified in self._list(top)
            )
            return sorted((info for info in found if info.key), key=lambda info: info.key)

        return self._call("list", prefix, lambda: _found(work)) or []

    def list_names(self, prefix: str) -> list[str]:
        """The first segments of all keys below a prefix, sorted."""

        def work() -> list[str]:
            top = self._path(prefix)
            return sorted({path[len(top) :].strip("/") for path in self._list_level(top)} - {""})

        return self._call("list", prefix, lambda: _found(work)) or []

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Remove many objects, as many in a request as the store takes."""
        if keys:
            self._call("delete", keys[0], lambda: self._delete([self._path(key) for key in keys]))

    def _path(self, key: str) -> str:
        refuse_escape(self.url, key)
        return f"{self._root}{key}".rstrip("/")

    def _call(self, verb: str, key: str, work: Callable[[], Result]) -> Result:
        """What `work` returns.

        Raises:
            StorageError: it failed; the kind says why.
        """
        try:
            return work()
        except StorageError:
            raise
        except BaseException as error:  # each client raises classes of its own, botocore's are no OSError
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # obstore's worst
                raise
            place = f"{self.url}/{key}" if key else self.url
            failure = store_error(error, verb=verb, place=place, redact=self._redact)
            texts = (text for link in chain(error) for text in (str(link), repr(link.args)))
            cause = error if all(self._redact(text) == text for text in texts) else None
        # Raised out here, a cause that repeats a secret is not even the context of what the user is shown.
        raise failure from cause

    def _put(self, path: str, views: list[memoryview]) -> None:
        raise NotImplementedError

    def _create(self, path: str, data: bytes) -> bool:
        raise NotImplementedError

    def _get(self, path: str, check: Callable[[int], None]) -> bytes:
        """The bytes, once `check` has raised nothing for their number."""
        raise NotImplementedError

    def _get_range(self, path: str, start: int, nbytes: int) -> bytes:
        raise NotImplementedError

    def _size(self, path: str) -> int | None:
        raise NotImplementedError

    def _list(self, path: str) -> Iterable[tuple[str, int, float]]:
        """All paths below one, each with size and time."""
        raise NotImplementedError

    def _list_level(self, path: str) -> Iterable[str]:
        """The objects and the folders right below a path."""
        raise NotImplementedError

    def _delete(self, paths: Sequence[str]) -> None:
        raise NotImplementedError


def _found(work: Callable[[], Result]) -> Result | None:
    """What `work` returns; None where it finds no object."""
    try:
        return work()
    except FileNotFoundError as error:
        if answer_of(error)[1] not in _NO_OBJECT:
            raise
        return None
