"""Opens a URL as a run, or as a folder of `.pt` files of other tools."""

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
"""Names that a message gives."""

MAX_SHOWN = 100
"""Characters of a path that a message gives where the path is what is wrong."""


class RecordSource(Protocol):
    """What a run and a folder have in common: what questions are asked of."""

    @property
    def url(self) -> str:
        """Where it is, without credentials."""
        ...

    @property
    def iterations(self) -> list[int]:
        """The iterations that are there, ascending."""
        ...

    def select(self, **filters: Any) -> Records:
        """The records whose fields have the values asked for."""
        ...


def open_source(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    *,
    skip_unreadable: bool = False,
    any_name: bool = False,
) -> RecordSource:
    """The run at a URL; where a directory of this machine holds no run but `.pt` files, that folder; or one such file.

    With `any_name` the files may have any name, and hold lists of which the first entry is the tensor.

    Raises:
        RunNotFoundError: there is neither.
        RunFormatError: what is there is not a run, or of a later schema.
        DataError: a file cannot be read, and `skip_unreadable` was not given.
        StorageError: the store cannot be reached or read.
        UsageError: the URL or the options are not usable.
    """
    path = local_path(os.fspath(url))
    mode = None if path is None else _mode(path)
    if path is not None and mode is not None and (stat.S_ISREG(mode) or _is_plain_folder(path, mode)):
        # Runs are opened without the kernels that files need.
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
    """The `.pt` files of a folder, or one of them.

    Raises:
        RunNotFoundError: there is no folder, or no file in it has a name that we know.
        DataError: a file cannot be read, and `skip_unreadable` was not given.
        StorageError: the folder cannot be read.
        UsageError: no file system has such a path.
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
        f"{folder.url} holds no run, and no .pt file under a name of one of the legacy tools"
        + (f" (there is {named})" if named else "")
        + ": give the folder that they wrote to, or one file"
    )


def _check_kind(path: Path, mode: int) -> None:
    """Refuse what is there and can be no run, and say what it is."""
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
    """What kind of file is at a path; None where there is nothing."""
    try:
        return path.stat().st_mode
    except ValueError as error:  # a NUL, or half of a character
        raise UsageError(f"{str(path)[:MAX_SHOWN]!r} is not a path: {error}") from error
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            return None
        shown = f"{str(path)[:MAX_SHOWN]!r}{'...' if len(str(path)) > MAX_SHOWN else ''}"
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"{shown} is not a path: {error.strerror}, at {len(str(path))} characters") from error
        is_refused = isinstance(error, PermissionError)
        kind = AccessDeniedError if is_refused else StorageError
        way_out = "mend the permissions" if is_refused else "check the disk or the file server"
        raise kind(f"{shown} cannot be looked at: {error.strerror or error}: {way_out}") from error


def _is_plain_folder(path: Path, mode: int) -> bool:
    return stat.S_ISDIR(mode) and _mode(path / layout.DOCUMENT) is None


def local_path(url: str) -> Path | None:
    """The path on this machine; None for a URL of a store."""
    protocol, separator, rest = url.partition("://")
    if not separator:
        return Path(url)
    return Path(unquote(rest.removeprefix("localhost"))) if protocol.lower() in {"file", "local"} else None
