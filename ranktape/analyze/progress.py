"""How far is a long question? A bar on a terminal's stderr, silence elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


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
