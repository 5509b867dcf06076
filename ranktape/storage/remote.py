"""How does a run lie in an object store, or in any other file system that fsspec knows?

Objects are the file system's files. An object store's PUT is atomic; other fsspec file systems are as
atomic as they are. Reads never trust a cached listing, and requests have deadlines where the file system
lets us set them (s3fs does).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

from ranktape.errors import StorageError, UsageError
from ranktape.storage.backend import byte_view, without_credentials

if TYPE_CHECKING:
    from zarr.abc.store import Store

    from ranktape.storage.backend import Buffer

_S3_DEFAULTS: dict[str, Any] = {
    "use_listings_cache": False,
    # A HEAD before each GET doubles the requests; s3fs leaves it out for one connection at a time.
    "max_concurrency": 1,
    "config_kwargs": {"connect_timeout": 5, "read_timeout": 15, "max_pool_connections": 32},
}

_DEFAULTS: dict[str, dict[str, Any]] = {"s3": _S3_DEFAULTS, "s3a": _S3_DEFAULTS}


class RemoteBackend:
    """A run behind a URL; the `Backend` over fsspec."""

    def __init__(self, url: str, *, storage_options: Mapping[str, Any]) -> None:
        self.url = without_credentials(url)
        protocol = url.partition("://")[0]
        self.is_shared = "memory" not in protocol.split("::")
        defaults = _DEFAULTS.get(protocol, {})
        options = {**defaults, **storage_options}
        try:
            self._fs, root = url_to_fs(url, **options)
        except (ValueError, ImportError, TypeError) as error:
            known = ", ".join(sorted({"s3", "gs", "az", "memory"} & set(fsspec.available_protocols())))
            raise UsageError(
                f"{self.url} cannot be opened: {error}: give a directory, or a URL of a protocol that is "
                f"installed (such as {known}), and storage options that it takes"
            ) from error
        self._root = root.rstrip("/")

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """Write an object of the joined parts."""
        with self._translated("write", key):
            self._fs.pipe_file(self._path(key), b"".join(byte_view(part) for part in parts))

    def create(self, key: str, data: bytes) -> bool:
        """Write an object if there is none; False if there was one."""
        path = self._path(key)
        with self._translated("write", key):
            try:
                self._fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            except OSError:
                # Some servers answer a failed precondition with a bare OSError; the object tells.
                if self._fs.exists(path):
                    return False
                raise
            return True

    def get(self, key: str) -> bytes | None:
        """The bytes of an object; None where there is none."""
        with self._translated("read", key):
            try:
                return bytes(self._fs.cat_file(self._path(key)))
            except FileNotFoundError:
                return None

    def exists(self, key: str) -> bool:
        """Whether there is an object."""
        with self._translated("read", key):
            return bool(self._fs.exists(self._path(key)))

    def list_keys(self, prefix: str) -> list[str]:
        """The keys of all objects below a prefix, relative to it, sorted."""
        top = self._path(prefix)
        with self._translated("list", prefix):
            self._fs.invalidate_cache()
            try:
                return sorted(str(path)[len(top) + 1 :] for path in self._fs.find(top) if len(str(path)) > len(top))
            except FileNotFoundError:
                return []

    def list_names(self, prefix: str) -> list[str]:
        """The first segments of all keys below a prefix, sorted."""
        top = self._path(prefix)
        with self._translated("list", prefix):
            self._fs.invalidate_cache()
            try:
                paths = [str(path).rstrip("/") for path in self._fs.ls(top, detail=False)]
            except FileNotFoundError:
                return []
            return sorted({path[len(top) + 1 :] for path in paths if len(path) > len(top)})

    def delete(self, prefix: str) -> None:
        """Remove every object below a prefix."""
        with self._translated("delete", prefix), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(prefix), recursive=True)

    def flush(self) -> None:
        """Nothing: an object store answers a PUT when the object is durable."""

    def zarr_store(self) -> Store:
        """A read-only Zarr store over the run."""
        from zarr.storage import FsspecStore

        # The same file system as ours, on its own event loop: one that is bound to zarr's loop works in no other,
        # and its connections are never closed.
        wrapped = AsyncFileSystemWrapper(self._fs, asynchronous=True)
        return FsspecStore(fs=wrapped, path=self._root, read_only=True)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}".rstrip("/")

    @contextlib.contextmanager
    def _translated(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each file system raises classes of its own (botocore's are no OSError)
            raise StorageError(
                f"cannot {verb} {self.url}/{key}: {type(error).__name__}: {error}: check the URL, the credentials "
                f"and that the server answers"
            ) from error
