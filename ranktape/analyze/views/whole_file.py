"""Writes a file whole or not at all, and says why where it cannot be written."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from ranktape.errors import AccessDeniedError, NoSpaceError, StorageError
from ranktape.storage.places.failures import FULL, REFUSED, printable


def write_whole(path: Path, data: bytes, *, what: str = "plot") -> None:
    """Put a file in its place: readers see the old one or the new one, and never a part.

    `what` it is stands in the error.

    Raises:
        StorageError: it cannot be written; the kind says why.
    """
    # What is no file, as /dev/stdout, cannot be replaced by one.
    is_special = path.exists() and not path.is_file() and not path.is_dir()
    partial = path if is_special else path.with_name(f".{path.name[:100]}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        if not is_special:
            partial.replace(path)
    except OSError as error:
        raise write_error(error, path, what=what) from error
    finally:
        if not is_special:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def write_error(error: OSError, path: Path, *, what: str = "plot") -> StorageError:
    """The error to raise for a file or folder that could not be written."""
    kind, way_out = StorageError, "move aside what is in the way, or give another --output"
    if error.errno in FULL:
        kind, way_out = NoSpaceError, "free space or raise the quota, or give another --output"
    elif error.errno in REFUSED:
        kind, way_out = AccessDeniedError, "mend the permissions, or give another --output"
    why = error.strerror or os.strerror(error.errno or errno.EIO)
    return kind(f"the {what} cannot be written to {printable(str(path))}: {why}: {way_out}")
