"""`ranktape check`: whether a run is whole, and if not, what exactly is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ranktape.analyze.console import say, say_json
from ranktape.analyze.table import nbytes_text
from ranktape.errors import CheckFoundError
from ranktape.launch.place import count_text, open_backend_of, read_options, storage_options_option, work_bar

if TYPE_CHECKING:
    from ranktape.storage.maintenance.finding import CheckReport


@click.command(name="check")
@click.argument("run", metavar="RUN")
@click.option("--deep", is_flag=True, help="Read every byte and compare it with its checksums.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
@storage_options_option
def command(run: str, *, deep: bool, as_json: bool, storage_options: str | None) -> None:
    """Verify that RUN is whole, and what was written.

    Errors are what was committed and is lost or wrong; they make it exit with 3. Notes are the rest: debris, what
    is not finished, what is not ours. Nothing is changed: 'ranktape repair' does that.
    """
    from ranktape.storage.maintenance.check import check_run

    with open_backend_of(run, read_options(storage_options)) as backend, work_bar("checking") as on_progress:
        report = check_run(backend, deep=deep, on_progress=on_progress)
    if as_json:
        say_json(report.to_json())
    else:
        say("\n".join(report_lines(report)))
    if report.errors:
        raise CheckFoundError(f"{count_text(len(report.errors), 'error')} in {report.url}")


def report_lines(report: CheckReport) -> list[str]:
    """Each finding in a line, errors first, and what was looked at below."""
    looked = (
        f"{count_text(report.num_iterations, 'complete iteration')}, {count_text(report.num_records, 'record')}, "
        f"{count_text(report.num_objects, 'object')}, {nbytes_text(report.nbytes)}"
    )
    how = "every byte was read" if report.deep else "sizes and documents were compared, --deep reads every byte"
    told = f"{count_text(len(report.errors), 'error')}, {count_text(len(report.notes), 'note')}"
    return [*(one.text() for one in (*report.errors, *report.notes)), f"{told}; {looked} ({how})"]
