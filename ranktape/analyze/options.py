"""The options that commands share: which records, and how the answer is written."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from ranktape.analyze.console import say
from ranktape.analyze.table import Form, Table, write_table
from ranktape.errors import NoRecordsError, UsageError
from ranktape.fields import RECORD_FIELDS
from ranktape.storage.places.urls import parse_storage_options

if TYPE_CHECKING:
    from ranktape.analyze.legacy.open import RecordSource
    from ranktape.storage import Records

Command = Callable[..., Any]

FILTERS = {field.name: field.help for field in RECORD_FIELDS if field.help}
"""The fields that have an option of their own, with what its help says; `--where` knows all."""

FORMAT_HELP = "Low-precision format: fp8_e4m3, fp8_e5m2, fp6_e2m3, fp6_e3m2, fp4_e2m1, int8, hif8, nvfp4, bf16, fp16."
"""What `--format` of one format takes."""

SWEEP_MODES = ("mx", "tensor", "channel", "legacy")
"""The members of `SweepMode`, which is not imported for a help text."""

MAX_TEXT_ROWS = 50
"""Rows that text on stdout shows where no number is asked for: it is read by people."""

MAX_NAMED_FILES = 4
"""Files left out that are named before the rest is counted."""

MAX_NAMED_VALUES = 8
"""Values that the message for an empty selection names."""


class NamedPath(click.Path):
    """A path on the command line; an empty one, which would be the working directory, is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, if it has a name."""
        if not os.fspath(value):
            self.fail("an empty path is not allowed: give a name, or . for the working directory", param, ctx)
        return super().convert(value, param, ctx)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which records a command is about."""

    run: str
    """URL or path of a run, of a folder of `.pt` files, or of one such file."""
    filters: Mapping[str, tuple[str, ...]]
    """For each field that was filtered the texts that were given; any of them may match."""
    where: str | None
    """An expression over fields."""
    storage_options: Mapping[str, Any] | None
    """For fsspec."""
    skip_unreadable: bool = False
    """Whether files of a folder that cannot be read are left out, and named."""
    any_name: bool = False
    """Whether `.pt` files under any name are taken; those of them that cannot be read are left out, not named."""

    def records(self) -> Records:
        """The records of a run, of a folder of `.pt` files, or of one such file; never none.

        What is left out of a folder is named on stderr. Raises what `source` and `chosen` raise.
        """
        source = self.source()
        say_what_is_left_out(source)
        return self.chosen(source)

    def source(self) -> RecordSource:
        """The run or the folder itself.

        Raises:
            DataError: a file cannot be read.
            RunNotFoundError: there is no run.
            StorageError: the store cannot be read.
        """
        from ranktape.analyze.legacy.open import open_source

        return open_source(self.run, self.storage_options, skip_unreadable=self.skip_unreadable, any_name=self.any_name)

    def chosen(self, run: RecordSource) -> Records:
        """The records of a source that the filters leave; never none.

        Raises:
            DataError: a file cannot be read.
            NoRecordsError: nothing matches; the message says what would.
            UnknownFieldError: the expression names no field of a record.
            UsageError: a filter has a value that its field cannot have.
            StorageError: the store cannot be read.
        """
        from ranktape.storage.records.run import Run

        if not run.iterations:
            what = "complete iteration" if isinstance(run, Run) else "file that can be read"
            raise NoRecordsError(f"{run.url} has no {what}: see 'ranktape status {self.run}'")
        texts = {field: ",".join(values) for field, values in self.filters.items()}
        # These two are known before any catalogue is read.
        early = {field: texts.pop(field) for field in ("iteration", "attempt") if field in texts}
        records = run.select(**early)
        if not len(records):
            given = " and ".join(f"--{field} {text}" for field, text in early.items())
            raise NoRecordsError(f"no records match {given}: complete iterations are {_spans(run.iterations)}")
        for field, text in texts.items():
            found = records.select_text([(field, text)])
            if not len(found):
                raise NoRecordsError(f"no records match {_flag(field)} {text}: {_what_is_there(records, field)}")
            records = found
        if self.where is None:
            return records
        chosen = records.where(self.where)
        if not len(chosen):
            raise NoRecordsError(
                f"no records match --where {self.where!r}: it leaves none of {len(records)}; "
                f"see 'ranktape analyze ls {self.run}'"
            )
        return chosen


