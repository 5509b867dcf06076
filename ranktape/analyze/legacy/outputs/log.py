"""How does a log say when each thing was done, in a file and on the console alike?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from ranktape.analyze.legacy.outputs.files import write_error


def stamped(text: str) -> str:
    """A line with the time now before it: local, to the millisecond."""
    return f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S.%f}"[:-3] + f"  {text}".rstrip()


class SweepLog:
    """A file of lines with time stamps, each of which is shown as well.

    A line is in the file before the next one is written: whoever is interrupted has all that was said.
    """

    def __init__(self, path: Path, *, show: Callable[[str], object]) -> None:
        """Begin a log, in place of the one that is there.

        Raises:
            StorageError: the file cannot be written.
        """
        self._path = path
        self._show = show
        try:
            self._file = path.open("w", encoding="utf-8", errors="backslashreplace", buffering=1)
        except OSError as error:
            raise write_error(error, path) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError as failure:
            raise write_error(failure, self._path) from failure

    def write(self, lines: Iterable[str]) -> None:
        """Add lines, each with the time now.

        Raises:
            StorageError: the file cannot be written.
        """
        for text in lines:
            line = stamped(text)
            try:
                self._file.write(line + "\n")
            except OSError as error:
                raise write_error(error, self._path) from error
            self._show(line)
