"""`ranktape repair`: a run is put in order after a crash."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ranktape.analyze.console import say, say_json
from ranktape.errors import CheckFoundError
from ranktape.launch.place import count_text, open_backend_of, read_options, storage_options_option, work_bar

if TYPE_CHECKING:
    from ranktape.storage.maintenance.finding import Finding


@click.command(name="repair")
@click.argument("run", metavar="RUN")
@click.option("--dry-run", is_flag=True, help="Change nothing, and say what would be done.")
@click.option(
    "--min-age",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    help="Seconds; what was written since may belong to a writer at work, and is left alone.",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
@storage_options_option
def command(run: str, *, dry_run: bool, min_age: float, as_json: bool, storage_options: str | None) -> None:
    """Put RUN in order after processes were lost.

    Removes what crashed writers left behind, restores markers and documents that were lost, and writes the commits
    of iterations that all ranks have committed. Exits with 3 if errors are left that it cannot mend. Where a ring
    or a spill directory is left, run 'ranktape recover' or 'ranktape push' first: they need what is removed here.
    """
    from ranktape.storage.maintenance.repair import repair_run

    def tell(finding: Finding) -> None:
        if not as_json:
            say(_line(finding))

    with open_backend_of(run, read_options(storage_options)) as backend, work_bar("checking") as on_progress:
        report = repair_run(backend, dry_run=dry_run, min_age_seconds=min_age, on_done=tell, on_progress=on_progress)
    if as_json:
        say_json(report.to_json())
    else:
        planned = [f"would {_line(finding)}" for finding in report.done] if dry_run else []
        young = [f"left alone, as it is younger than {min_age:g} s: {_line(finding)}" for finding in report.young]
        left = [f"cannot be mended: {finding.text()}" for finding in report.left]
        word = "to be mended" if dry_run else "mended"
        told = f"{len(report.done)} {word}, {len(young)} left alone, {len(left)} cannot be mended"
        say("\n".join((*planned, *young, *left, told)))
    if report.left:
        raise CheckFoundError(f"{count_text(len(report.left), 'error')} left in {report.url}")


def _line(finding: Finding) -> str:
    return f"{finding.mend}: {finding.text()}"
