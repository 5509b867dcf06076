"""How does a plot become a file, whole or not at all?"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ranktape.analyze.views.plots.style import FORMS, plot_bytes
from ranktape.errors import AccessDeniedError, NoSpaceError, StorageError, UsageError
from ranktape.storage.places.failures import FULL, REFUSED, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OTHER_FORMS = ("jpg", "jpeg", "gif", "bmp", "tif", "tiff", "webp", "eps", "ps")
"""Ends of names that would promise what is not written."""


def form_of(path: Path) -> str:
    """What is written under a name: png, unless it ends in .svg or .pdf.

    Raises:
        UsageError: it ends as one of a plot of another kind.
    """
    end = path.suffix.lower().lstrip(".")
    if end in OTHER_FORMS:
        raise UsageError(f"--output {printable(str(path))}: no plot is written as .{end}; give .png, .svg or .pdf")
    return end if end in FORMS else "png"


def write_plot(figure: Figure, path: Path) -> None:
    """Draw a plot into its file; an existing one is replaced, folders are made.

    Raises:
        UsageError: the name ends as one of a plot of another kind.
        StorageError: it cannot be written; the kind says why.
    """
    write_whole(path, plot_bytes(figure, form=form_of(path)))


def write_whole(path: Path, data: bytes) -> None:
    """Put a file in its place: readers see the old one or the new one, and never a part.

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
        raise write_error(error, path) from error
    finally:
        if not is_special:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def write_error(error: OSError, path: Path) -> StorageError:
    """The error to raise for a file or folder that could not be written."""
    kind, way_out = StorageError, "move aside what is in the way, or give another --output"
    if error.errno in FULL:
        kind, way_out = NoSpaceError, "free space or raise the quota, or give another --output"
    elif error.errno in REFUSED:
        kind, way_out = AccessDeniedError, "mend the permissions, or give another --output"
    return kind(f"the plot cannot be written to {printable(str(path))}: {error.strerror or error}: {way_out}")
