"""How does a folder of other people's `.pt` files become a run?"""

from __future__ import annotations

from pathlib import Path

import click

from ranktape.analyze.console import say
from ranktape.analyze.options import MAX_NAMED_FILES
from ranktape.storage.places.urls import parse_storage_options


@click.command(name="import")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("run", metavar="RUN")
@click.option("--skip-unreadable", is_flag=True, help="Name and leave out files that cannot be read or are not known.")
@click.option("--overwrite", is_flag=True, help="Delete the run that is at RUN.")
@click.option("--storage-options", metavar="JSON", help="JSON object for fsspec.")
def command(folder: Path, run: str, *, skip_unreadable: bool, overwrite: bool, storage_options: str | None) -> None:
    """Store the .pt files of DIR as the run RUN.

    DIR holds files under the names of the tools before us, tagged ones or the outputs of layers; nothing in them is
    ever executed. An import that was interrupted goes on where it was when the command is given again.
    """
    from ranktape.analyze.engine.progress import progress
    from ranktape.analyze.legacy.into_run import import_folder
    from ranktape.analyze.legacy.open import open_folder
    from ranktape.analyze.table import nbytes_text

    opened = open_folder(folder, skip_unreadable=skip_unreadable)
    with progress(len(opened), description="importing") as on_record:
        report = import_folder(
            opened,
            run,
            storage_options=parse_storage_options(storage_options) if storage_options is not None else None,
            overwrite=overwrite,
            skip_unreadable=skip_unreadable,
            on_record=on_record,
        )
    for name, reason in list(report.left_out.items())[:MAX_NAMED_FILES]:
        say(f"left out: {name}: {reason}", err=True)
    if len(report.left_out) > MAX_NAMED_FILES:
        say(f"left out: {len(report.left_out)} files in all", err=True)
    stored = f"{report.num_records} tensors stored in {run}, {nbytes_text(report.nbytes)}"
    already = "everything was stored before" if not report.num_records else stored
    say(f"{already}; {report.verdict.message()}")
