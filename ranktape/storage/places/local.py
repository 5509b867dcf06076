"""A store in a local directory.

Objects are files. A file is written under a temporary name in its directory and renamed, so that readers never see a
part of it; `os.link` creates it only if it does not exist. No event loop is involved, so that writing works until the
end of a process. NFS and Lustre answer some requests twice or with `ESTALE`: a rename that took place is a success
whatever the answer, and `RetryingBackend` retries other requests.

Only regular files are objects. Links to files are not followed, links to directories are not listed, nothing is deleted
through a link, and pipes and devices, which may never end, are not read.

Two cases are beyond control: a hard-mounted NFS without its server blocks the process in the system call, beyond any
deadline; and a client may not see a new file of another host until its attribute cache expires (`acdirmax`, a minute).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import os
import shutil
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ranktape.errors import StorageError, UsageError
from ranktape.storage.places.backend import (
    Backend,
    Buffer,
    ObjectInfo,
    byte_view,
    is_text,
    range_within,
    refuse_escape,
    too_large,
)
from ranktape.storage.places.failures import local_error, printable

PARTIAL_SUFFIX = ".partial"
"""The suffix of files that are being written. A crash can leave them behind; readers ignore them."""

_FOLDER_TRIES = 10
"""The number of attempts to create the directory of a file."""

_MAX_UNFLUSHED = 1 << 16
"""The number of unflushed files above which whole file systems are flushed. An iteration writes fewer files."""

_FLUSH_THREADS = 8
"""The number of files that are flushed concurrently, so that the journal combines them."""

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
"""The errors of a file system without hard links."""

_NO_RENAMES = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
"""The errors of a file system that cannot rename without replacing."""

_MAX_PARTS = 1024
"""The largest number of buffers of one `writev`: IOV_MAX on Linux."""

_TOGETHER_NBYTES = 1 << 19
"""The size up to which parts are written together, in bytes."""

_EARLY_NBYTES = 1 << 20
"""The size from which the flush of a file starts right after its write, in bytes."""

_REMOVALS = 30
"""The number of attempts to delete a directory into which others still write."""

_REMOVAL_SECONDS = 0.1

_AT_CWD = -100
_RENAME_NOREPLACE = 1
_SYNC_FILE_RANGE_WRITE = 2


class LocalBackend(Backend):
    """The `Backend` over the files of a directory."""

    def __init__(self, path: str) -> None:
        """Use a directory. A leading `~` is the home directory.

        Raises:
            UsageError: no directory can have the path.
        """
        self.url = _absolute(path)
        self.is_shared = True
        self._root = Path(self.url)
        self._folder = self.url.rstrip("/") + "/"
        self._serial = itertools.count()
        # Without a lock, because a forked process could inherit it in the locked state.
        self._unflushed: deque[str] = deque()
        self._flushing: dict[int, threading.RLock] = {}

    def __reduce__(self) -> tuple[type[LocalBackend], tuple[str]]:
        return LocalBackend, (self.url,)

    def put(self, key: str, parts: Iterable[Buffer]) -> None:
        """Write a file from parts, atomically."""
        path = self._path(key)
        with self._translated("write", key), self._partial(path, parts) as (partial, inode):
            try:
                os.rename(partial, path)  # noqa: PTH104  # making a `Path` takes longer than the renaming
            except OSError:
                # If the answer of a file server was lost, the repeated request finds nothing to rename.
                status = _status_of(path)
                if status is None or status.st_ino != inode:
                    raise
                Path(partial).unlink(missing_ok=True)

    def create(self, key: str, data: bytes) -> bool:
        """Write a file if it does not exist, atomically; False if it exists."""
        path = self._path(key)
        with self._translated("write", key), self._partial(path, [data]) as (partial, _):
            try:
                os.link(partial, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return _rename_new(partial, path)
            finally:
                Path(partial).unlink(missing_ok=True)
            return True

    def get(self, key: str, *, max_nbytes: int | None = None) -> bytes | None:
        """The bytes of a file; None if it does not exist."""

        def whole(size: int) -> tuple[int, int]:
            if max_nbytes is not None and size > max_nbytes:
                raise too_large(self._path(key), max_nbytes)
            return 0, size

        return self._read(key, whole)

    def get_range(self, key: str, start: int, nbytes: int) -> bytes | None:
        """Some bytes of a file, clipped to its size; None if it does not exist."""
        return self._read(key, lambda size: range_within(size, start, nbytes))

    def size(self, key: str) -> int | None:
        """The size of a file, in bytes; None if it does not exist."""
        with self._translated("read", key):
            status = _status_of(self._path(key))
            return status.st_size if status else None

    def list_keys(self, prefix: str) -> list[str]:
        """The paths of all files below a directory, relative to it, sorted."""
        with self._translated("list", prefix):
            return sorted(path for path in self._files(prefix) if not path.endswith(PARTIAL_SUFFIX))

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        """All files below a directory with size and time, sorted by key."""
        with self._translated("list", prefix):
            return list(self._list(prefix, are_partial=False))

    def list_names(self, prefix: str) -> list[str]:
        """The names of everything in a directory, sorted."""
        with self._translated("list", prefix):
            names = _names(self._path(prefix))
            return sorted(name for name in names if is_text(name) and not name.endswith(PARTIAL_SUFFIX))

    def delete(self, prefix: str) -> None:
        """Delete a directory with its contents, or the contents of the root."""
        with self._translated("delete", prefix):
            # The root itself remains, because it may be a mount or a directory with special permissions.
            paths = [self._within(prefix)] if prefix else [self._root / name for name in _names(self._root)]
            for path in paths:
                if path.is_dir() and not path.is_symlink():
                    _remove_tree(path)
                else:
                    path.unlink(missing_ok=True)

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Delete many files, and directories that become empty."""
        for key in keys:
            with self._translated("delete", key):
                self._unlink(self._within(key))

    def list_unfinished(self) -> list[ObjectInfo]:
        """Partial files, including those of running writers."""
        with self._translated("list", ""):
            return list(self._list("", are_partial=True))

    def remove_unfinished(self, debris: Sequence[ObjectInfo]) -> None:
        """Delete partial files, and directories that become empty."""
        self.delete_keys([file.key for file in debris if file.key.endswith(PARTIAL_SUFFIX)])

    def flush(self) -> None:
        """Flush the files that this backend has written since the last flush, and their directories, to the disk.

        Whole file systems, which may have much data of others, are flushed only if there are very many files.
        """
        # Files that another thread is flushing must also be on the disk. Each process has its own lock.
        with self._flushing.setdefault(os.getpid(), threading.RLock()):
            are_all_known, paths = len(self._unflushed) <= _MAX_UNFLUSHED, set[str]()
            with contextlib.suppress(IndexError):  # the deque is empty
                while True:
                    paths.add(self._unflushed.popleft())
            try:
                with self._translated("flush", ""):
                    if not are_all_known:
                        os.sync()
                    elif paths:
                        _flush(paths, folders=self._folders_of(paths))
            except StorageError:
                self._unflushed.extend(paths)
                raise

    def _folders_of(self, paths: Iterable[str]) -> set[str]:
        """The directories of files, up to the parent of the run."""
        folders = {str(self._root.parent)}
        for path in paths:
            folder = path
            while (folder := folder.rpartition("/")[0]).startswith(self.url) and folder not in folders:
                folders.add(folder)
        return folders

    def _path(self, key: str) -> str:
        """The path of a key. Keys may come from documents, which are not trusted, and must not lead out of the run."""
        refuse_escape(self.url, key)
        return self._folder + key

    def _within(self, key: str) -> Path:
        """The path of a key to delete. Nothing is deleted through a link that leads out of the run."""
        path = Path(self._path(key))
        if not path.parent.resolve().is_relative_to(self._root.resolve()):
            raise _not_plain(str(path.parent), stat.S_IFLNK)
        return path

    def _read(self, key: str, choose: Callable[[int], tuple[int, int]]) -> bytes | None:
        """The range of a regular file that `choose` gives for its size."""
        with self._translated("read", key):
            try:
                descriptor = _open_plain(self._path(key))
            except (FileNotFoundError, NotADirectoryError):
                return None
            try:
                return _read_all(descriptor, *choose(os.fstat(descriptor).st_size))
            finally:
                os.close(descriptor)

    def _files(self, prefix: str) -> Iterator[str]:
        """The paths of all regular files below a directory, relative to it, including partial ones.

        Names that are not valid text are not keys. Links are not followed.
        """
        top = Path(self._path(prefix))
        folders = [""]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(top / folder) as entries:
                    files = [entry for entry in entries if is_text(entry.name)]
            except (FileNotFoundError, NotADirectoryError):
                continue
            folders += [f"{folder}{entry.name}/" for entry in files if entry.is_dir(follow_symlinks=False)]
            yield from (f"{folder}{entry.name}" for entry in files if entry.is_file(follow_symlinks=False))

    def _list(self, prefix: str, *, are_partial: bool) -> Iterator[ObjectInfo]:
        """The files below a directory, either partial or complete ones, sorted. Deleted ones are omitted."""
        for path in sorted(self._files(prefix)):
            if path.endswith(PARTIAL_SUFFIX) is are_partial:
                status = _status_of(self._root / prefix / path)
                if status is not None:
                    yield ObjectInfo(key=path, nbytes=status.st_size, modified=status.st_mtime)

    def _unlink(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
        for folder in path.parents:
            if folder == self._root or self._root not in folder.parents:
                return
            try:
                folder.rmdir()
            except OSError:
                return  # it is not empty, or does not exist

    @contextlib.contextmanager
    def _partial(self, path: str, parts: Iterable[Buffer]) -> Iterator[tuple[str, int]]:
        """A temporary file with the parts, in the directory of a path, and its inode; deleted if the block fails."""
        # The length of the name must not depend on that of the file, which may be as long as names can be.
        name = f"{os.getpid()}-{threading.get_ident()}-{next(self._serial)}{PARTIAL_SUFFIX}"
        partial = f"{path.rpartition('/')[0]}/{name}"
        descriptor = _open_new(partial)
        try:
            try:
                _write_all(descriptor, parts)
                status = os.fstat(descriptor)
                if status.st_size >= _EARLY_NBYTES and hasattr(_library(), "sync_file_range"):
                    # Start writing to the disk before `flush` waits for it. Not every file system supports this.
                    whole = ctypes.c_int64(0), ctypes.c_int64(0)
                    _library().sync_file_range(descriptor, *whole, _SYNC_FILE_RANGE_WRITE)
            finally:
                os.close(descriptor)
            yield partial, status.st_ino
            if len(self._unflushed) <= _MAX_UNFLUSHED:
                self._unflushed.append(path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def _translated(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise local_error(error, verb=verb, place=(self._folder + key).rstrip("/")) from error


def _rename_new(source: str, target: str) -> bool:
    """Rename without replacing, for file systems without hard links. Python's own rename replaces."""
    number = errno.ENOSYS
    if hasattr(_library(), "renameat2"):
        names = os.fsencode(source), os.fsencode(target)
        if _library().renameat2(_AT_CWD, names[0], _AT_CWD, names[1], _RENAME_NOREPLACE) == 0:
            return True
        number = ctypes.get_errno()
    # If the answer was lost and the request repeated, the source is gone and the target exists.
    if number == errno.EEXIST or (number == errno.ENOENT and Path(target).exists()):
        return False
    error = OSError(number, os.strerror(number))
    if number not in _NO_RENAMES:
        raise error
    raise StorageError(
        f"cannot write {printable(target)}: its file system has neither hard links nor another way to create a file "
        f"only if there is none: choose a directory on another file system, or another URL"
    ) from error


def _absolute(path: str) -> str:
    """The absolute path of a directory. A leading `~` is the home directory."""
    try:
        full = str(Path(path).expanduser().absolute())
        os.fsencode(full)
        if "\0" in full:
            raise ValueError("it holds a NUL")
    except (ValueError, RuntimeError, OSError) as error:  # NUL in the path, unknown user, no current directory
        raise UsageError(f"{path!r} cannot be the path of a directory ({error}): give another one") from error
    return full


def _not_plain(place: str, mode: int) -> StorageError:
    """The error for a path that is not a regular file."""
    if stat.S_ISLNK(mode):
        return StorageError(
            f"{printable(place)} is a symbolic link, which is not followed inside of a run, since it can lead "
            f"anywhere: put what it means in its place (cp -rL copies a run so)"
        )
    kind = "a directory" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
    return StorageError(
        f"{printable(place)} is {kind} and not a file: move aside what is in the way, or choose another URL"
    )


def _names(folder: str | Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208  # making a `Path` of each takes longer
    except (FileNotFoundError, NotADirectoryError):
        return []


def _status_of(path: str | Path) -> os.stat_result | None:
    """The status of a regular file; None if it does not exist or is not a regular file."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _open_plain(path: str) -> int:
    """Open a regular file for reading."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_plain(path, stat.S_IFLNK) from error
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _not_plain(path, mode)
    return descriptor


def _read_all(descriptor: int, begin: int, stop: int) -> bytes:
    """The bytes of a file from `begin` to `stop`; fewer if the file is shorter."""
    parts = []
    while begin < stop:
        part = os.pread(descriptor, stop - begin, begin)
        if not part:
            break
        parts.append(part)
        begin += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _remove_tree(path: Path) -> None:
    """Delete a directory in which a writer may still create files."""
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


def _write_all(descriptor: int, parts: Iterable[Buffer]) -> None:
    """Write all parts: large ones as soon as they are created, small ones together."""
    views: list[memoryview] = []
    nbytes = 0
    for view in map(byte_view, parts):
        views.append(view)
        nbytes += view.nbytes
        if nbytes >= _TOGETHER_NBYTES or len(views) == _MAX_PARTS:
            _write_views(descriptor, views)
            views, nbytes = [], 0
    _write_views(descriptor, views)


def _write_views(descriptor: int, views: list[memoryview]) -> None:
    while views:
        written = os.writev(descriptor, views)
        while views and written >= views[0].nbytes:
            written -= views.pop(0).nbytes
        if written:
            views[0] = views[0][written:]


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _flush(paths: Collection[str], *, folders: Collection[str]) -> None:
    """Flush files to the disk, several concurrently, and then their directories."""
    for targets, work in ((paths, os.fdatasync), (folders, os.fsync)):
        flush = functools.partial(_flush_one, work=work)
        try:
            with ThreadPoolExecutor(_FLUSH_THREADS) as pool:
                list(pool.map(flush, targets))
        except RuntimeError:  # no thread can be started at the end of a process
            list(map(flush, targets))


def _flush_one(path: str, *, work: Callable[[int], object]) -> None:
    """Flush a file or a directory, if it still exists and the file system supports and permits it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            work(descriptor)
        finally:
            os.close(descriptor)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if work is os.fdatasync or error.errno not in {errno.EINVAL, errno.EACCES, errno.EPERM}:
            raise


def _open_new(path: str) -> int:
    """Create and open a file, and its directory if it does not exist."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    for _ in range(_FOLDER_TRIES):
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags, 0o666)
        # Another process that deletes the last file of the directory may delete the directory between these two steps.
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            os.makedirs(path.rpartition("/")[0], exist_ok=True)  # noqa: PTH103  # as above
    return os.open(path, flags, 0o666)
