"""Keeps a run in a local directory.

Objects are files. A file is written under another name beside its place and renamed, so that nobody sees
half of it; `os.link` creates it only if it is not there. No event loop is involved, so writing works until the last
line of a process. NFS and Lustre answer some requests twice or with `ESTALE`:
a rename that was done counts as done whatever was answered, and `RetryingBackend` tries the others again.

Only plain files are objects: links to files are not followed, links to folders are not listed, nothing is deleted
through one, and pipes and devices are not read, for they never end.

Not in our hands: a hard-mounted NFS whose server is away holds the process inside the system call, beyond any deadline
of ours; and a client may believe for as long as its attribute cache lasts (`acdirmax`, a minute) that a file of another
host is not there yet.
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
"""Ends the names of files that are being written; a crash can leave them behind, and readers pass them over."""

_FOLDER_TRIES = 10
"""How often a folder is made for a file before its absence is an error."""

_MAX_UNFLUSHED = 1 << 16
"""More files than this are not remembered: everything is flushed. A capture writes fewer in an iteration."""

_FLUSH_THREADS = 8
"""Files flushed at once: a journal takes them together."""

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
"""What a file system answers that has no hard links."""

_NO_RENAMES = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
"""What one answers that cannot rename without replacing."""

_MAX_PARTS = 1024
"""Buffers in one `writev`: IOV_MAX on Linux."""

_TOGETHER_NBYTES = 1 << 19
"""Parts are written together up to this size."""

_EARLY_NBYTES = 1 << 20
"""From this size on files go to the disk while others are written."""

_REMOVALS = 30
"""Tries to remove a directory before its writers count as unstoppable."""

_REMOVAL_SECONDS = 0.1

_AT_CWD = -100
_RENAME_NOREPLACE = 1
_SYNC_FILE_RANGE_WRITE = 2


class LocalBackend(Backend):
    """A run in a directory; the `Backend` over plain files."""

    def __init__(self, path: str) -> None:
        """A `~` at the beginning is the home directory.

        Raises:
            UsageError: no directory can have such a path.
        """
        self.url = _absolute(path)
        self.is_shared = True
        self._root = Path(self.url)
        self._folder = self.url.rstrip("/") + "/"
        self._serial = itertools.count()
        # Without a lock: a forked process could inherit it locked.
        self._unflushed: deque[str] = deque()
        self._flushing: dict[int, threading.RLock] = {}

    def __reduce__(self) -> tuple[type[LocalBackend], tuple[str]]:
        return LocalBackend, (self.url,)

    def put(self, key: str, parts: Iterable[Buffer]) -> None:
        """Write a file of the joined parts, atomically."""
        path = self._path(key)
        with self._translated("write", key), self._partial(path, parts) as (partial, inode):
            try:
                os.rename(partial, path)  # noqa: PTH104  # making a `Path` takes longer than the renaming
            except OSError:
                # A file server that lost its answer is asked again, and says that there is nothing to rename.
                status = _status_of(path)
                if status is None or status.st_ino != inode:
                    raise
                Path(partial).unlink(missing_ok=True)

    def create(self, key: str, data: bytes) -> bool:
        """Write a file if there is none, atomically; False if there was one."""
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
        """The bytes of a file; None where there is none."""

        def whole(size: int) -> tuple[int, int]:
            if max_nbytes is not None and size > max_nbytes:
                raise too_large(self._path(key), max_nbytes)
            return 0, size

        return self._read(key, whole)

    def get_range(self, key: str, start: int, nbytes: int) -> bytes | None:
        """Some bytes of a file, clipped to what it has; None where there is none."""
        return self._read(key, lambda size: range_within(size, start, nbytes))

    def size(self, key: str) -> int | None:
        """The bytes that a file has; None where there is none."""
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
        """Remove a directory with everything in it, or the contents of the root."""
        with self._translated("delete", prefix):
            # The root itself stays: it may be a mount, or a directory that the user made with care.
            paths = [self._within(prefix)] if prefix else [self._root / name for name in _names(self._root)]
            for path in paths:
                if path.is_dir() and not path.is_symlink():
                    _remove_tree(path)
                else:
                    path.unlink(missing_ok=True)

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Remove many files, and the directories that nothing is left in."""
        for key in keys:
            with self._translated("delete", key):
                self._unlink(self._within(key))

    def list_debris(self) -> list[ObjectInfo]:
        """Partial files, of crashed writers and of those still at it."""
        with self._translated("list", ""):
            return list(self._list("", are_partial=True))

    def remove_debris(self, debris: Sequence[ObjectInfo]) -> None:
        """Remove partial files, and the directories that nothing is left in."""
        self.delete_keys([one.key for one in debris if one.key.endswith(PARTIAL_SUFFIX)])

    def flush(self) -> None:
        """Flush the files that this backend has written since the last time, and their directories, to the disk.

        Not whole file systems, unless the files are very many: that would wait for whatever others have written.
        """
        # What another thread is flushing must be on the disk, too. Each process has a lock of its own.
        with self._flushing.setdefault(os.getpid(), threading.RLock()):
            are_all_known, paths = len(self._unflushed) <= _MAX_UNFLUSHED, set[str]()
            with contextlib.suppress(IndexError):  # until it is empty
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
        """The directories that files lie in, up to the one that holds the run."""
        folders = {str(self._root.parent)}
        for path in paths:
            folder = path
            while (folder := folder.rpartition("/")[0]).startswith(self.url) and folder not in folders:
                folders.add(folder)
        return folders

    def _path(self, key: str) -> str:
        """Where a key lies; keys come from what others have stored, too, and must not lead out of the run."""
        refuse_escape(self.url, key)
        return self._folder + key

    def _within(self, key: str) -> Path:
        """The same of what is to be deleted: nothing is, through a link that leads out of the run."""
        path = Path(self._path(key))
        if not path.parent.resolve().is_relative_to(self._root.resolve()):
            raise _not_plain(str(path.parent), stat.S_IFLNK)
        return path

    def _read(self, key: str, choose: Callable[[int], tuple[int, int]]) -> bytes | None:
        """The part of a plain file that is chosen by its size."""
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
        """The paths of all plain files below a directory, relative to it, partial ones too.

        Names that are no text are no keys, and links are not followed.
        """
        top = Path(self._path(prefix))
        folders = [""]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(top / folder) as entries:
                    found = [entry for entry in entries if is_text(entry.name)]
            except (FileNotFoundError, NotADirectoryError):
                continue
            folders += [f"{folder}{entry.name}/" for entry in found if entry.is_dir(follow_symlinks=False)]
            yield from (f"{folder}{entry.name}" for entry in found if entry.is_file(follow_symlinks=False))

    def _list(self, prefix: str, *, are_partial: bool) -> Iterator[ObjectInfo]:
        """The files below a directory that are partial, or are not, sorted; those that went away are left out."""
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
                return  # it still holds something, or is gone already

    @contextlib.contextmanager
    def _partial(self, path: str, parts: Iterable[Buffer]) -> Iterator[tuple[str, int]]:
        """A file of the joined parts beside a path, and its inode; gone if what follows fails."""
        # The name's length must not grow with the last one of the path, which may be as long as names can be.
        name = f"{os.getpid()}-{threading.get_ident()}-{next(self._serial)}{PARTIAL_SUFFIX}"
        partial = f"{path.rpartition('/')[0]}/{name}"
        descriptor = _open_new(partial)
        try:
            try:
                _write_all(descriptor, parts)
                status = os.fstat(descriptor)
                if status.st_size >= _EARLY_NBYTES and hasattr(_library(), "sync_file_range"):
                    # On its way to the disk before `flush` waits for it. Not every file system can: no failure.
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
    """As `create`, where the file system has no hard links; Python's own rename replaces what is there."""
    number = errno.ENOSYS
    if hasattr(_library(), "renameat2"):
        names = os.fsencode(source), os.fsencode(target)
        if _library().renameat2(_AT_CWD, names[0], _AT_CWD, names[1], _RENAME_NOREPLACE) == 0:
            return True
        number = ctypes.get_errno()
    # Where the answer was lost, and it was asked again, what was renamed is gone, and there.
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
    """The whole path of a directory; a `~` at the beginning is the home directory."""
    try:
        full = str(Path(path).expanduser().absolute())
        os.fsencode(full)
        if "\0" in full:
            raise ValueError("it holds a NUL")
    except (ValueError, RuntimeError, OSError) as error:  # no such text, no such user, no current directory
        raise UsageError(f"{path!r} cannot be the path of a directory ({error}): give another one") from error
    return full


