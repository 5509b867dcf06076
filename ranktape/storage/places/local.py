"""Keeps a run in a local directory.

Objects are files. A file is written under another name beside its place and renamed, so that nobody sees
half of it; `os.link` creates it only if it is not there. No executor and no event loop is involved, so
writing works until the last line of a process. NFS and Lustre answer some requests twice or with `ESTALE`:
a rename that was done counts as done whatever was answered, and `retry.py` tries the others again.

Only plain files are objects. A run may come from a stranger: symbolic links below its root are not followed, for they
could name any file of this machine, and pipes and devices are not read, for they never end.

Not in our hands: a hard-mounted NFS whose server is away holds the process inside the system call, beyond any deadline
of ours; and a client may believe for as long as its attribute cache lasts (`acdirmax`, a minute) that a file of another
host is not there yet.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ranktape.errors import StorageError
from ranktape.storage.places.backend import Backend, Buffer, ObjectInfo, is_text, range_within, refuse_escape, too_large
from ranktape.storage.places.failures import local_error, printable
from ranktape.storage.places.local_files import (
    absolute,
    flush_file_system,
    not_plain,
    open_plain,
    read_all,
    remove_tree,
    rename_unless_there,
    status_of,
    write_all,
)

PARTIAL_SUFFIX = ".partial"
"""Ends the names of files that are being written; a crash can leave them behind, and readers pass them over."""

_FOLDER_TRIES = 10
"""How often a folder is made for a file before its absence is an error."""
_MAX_REMEMBERED = 4096
"""Folders that are known to be there; a long capture makes one for each large tensor."""

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
"""What a file system answers that has no hard links."""

_NO_RENAMES = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
"""What one answers that cannot rename without replacing."""


class LocalBackend(Backend):
    """A run in a directory; the `Backend` over plain files."""

    def __init__(self, path: str) -> None:
        """A `~` at the beginning is the home directory.

        Raises:
            UsageError: no directory can have such a path.
        """
        self.url = absolute(path)
        self.is_shared = True
        self._root = Path(self.url)
        self._made: set[Path] = set()
        self._serial = itertools.count()

    def __reduce__(self) -> tuple[type[LocalBackend], tuple[str]]:
        return LocalBackend, (self.url,)

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """Write a file of the joined parts, atomically."""
        with self._translated("write", key), self._partial(key, parts) as (partial, inode):
            try:
                partial.rename(self._root / key)
            except OSError:
                # A file server that lost its answer is asked again, and says that there is nothing to rename.
                status = status_of(self._root / key)
                if status is None or status.st_ino != inode:
                    raise
                partial.unlink(missing_ok=True)

    def create(self, key: str, data: bytes) -> bool:
        """Write a file if there is none, atomically; False if there was one."""
        with self._translated("write", key), self._partial(key, [data]) as (partial, _):
            try:
                os.link(partial, self._root / key)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return _rename_new(partial, self._root / key)
            finally:
                partial.unlink(missing_ok=True)
            return True

    def get(self, key: str, *, max_nbytes: int | None = None) -> bytes | None:
        """The bytes of a file; None where there is none."""

        def whole(size: int) -> tuple[int, int]:
            if max_nbytes is not None and size > max_nbytes:
                raise too_large(str(self._root / key), max_nbytes)
            return 0, size

        return self._read(key, whole)

    def get_range(self, key: str, start: int, nbytes: int) -> bytes | None:
        """Some bytes of a file, clipped to what it has; None where there is none."""
        return self._read(key, lambda size: range_within(size, start, nbytes))

    def size(self, key: str) -> int | None:
        """The bytes that a file has; None where there is none."""
        with self._translated("read", key):
            status = status_of(self._place(key))
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
            try:
                names = [entry.name for entry in self._folder(prefix).iterdir()]
                return sorted(name for name in names if is_text(name) and not name.endswith(PARTIAL_SUFFIX))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def delete(self, prefix: str) -> None:
        """Remove a directory with everything in it, or the contents of the root."""
        with self._translated("delete", prefix):
            self._made.clear()
            # The root itself stays: it may be a mount, or a directory that the user made with care.
            for path in [self._place(prefix)] if prefix else self._everything():
                if path.is_dir() and not path.is_symlink():
                    remove_tree(path)
                else:
                    path.unlink(missing_ok=True)

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Remove many files, and the directories that nothing is left in."""
        self._made.clear()
        for key in keys:
            with self._translated("delete", key):
                self._unlink(self._place(key))

    def list_debris(self) -> list[ObjectInfo]:
        """Partial files, of crashed writers and of those still at it."""
        with self._translated("list", ""):
            return list(self._list("", are_partial=True))

    def remove_debris(self, debris: Sequence[ObjectInfo]) -> None:
        """Remove partial files, and the directories that nothing is left in."""
        self.delete_keys([one.key for one in debris if one.key.endswith(PARTIAL_SUFFIX)])

    def flush(self) -> None:
        """Flush the file system that holds the run to its disk, once for all files."""
        with self._translated("flush", ""):
            descriptor = os.open(self._root, os.O_RDONLY)
            try:
                flush_file_system(descriptor)
            finally:
                os.close(descriptor)

    def _place(self, key: str) -> Path:
        """Where a key lies; keys come from what others have stored, too, and must not lead out of the run."""
        refuse_escape(self.url, key)
        path = self._root / key
        if path.parent not in self._made:
            self._refuse_links(key.split("/")[:-1])
        return path

    def _folder(self, prefix: str) -> Path:
        """Where the keys below a prefix lie."""
        refuse_escape(self.url, prefix)
        self._refuse_links(prefix.split("/"))
        return self._root / prefix

    def _everything(self) -> list[Path]:
        try:
            return list(self._root.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _refuse_links(self, names: Sequence[str]) -> None:
        folder = str(self._root)
        for name in names:
            folder = f"{folder}/{name}"
            try:
                mode = os.stat(folder, follow_symlinks=False).st_mode  # noqa: PTH116  # a third of Path's time
            except (FileNotFoundError, NotADirectoryError):
                return
            if stat.S_ISLNK(mode):
                raise not_plain(folder, mode)

    def _read(self, key: str, choose: Callable[[int], tuple[int, int]]) -> bytes | None:
        """The part of a plain file that is chosen by its size."""
        with self._translated("read", key):
            try:
                descriptor = open_plain(str(self._place(key)))
            except (FileNotFoundError, NotADirectoryError):
                return None
            try:
                return read_all(descriptor, *choose(os.fstat(descriptor).st_size))
            finally:
                os.close(descriptor)

    def _files(self, prefix: str) -> Iterator[str]:
        """The paths of all plain files below a directory, relative to it, partial ones too.

        Names that are no text are no keys, and links are not followed.
        """
        top = self._folder(prefix)
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
                status = status_of(self._root / prefix / path)
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
    def _partial(self, key: str, parts: Sequence[Buffer]) -> Iterator[tuple[Path, int]]:
        """A file of the joined parts beside the key's place, and its inode; gone if what follows fails."""
        path = self._place(key)
        # The name's length must not grow with the key's last segment, which may be as long as names can be.
        partial = path.parent / f"{os.getpid()}-{threading.get_ident()}-{next(self._serial)}{PARTIAL_SUFFIX}"
        descriptor = self._open_new(partial)
        try:
            try:
                write_all(descriptor, parts)
                inode = os.fstat(descriptor).st_ino
            finally:
                os.close(descriptor)
            yield partial, inode
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _open_new(self, path: Path) -> int:
        """A descriptor of a file that is made, with its folder where that is not there."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        if path.parent in self._made:
            try:
                return os.open(path, flags, 0o666)
            except FileNotFoundError:
                self._made.discard(path.parent)  # another process has removed the folder since
                self._refuse_links(path.relative_to(self._root).parts[:-1])
        if len(self._made) >= _MAX_REMEMBERED:
            self._made.clear()
        for _ in range(_FOLDER_TRIES - 1):
            # Who removes the last file of a folder removes the folder, perhaps between these two.
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                return self._made_with_folder(path, flags)
        return self._made_with_folder(path, flags)

    def _made_with_folder(self, path: Path, flags: int) -> int:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, flags, 0o666)
        self._made.add(path.parent)
        return descriptor

    @contextlib.contextmanager
    def _translated(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise local_error(error, verb=verb, place=str(self._root / key)) from error


def _rename_new(partial: Path, target: Path) -> bool:
    """As `create`, where the file system has no hard links."""
    try:
        rename_unless_there(partial, target)
    except FileExistsError:
        return False
    except FileNotFoundError:
        # Where the answer was lost, and it was asked again, what was renamed is gone, and there.
        if not target.exists():
            raise
        return False
    except OSError as error:
        if error.errno not in _NO_RENAMES:
            raise
        raise StorageError(
            f"cannot write {printable(str(target))}: its file system has neither hard links nor another "
            f"way to create a file only if there is none: choose a directory on another file system, or another URL"
        ) from error
    return True
