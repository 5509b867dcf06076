"""How does a run lie in a local directory?

Objects are files. A file is written under another name beside its place and renamed, so that nobody sees
half of it; `os.link` creates it only if it is not there. No executor and no event loop is involved, so
writing works until the last line of a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ranktape.errors import StorageError
from ranktape.storage.backend import byte_view

if TYPE_CHECKING:
    from zarr.abc.store import Store

    from ranktape.storage.backend import Buffer

PARTIAL_SUFFIX = ".partial"
"""Ends the names of files that are being written; a crash can leave them behind, and readers pass them over."""

_MAX_PARTS = 1024
"""Buffers in one `writev`: IOV_MAX on Linux."""


_REMOVALS = 30
"""Tries to remove a directory before its writers count as unstoppable."""

_REMOVAL_SECONDS = 0.1


class LocalBackend:
    """A run in a directory; the `Backend` over plain files."""

    def __init__(self, path: str) -> None:
        self.url = str(Path(path).expanduser().absolute())
        self.is_shared = True
        self._root = Path(self.url)
        self._made: set[Path] = set()
        self._serial = itertools.count()

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """Write a file of the joined parts, atomically."""
        with self._translated("write", key):
            partial = self._write_partial(key, parts)
            partial.rename(self._root / key)

    def create(self, key: str, data: bytes) -> bool:
        """Write a file if there is none, atomically; False if there was one."""
        with self._translated("write", key):
            partial = self._write_partial(key, [data])
            try:
                os.link(partial, self._root / key)
            except FileExistsError:
                return False
            finally:
                partial.unlink()
            return True

    def get(self, key: str) -> bytes | None:
        """The bytes of a file; None where there is none."""
        with self._translated("read", key):
            try:
                return (self._root / key).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def exists(self, key: str) -> bool:
        """Whether there is a file."""
        with self._translated("read", key):
            return (self._root / key).is_file()

    def list_keys(self, prefix: str) -> list[str]:
        """The paths of all files below a directory, relative to it, sorted."""
        with self._translated("list", prefix):
            top = self._root / prefix
            return sorted(
                os.path.relpath(Path(folder) / name, top)
                for folder, _, names in os.walk(top, onerror=_raise_unless_missing)
                for name in names
                if not name.endswith(PARTIAL_SUFFIX)
            )

    def list_names(self, prefix: str) -> list[str]:
        """The names of everything in a directory, sorted."""
        with self._translated("list", prefix):
            try:
                return sorted(
                    entry.name for entry in (self._root / prefix).iterdir() if not entry.name.endswith(PARTIAL_SUFFIX)
                )
            except (FileNotFoundError, NotADirectoryError):
                return []

    def delete(self, prefix: str) -> None:
        """Remove a directory with everything in it, or the contents of the root."""
        with self._translated("delete", prefix):
            self._made.clear()
            # The root itself stays: it may be a mount, or a directory that the user made with care.
            paths = [self._root / prefix] if prefix else [self._root / name for name in self.list_names("")]
            for path in paths:
                if path.is_dir():
                    _remove_tree(path)
                else:
                    path.unlink(missing_ok=True)

    def flush(self) -> None:
        """Flush the file system that holds the run to its disk, once for all files."""
        with self._translated("flush", ""):
            descriptor = os.open(self._root, os.O_RDONLY)
            try:
                _flush_file_system(descriptor)
            finally:
                os.close(descriptor)

    def zarr_store(self) -> Store:
        """A read-only Zarr store over the directory."""
        from zarr.storage import LocalStore

        return LocalStore(self._root, read_only=True)

    def _write_partial(self, key: str, parts: Sequence[Buffer]) -> Path:
        path = self._root / key
        if path.parent not in self._made:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._made.add(path.parent)
        # The name's length must not grow with the key's last segment, which may be as long as names can be.
        partial = path.parent / f"{os.getpid()}-{threading.get_ident()}-{next(self._serial)}{PARTIAL_SUFFIX}"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _write_all(descriptor, parts)
        except BaseException:
            partial.unlink()
            raise
        finally:
            os.close(descriptor)
        return partial

    @contextlib.contextmanager
    def _translated(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            place = self._root / key
            raise StorageError(
                f"cannot {verb} {place}: {error.strerror or error}: free space, mend the permissions, "
                f"or choose another URL"
            ) from error


def _remove_tree(path: Path) -> None:
    """Remove a directory, in which a writer that has not noticed yet may still be making files."""
    for _ in range(_REMOVALS - 1):
        try:
            shutil.rmtree(path)
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}:
                raise
            time.sleep(_REMOVAL_SECONDS)
        if not path.exists():
            return
    shutil.rmtree(path)


def _write_all(descriptor: int, parts: Sequence[Buffer]) -> None:
    views = [view for view in (byte_view(part) for part in parts) if view.nbytes]
    while views:
        written = os.writev(descriptor, views[:_MAX_PARTS])
        while views and written >= views[0].nbytes:
            written -= views.pop(0).nbytes
        if written:
            views[0] = views[0][written:]


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _flush_file_system(descriptor: int) -> None:
    # One flush for all files of an iteration; Python has no syncfs, and fsync of each file costs far more.
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "syncfs"):
        os.sync()
    elif library.syncfs(descriptor) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