class AnswerTable(Protocol):
    """An answer that is more than a table."""

    def write(self, output: Output) -> None:
        """Write it where and how it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """How the answer is written."""

    form: Form
    """Text, JSON or CSV."""
    wide: bool
    """Whether text shows every column."""
    sort: str | None
    """The column whose largest values come first."""
    limit: int | None
    """Rows to write at most, 0 for all; None for all, and in text on stdout for as many as people read."""
    output: Path | None
    """A file instead of stdout."""

    @property
    def is_asked_for(self) -> bool:
        """Whether any of the options was given."""
        return self != Output(form=Form.TEXT, wide=False, sort=None, limit=None, output=None)

    @property
    def chosen_form(self) -> Form:
        """The form, of a file also by its name."""
        if self.output is None or self.form is not Form.TEXT:
            return self.form
        return {".json": Form.JSON, ".csv": Form.CSV}.get(self.output.suffix.lower(), Form.TEXT)

    def shown(self, table: Table) -> Table:
        """The rows to write, in the order that was asked for; what text leaves out is said on stderr.

        Where rows are left out and no order was asked for, the worst are shown if the table knows them.

        Raises:
            UsageError: there is no such column.
        """
        ordered = table if self.sort is None else table.sorted_by(self.sort)
        if self.limit is not None:
            return ordered.first(self.limit) if self.limit else ordered
        is_read = self.output is None and self.form is Form.TEXT
        if not is_read or table.is_whole or len(ordered.rows) <= MAX_TEXT_ROWS:
            return ordered
        which = "first"
        if self.sort is None and table.worst_first is not None:
            which, ordered = "worst", table.worst_first(ordered)
        said = f"the {which} {MAX_TEXT_ROWS} of {len(ordered.rows):,} rows: --limit 0, --json and --csv show all"
        say(said, err=True)
        return replace(ordered, rows=ordered.rows[:MAX_TEXT_ROWS])

    def write(self, answer: Table | AnswerTable) -> None:
        """Write an answer where and how it was asked for; of a table what `shown` leaves.

        Raises:
            UsageError: there is no such column, or the file cannot be written.
        """
        if isinstance(answer, Table):
            write_table(self.shown(answer), form=self.chosen_form, wide=self.wide, output=self.output)
        else:
            answer.write(self)


def selection_options(command: Command) -> Command:
    """Add the argument RUN and one option for each field; the command gets them as `selection`."""

    @functools.wraps(command)
    def wrapped(*, run: str, **values: Any) -> Any:
        selection = Selection(run=run, **_filters(values))
        return command(selection=selection, **values)

    return click.argument("run", metavar="RUN")(_filter_options(wrapped))


def sources_options(command: Command) -> Command:
    """Add the arguments SOURCE..., with `.pt` files under any name, and the options of `selection_options`.

    The command gets a `Selection` of each source as `selections`. A mode of the sweep that is given as a filter is
    refused: records have none of these.
    """

    @functools.wraps(command)
    def wrapped(*, sources: tuple[str, ...], **values: Any) -> Any:
        filters = _filters(values)
        for word in ",".join(filters["filters"].get("mode", ())).split(","):
            if word.strip() in SWEEP_MODES:
                raise UsageError(
                    f"--mode {word.strip()} is not allowed: it leaves out records of training (train) or of "
                    f"evaluation (eval); did you mean --sweep-mode {word.strip()}?"
                )
        selections = tuple(Selection(run=source, any_name=True, **filters) for source in dict.fromkeys(sources))
        return command(selections=selections, **values)

    return click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)(_filter_options(wrapped))


def _filters(values: dict[str, Any]) -> dict[str, Any]:
    """What the options of `_filter_options` say of a `Selection`; they are taken out of `values`."""
    given = {field: tuple(values.pop(field)) for field in FILTERS}
    storage_options = values.pop("storage_options")
    return {
        "filters": {field: texts for field, texts in given.items() if texts},
        "where": values.pop("where"),
        "storage_options": parse_storage_options(storage_options) if storage_options is not None else None,
        "skip_unreadable": values.pop("skip_unreadable"),
    }


def _filter_options(decorated: Command) -> Command:
    decorated = click.option(
        "--skip-unreadable", is_flag=True, help="Of a folder of .pt files: name and leave out what cannot be read."
    )(decorated)
    decorated = click.option("--storage-options", metavar="JSON", help="JSON object for fsspec.")(decorated)
    decorated = click.option("--where", metavar="EXPR", help="As in \"overflow.ratio > 0 and phase == 'pre'\".")(
        decorated
    )
    for field, text in reversed(list(FILTERS.items())):
        decorated = click.option(_flag(field), field, multiple=True, metavar="VALUE", help=text)(decorated)
    return decorated


def output_options(command: Command) -> Command:
    """Add the options for how the answer is written; the command gets them as `output`."""

    @functools.wraps(command)
    def wrapped(
        *,
        as_json: bool,
        as_csv: bool,
        wide: bool,
        sort: str | None,
        limit: int | None,
        output: Path | None,
        **values: Any,
    ) -> Any:
        if as_json and as_csv:
            raise UsageError("--json and --csv exclude each other: give one")
        form = Form.JSON if as_json else Form.CSV if as_csv else Form.TEXT
        return command(output=Output(form=form, wide=wide, sort=sort, limit=limit, output=output), **values)

    decorated: Command = wrapped
    for option in (
        click.option(
            "--output",
            "-o",
            type=NamedPath(path_type=Path),
            metavar="FILE",
            help="Write to a file; by its name also JSON or CSV.",
        ),
        click.option(
            "--limit",
            type=click.IntRange(min=0),
            metavar="N",
            help=f"Write N rows at most, 0 for all; as text {MAX_TEXT_ROWS} by default.",
        ),
        click.option("--sort", metavar="COLUMN", help="Largest values of a column first."),
        click.option("--wide", is_flag=True, help="Show every column as text."),
        click.option("--csv", "as_csv", is_flag=True, help="Write CSV."),
        click.option("--json", "as_json", is_flag=True, help="Write one JSON document."),
    ):
        decorated = option(decorated)
    return decorated


def by_option(command: Command) -> Command:
    """Add `--by`; the command gets the fields as `by`, in the order given."""

    @functools.wraps(command)
    def wrapped(*, by: tuple[str, ...], **values: Any) -> Any:
        fields = [field.strip().replace("-", "_") for text in by for field in text.split(",")]
        return command(by=tuple(dict.fromkeys(fields)), **values)

    return click.option("--by", multiple=True, metavar="FIELD", help="One row for each value of a field; repeatable.")(
        wrapped
    )


def engine_options(command: Command) -> Command:
    """Add `--workers`, `--scheduler` and `--no-cache`; the command gets an `Engine` as `engine`."""

    @functools.wraps(command)
    def wrapped(*, workers: int, scheduler: str | None, no_cache: bool, **values: Any) -> Any:
        from ranktape.analyze.engine.engine import Engine

        engine = Engine(workers=workers, scheduler=scheduler, use_cache=not no_cache, show_progress=True)
        return command(engine=engine, **values)

    decorated: Command = wrapped
    for option in (
        click.option("--no-cache", is_flag=True, help="Neither use nor keep what was counted before."),
        click.option("--scheduler", metavar="URL", help="Work on a Dask cluster: tcp://HOST:PORT."),
        click.option(
            "--workers",
            type=click.IntRange(min=1),
            default=1,
            show_default=True,
            metavar="N",
            help="Processes that read and count.",
        ),
    ):
        decorated = option(decorated)
    return decorated


def view_option(command: Command) -> Command:
    """Add `--view`; the command gets None or one of `values.View` as `view`."""

    @functools.wraps(command)
    def wrapped(*, view: str | None, **values: Any) -> Any:
        from ranktape.analyze.engine.values import View

        return command(view=None if view is None else View(view), **values)

    return click.option(
        "--view",
        type=click.Choice(["compute", "seen"]),
        help="Values rounded to what the operation computed in, or as they were captured.",
    )(wrapped)


def say_what_is_left_out(run: RecordSource, *, with_unreadable: bool = True) -> None:
    """Name on stderr the files of a folder that no record is of."""
    for names, why in (
        ([name for name in getattr(run, "foreign", ()) if name.endswith(".pt")], "not under a name that we know"),
        (list(getattr(run, "unreadable", {}).values()) if with_unreadable else [], "cannot be read"),
    ):
        if names:
            shown = "; ".join(names[:MAX_NAMED_FILES])
            rest = len(names) - MAX_NAMED_FILES
            more = f"; and {rest} more" if rest > 0 else ""
            say(f"{len(names)} .pt files left out, {why}: {shown}{more}", err=True)


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _what_is_there(records: Records, field: str) -> str:
    counts = Counter(map(_text, records.column(field).tolist()))
    named = [f"{text} ({count} records)" for text, count in counts.most_common(MAX_NAMED_VALUES)]
    rest = len(counts) - len(named)
    return f"{field} is " + ", ".join(named) + (f" and {rest} more" if rest else "")


def _text(value: Any) -> str:
    """A value as a filter takes it: numbers that may be missing are floats in the catalogue, NaN where they are."""
    if isinstance(value, float):
        return "none" if math.isnan(value) else f"{value:g}"
    return str(value)


def _spans(iterations: list[int]) -> str:
    if len(iterations) <= MAX_NAMED_VALUES:
        return ", ".join(map(str, iterations))
    return f"{iterations[0]} to {iterations[-1]} ({len(iterations)} of them)"
