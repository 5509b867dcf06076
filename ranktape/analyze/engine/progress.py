"""Bars on a terminal's stderr that say how far a long question is; silence elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


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


@dataclass(slots=True)
class _Screen:
    """What is shown on the terminal, and for how many questions that are asked at the same time."""

    shown: Progress
    num_users: int = 0


_screens: list[_Screen] = []
"""The one that is shown just now, if there is one: a terminal has room for one."""


@contextlib.contextmanager
def bytes_left(total: int, *, is_shown: bool, description: str) -> Iterator[Callable[[int], object]]:
    """A function to call with the bytes that have been read, or were known already, out of `total`.

    It moves a bar with bytes, rate and the time left, if stderr is a terminal and it is to be shown. Each question has
    a line of its own, which never runs backwards, and is gone when the question is answered.
    """
    if not is_shown or not sys.stderr.isatty():
        yield lambda _: None
        return
    if not _screens:
        _screens.append(_Screen(_started()))
    screen = _screens[0]
    screen.num_users += 1
    task = screen.shown.add_task(description, total=total)
    try:
        yield lambda nbytes: screen.shown.advance(task, nbytes)
    finally:
        screen.num_users -= 1
        screen.shown.refresh()
        screen.shown.remove_task(task)
        if not screen.num_users:
            _screens.clear()
            screen.shown.stop()


def _started() -> Progress:
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
    return shown
