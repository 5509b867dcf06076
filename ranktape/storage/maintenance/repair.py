"""Puts a run in order after processes were lost: removes debris, and finishes what can be finished.

What `check_run` finds says itself how it is mended; here it is done. Nothing that was committed is ever removed,
but for an iteration commit that is damaged and is written again from the rank commits. What may still be worked
at, by its age, is left alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ranktape.errors import DataError, expect_least
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import Attempt, read_attempts
from ranktape.storage.format.commit import finish_iteration, mark_committed
from ranktape.storage.format.documents import (
    MAX_COMMIT_NBYTES,
    decode_document,
    is_document_intact,
    read_document,
    write_group,
)
from ranktape.storage.format.progress import judge_again
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.maintenance.finding import CheckFinding, CheckReport, Mend
from ranktape.storage.maintenance.prune import drop_iteration
from ranktape.storage.maintenance.work import OnProgress
from ranktape.storage.places.backend import Backend

MIN_AGE_SECONDS = 3600.0
"""What was written since may belong to a writer that is still at work."""

_MAX_ROUNDS = 4
"""Mending one thing can make another one possible: documents, then markers, then iteration commits, the verdict."""

_NUM_PARTS = 3
"""Of the path of a rank's iteration: attempt, rank, iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What a repair did, or would do."""

    url: str
    """Where the run is, without credentials."""
    dry_run: bool
    """Whether nothing was changed."""
    done: tuple[CheckFinding, ...]
    """What was mended, or would be, in order."""
    young: tuple[CheckFinding, ...]
    """What could be mended, but may still be worked at."""
    left: tuple[CheckFinding, ...]
    """Errors that cannot be mended."""

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
    """Put a run in order.

    Args:
        backend: Where the run is.
        dry_run: Change nothing, and say what would be done.
        min_age_seconds: What is younger is left alone, and so is an attempt without a verdict in which anything is.
        on_done: Called after each thing that was mended.
        on_progress: As for `check_run`.

    Raises:
        RunNotFoundError: there is no run.
        StorageError: the store cannot be read or written.
        UsageError: the age is negative.
    """
    expect_least(0, min_age=min_age_seconds)
    done: list[CheckFinding] = []
    report = check_run(backend, on_progress=on_progress)
    for _ in range(_MAX_ROUNDS):
        due = _due(report, min_age_seconds=min_age_seconds)
        if dry_run or not due:
            done += due
            break
        repair = _Repair(backend)
        for finding in due:
            if repair.mend(finding):
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
        young=tuple(one for one in report.findings if one.mend is not None and one not in allowed),
        left=tuple(one for one in report.errors if one.mend is None or (one in allowed and not dry_run)),
    )


def _due(report: CheckReport, *, min_age_seconds: float) -> list[CheckFinding]:
    """What can be mended now, in the order in which it is to be done."""
    latest = time.time() - min_age_seconds

    def is_old(modified: float) -> bool:
        # Where the store tells no time, only somebody who gives no age can know.
        return min_age_seconds == 0 or 0 < modified <= latest

    busy = {path for path, modified in report.unclosed.items() if not is_old(modified)}
    removals = {Mend.REMOVE_OBJECTS, Mend.REMOVE_DEBRIS}
    due = [
        finding
        for finding in report.findings
        if finding.mend is not None
        and finding.key.partition("/")[0] not in busy
        and (finding.mend not in removals or is_old(finding.modified))
    ]
    return sorted(due, key=lambda finding: list(Mend).index(finding.mend or Mend.RESTORE_DOCUMENT))


class _Repair:
    """One round of mending."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._attempts = {attempt.path: attempt for attempt in read_attempts(backend)}
        self._finished: set[tuple[str, int]] = set()

    def mend(self, finding: CheckFinding) -> bool:
        """Do what the finding asks for; False where it turned out not to be needed."""
        match finding.mend:
            case Mend.RESTORE_DOCUMENT:
                self._restore_document(finding.key)
            case Mend.RESTORE_GROUP:
                place = {} if finding.rank is None else {"rank": finding.rank}
                write_group(self._backend, _path(finding.key), {**place, "restored": time.time()})
            case Mend.RESTORE_MARKER:
                self._restore_marker(finding)
            case Mend.REWRITE_COMMIT | Mend.FINISH_ITERATION:
                return self._finish(finding)
            case Mend.FINISH_REMOVAL:
                assert finding.iteration is not None
                drop_iteration(self._backend, attempt=self._attempt_of(finding), iteration=finding.iteration)
            case Mend.REMOVE_OBJECTS:
                return self._remove(finding.key)
            case Mend.REMOVE_DEBRIS:
                found = [debris for debris in self._backend.list_debris() if debris.key == finding.key]
                self._backend.remove_debris(found)
                return bool(found)
            case Mend.WRITE_VERDICT:
                judge_again(self._backend, self._attempt_of(finding))
        return True

    def _restore_document(self, key: str) -> None:
        """Of an array or group of a rank commit: the copy in the commit is, byte by byte, what was written."""
        parts = _path(key).split("/")
        group, name = "/".join(parts[:_NUM_PARTS]), "/".join(parts[_NUM_PARTS:])
        commit_key = layout.document_key(group)
        place = f"{self._backend.url}/{commit_key}"
        commit = decode_document(
            read_document(self._backend, group, max_nbytes=MAX_COMMIT_NBYTES) or b"", place=place, key=commit_key
        )
        member = commit["consolidated_metadata"]["metadata"][name]
        data = json.dumps(member, separators=(",", ":"), allow_nan=False).encode()
        if is_document_intact(data, key=key) is False:
            raise DataError(f"the copy of {key} in {place} is not what was written: it cannot be restored")
        self._backend.put(key, [data])

    def _restore_marker(self, finding: CheckFinding) -> None:
        attempt = self._attempt_of(finding)
        assert finding.rank is not None
        assert finding.iteration is not None
        group = layout.rank_iteration_path(attempt.path, finding.rank, finding.iteration)
        commit = read_document(self._backend, group, max_nbytes=MAX_COMMIT_NBYTES)
        assert commit is not None, group
        mark_committed(self._backend, attempt.path, finding.rank, finding.iteration, commit=commit)

    def _finish(self, finding: CheckFinding) -> bool:
        attempt = self._attempt_of(finding)
        assert finding.iteration is not None
        place = (attempt.path, finding.iteration)
        if place in self._finished:
            return False
        if finding.mend is Mend.REWRITE_COMMIT:
            # A commit is only ever created, never replaced. Without it the iteration is not seen until the next line
            # is through, and another repair writes it where that is interrupted.
            path = layout.iteration_path(attempt.path, finding.iteration)
            self._backend.delete_keys([layout.document_key(path)])
        finish_iteration(self._backend, attempt=attempt, iteration=finding.iteration)
        self._finished.add(place)
        return True

    def _remove(self, key: str) -> bool:
        if not key.endswith("/"):
            self._backend.delete_keys([key])
            return True
        path = key.rstrip("/")
        if read_document(self._backend, path, max_nbytes=MAX_COMMIT_NBYTES) is not None:
            # It has been committed since it was looked at.
            return False
        self._backend.delete(path)
        return True

    def _attempt_of(self, finding: CheckFinding) -> Attempt:
        return self._attempts[finding.key.partition("/")[0]]


def _path(key: str) -> str:
    return key.removesuffix(f"/{layout.DOCUMENT}")
