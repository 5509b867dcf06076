"""The options that commands share: the selection of records, and the output of the answer."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ranktape.analyze.console import MAX_TEXT_ROWS, Form, say
from ranktape.analyze.group import Section, SectionOption
from ranktape.errors import CheckFoundError, NoRecordsError, UsageError
from ranktape.fields import RECORD_FIELDS
from ranktape.storage.places.urls import parse_storage_options

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View
    from ranktape.analyze.legacy.open import RecordSource
    from ranktape.analyze.table import Table
    from ranktape.storage import Records

Command = Callable[..., Any]


class NamedPath(click.Path):
    """A path on the command line. An empty path, which would be the working directory, is rejected."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, unless it is empty."""
        if not os.fspath(value):
            self.fail("an empty path is not allowed: give a name, or . for the working directory", param, ctx)
        return super().convert(value, param, ctx)


class JsonObject(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """The storage options on the command line. No message shows their values."""

    name = "JSON"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        """The object."""
        return parse_storage_options(value) if isinstance(value, str) else value


class SourcesArgument(click.Argument):
    """One or more sources: all arguments except those that follow."""

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """The sources. If none is left, the error names the last argument, because it took the only value."""
        try:
            return super().process_value(ctx, value)
        except click.MissingParameter as error:
            error.param = [one for one in ctx.command.params if isinstance(one, click.Argument)][-1]
            raise


FILTERS = {"source": "Name of a source, if several are given: mxfp8, 'run*'."} | {
    field.name: field.help for field in RECORD_FIELDS if field.help
}
"""The fields that have their own option, with its help. `--where` supports all fields."""

SWEEP_MODES = ("mx", "tensor", "channel", "legacy")
"""The members of `SweepMode`, which is not imported only for a help text."""

MAX_NAMED_FILES = 4
"""Maximum number of omitted files that are named."""


def flag_of(name: str) -> str:
    """The option of a parameter or a field."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The records that a command uses."""

    run: str
    """URL or path of a run, of a folder of `.pt` files, of one such file, or of a folder of all these."""
    filters: Mapping[str, tuple[str, ...]]
    """The filter values of each field; any of them may match."""
    where: str | None
    """An expression over fields."""
    more: tuple[str, ...] = ()
    """Further sources, whose records are included."""
    storage_options: Mapping[str, Any] | None
    """Options for fsspec."""
    skip_unreadable: bool = False
    """Whether unreadable files of a folder are left out and named."""
    any_name: bool = False
    """Whether `.pt` files with any name are read. Those that are unreadable are left out without being named."""

    def records(self) -> Records:
        """The records of the sources, at least one.

        Files that are left out of a folder are named on stderr. Raises the errors of `source` and `chosen`.
        """
        source = self.source()
        say_what_is_left_out(source)
        return self.chosen(source)

    def source(self) -> RecordSource:
        """The run, the folder or the file itself, or several of them as one source."""
        from ranktape.analyze.sources import open_sources
        from ranktape.storage.maintenance.runs import suggest_nearest

        options: dict[str, Any] = {"skip_unreadable": self.skip_unreadable, "any_name": self.any_name}
        with suggest_nearest(self.run, storage_options=self.storage_options):
            return open_sources((self.run, *self.more), self.storage_options, **options)

    def chosen(self, run: RecordSource) -> Records:
        """The records of a source that match the filters, at least one.

        Raises:
            DataError: a file cannot be read.
            NoRecordsError: no records match. The message suggests values that would.
            UnknownFieldError: the expression names an unknown field.
            UsageError: a filter has an invalid value.
            StorageError: the store cannot be read.
        """
        from ranktape.storage.query.filters import parse_filter
        from ranktape.storage.records.records import nothing_matches
        from ranktape.storage.records.run import Run
        from ranktape.storage.records.tables import spans

        if not run.iterations:
            what = "complete iteration" if isinstance(run, Run) else "file that can be read"
            raise NoRecordsError(f"{run.url} has no {what}: see 'ranktape status {self.run}'")
        texts = {field: ",".join(values) for field, values in self.filters.items()}
        # These two filters do not need a catalogue.
        early = {field: texts.pop(field) for field in ("iteration", "attempt") if field in texts}
        records = run.select(**early)
        if not len(records):
            filters_text = " and ".join(f"--{field} {text}" for field, text in early.items())
            raise NoRecordsError(f"no records match {filters_text}: readable iterations are {spans(run.iterations)}")
        for field, text in texts.items():
            matching = records.fitting(parse_filter(field, text))
            if not len(matching):
                raise nothing_matches(records, field, text, name=flag_of(field))
            records = matching
        if self.where is None:
            return records
        chosen = records.where(self.where)
        if not len(chosen):
            raise NoRecordsError(
                f"no records match --where {self.where!r}: it excludes all {len(records)} records; "
                f"see 'ranktape analyze ls {self.run}'"
            )
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """How the answer is written."""

    form: Form = Form.TEXT
    wide: bool = False
    """Whether text shows every column."""
    sort: str | None = None
    """The column to sort by, largest values first."""
    limit: int | None = None
    """Maximum number of rows, 0 for all. If None, all, or `Table.max_rows` on a terminal."""
    output: Path | None = None
    """A file to write to instead of stdout."""
    check: str | None = None
    """An expression. Only rows for which it is false are written."""

    @property
    def is_asked_for(self) -> bool:
        """Whether any of the options was given."""
        return self != Output()

    @property
    def chosen_form(self) -> Form:
        """The format. For a file, the suffix may determine it."""
        if self.output is None or self.form is not Form.TEXT:
            return self.form
        return {".json": Form.JSON, ".csv": Form.CSV}.get(self.output.suffix.lower(), Form.TEXT)

    def shown(self, table: Table) -> Table:
        """The rows to write, in the requested order. On a terminal, only the first ones and how many more there are.

        If rows are left out and no order was requested, the worst ones are shown if the table can sort them.
        """
        ordered = table if self.sort is None else table.sorted_by(self.sort)
        if self.limit is not None:
            return ordered.first(self.limit) if self.limit else ordered
        is_read = self.output is None and self.form is Form.TEXT and sys.stdout.isatty()
        rest = len(ordered.rows) - table.max_rows
        if not is_read or table.is_whole or rest <= 0:
            return ordered
        which = ""
        if self.sort is None and table.worst_first is not None:
            which, ordered = "; the worst are shown", table.worst_first(ordered)
        more = f"{rest:,} more rows{which}: --limit 0 shows all"
        return replace(ordered, rows=ordered.rows[: table.max_rows], notes=(more, *ordered.notes))

    def write(self, table: Table) -> None:
        """Write a table according to the options.

        Raises:
            CheckFoundError: rows fail the check. They have been written.
            UsageError: there is no such column, the check cannot be parsed, or the file cannot be written.
        """
        # This imports numpy, which help does not need.
        from ranktape.analyze.table import write_table

        written = table if self.check is None else table.check(self.check)
        write_table(self.shown(written), form=self.chosen_form, wide=self.wide, output=self.output)
        if self.check is not None and written.rows:
            raise CheckFoundError(f"{len(written.rows)} of {len(table.rows)} rows fail --check {self.check!r}")


def _together(
    name: str, take: Callable[[dict[str, Any]], Any], *options: Callable[[Command], Command]
) -> Callable[[Command], Command]:
    """A decorator that adds options. `take` removes their values and combines them into the parameter `name`."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapped(**values: Any) -> Any:
            taken = take(values)
            return command(**{name: taken}, **values)

        decorated: Command = wrapped
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


def _selection(values: dict[str, Any]) -> Selection:
    run, *more = given if isinstance(given := values.pop("run"), tuple) else (given,)
    return Selection(run=run, more=tuple(more), **_filters(values))


def _selections(values: dict[str, Any]) -> tuple[Selection, ...]:
    """A selection for each source, including those below a folder, with `.pt` files of any name.

    A mode of the sweep is rejected as a filter, because records have other modes.
    """
    filters = _filters(values)
    for word in ",".join(filters["filters"].get("mode", ())).split(","):
        if word.strip() in SWEEP_MODES:
            raise UsageError(
                f"--mode {word.strip()} is not allowed: it selects records of training (train) or "
                f"evaluation (eval); did you mean --sweep-mode {word.strip()}?"
            )
    from ranktape.analyze.sources import places_of

    options = filters["storage_options"]
    urls = (url for source in values.pop("sources") for url in places_of(source, options, any_name=True))
    return tuple(Selection(run=url, any_name=True, **filters) for url in dict.fromkeys(urls))


def _filters(values: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a `Selection` from the options of filters."""
    filters = {field: tuple(values.pop(field)) for field in FILTERS}
    return {
        "filters": {field: texts for field, texts in filters.items() if texts},
        "where": values.pop("where"),
        "storage_options": values.pop("storage_options"),
        "skip_unreadable": values.pop("skip_unreadable"),
    }


def _output(values: dict[str, Any]) -> Output:
    as_json, as_csv = values.pop("as_json"), values.pop("as_csv")
    if as_json and as_csv:
        raise UsageError("--json and --csv exclude each other: give one")
    form = Form.JSON if as_json else Form.CSV if as_csv else Form.TEXT
    return Output(form=form, **{name: values.pop(name) for name in ("wide", "sort", "limit", "output", "check")})


def field_words(texts: Sequence[str]) -> tuple[str, ...]:
    """The distinct fields in comma-separated texts, with underscores: `layer-idx` becomes `layer_idx`, but not `-1`."""
    named = [field.strip() for text in texts for field in text.split(",")]
    return tuple(dict.fromkeys(re.sub(r"(?<=[a-z])-(?=[a-z])", "_", field) for field in named))


def _engine(values: dict[str, Any]) -> Engine:
    from ranktape.analyze.engine.engine import Engine, keep_freed_memory

    # Answers about many records are built from large parts, one after another.
    keep_freed_memory()
    workers, scheduler, no_cache = (values.pop(name) for name in ("workers", "scheduler", "no_cache"))
    return Engine(workers=workers, scheduler=scheduler, use_cache=not no_cache, show_progress=True)


def _view(values: dict[str, Any]) -> View | None:
    from ranktape.analyze.engine.values import View

    view = values.pop("view")
    return None if view is None else View(view)


storage_options_option = click.option(
    "--storage-options", type=JsonObject(), help="Options of fsspec, as a JSON object."
)
"""The option of every command that opens a store."""

_filter_option = functools.partial(click.option, cls=SectionOption, section=Section.RECORDS)
_work_option = functools.partial(click.option, cls=SectionOption, section=Section.WORK)
_output_option = functools.partial(click.option, cls=SectionOption, section=Section.OUTPUT)

_FILTER_OPTIONS = (
    *(
        _filter_option(flag_of(field), field, multiple=True, metavar="VALUE", help=text)
        for field, text in FILTERS.items()
    ),
    _filter_option("--where", metavar="EXPR", help="Expression: \"overflow.ratio > 0 and phase == 'pre'\"."),
    _filter_option("--storage-options", type=JsonObject(), help="Options of fsspec, as a JSON object."),
    _filter_option(
        "--skip-unreadable", is_flag=True, help="Skip .pt files that cannot be read, and print their names."
    ),
)

selection_options = _together("selection", _selection, click.argument("run", metavar="RUN"), *_FILTER_OPTIONS)
"""Adds the argument RUN and one option for each field. The command gets them as `selection`."""

OPTIONS: dict[str, Callable[[Command], Command]] = {
    "selection": selection_options,
    # For a command that answers about several sources together.
    "selection_of_several": _together(
        "selection",
        _selection,
        click.argument("run", metavar="RUN...", nargs=-1, required=True, cls=SourcesArgument),
        *_FILTER_OPTIONS,
    ),
    "selections": _together(
        "selections",
        _selections,
        click.argument("sources", metavar="SOURCE...", nargs=-1, required=True),
        *_FILTER_OPTIONS,
    ),
    "storage_options": storage_options_option,
    "view": _together(
        "view",
        _view,
        click.option(
            "--view",
            type=click.Choice(["compute", "seen"]),
            help="Rounded to the compute dtype, or as captured.",
        ),
    ),
    "by": _together(
        "by",
        lambda values: field_words(values.pop("by")),
        click.option("--by", multiple=True, metavar="FIELD", help="One row for each value of a field; repeatable."),
    ),
    "engine": _together(
        "engine",
        _engine,
        _work_option(
            "--workers",
            type=click.IntRange(min=1),
            default=1,
            show_default=True,
            metavar="N",
            help="Number of processes.",
        ),
        _work_option("--scheduler", metavar="URL", help="Address of a Dask scheduler: tcp://HOST:PORT."),
        _work_option("--no-cache", is_flag=True, help="Do not read or write the cache."),
    ),
    "output": _together(
        "output",
        _output,
        _output_option("--json", "as_json", is_flag=True, help="Write one JSON document."),
        _output_option("--csv", "as_csv", is_flag=True, help="Write CSV."),
        _output_option("--wide", is_flag=True, help="Show all columns in text output."),
        _output_option("--sort", metavar="COLUMN", help="Sort by a column, largest values first."),
        _output_option(
            "--check",
            metavar="EXPR",
            help="Write only rows for which EXPR is false, and exit with 3 if there are any: 'overflow.total == 0'.",
        ),
        _output_option(
            "--limit",
            type=click.IntRange(min=0),
            metavar="N",
            help=f"Write at most N rows; 0 for all [terminal: {MAX_TEXT_ROWS}].",
        ),
        _output_option(
            *("--output", "-o"),
            type=NamedPath(path_type=Path),
            metavar="FILE",
            help="Write to a file: .json, .csv, or text.",
        ),
    ),
}
"""The decorators for parameters that have the same meaning in every command, in the order of help."""


def say_what_is_left_out(run: RecordSource, *, with_unreadable: bool = True) -> None:
    """Name the files of a folder without records on stderr."""
    for names, why in (
        ([name for name in getattr(run, "foreign", ()) if name.endswith(".pt")], "because their names are unknown"),
        (list(getattr(run, "unreadable", {}).values()) if with_unreadable else [], "because they cannot be read"),
    ):
        if names:
            shown = "; ".join(names[:MAX_NAMED_FILES])
            rest = len(names) - MAX_NAMED_FILES
            more = f"; and {rest} more" if rest > 0 else ""
            say(f"{len(names)} .pt files left out, {why}: {shown}{more}", err=True)
