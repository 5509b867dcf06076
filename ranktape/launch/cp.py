"""`ranktape cp`: a run is copied to another disk, into an object store, or back."""

from __future__ import annotations

import dataclasses

import click

from ranktape.analyze.console import say, say_json
from ranktape.analyze.table import nbytes_text
from ranktape.launch.place import read_options, shown, storage_options_option, work_bar


@click.command(name="cp")
@click.argument("run", metavar="RUN")
@click.argument("url", metavar="URL")
@click.option("--no-verify", is_flag=True, help="Trust the sizes of values instead of reading them back.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
@storage_options_option
@click.option("--target-storage-options", metavar="JSON", help="The same for URL; those of RUN by default.")
def command(
    run: str,
    url: str,
    *,
    no_verify: bool,
    as_json: bool,
    storage_options: str | None,
    target_storage_options: str | None,
) -> None:
    """Copy RUN to URL: a directory or an object store.

    A copy that was interrupted goes on where it stopped, and is a run only when it is whole. Every object is read
    back and compared. A run that is being recorded is copied as far as it is committed; copying it again brings the
    rest.
    """
    from ranktape.storage.backends.urls import open_backend
    from ranktape.storage.upkeep.copy import copy_run
    from ranktape.storage.upkeep.runs import suggest_nearest

    options = read_options(storage_options)
    target_options = read_options(target_storage_options) if target_storage_options else options
    with suggest_nearest(run, storage_options=options), work_bar("copying") as on_progress:
        source = open_backend(run, storage_options=options if "://" in run else None)
        target = open_backend(url, storage_options=target_options if "://" in url else None)
        report = copy_run(source, target, verify=not no_verify, on_progress=on_progress)
    if as_json:
        say_json({"run": shown(run), "url": shown(url), **dataclasses.asdict(report)})
        return
    present = f"; {report.num_present} ({nbytes_text(report.nbytes_present)}) were there" if report.num_present else ""
    left = f"; {len(report.left_out)} that are no part of what is committed were left out" if report.left_out else ""
    say(f"{shown(url)}: {report.num_copied} objects ({nbytes_text(report.nbytes_copied)}) copied{present}{left}")
