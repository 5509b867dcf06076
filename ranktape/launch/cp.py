"""`ranktape cp`: a run is copied to another disk, into an object store, or back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ranktape.analyze.console import say, say_json
from ranktape.analyze.options import Selection, selection_options
from ranktape.analyze.table import nbytes_text
from ranktape.errors import UsageError
from ranktape.launch.place import count_text, read_options, shown, work_bar

if TYPE_CHECKING:
    from ranktape.storage.places.retry import RetryingBackend


@click.command(name="cp")
@selection_options
@click.argument("url", metavar="URL")
@click.option("--no-verify", is_flag=True, help="Trust the sizes of values instead of reading them back.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
@click.option("--target-storage-options", metavar="JSON", help="The same for URL; those of RUN by default.")
def command(
    *,
    selection: Selection,
    url: str,
    no_verify: bool,
    as_json: bool,
    target_storage_options: str | None,
) -> None:
    """Copy RUN to URL: a directory or an object store.

    A copy that was interrupted goes on where it stopped, and is a run only when it is whole. Every object is read
    back and compared. A run that is being recorded is copied as far as it is committed; copying it again brings the
    rest.

    With filters only the records that match are copied, into a run of their own: its iterations are complete when
    those records are there, and say how many others were left out. Such a copy does not go on where it stopped.
    """
    from ranktape.storage.maintenance.copy import copy_run
    from ranktape.storage.maintenance.runs import suggest_nearest
    from ranktape.storage.places.urls import open_backend

    run, options = selection.run, selection.storage_options
    target_options = read_options(target_storage_options) if target_storage_options else options
    with suggest_nearest(run, storage_options=options), work_bar("copying") as on_progress:
        source = open_backend(run, storage_options=options if "://" in run else None)
        target = open_backend(url, storage_options=target_options if "://" in url else None)
        if selection.filters or selection.where:
            _copy_selection(source, target, selection=selection, url=url, as_json=as_json, on_progress=on_progress)
            return
        report = copy_run(source, target, verify=not no_verify, on_progress=on_progress)
    if as_json:
        say_json({"run": shown(run), "url": shown(url), **dataclasses.asdict(report)})
        return
    present = f"; {report.num_present} ({nbytes_text(report.nbytes_present)}) were there" if report.num_present else ""
    left = f"; {len(report.left_out)} that are no part of what is committed were left out" if report.left_out else ""
    say(f"{shown(url)}: {report.num_copied} objects ({nbytes_text(report.nbytes_copied)}) copied{present}{left}")


def _copy_selection(
    source: RetryingBackend,
    target: RetryingBackend,
    *,
    selection: Selection,
    url: str,
    as_json: bool,
    on_progress: Callable[[int, int], object],
) -> None:
    from ranktape.storage.maintenance.copy_selection import copy_records
    from ranktape.storage.records.run import Run

    run = selection.source()
    if not isinstance(run, Run):
        raise UsageError(f"{selection.run} is a folder of files and no run: use 'ranktape import'")
    words = [f"--{field.replace('_', '-')} {text}" for field, texts in selection.filters.items() for text in texts]
    filters = " ".join([*words, *([f"--where {selection.where!r}"] if selection.where else [])])
    report = copy_records(
        source, target, run=run, records=selection.chosen(run), filters=filters, on_progress=on_progress
    )
    if as_json:
        say_json({"run": shown(selection.run), "url": shown(url), **dataclasses.asdict(report)})
        return
    say(
        f"{shown(url)}: {count_text(report.num_records, 'record')} ({nbytes_text(report.nbytes)}) of "
        f"{count_text(len(report.iterations), 'iteration')} copied; {report.num_left_out} others left out"
    )
