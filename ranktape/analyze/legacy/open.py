"""Opens a URL as a run, or as a folder of `.pt` files from other tools."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

from ranktape.errors import AccessDeniedError, RunNotFoundError, StorageError, UsageError
from ranktape.storage.format import layout
from ranktape.storage.records.records import Records
from ranktape.storage.records.run import open_run

if TYPE_CHECKING:
    from ranktape.analyze.legacy.files import Folder

MAX_NAMED = 4
"""The largest number of names in a message."""

MAX_SHOWN = 100
"""The largest number of characters that a message shows of an invalid path."""


class RecordSource(Protocol):
    """The common interface of a run and a folder."""

    @property
    def url(self) -> str:
        """The URL or path, without credentials."""
        ...

    @property
    def iterations(self) -> list[int]:
        """The available iterations in ascending order."""
        ...

    def select(self, **filters: Any) -> Records:
        """The records whose fields match all filters."""
        ...


def open_source(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    *,
    skip_unreadable: bool = False,
    any_name: bool = False,
) -> RecordSource:
    """Open the run at a URL, or a local `.pt` file or folder of such files.

    If `any_name` is true, files can have any name, and can contain lists whose first entry is the tensor.

    Raises:
        RunNotFoundError: there is neither a run nor such a file.
        RunFormatError: the URL is not a run, or its schema is newer.
        DataError: a file cannot be read, and `skip_unreadable` is false.
        StorageError: the store cannot be reached or read.
        UsageError: the URL or the options are invalid.
    """
    path = local_path(os.fspath(url))
    mode = None if path is None else _mode(path)
    if path is not None and mode is not None and (stat.S_ISREG(mode) or _is_plain_folder(path, mode)):
        # Imported here, so that runs open without the compiled kernels that files need.
        from ranktape.analyze.legacy.files import Folder

        folder = Folder(path, skip_unreadable=skip_unreadable, any_name=any_name)
        if len(folder) or folder.unreadable:
            return folder
        if any(name.endswith(".pt") for name in folder.foreign):
            raise RunNotFoundError(_no_names(folder))
    if path is not None and mode is not None:
        _check_kind(path, mode)
    return open_run(url, storage_options=storage_options)


def open_folder(path: str | os.PathLike[str], *, skip_unreadable: bool = False) -> Folder:
    """Open a folder of `.pt` files, or one such file.

    Raises:
        RunNotFoundError: the path does not exist, or no file has a known name.
        DataError: a file cannot be read, and `skip_unreadable` is false.
        StorageError: the folder cannot be read.
        UsageError: the path is invalid on any file system.
    """
    place = Path(path)
    if _mode(place) is None:
        raise RunNotFoundError(f"there is nothing at {place}: check the path")
    from ranktape.analyze.legacy.files import Folder

    folder = Folder(place, skip_unreadable=skip_unreadable)
    if not len(folder) and not folder.unreadable:
        raise RunNotFoundError(_no_names(folder))
    return folder


def _no_names(folder: Folder) -> str:
    named = ", ".join(folder.foreign[:MAX_NAMED])
    return (
        f"{folder.url} contains neither a run nor a .pt file with a name of the legacy tools"
        + (f" (it contains {named})" if named else "")
        + ": give the folder of such files, or one file"
    )


def _check_kind(path: Path, mode: int) -> None:
    """Check that the path can be a run.

    Raises:
        RunNotFoundError: it is a special file, a file without a tensor, or an empty folder.
    """
    if not stat.S_ISDIR(mode):
        what = next((words for is_kind, words in _KINDS if is_kind(mode)), "a file without a tensor")
        raise RunNotFoundError(f"there is no run at {path}: it is {what}; give a run or a folder of .pt files")
    if _is_plain_folder(path, mode) and not any(path.iterdir()):
        raise RunNotFoundError(f"there is no run at {path}: it is an empty folder")


_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def _mode(path: Path) -> int | None:
    """The mode of the file at a path; None if the path does not exist."""
    try:
        return path.stat().st_mode
    except ValueError as error:  # a NUL character or a lone surrogate
        raise UsageError(f"{str(path)[:MAX_SHOWN]!r} is not a path: {error}") from error
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            return None
        shown = f"{str(path)[:MAX_SHOWN]!r}{'...' if len(str(path)) > MAX_SHOWN else ''}"
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"{shown} is not a path: {error.strerror}, at {len(str(path))} characters") from error
        is_refused = isinstance(error, PermissionError)
        kind = AccessDeniedError if is_refused else StorageError
        way_out = "change the permissions" if is_refused else "check the disk or the file server"
        raise kind(f"{shown} cannot be accessed: {error.strerror or error}: {way_out}") from error


def _is_plain_folder(path: Path, mode: int) -> bool:
    return stat.S_ISDIR(mode) and _mode(path / layout.DOCUMENT) is None


def local_path(url: str) -> Path | None:
    """The local path that a URL names; None for a URL of another store."""
    protocol, separator, rest = url.partition("://")
    if not separator:
        return Path(url)
    return Path(unquote(rest.removeprefix("localhost"))) if protocol.lower() in {"file", "local"} else None