def _not_plain(place: str, mode: int) -> StorageError:
    """The error for what is neither a file nor a directory, or a directory in the place of a file."""
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
    """What a plain file is; None where it is none, or went away meanwhile."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _open_plain(path: str) -> int:
    """A descriptor to read a plain file with."""
    try:
        # Without O_NONBLOCK, to open a pipe is to wait for whoever writes into it.
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
    """The bytes of a file from one place to another, fewer where it ends before."""
    parts = []
    while begin < stop:
        part = os.pread(descriptor, stop - begin, begin)
        if not part:
            break
        parts.append(part)
        begin += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


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


def _write_all(descriptor: int, parts: Iterable[Buffer]) -> None:
    """Write all bytes of the parts, large ones as soon as they are made, small ones together."""
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
    """Bring files to the disk, several at once, and then the entries of their directories."""
    for places, work in ((paths, os.fdatasync), (folders, os.fsync)):
        flush = functools.partial(_flush_one, work=work)
        try:
            with ThreadPoolExecutor(_FLUSH_THREADS) as pool:
                list(pool.map(flush, places))
        except RuntimeError:  # no thread can be started in the last lines of a process
            list(map(flush, places))


def _flush_one(path: str, *, work: Callable[[int], object]) -> None:
    """Flush a file that is still there, or the entries of a directory, where the file system knows how and we may."""
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
    """A descriptor of a file that is made, with its folder where that is not there."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    for _ in range(_FOLDER_TRIES):
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags, 0o666)
        # Who removes the last file of a folder removes the folder, perhaps between these two.
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            os.makedirs(path.rpartition("/")[0], exist_ok=True)  # noqa: PTH103  # as above
    return os.open(path, flags, 0o666)
