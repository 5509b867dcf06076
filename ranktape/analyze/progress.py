"""How far is a long question? A bar on a terminal's stderr, silence elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@contextlib.contextmanager
def progress(total: int, *, description: str) -> Iterator[Callable[[], object]]:
    """A function to call after each of `total` pieces of work; it moves a bar if stderr is a terminal.

    Where `total` is 0 there is none: the work shows itself.
    """
    if not total or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)


class BytesLeft(Protocol):
    """A bar of bytes."""

    def expect(self, nbytes: int) -> None:
        """There are so many more bytes to be read; fewer, where the number is negative."""
        ...

    def advance(self, nbytes: int) -> None:
        """So many bytes have been read."""
        ...


class _Silence:
    def expect(self, nbytes: int) -> None:
        """Say nothing."""

    def advance(self, nbytes: int) -> None:
        """Say nothing."""


class _Bar:
    """A bar that several questions share which are asked at the same time: a terminal has room for one."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar = bar
        self._task = task
        self._total = 0
        self.num_users = 0

    def expect(self, nbytes: int) -> None:
        self._total += nbytes
        self._bar.update(self._task, total=self._total)

    def advance(self, nbytes: int) -> None:
        self._bar.advance(self._task, nbytes)


_shared: list[tuple[Progress, _Bar]] = []
"""The bar that is shown just now, if there is one."""


@contextlib.contextmanager
def bytes_left(*, is_shown: bool, description: str) -> Iterator[BytesLeft]:
    """A bar with bytes, rate and the time left, if stderr is a terminal and it is to be shown; else nothing."""
    if not is_shown or not sys.stderr.isatty():
        yield _Silence()
        return
    if not _shared:
        _shared.append(_started(description))
    progress_bar, bar = _shared[0]
    bar.num_users += 1
    try:
        yield bar
    finally:
        bar.num_users -= 1
        if not bar.num_users:
            _shared.clear()
            progress_bar.stop()


def _started(description: str) -> tuple[Progress, _Bar]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    shown = Progress(*columns, console=Console(stderr=True), transient=True)
    shown.start()
    return shown, _Bar(shown, shown.add_task(description, total=None))
