"""`ranktape prune`: iterations are removed from a run."""

from __future__ import annotations

import dataclasses

import click

from ranktape.analyze.console import say, say_json
from ranktape.launch.place import confirm, count_text, open_backend_of, read_options, storage_options_option, work_bar


@click.command(name="prune")
@click.argument("run", metavar="RUN")
@click.option("--keep-last", type=click.IntRange(min=0), metavar="N", help="Remove all but the last N iterations.")
@click.option("--iteration", metavar="SPEC", help="Remove these: a number, a range (0-3, 10:20:2) or several (0,2,5).")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Change nothing, and say what would be removed.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
@storage_options_option
def command(
    run: str,
    *,
    keep_last: int | None,
    iteration: str | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    storage_options: str | None,
) -> None:
    """Remove complete iterations from RUN.

    Of each iteration first the commit goes, so that no reader takes what is left for the whole, then the values; what
    was interrupted goes on when the command is said again, or with 'ranktape repair'. Iterations that were removed
    still count for the guaranteed minimum. A run that is being recorded is refused.
    """
    from ranktape.storage.maintenance.prune import prune_run

    with open_backend_of(run, read_options(storage_options)) as backend:
        report = prune_run(backend, keep_last=keep_last, iteration=iteration, dry_run=True)
        if report.removed and not dry_run:
            what = count_text(len(report.removed), "iteration")
            confirm(f"Remove {what} ({_named(report.removed)}) from {report.url}?", is_yes=yes)
            with work_bar("removing") as on_progress:
                report = prune_run(backend, keep_last=keep_last, iteration=iteration, on_progress=on_progress)
    if as_json:
        say_json(dataclasses.asdict(report))
        return
    word = "to be removed" if report.dry_run and report.removed else "removed"
    removed = f" ({_named(report.removed)})" if report.removed else ""
    kept = f" ({_named(report.kept)})" if report.kept else ""
    say(f"{report.url}: {count_text(len(report.removed), 'iteration')} {word}{removed}, {len(report.kept)} kept{kept}")


def _named(iterations: tuple[int, ...]) -> str:
    from ranktape.storage.records.notebook import spans

    return spans(iterations)
