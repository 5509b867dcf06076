"""`ranktape rm`: a run is deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ranktape.analyze.console import say
from ranktape.errors import RanktapeError
from ranktape.launch.place import confirm, count_text, open_backend_of, read_options, storage_options_option

if TYPE_CHECKING:
    from ranktape.storage.places.backend import Backend


@click.command(name="rm")
@click.argument("run", metavar="RUN")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Change nothing, and say what would be deleted.")
@storage_options_option
def command(run: str, *, yes: bool, dry_run: bool, storage_options: str | None) -> None:
    """Delete RUN, and nothing that lies beside its parts.

    A damaged run is deleted as well; one that is being recorded is refused. What was interrupted goes on when the
    command is said again.
    """
    from ranktape.storage.maintenance.prune import delete_run, expect_run

    with open_backend_of(run, read_options(storage_options)) as backend:
        expect_run(backend)
        what = _described(backend)
        if not dry_run:
            confirm(f"Delete {what}?", is_yes=yes)
            delete_run(backend)
    say(f"{'to be deleted' if dry_run else 'deleted'}: {what}")


def _described(backend: Backend) -> str:
    """The run, and how much is in it, as far as it can be read."""
    from ranktape.analyze.table import nbytes_text
    from ranktape.storage.maintenance.runs import summarize

    try:
        run = summarize(backend)
    except RanktapeError as error:
        return f"{backend.url}, which cannot be read ({error})"
    complete = count_text(len(run.iterations), "complete iteration")
    return f"{backend.url} ({complete}, {count_text(run.num_records, 'record')}, {nbytes_text(run.nbytes)})"
