"""Terminal output with unsafe characters escaped, and files that are written atomically."""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import click

from ranktape.errors import AccessDeniedError, NoSpaceError, StorageError
from ranktape.storage.places.failures import FULL, REFUSED, printable

MAX_TEXT_ROWS = 20
"""Maximum number of rows that a terminal shows by default."""


class Form(enum.StrEnum):
    """The format of an answer: aligned columns, one JSON document, or CSV."""

    TEXT, JSON, CSV = "text", "json", "csv"


def say(text: str, *, err: bool = False) -> None:
    """Write lines to stdout or stderr. Control codes and characters that the terminal cannot show are escaped."""
    click.echo(encodable(printable_lines(text), sys.stderr if err else sys.stdout), err=err)


@contextlib.contextmanager
def passing_line(text: str) -> Iterator[None]:
    """A line on stderr that is erased after the block. stderr is a terminal."""
    # The cursor returns at once, so that a progress bar replaces the line.
    click.echo(f"{encodable(printable(text), sys.stderr)}\r", err=True, nl=False)
    try:
        yield
    finally:
        click.echo("\x1b[2K\r", err=True, nl=False)


def say_json(document: Any) -> None:
    """Write one JSON document to stdout. Characters outside ASCII are escaped."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def printable_lines(text: str) -> str:
    """The text with control codes escaped, except line breaks."""
    return "\n".join(map(printable, text.split("\n")))


def encodable(text: str, stream: IO[str]) -> str:
    """The text with characters escaped that the stream cannot encode."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def write_whole(path: Path, data: bytes, *, what: str = "plot", option: str = "--output") -> None:
    """Write a file atomically: readers see the old or the new content.

    Errors name the object, `what`, and the `option` that gives its path.
    """
    # Special files, such as /dev/stdout, cannot be replaced.
    is_special = path.exists() and not path.is_file() and not path.is_dir()
    # Two threads may write the same file.
    writer = f"{os.getpid()}.{threading.get_ident()}"
    partial = path if is_special else path.with_name(f".{path.name[:100]}.{writer}.partial")
    with writing(path, what=what, option=option):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(data)
            if not is_special:
                partial.replace(path)
        finally:
            if not is_special:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: Path, *, what: str = "plot", option: str = "--output") -> Iterator[None]:
    """Explain why a file or folder cannot be written.

    Raises:
        StorageError: the block raised an OSError. The class depends on the cause.
    """
    try:
        yield
    except OSError as error:
        kind, remedy = StorageError, "move the existing file or folder"
        if error.errno in FULL:
            kind, remedy = NoSpaceError, "free space or raise the quota"
        elif error.errno in REFUSED:
            kind, remedy = AccessDeniedError, "change the permissions"
        why = error.strerror or os.strerror(error.errno or errno.EIO)
        shown_path = printable(str(path))
        raise kind(
            f"the {what} cannot be written to {shown_path}: {why}: {remedy}, or give another {option}"
        ) from error
