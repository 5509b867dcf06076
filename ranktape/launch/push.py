"""How does a user bring what waits in a spill directory to the store?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ranktape.analyze.console import say, say_json
from ranktape.analyze.table import nbytes_text
from ranktape.errors import CheckFoundError, RanktapeError, UsageError
from ranktape.launch.place import read_options, storage_options_option

if TYPE_CHECKING:
    from ranktape.storage.maintenance.push import PushReport, Spill


@click.command(name="push")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--to", "url", metavar="URL", help="The run, where it is not the one that DIR names.")
@click.option("--keep", is_flag=True, help="Leave everything in DIR, too.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
@storage_options_option
def command(directory: Path, *, url: str | None, keep: bool, as_json: bool, storage_options: str | None) -> None:
    """Bring the iterations that wait in DIR, the --spill-dir of a capture, to the run that they belong to.

    Everything that a commit names is read back from the run and compared before the commit is made. What was brought
    is removed from DIR. A push that was interrupted can be repeated. Exits with 3 when something has to stay.
    """
    from ranktape.storage.maintenance.push import find_spills, push_spill
    from ranktape.storage.places.urls import open_backend

    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory: give the --spill-dir of a capture")
    options = read_options(storage_options)
    results: list[tuple[Spill, PushReport | None, str | None]] = []
    for spill in find_spills(directory):
        place = url or spill.url
        try:
            target = open_backend(place, storage_options=options if "://" in place else None)
            results.append((spill, push_spill(spill, target, keep=keep), None))
        except RanktapeError as error:
            results.append((spill, None, str(error)))
    if as_json:
        spills = [
            {
                "url": spill.url,
                "attempt": spill.attempt,
                "rank": spill.rank,
                "error": error,
                "pushed": None if report is None else dataclasses.asdict(report),
            }
            for spill, report, error in results
        ]
        say_json({"directory": str(directory), "spills": spills})
    else:
        lines = [line for spill, report, error in results for line in _lines(spill, report, error)]
        say("\n".join(lines or [f"nothing waits in {directory}"]))
    stays = [spill for spill, report, _ in results if report is None or report.problems or report.unfinished]
    if stays:
        raise CheckFoundError(f"something of {len(stays)} of {len(results)} ranks stays in {directory}")


def _lines(spill: Spill, report: PushReport | None, error: str | None) -> list[str]:
    head = f"rank {spill.rank} of {spill.url}, {spill.attempt}"
    if report is None:
        return [f"{head}: not pushed: {error}"]
    named = ", ".join(str(iteration) for iteration in report.iterations) or "none"
    lines = [f"{head}: iterations {named} pushed ({report.num_objects} objects, {nbytes_text(report.nbytes)})"]
    if report.finished:
        lines.append(f"  complete with all ranks: iterations {', '.join(str(one) for one in report.finished)}")
    if report.uncommitted:
        lines.append(f"  never committed: iterations {', '.join(str(one) for one in report.uncommitted)}")
    if report.unfinished:
        lines.append(f"  still being recorded: iterations {', '.join(str(one) for one in report.unfinished)}")
    return lines + [f"  stays: iteration {iteration}: {reason}" for iteration, reason in report.problems.items()]
