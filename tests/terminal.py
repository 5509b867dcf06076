"""What does a command write where its stdout is a terminal?"""

from __future__ import annotations

import errno
import io
import os
import pty
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ranktape.analyze.cli import cli

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""What colours text and moves the cursor."""


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Always."""
        return True


def on_terminal(write: Callable[[], object], *, columns: int = 100, term: str = "xterm") -> str:
    """What a function writes to a terminal of that width, with its codes."""
    ours, theirs = pty.openpty()
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        text = pool.submit(_read, ours)
        with os.fdopen(theirs, "w", encoding="utf-8") as stdout:
            patch.setattr("sys.stdout", stdout)
            patch.setenv("COLUMNS", str(columns))
            patch.setenv("TERM", term)
            write()
        return text.result().decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    """All that comes until the other end is closed."""
    text = b""
    try:
        while part := os.read(terminal, 65536):
            text += part
    except OSError as error:
        if error.errno != errno.EIO:  # so Linux says that the other end is closed, and all of it is read
            raise
    os.close(terminal)
    return text


def answered(*words: str, columns: int = 100) -> list[str]:
    """The lines that `ranktape analyze WORDS` shows on such a terminal."""
    text = on_terminal(lambda: cli.main(words, standalone_mode=False), columns=columns)
    return CODES.sub("", text).splitlines()
