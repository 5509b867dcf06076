"""`ranktape runs`: the runs below a place, how each is, and how large."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ranktape.analyze.console import say_json
from ranktape.analyze.table import Column, Kind, Table, write_table
from ranktape.launch.place import read_options, shown, storage_options_option

if TYPE_CHECKING:
    from ranktape.storage.maintenance.runs import RunSummary

COLUMNS = (
    Column(name="run", kind=Kind.TEXT),
    Column(name="state", kind=Kind.TEXT),
    Column(name="iterations", kind=Kind.INTEGER),
    Column(name="ranks", kind=Kind.INTEGER),
    Column(name="attempts", kind=Kind.INTEGER),
    Column(name="records", kind=Kind.INTEGER),
    Column(name="size", kind=Kind.NBYTES, unit="bytes"),
    Column(name="created", kind=Kind.TEXT),
)
"""One row is one run."""


@click.command(name="runs")
@click.argument("url", metavar="URL")
@click.option("--depth", type=click.IntRange(min=0), help="Levels of names that are looked through. [default: 4]")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
@storage_options_option
def command(url: str, *, depth: int | None, as_json: bool, storage_options: str | None) -> None:
    """List the runs at and below URL.

    A run is met or unmet (it is closed, and its guaranteed minimum is there or not), open (it is being recorded,
    or its processes were lost), empty or unreadable. The size is that of the values of its complete iterations.
    """
    from ranktape.storage.maintenance.runs import MAX_DEPTH, find_runs, suggest_nearest

    options = read_options(storage_options)
    with suggest_nearest(url, storage_options=options):
        found = find_runs(url, storage_options=options, max_depth=MAX_DEPTH if depth is None else depth)
    if as_json:
        say_json(runs_document(found, url=shown(url)))
    else:
        write_table(runs_table(found, url=shown(url)))


def runs_table(runs: Sequence[RunSummary], *, url: str) -> Table:
    """One row for each run; below, why some cannot be read."""
    rows = tuple(
        (
            run.path or ".",
            run.state.value,
            len(run.iterations),
            run.world_size,
            run.num_attempts,
            run.num_records,
            run.nbytes,
            created_text(run.created),
        )
        for run in runs
    )
    unreadable = tuple(f"{run.path or '.'}: {run.message}" for run in runs if run.state == "unreadable")
    notes = unreadable if runs else ("no run lies here",)
    return Table(title=url, columns=COLUMNS, rows=rows, notes=notes)


def runs_document(runs: Sequence[RunSummary], *, url: str) -> dict[str, Any]:
    """The same for programs."""
    return {"url": url, "runs": [dataclasses.asdict(run) for run in runs]}


def created_text(created: float | None) -> str:
    """A time of UTC to the second; empty where it is not known."""
    return "" if created is None else datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
