"""How does a command take the place of a run, and name it without giving away how it is opened?"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from ranktape.errors import UsageError
from ranktape.storage.places.backend import without_credentials
from ranktape.storage.places.failures import printable
from ranktape.storage.places.urls import parse_storage_options

if TYPE_CHECKING:
    from ranktape.storage.places.retry import RetryingBackend

storage_options_option = click.option("--storage-options", metavar="JSON", help="JSON object for fsspec.")
"""The option of every command that opens a store; `read_options` reads its value."""


def read_options(text: str | None) -> dict[str, Any] | None:
    """The storage options that were given; None where none were.

    Raises:
        UsageError: they are not a JSON object.
    """
    return parse_storage_options(text) if text else None


@contextlib.contextmanager
def open_backend_of(run: str, options: dict[str, Any] | None) -> Iterator[RetryingBackend]:
    """The store of a run that a command was given; where no run is there, the error names similar places.

    Raises:
        RanktapeError: the place cannot be opened, or the block raised it.
    """
    from ranktape.storage.maintenance.runs import suggest_nearest
    from ranktape.storage.places.urls import open_backend

    with suggest_nearest(run, storage_options=options):
        yield open_backend(run, storage_options=options)


def shown(url: str) -> str:
    """The place as it was given, fit to be printed: without a user name, a password or a query."""
    return without_credentials(url) if "://" in url else url


def count_text(number: int, what: str) -> str:
    """A number of things in words: 1 error, 2 errors."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def confirm(question: str, *, is_yes: bool) -> None:
    """Ask before something is removed; `is_yes` is the answer that was given with `--yes`.

    Raises:
        UsageError: there is no terminal to ask at.
        click.Abort: the answer is no.
    """
    if is_yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("nothing is removed without being asked, and there is no terminal to ask at: add --yes")
    click.confirm(printable(question), abort=True, err=True)


@contextlib.contextmanager
def work_bar(description: str) -> Iterator[Callable[[int, int], object]]:
    """A function to call with the pieces of work done and all that are known; a bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
