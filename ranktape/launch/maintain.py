"""Gives the commands that look after runs, each with its function: `runs`, `check`, `repair`, `prune` and `rm`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import RanktapeError
from ranktape.launch.place import CommandAnswer, command_of, count_text, open_backend_of, shown
from ranktape.storage.maintenance import OnProgress
from ranktape.storage.places.backend import nbytes_text

if TYPE_CHECKING:
    from ranktape.storage.maintenance.finding import CheckFinding, CheckReport
    from ranktape.storage.maintenance.prune import PruneReport
    from ranktape.storage.maintenance.repair import RepairReport
    from ranktape.storage.maintenance.runs import RunSummary
    from ranktape.storage.places.backend import Backend

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


def runs(url: str, *, depth: int | None = None, storage_options: Mapping[str, Any] | None = None) -> list[RunSummary]:
    """List the runs at and below URL.

    A run is met or unmet (it is closed, and its guaranteed minimum is there or not), open (it is being recorded,
    or its processes were lost), empty or unreadable. The size is that of the values of its complete iterations.

    Args:
        depth (N): Levels of names that are looked through. [default: 4]
    """
    from ranktape.storage.maintenance.runs import MAX_DEPTH, find_runs, suggest_nearest

    with suggest_nearest(url, storage_options=storage_options):
        return find_runs(url, storage_options=storage_options, max_depth=MAX_DEPTH if depth is None else depth)


@command_of(runs)
def runs_command(found: Sequence[RunSummary], given: Mapping[str, Any]) -> CommandAnswer:
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
            # A time of UTC to the second; empty where it is not known.
            "" if run.created is None else datetime.fromtimestamp(run.created, UTC).strftime("%Y-%m-%d %H:%M:%SZ"),
        )
        for run in found
    )
    unreadable = tuple(f"{run.path or '.'}: {run.message}" for run in found if run.state == "unreadable")
    notes = unreadable if found else ("no run lies here",)
    return CommandAnswer(
        text=Table(title=shown(given["url"]), columns=COLUMNS, rows=rows, notes=notes),
        document={"url": shown(given["url"]), "runs": [dataclasses.asdict(run) for run in found]},
    )


def check(
    run: str,
    *,
    deep: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> CheckReport:
    """Verify that RUN is whole.

    Errors are committed data that is lost or wrong; they exit with 3. Notes are everything else: leftovers of lost
    writers, unfinished iterations, foreign objects. Nothing is changed: 'ranktape repair' does that.

    Args:
        deep: Read every byte and compare it with its checksums.
    """
    from ranktape.storage.maintenance.check import check_run

    with open_backend_of(run, storage_options) as backend:
        return check_run(backend, deep=deep, on_progress=on_progress)


@command_of(check, working="checking")
def check_command(report: CheckReport, _given: Mapping[str, Any]) -> CommandAnswer:
    """Each finding in a line, errors first, and what was looked at below."""
    partial = f", {count_text(report.num_partial, 'partial iteration')}" if report.num_partial else ""
    looked = (
        f"{count_text(report.num_iterations - report.num_partial, 'complete iteration')}{partial}, "
        f"{count_text(report.num_records, 'record')}, "
        f"{count_text(report.num_objects, 'object')}, {nbytes_text(report.nbytes)}"
    )
    how = "every byte was read" if report.deep else "sizes and documents were compared, --deep reads every byte"
    errors = count_text(len(report.errors), "error")
    summary = f"{errors}, {count_text(len(report.notes), 'note')}; {looked} ({how})"
    return CommandAnswer(
        text="\n".join([*(one.text() for one in (*report.errors, *report.notes)), summary]),
        document=report.to_json(),
        problem=f"{errors} in {report.url}" if report.errors else None,
    )


def repair(
    run: str,
    *,
    dry_run: bool = False,
    min_age: float = 3600.0,
    storage_options: Mapping[str, Any] | None = None,
    on_done: Callable[[CheckFinding], object] | None = None,
    on_progress: OnProgress | None = None,
) -> RepairReport:
    """Finish or remove what lost processes left in RUN.

    Removes leftovers of crashed writers, writes the commits of iterations that all ranks have committed, and restores
    lost markers. Exits with 3 if errors remain. If a spill directory is left, run 'ranktape push' first: it needs what
    is removed here.

    Args:
        dry_run: Change nothing, and say what would be done.
        min_age (SECONDS): What was written since may belong to a writer at work, and is left alone.
    """
    from ranktape.storage.maintenance.repair import repair_run

    with open_backend_of(run, storage_options) as backend:
        return repair_run(backend, dry_run=dry_run, min_age_seconds=min_age, on_done=on_done, on_progress=on_progress)


def _mend(finding: CheckFinding) -> str:
    return f"{finding.mend}: {finding.text()}"


@command_of(repair, working="checking", each=_mend)
def repair_command(report: RepairReport, given: Mapping[str, Any]) -> CommandAnswer:
    """What was done, what was left alone and what cannot be mended."""
    word = "to be mended" if report.dry_run else "mended"
    lines = [f"would {_mend(finding)}" for finding in report.done] if report.dry_run else []
    lines += [f"left alone, as it is younger than {given['min_age']:g} s: {_mend(one)}" for one in report.young]
    lines += [f"cannot be mended: {finding.text()}" for finding in report.left]
    lines.append(f"{len(report.done)} {word}, {len(report.young)} left alone, {len(report.left)} cannot be mended")
    return CommandAnswer(
        text="\n".join(lines),
        document=report.to_json(),
        problem=f"{count_text(len(report.left), 'error')} left in {report.url}" if report.left else None,
    )


def prune(
    run: str,
    *,
    keep_last: int | None = None,
    iteration: str | None = None,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> PruneReport:
    """Delete complete iterations from RUN.

    The commit of an iteration is deleted before its values, so that no reader sees a part of it. Run the command again
    to resume, or 'ranktape repair'. Deleted iterations still count for the guaranteed minimum. A run that is being
    recorded is refused.

    Args:
        keep_last (N): Remove all but the last N iterations.
        iteration (SPEC): Remove these: a number, a range (0-3, 10:20:2) or several (0,2,5).
        dry_run: Change nothing, and say what would be removed.
    """
    from ranktape.storage.maintenance.prune import prune_run

    with open_backend_of(run, storage_options) as backend:
        return prune_run(backend, keep_last=keep_last, iteration=iteration, dry_run=dry_run, on_progress=on_progress)


def _prune_question(plan: PruneReport) -> str | None:
    what = f"{count_text(len(plan.removed), 'iteration')} ({_named(plan.removed)})"
    return f"Remove {what} from {plan.url}?" if plan.removed else None


@command_of(prune, working="removing", question=_prune_question)
def prune_command(report: PruneReport, _given: Mapping[str, Any]) -> CommandAnswer:
    """How many iterations are gone, or would be, and which are left."""
    word = "to be removed" if report.dry_run and report.removed else "removed"
    removed = f" ({_named(report.removed)})" if report.removed else ""
    kept = f" ({_named(report.kept)})" if report.kept else ""
    count = count_text(len(report.removed), "iteration")
    return CommandAnswer(
        text=f"{report.url}: {count} {word}{removed}, {len(report.kept)} kept{kept}",
        document=dataclasses.asdict(report),
    )


def _named(iterations: tuple[int, ...]) -> str:
    from ranktape.storage.records.tables import spans

    return spans(iterations)


def rm(run: str, *, dry_run: bool = False, storage_options: Mapping[str, Any] | None = None) -> str:
    """Delete RUN, and nothing else that is in its place.

    A damaged run is deleted, too; one that is being recorded is refused. Run the command again to resume.

    Args:
        dry_run: Change nothing, and say what would be deleted.
    """
    from ranktape.storage.maintenance.prune import delete_run, expect_run

    with open_backend_of(run, storage_options) as backend:
        expect_run(backend)
        what = _described(backend)
        if not dry_run:
            delete_run(backend)
    return f"{'to be deleted' if dry_run else 'deleted'}: {what}"


@command_of(rm, question=lambda answer: f"Delete {answer.partition(': ')[2]}?", has_json=False)
def rm_command(answer: str, _given: Mapping[str, Any]) -> CommandAnswer:
    """What was deleted."""
    return CommandAnswer(text=answer)


def _described(backend: Backend) -> str:
    """The run, and how much is in it, as far as it can be read."""
    from ranktape.storage.maintenance.runs import summarize

    try:
        run = summarize(backend)
    except RanktapeError as error:
        return f"{backend.url}, which cannot be read ({error})"
    complete = count_text(len(run.iterations), "complete iteration")
    return f"{backend.url} ({complete}, {count_text(run.num_records, 'record')}, {nbytes_text(run.nbytes)})"
