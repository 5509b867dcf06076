"""The state of each iteration of a run, what is missing, and whether the guaranteed minimum is stored.

The coordinator, `status` and every reader use this module. One LIST of the markers gives the state of every
iteration on every rank.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ranktape.errors import DataError, RunFormatError, RunNotFoundError
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import (
    Attempt,
    check_attempt,
    committed_iterations,
    dropped_iterations,
    is_attempt_there,
    lost_message,
    read_attempts,
    read_plan,
)
from ranktape.storage.format.commit import IterationSummary, finish_iteration
from ranktape.storage.format.documents import MAX_COMMIT_NBYTES, for_each, read_as, write_group
from ranktape.storage.format.layout import Mark
from ranktape.storage.format.live import count_triggers
from ranktape.storage.places.backend import Backend

DISABLED = "capture disabled itself"
"""The start of the reason that a rank leaves when its capture failed and recorded nothing more."""


class IterationState(enum.StrEnum):
    """The state of one iteration."""

    COMPLETE = "complete"
    """Every expected rank and the coordinator have committed it: each expected tensor, or why it is missing."""
    PARTIAL = "partial"
    """A rank did not commit it or was cut off while recording it, and will not complete it."""
    SKIPPED = "skipped"
    """A rank could not record it. Readers hide it."""
    DROPPED = "dropped"
    """It was complete and has been removed to bound the size of the run (`--keep-last`)."""
    OPEN = "open"
    """Ranks may still commit it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationStatus:
    """The status of one iteration of one attempt, as read from the store."""

    iteration: int
    """Training step."""
    attempt: int
    """Number of the worker group's start that recorded it."""
    state: IterationState
    """The state."""
    expected_ranks: list[int]
    """The ranks that must commit it."""
    committed_ranks: list[int]
    """The ranks that have committed it."""
    missing: dict[int, str]
    """The reason for each rank that has not committed it (at most 1,000 of them) or was cut off, as far as known."""
    silent_sites: dict[int, dict[str, str]] = field(default_factory=dict)
    """For each rank that committed it, the expected tensors that were not recorded, each with the reason."""
    num_records: int = 0
    """Number of records in the iteration commit; 0 before the commit."""
    nbytes: int = 0
    """Size of the stored records, in bytes, before compression."""
    problem: str = ""
    """What is wrong with the document of its commit; empty if nothing is."""
    num_expected: int | None = None
    """Number of expected tensors. Each counts once per rank, whatever its number of microbatches and calls. None before
    the iteration commit, and if the recorder does not count."""
    num_recorded: int | None = None
    """Number of expected tensors that were recorded in all microbatches and calls."""
    num_missing: int | None = None
    """Number of expected tensors that were not recorded, or only in part; `silent_sites` has the reasons."""
    compiled: str = ""
    """How compiled code was recorded: inside its graphs, or why it ran eagerly. Empty if no compiled code ran."""
    step_skipped_ranks: list[int] = field(default_factory=list)
    """The ranks on which a gradient scaler skipped the optimizer's step because a gradient was not finite."""

    def lacks(self, *, max_named: int) -> str:
        """What is missing for it to be complete, with at most `max_named` ranks named; empty if nothing is missing."""
        if self.state in {IterationState.COMPLETE, IterationState.DROPPED}:
            return ""
        if not self.missing:
            return "every rank has committed it, its iteration commit is not written yet"
        reasons = [f"rank {rank}: {reason}" for rank, reason in list(self.missing.items())[:max_named]]
        num_missing = max(len(self.missing), len(self.expected_ranks) - len(self.committed_ranks))
        num_more = num_missing - len(reasons)
        return "; ".join(reasons) + (f"; and {num_more} more" if num_more > 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """Whether a run holds the guaranteed number of iterations."""

    met: bool
    """Whether at least `required` iterations are stored complete, or were before they were removed."""
    required: int
    """The guaranteed minimum."""
    complete: list[int]
    """The iterations that are stored complete, over all attempts."""
    missing: list[str]
    """What is missing: one line for each iteration that is not complete."""
    final: bool
    """Whether the coordinator has closed the attempt. Before that, the verdict may change."""
    num_dropped: int = 0
    """Number of iterations that were stored complete and have been removed since. They count for the minimum."""
    ended: str = ""
    """What ended the training or the capture on request; empty otherwise."""
    num_triggers: int | None = None
    """Number of triggers of a flight recorder, which guarantees no minimum; None for other captures."""

    def message(self) -> str:
        """The verdict as one line of text."""
        if self.num_triggers is not None:
            return self._recorder_message(self.num_triggers)
        have = f"{len(self.complete)} of {self.required} guaranteed iterations are stored complete"
        if self.num_dropped and len(self.complete) < self.required:
            have += f", {self.num_dropped} more were until they were removed"
        ended = f"; {self.ended}" if self.ended else ""
        if self.met:
            return f"minimum met: {have}" + (f" ({_listed(self.complete)})" if self.complete else "") + ended
        missing = "; ".join(self.missing[:_MAX_NAMED]) or "no iteration was begun"
        num_more = len(self.missing) - _MAX_NAMED
        return f"minimum not met: {have}; {missing}" + (f"; and {num_more} more" if num_more > 0 else "") + ended

    def _recorder_message(self, num_triggers: int) -> str:
        if not num_triggers:
            return "flight recorder: no trigger occurred, and no iteration is stored"
        stored = f"flight recorder: {num_triggers} trigger{'s' * (num_triggers != 1)}; stored complete are "
        stored += f"iterations {_listed(self.complete)}" if self.complete else "no iterations"
        missing = "; ".join(self.missing[:_MAX_NAMED])
        return stored + (f"; {missing}" if missing else "")

    def to_json(self) -> dict[str, Any]:
        """The verdict as a dictionary for JSON and Zarr attributes."""
        return dataclasses.asdict(self)


_MAX_NAMED = 4
"""The number of items named in one line before the rest is counted."""


def judge(
    statuses: Sequence[IterationStatus],
    *,
    required: int,
    final: bool,
    notes: Mapping[int, str] | None = None,
    problems: Mapping[str, str] | None = None,
    ended: str = "",
    num_triggers: int | None = None,
    requested: Collection[tuple[int, int]] = (),
) -> RunVerdict:
    """The verdict on a run whose iterations have `statuses`.

    `notes` are the reasons that ranks left and `problems` the coordinator's errors; the verdict names them if the
    minimum is not met. `num_triggers` is that of a flight recorder. `asked` are pairs of attempt and iteration that
    were requested while the training ran; they do not count for the minimum.
    """
    complete = sorted({status.iteration for status in statuses if status.state is IterationState.COMPLETE})
    # They were stored complete and removed on purpose, so that they still count for the minimum.
    dropped = {status.iteration for status in statuses if status.state is IterationState.DROPPED} - {*complete}
    missing = []
    for status in statuses:
        if status.iteration in complete or status.state is IterationState.DROPPED:
            continue
        missing.append(f"iteration {status.iteration} is {status.state} ({status.lacks(max_named=_MAX_NAMED)})")
    planned = {
        status.iteration
        for status in statuses
        if status.state in {IterationState.COMPLETE, IterationState.DROPPED}
        and (status.attempt, status.iteration) not in requested
    }
    is_met = len(planned) >= required
    if not is_met and (extra := sorted(set(complete) - planned)):
        missing.append(f"{_listed(extra)} were requested while the training ran, and do not count for the minimum")
    if not is_met:
        missing += [f"{subject}: {problem}" for subject, problem in (problems or {}).items()]
        # An iteration that was cut off has the note already.
        noted = "; ".join(missing)
        missing += [f"rank {rank}: {note}" for rank, note in (notes or {}).items() if note not in noted]
    return RunVerdict(
        met=is_met,
        required=required,
        complete=complete,
        missing=missing,
        final=final,
        num_dropped=len(dropped),
        ended=ended,
        num_triggers=num_triggers,
    )


def _listed(iterations: Sequence[int]) -> str:
    shown = ", ".join(str(iteration) for iteration in iterations[:_MAX_NAMED])
    return shown if len(iterations) <= _MAX_NAMED else f"{shown}, ... {iterations[-1]}"


_MAX_REASONS = 1000
"""The number of ranks whose reason is read for one iteration."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of an attempt, as read from its keys."""

    attempt: Attempt
    """The attempt."""
    opened: frozenset[int]
    """Iterations that have started."""
    marks: dict[int, dict[int, Mark]]
    """The mark of each rank, by iteration and rank."""
    complete: frozenset[int]
    """Iterations with an iteration commit."""
    closed: frozenset[int]
    """Ranks that will commit nothing more."""
    dropped: frozenset[int] = frozenset()
    """Iterations that were complete and were removed."""

    def committed_ranks(self, iteration: int) -> list[int]:
        """The ranks that have committed an iteration, in ascending order."""
        return sorted(rank for rank, mark in self.marks.get(iteration, {}).items() if mark is Mark.COMMITTED)

    def ready(self) -> list[int]:
        """The iterations that all ranks have committed and that lack an iteration commit, in ascending order."""
        size = self.attempt.launch.world_size
        settled = self.complete | self.dropped
        return sorted(
            iteration
            for iteration in self.marks
            if iteration not in settled and len(self.committed_ranks(iteration)) == size
        )


def read_progress(backend: Backend, attempt: Attempt, *, known: Progress | None = None) -> Progress:
    """The state of an attempt. It takes a few LIST requests and reads no document.

    `known` is an earlier result. The markers of an iteration that all ranks have marked there are not read again.
    """
    # Read before the markers, so that all markers of a rank that has closed are seen.
    closed = [layout.parse_key(f"closed/{key}") for key in backend.list_keys(f"{attempt.path}/closed")]
    opened, marks = _read_marks(backend, attempt, known=known)
    # The order matters: an iteration that is removed between the two requests is in the second list.
    committed = committed_iterations(backend, attempt)
    dropped = dropped_iterations(backend, attempt)
    return Progress(
        attempt=attempt,
        opened=frozenset(opened),
        marks=marks,
        complete=committed - dropped,
        closed=frozenset(rank_key.rank for rank_key in closed if rank_key is not None and rank_key.rank >= 0),
        dropped=dropped,
    )


def _read_marks(
    backend: Backend, attempt: Attempt, *, known: Progress | None
) -> tuple[set[int], dict[int, dict[int, Mark]]]:
    top = layout.commits_path(attempt.path)
    opened: set[int] = set()
    marks: dict[int, dict[int, Mark]] = {}
    if known is None:
        keys = backend.list_keys(top)
    else:
        size = attempt.launch.world_size
        marks = {iteration: by_rank for iteration, by_rank in known.marks.items() if len(by_rank) == size}
        opened = set(marks)
        # Each name is the group of an iteration. Only groups of unsettled iterations are listed.
        unsettled = sorted(layout.iterations_named(backend.list_names(top)) - set(marks))
        folders = [layout.opened_path(attempt.path, iteration).removeprefix(f"{top}/") for iteration in unsettled]
        keys = [f"{folder}/{key}" for folder in folders for key in backend.list_keys(f"{top}/{folder}")]
    for parsed in (layout.parse_key(f"commits/{key}") for key in keys):
        if parsed is not None and parsed.iteration >= 0:
            opened.add(parsed.iteration)
            if parsed.mark is not None:
                marks.setdefault(parsed.iteration, {})[parsed.rank] = parsed.mark
    return opened, marks


def open_iteration(backend: Backend, *, attempt: Attempt, iteration: int) -> None:
    """Note that an iteration has started, so that it is reported as missing if no rank commits it."""
    check_attempt(backend, attempt)
    write_group(backend, layout.opened_path(attempt.path, iteration), {"opened": time.time()})


def read_statuses(
    backend: Backend, progress: Progress, *, final: bool, known: Mapping[int, IterationStatus]
) -> list[IterationStatus]:
    """The status of every iteration that has started in an attempt, in ascending order.

    `final` states that no rank will commit anything more. `known` are earlier results; those of complete iterations are
    returned without reading.
    """
    iterations = sorted(progress.opened | progress.complete | progress.dropped)
    expected = list(progress.attempt.launch.ranks)

    def answer(iteration: int) -> IterationStatus:
        before = known.get(iteration)
        is_settled = before is not None and before.state is IterationState.COMPLETE and not before.problem
        if before is not None and is_settled and iteration in progress.complete:
            return before
        return _status(backend, progress, iteration, expected=expected, final=final)

    return for_each(answer, iterations)


@dataclass(frozen=True, slots=True)
class ProgressCache:
    """The results for complete iterations, which do not change, from earlier calls of `read_verdict`."""

    progresses: dict[str, Progress] = field(default_factory=dict)
    """The state of each attempt by its path, with the marks of complete iterations only."""
    statuses: dict[str, dict[int, IterationStatus]] = field(default_factory=dict)
    """The status of each iteration, by the path of the attempt and the iteration."""


def read_verdict(
    backend: Backend,
    *,
    until: str | None = None,
    attempts: list[Attempt] | None = None,
    seen: ProgressCache | None = None,
) -> tuple[RunVerdict, list[IterationStatus]] | None:
    """The verdict on a run and the status of all its iterations; None for a run without an attempt.

    `until` is the path of an attempt; later attempts are ignored. `attempts` are the attempts of the run if the caller
    has read them already. A caller that polls passes the same `seen` each time; it is updated, and only iterations that
    are not complete are read again.
    """
    seen = seen or ProgressCache()
    attempts = read_attempts(backend) if attempts is None else attempts
    paths = [attempt.path for attempt in attempts]
    attempts = attempts[: paths.index(until) + 1] if until in paths else attempts
    if not attempts:
        return None
    last = attempts[-1]
    # Read first: a rank writes the reason why it closed before the verdict is written.
    closing, damage = _read_or_damage(backend, layout.verdict_path(last.path), _RankDocument)
    final = closing is not None or bool(damage)
    closing = closing or _RankDocument()
    progresses = [read_progress(backend, attempt, known=seen.progresses.get(attempt.path)) for attempt in attempts]
    statuses: list[IterationStatus] = []
    for progress in progresses:
        complete = {iteration: marks for iteration, marks in progress.marks.items() if iteration in progress.complete}
        seen.progresses[progress.attempt.path] = dataclasses.replace(progress, marks=complete)
        is_over = final or progress.attempt is not last
        known = seen.statuses.get(progress.attempt.path, {})
        iteration_statuses = read_statuses(backend, progress, final=is_over, known=known)
        seen.statuses[progress.attempt.path] = {status.iteration: status for status in iteration_statuses}
        statuses += iteration_statuses
    statuses.sort(key=lambda status: (status.iteration, status.attempt))
    verdict = judge(
        statuses,
        requested={
            (attempt.number, iteration) for attempt in attempts for iteration in _asked_iterations(backend, attempt)
        },
        required=last.min_iterations,
        final=final,
        # Only of the first rank that closed: the reasons of the others are in the iterations that they did not commit.
        notes={rank: _closing_reason(backend, last.path, rank) for rank in sorted(progresses[-1].closed)[: int(final)]},
        problems={**closing.problems, **({"the verdict": damage} if damage else {})},
        ended=closing.ended,
        # A run without a minimum is that of a flight recorder. Its launch may have had several attempts.
        num_triggers=None if last.min_iterations else sum(count_triggers(backend, attempt) for attempt in attempts),
    )
    return verdict, statuses


def _asked_iterations(backend: Backend, attempt: Attempt) -> Collection[int]:
    """The iterations that were requested while the training ran; none if the plan is damaged."""
    try:
        plan = read_plan(backend, attempt=attempt)
    except (DataError, RunFormatError):
        return ()
    return () if plan is None else plan.requested_iterations


def write_verdict(
    backend: Backend, *, attempt: Attempt, problems: Mapping[str, str] | None = None, ended: str = ""
) -> RunVerdict:
    """Close the attempt and write the verdict on the run up to it.

    Args:
        backend: The store of the run.
        attempt: The attempt that ends.
        problems: The coordinator's errors. The verdict names them if the minimum is not met.
        ended: What ended the training or the capture on request.

    Raises:
        RunNotFoundError: the run was deleted or replaced.
    """
    if not is_attempt_there(backend, attempt):
        raise RunNotFoundError(lost_message(backend))
    path = layout.verdict_path(attempt.path)
    closing = {"problems": dict(problems or {}), "ended": ended, "written": time.time()}
    write_group(backend, path, closing)
    judged = read_verdict(backend, until=attempt.path)
    if judged is None or not is_attempt_there(backend, attempt):
        raise RunNotFoundError(lost_message(backend))
    verdict = judged[0]
    write_group(backend, path, {**verdict.to_json(), **closing})
    backend.flush()
    return verdict


def judge_again(backend: Backend, attempt: Attempt) -> None:
    """Write the verdict on an attempt again from the present state of the run. The coordinator's errors are kept."""
    verdict_fields, damage = _read_or_damage(backend, layout.verdict_path(attempt.path), _RankDocument)
    verdict_fields = verdict_fields or _RankDocument(
        problems={"verdict": "it was damaged, and written again"} if damage else {}
    )
    write_verdict(backend, attempt=attempt, problems=verdict_fields.problems, ended=verdict_fields.ended)


def finish_ready(backend: Backend, attempt: Attempt, *, problems: dict[int, str] | None = None) -> list[int]:
    """Write the missing iteration commits of iterations that all ranks have committed, and return these iterations.

    An iteration with a damaged document is added to `problems`; without `problems`, the error is raised.
    """
    finished = []
    for iteration in read_progress(backend, attempt).ready():
        try:
            finish_iteration(backend, attempt=attempt, iteration=iteration)
            finished.append(iteration)
        except DataError as error:
            if problems is None:
                raise
            problems.setdefault(iteration, str(error))
    return finished


def _status(
    backend: Backend, progress: Progress, iteration: int, *, expected: list[int], final: bool
) -> IterationStatus:
    attempt = progress.attempt
    marks = progress.marks.get(iteration, {})
    committed = progress.committed_ranks(iteration)
    # Nothing is missing from an iteration that was removed on purpose.
    absent = set() if iteration in progress.dropped else set(expected).difference(committed)
    named = sorted(absent)[:_MAX_REASONS]
    missing = {rank: _reason(backend, progress, iteration, rank, final=final) for rank in named}
    summary, damage = IterationSummary(), ""
    if iteration in progress.dropped:
        state = IterationState.DROPPED
    elif iteration in progress.complete:
        path = layout.iteration_path(attempt.path, iteration)
        stored_summary, damage = _read_or_damage(backend, path, IterationSummary)
        summary = stored_summary or summary
        missing |= summary.cut_off
        state = IterationState.PARTIAL if summary.cut_off else IterationState.COMPLETE
    elif Mark.SKIPPED in marks.values():
        state = IterationState.SKIPPED
    elif final or Mark.FAILED in marks.values() or absent & progress.closed:
        state = IterationState.PARTIAL
    else:
        state = IterationState.OPEN
    return IterationStatus(
        iteration=iteration,
        attempt=attempt.number,
        state=state,
        expected_ranks=expected,
        committed_ranks=committed,
        missing=missing,
        problem=damage,
        silent_sites=summary.silent_sites,
        num_records=summary.num_records,
        nbytes=summary.nbytes,
        num_expected=summary.num_expected,
        num_recorded=summary.num_recorded,
        num_missing=summary.num_missing,
        compiled=summary.compiled,
        step_skipped_ranks=list(summary.step_skipped_ranks),
    )


def _reason(backend: Backend, progress: Progress, iteration: int, rank: int, *, final: bool) -> str:
    path = progress.attempt.path
    mark = progress.marks.get(iteration, {}).get(rank)
    if mark is not None:
        marker = layout.marker_path(path, iteration, rank, mark)
        marker_fields, damage = _read_or_damage(backend, marker, _RankDocument)
        return f"{mark}, and {damage}" if damage else (marker_fields and marker_fields.reason) or mark.value
    if rank in progress.closed:
        return f"ended before it ({_closing_reason(backend, path, rank) or 'no reason was recorded'})"
    return "never reported (its host may be lost)" if final else "has not committed yet"


def read_disabled(backend: Backend, *, attempts: list[Attempt] | None = None) -> dict[int, str]:
    """The ranks whose capture disabled itself in the last attempt of a run, with the reason of each."""
    reasons = _read_of_ranks(backend, layout.closed_path, "reason", attempts=attempts)
    return {rank: reason for rank, reason in reasons.items() if reason.startswith(DISABLED)}


def read_troubles(backend: Backend, *, attempts: list[Attempt] | None = None) -> dict[int, str]:
    """The ranks that had an error in the last attempt of a run and continued, with the error of each."""
    return _read_of_ranks(backend, layout.rank_path, "trouble", attempts=attempts)


def _read_of_ranks(
    backend: Backend, path_of: Callable[[str, int], str], name: str, *, attempts: list[Attempt] | None
) -> dict[int, str]:
    """The value of a field in the documents that ranks of the last attempt have at a path, by rank."""
    attempts = read_attempts(backend) if attempts is None else attempts
    if not attempts:
        return {}
    path = attempts[-1].path
    ranks = sorted(layout.ranks_named(backend.list_names(path_of(path, 0).rpartition("/")[0])))
    documents = for_each(lambda rank: _read_or_damage(backend, path_of(path, rank), _RankDocument), ranks)
    texts = {rank: damage or getattr(fields, name, "") for rank, (fields, damage) in zip(ranks, documents, strict=True)}
    return {rank: text for rank, text in texts.items() if text}


def _closing_reason(backend: Backend, attempt: str, rank: int) -> str:
    fields, damage = _read_or_damage(backend, layout.closed_path(attempt, rank), _RankDocument)
    return damage or (fields.reason if fields is not None else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankDocument:
    """The fields read from the documents of ranks, of markers, of closed ranks, and of the verdict."""

    reason: str = ""
    trouble: str = ""
    problems: dict[str, str] = field(default_factory=dict)
    ended: str = ""


def _read_or_damage(backend: Backend, path: str, kind: type[_T]) -> tuple[_T | None, str]:
    """The document at a path and an empty string, or None and what is wrong: the rest of the run stays readable."""
    try:
        return read_as(backend, path, kind, max_nbytes=MAX_COMMIT_NBYTES), ""
    except (DataError, RunFormatError) as error:
        return None, f"its document is damaged: {error}"
