"""Shared by commands: the store of a run, texts for messages, and commands made from the signatures of functions."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ranktape.analyze.command import describe
from ranktape.analyze.console import say, say_json
from ranktape.analyze.options import Selection
from ranktape.errors import CheckFoundError, UsageError
from ranktape.storage.places.backend import without_credentials
from ranktape.storage.places.failures import printable
from ranktape.storage.places.urls import RetryingBackend, open_backend, parse_storage_options

if TYPE_CHECKING:
    from ranktape.analyze.table import Table


def read_options(text: str | None) -> dict[str, Any] | None:
    """The given storage options; None if none were given."""
    return parse_storage_options(text) if text else None


@contextlib.contextmanager
def open_backend_of(run: str, options: Mapping[str, Any] | None) -> Iterator[RetryingBackend]:
    """The store of a run; if there is no run, the error suggests similar URLs."""
    from ranktape.storage.maintenance.runs import suggest_nearest

    with suggest_nearest(run, storage_options=options):
        yield open_backend(run, storage_options=options)


def shown(url: str) -> str:
    """The URL or path as given, without user name, password and query, for messages."""
    return without_credentials(url) if "://" in url else url


def count_text(number: int, noun: str) -> str:
    """A count with its noun, such as `1 error` or `2 errors`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


MAX_NAMED = 4
"""Largest number of items that text names; the others are counted. JSON names all."""


def by_reason(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """A text for each reason with its items, given pairs of a reason and an item. Only the first items are named."""
    items_by_reason: dict[str, dict[str, None]] = {}
    for reason, item in pairs:
        items_by_reason.setdefault(reason, {})[item] = None
    return {
        reason: "; ".join(list(items)[:MAX_NAMED])
        + (f"; and {len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else "")
        for reason, items in items_by_reason.items()
    }


def confirm(question: str | None, *, is_yes: bool) -> None:
    """Ask before something is removed, if there is a question; `is_yes` is whether `--yes` was given.

    Raises:
        UsageError: there is no terminal.
        click.Abort: the answer is no.
    """
    if is_yes or not question:
        return
    if not sys.stdin.isatty():
        raise UsageError("removing needs a confirmation, and there is no terminal: add --yes")
    click.confirm(printable(question), abort=True, err=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandAnswer:
    """The output of a command."""

    text: Table | str
    """Output without `--json`."""
    document: Any = None
    """Output with `--json`; None for a command without that option."""
    problem: str | None = None
    """A problem that was found, so that the command exits with 3; None if there is none."""


def command_of(
    function: Callable[..., Any],
    *,
    for_answer: Collection[str] = (),
    progress: str | Callable[[Mapping[str, Any]], str] = "",
    question: Callable[[Any], str | None] | None = None,
    each: Callable[[Any], str] | None = None,
    has_json: bool = True,
) -> Callable[[Callable[..., CommandAnswer]], click.Command]:
    """A decorator that makes the command of a function. The decorated function converts the result into the output.

    The options of the command come from the function's signature and docstring. Its `on_progress` shows a bar.

    Args:
        function: The function, which has the name of the command.
        for_answer: Options that are passed to the decorated function instead of `function`.
        progress: The text of the bar, or a function that returns it for the options; no bar if empty.
        question: Returns the question before something is removed, given the result of a dry run; None for no question.
        each: Returns a line for each item that `function` passes to `on_done`.
        has_json: Whether the command has `--json`.
    """
    names = inspect.signature(function).parameters

    def decorate(answer_of: Callable[..., CommandAnswer]) -> click.Command:
        def run(*, as_json: bool = False, yes: bool = False, selection: Selection | None = None, **given: Any) -> None:
            answer_options = {name: given.pop(name) for name in for_answer}
            if selection is not None and "records" in names:
                given["records"] = selection.records()
            elif selection is not None:
                given |= {name: getattr(selection, name) for name in ("run", "filters", "where", "storage_options")}
            if question is not None and not given["dry_run"]:
                confirm(question(function(**{**given, "dry_run": True})), is_yes=yes)
            bar: Callable[[str], Any] = contextlib.nullcontext
            text = progress(given) if callable(progress) else progress
            if text:
                from ranktape.analyze.engine.engine import work_bar as bar
            with bar(text) as on_progress:
                callbacks: dict[str, Any] = {"on_progress": on_progress} if text else {}
                if each is not None and not as_json:
                    callbacks["on_done"] = lambda item: say(each(item))
                result = function(**given, **callbacks)
            _write(answer_of(result, given | answer_options), as_json=as_json)

        more = [*([_JSON] if has_json else []), *([_YES] if question is not None else [])]
        return describe(function.__module__, function.__name__).command(run, more=more)

    return decorate


_JSON = click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
_YES = click.option("--yes", is_flag=True, help="Do not ask.")


def _write(answer: CommandAnswer, *, as_json: bool) -> None:
    """Print the output of a command.

    Raises:
        CheckFoundError: there is a problem.
    """
    from ranktape.analyze.table import write_table

    if as_json:
        say_json(answer.document)
    elif isinstance(answer.text, str):
        say(answer.text)
    else:
        write_table(answer.text)
    if answer.problem is not None:
        raise CheckFoundError(answer.problem)
