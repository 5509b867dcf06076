"""Repairs a run after processes died: removes leftovers and finishes commits.

Each finding of `check_run` names its repair, which is applied here. Committed data is never removed. Objects that may
still be in use, judged by their age, are not changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ranktape.errors import expect_least
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import Attempt, read_attempts
from ranktape.storage.format.commit import finish_iteration, mark_committed
from ranktape.storage.format.documents import MAX_COMMIT_NBYTES, read_document
from ranktape.storage.format.progress import judge_again
from ranktape.storage.maintenance import OnProgress
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.maintenance.finding import CheckFinding, CheckReport, Repair
from ranktape.storage.maintenance.prune import drop_iteration
from ranktape.storage.places.backend import Backend

MIN_AGE_SECONDS = 3600.0
"""The age below which an object may belong to a running writer, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """The result of a repair."""

    url: str
    """URL of the run, without credentials."""
    dry_run: bool
    """Whether nothing was changed."""
    done: tuple[CheckFinding, ...]
    """The findings that were repaired, or would be, in order."""
    young: tuple[CheckFinding, ...]
    """The findings that were not repaired because a writer may still be running."""
    left: tuple[CheckFinding, ...]
    """The errors that cannot be repaired."""

    def to_json(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        parts = {"done": self.done, "young": self.young, "left": self.left}
        listed = {name: [finding.to_json() for finding in findings] for name, findings in parts.items()}
        return {"run": self.url, "dry_run": self.dry_run, **listed}


def repair_run(
    backend: Backend,
    *,
    dry_run: bool = False,
    min_age_seconds: float = MIN_AGE_SECONDS,
    on_done: Callable[[CheckFinding], object] | None = None,
    on_progress: OnProgress | None = None,
) -> RepairReport:
    """Repair a run.

    Args:
        backend: The store of the run.
        dry_run: Change nothing and return what would be done.
        min_age_seconds: Do not change objects younger than this, or an attempt without a verdict that has such objects.
        on_done: Called after each repair.
        on_progress: See `check_run`.

    Raises:
        RunNotFoundError: there is no run.
        UsageError: the age is negative.
    """
    expect_least(0, min_age=min_age_seconds)
    report = check_run(backend, on_progress=on_progress)
    due = done = _due(report, min_age_seconds=min_age_seconds)
    if due and not dry_run:
        done = []
        attempts = {attempt.path: attempt for attempt in read_attempts(backend)}
        for finding in due:
            if _repair(backend, finding, attempts):
                done.append(finding)
                if on_done is not None:
                    on_done(finding)
        backend.flush()
        report = check_run(backend, on_progress=on_progress)
    allowed = set(_due(report, min_age_seconds=min_age_seconds))
    return RepairReport(
        url=backend.url,
        dry_run=dry_run,
        done=tuple(done),
        young=tuple(finding for finding in report.findings if finding.mend is not None and finding not in allowed),
        left=tuple(
            finding for finding in report.errors if finding.mend is None or (finding in allowed and not dry_run)
        ),
    )


def _due(report: CheckReport, *, min_age_seconds: float) -> list[CheckFinding]:
    """The findings to repair now, in the order of their repairs."""
    latest = time.time() - min_age_seconds

    def is_old(modified: float) -> bool:
        # If the store gives no times, nothing is known to be old enough.
        return min_age_seconds == 0 or 0 < modified <= latest

    busy = {path for path, modified in report.unclosed.items() if not is_old(modified)}
    removals = {Repair.REMOVE_OBJECTS, Repair.REMOVE_UNFINISHED_WRITE}
    due = [
        finding
        for finding in report.findings
        if finding.mend is not None
        and finding.key.partition("/")[0] not in busy
        and (finding.mend not in removals or is_old(finding.modified))
    ]
    return sorted(due, key=lambda finding: list(Repair).index(finding.mend or Repair.RESTORE_MARKER))


def _repair(backend: Backend, finding: CheckFinding, attempts: Mapping[str, Attempt]) -> bool:
    """Apply the repair of a finding; False if it turned out not to be needed."""
    if finding.mend is Repair.REMOVE_OBJECTS:
        return _remove(backend, finding.key)
    if finding.mend is Repair.REMOVE_UNFINISHED_WRITE:
        leftovers = [debris for debris in backend.list_unfinished() if debris.key == finding.key]
        backend.remove_unfinished(leftovers)
        return bool(leftovers)
    attempt = attempts[finding.key.partition("/")[0]]
    if finding.mend is Repair.WRITE_VERDICT:
        judge_again(backend, attempt)
        return True
    assert finding.iteration is not None
    if finding.mend is Repair.FINISH_ITERATION:
        finish_iteration(backend, attempt=attempt, iteration=finding.iteration)
    elif finding.mend is Repair.FINISH_REMOVAL:
        drop_iteration(backend, attempt=attempt, iteration=finding.iteration)
    else:
        assert finding.rank is not None
        group = layout.rank_iteration_path(attempt.path, finding.rank, finding.iteration)
        commit = read_document(backend, group, max_nbytes=MAX_COMMIT_NBYTES)
        if commit is None:
            return False
        mark_committed(backend, attempt.path, finding.rank, finding.iteration, commit=commit)
    return True


def _remove(backend: Backend, key: str) -> bool:
    if not key.endswith("/"):
        backend.delete_keys([key])
    elif read_document(backend, key.rstrip("/"), max_nbytes=MAX_COMMIT_NBYTES) is not None:
        # The iteration has been committed since the check.
        return False
    else:
        backend.delete(key.rstrip("/"))
    return True
