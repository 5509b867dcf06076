"""System calls for files that Python's library lacks, or does not make as a run needs them."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from ranktape.errors import StorageError, UsageError
from ranktape.storage.places.backend import Buffer, byte_view
from ranktape.storage.places.failures import printable

_MAX_PARTS = 1024
"""Buffers in one `writev`: IOV_MAX on Linux."""

_REMOVALS = 30
"""Tries to remove a directory before its writers count as unstoppable."""

_REMOVAL_SECONDS = 0.1

_AT_CWD = -100
_RENAME_NOREPLACE = 1


def absolute(path: str) -> str:
    """The whole path of a directory; a `~` at the beginning is the home directory.

    Raises:
        UsageError: no directory can have such a path.
    """
    try:
        full = str(Path(path).expanduser().absolute())
        is_possible = "\0" not in full
        os.fsencode(full)
    except (ValueError, RuntimeError, OSError) as error:  # no such text, no such user, no current directory
        raise UsageError(f"{path!r} cannot be the path of a directory ({error}): give another one") from error
    if not is_possible:
        raise UsageError(f"{path!r} cannot be the path of a directory: it holds a NUL: give another one")
    return full


def not_plain(place: str, mode: int) -> StorageError:
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


def status_of(path: Path) -> os.stat_result | None:
    """What a plain file is; None where it is none, or went away meanwhile."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def open_plain(path: str) -> int:
    """A descriptor to read a plain file with.

    Raises:
        StorageError: a link, a directory or something else is there.
        OSError: it cannot be opened.
    """
    try:
        # Without O_NONBLOCK, to open a pipe is to wait for whoever writes into it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise not_plain(path, stat.S_IFLNK) from error
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise not_plain(path, mode)
    return descriptor


def read_all(descriptor: int, begin: int, stop: int) -> bytes:
    """The bytes of a file from one place to another, fewer where it ends before."""
    parts = []
    while begin < stop:
        part = os.pread(descriptor, stop - begin, begin)
        if not part:
            break
        parts.append(part)
        begin += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def remove_tree(path: Path) -> None:
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


def write_all(descriptor: int, parts: Sequence[Buffer]) -> None:
    """Write all bytes of the parts."""
    views = [view for view in (byte_view(part) for part in parts) if view.nbytes]
    while views:
        written = os.writev(descriptor, views[:_MAX_PARTS])
        while views and written >= views[0].nbytes:
            written -= views.pop(0).nbytes
        if written:
            views[0] = views[0][written:]


def rename_unless_there(source: Path, target: Path) -> None:
    """Rename a file, atomically.

    Raises:
        FileExistsError: something is at the new name.
        OSError: it failed otherwise, or the file system knows no such renaming.
    """
    # Python's rename replaces what is there.
    library = ctypes.CDLL(None, use_errno=True)
    number = errno.ENOSYS
    if hasattr(library, "renameat2"):
        names = os.fsencode(source), os.fsencode(target)
        if library.renameat2(_AT_CWD, names[0], _AT_CWD, names[1], _RENAME_NOREPLACE) == 0:
            return
        number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))


def flush_file_system(descriptor: int) -> None:
    """Bring everything that was written to the file system of an open directory to its disk."""
    # One flush for all files of an iteration; Python has no syncfs, and fsync of each file costs far more.
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "syncfs"):
        os.sync()
    elif library.syncfs(descriptor) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
