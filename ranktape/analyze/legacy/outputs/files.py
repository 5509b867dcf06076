"""Where do the files of a sweep go, under names that nobody can turn against the user?

One directory for each tensor. Its name is made of the tensor's, of which nothing is left that could lead out of the
output directory, hide the files, or be too long; no two tensors share one, on file systems that ignore case neither.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ranktape.errors import AccessDeniedError, NoSpaceError, StorageError
from ranktape.storage.places.failures import FULL, REFUSED, printable

DEFAULT_OUTPUT_DIR = Path("draw/scaling_analysis")
"""Where the directories of tensors go if nobody says where: the place that the seeds name."""

MAX_NAME_NBYTES = 120
"""Longest name of a directory; names of files hold it too, and a file system allows 255 bytes."""

_HASH_LENGTH = 8
_PLAIN = "._-+=@"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFiles:
    """The files about one tensor in one format."""

    folder: Path
    """The directory of the tensor."""
    tensor_name: str
    """The directory's name."""
    format: str
    """The format's name."""

    @property
    def results(self) -> Path:
        """The figures of every level."""
        return self.folder / f"mxfp_scaling_results_{self.format}.txt"

    @property
    def panels(self) -> Path:
        """The plot of six panels."""
        return self.folder / f"mxfp_scaling_test_{self.format}.png"

    @property
    def summary(self) -> Path:
        """The plot of what matters most."""
        return self.folder / f"mxfp_scaling_summary_{self.format}.png"

    @property
    def log(self) -> Path:
        """What was done, said and saved."""
        return self.folder / f"mxfp_scaling_test_{self.tensor_name}_{self.format}.log"


class FolderNames:
    """Names of directories, none of which was given before."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, text: str) -> str:
        """A name that says `text`; with a number behind it where others have taken that name."""
        plain = safe_name(text)
        name, number = plain, 1
        while _key(name) in self._taken:
            number += 1
            name = f"{plain}_{number}"
        self._taken.add(_key(name))
        return name


def titles_of(paths: Sequence[Path]) -> list[str]:
    """The name of each file, with as many folders before it as tell it from the others, if its path does."""
    titles = [path.name for path in paths]
    for depth in range(2, max((len(path.parts) for path in paths), default=0) + 1):
        counts = Counter(titles)
        titles = [
            title if counts[title] == 1 else str(Path(*path.parts[-depth:]))
            for title, path in zip(titles, paths, strict=True)
        ]
    return titles


def safe_name(text: str) -> str:
    """The text as the name of a directory: letters, digits and `._-+=@`; never empty, hidden, or a way up."""
    letters = unicodedata.normalize("NFC", text)
    kept = "".join(letter if letter.isalnum() or letter in _PLAIN else "_" for letter in letters)
    name = kept.lstrip(".-").rstrip(".") or "tensor"
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:  # a file system that has letters of one language only
        name = "".join(letter if letter.isascii() else "_" for letter in name)
        encoded = os.fsencode(name)
    if len(encoded) <= MAX_NAME_NBYTES:
        return name
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_LENGTH]
    start = encoded[: MAX_NAME_NBYTES - _HASH_LENGTH - 1].decode(errors="ignore")
    return f"{start}_{digest}"


def make_folder(folder: Path) -> None:
    """Make a directory and those above it.

    Raises:
        StorageError: it cannot be made; the kind says why.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(error, folder) from error


def write_file(path: Path, data: bytes) -> None:
    """Put a file in its place, whole or not at all.

    Raises:
        StorageError: it cannot be written; the kind says why.
    """
    partial = path.with_name(f".{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        raise write_error(error, path) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def write_error(error: OSError, path: Path) -> StorageError:
    """The error to raise for a file or directory that could not be written."""
    kind, way_out = StorageError, "move aside what is in the way, or give another --output-dir"
    if error.errno in FULL:
        kind, way_out = NoSpaceError, "free space or raise the quota, or give another --output-dir"
    elif error.errno in REFUSED:
        kind, way_out = AccessDeniedError, "mend the permissions, or give another --output-dir"
    return kind(f"{printable(str(path))} cannot be written: {error.strerror or error}: {way_out}")


def _key(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
