"""How far each iteration of a run is, what is missing, and whether the guaranteed minimum is there.

The coordinator, `status` and every reader look at the same keys through this module. One LIST of the
markers tells the state of every iteration on every rank.
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
"""Begins the last words of a rank that recorded nothing more after a failure inside of the capture."""


class IterationState(enum.StrEnum):
    """How far one iteration is."""

    COMPLETE = "complete"
    """Every expected rank has committed it, and so has the coordinator: each expected tensor, or the reason why not."""
    PARTIAL = "partial"
    """Some rank did not commit it, or was cut off in it, and will not complete it."""
    SKIPPED = "skipped"
    """Some rank could not take it; readers hide it."""
    DROPPED = "dropped"
    """It was complete, and removed to keep the run small (`--keep-last`)."""
    OPEN = "open"
    """Ranks may still commit it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationStatus:
    """What the store says of one iteration of one attempt."""

    iteration: int
    """Training step."""
    attempt: int
    """Start of the worker group that recorded it."""
    state: IterationState
    """How far it is."""
    expected_ranks: list[int]
    """The ranks that must commit it."""
    committed_ranks: list[int]
    """The ranks that have committed it."""
    missing: dict[int, str]
    """For each rank that has not committed it, the first 1,000 of them, or was cut off in it: why, as far as known."""
    silent_sites: dict[int, dict[str, str]] = field(default_factory=dict)
    """For each rank that committed: the tensors that were expected and not recorded, each with the reason."""
    num_records: int = 0
    """Records in the iteration commit; 0 before it."""
    nbytes: int = 0
    """Bytes of what was kept of them, before compression."""
    problem: str = ""
    """What is wrong with the document of its commit; empty where nothing is."""
    num_expected: int | None = None
    """Tensors that were expected, each counted once on each rank, however many records its microbatches and calls
    make; None before the iteration commit, and where no capture counted."""
    num_recorded: int | None = None
    """Those of them that were recorded, in all microbatches and calls in which they came."""
    num_missing: int | None = None
    """Those of them that were not, or not whole; `silent_sites` has the reasons."""
    compiled: str = ""
    """How compiled code was recorded: inside of its graphs, or why it ran eagerly; empty where none ran."""
    step_skipped_ranks: list[int] = field(default_factory=list)
    """The ranks on which a gradient scaler skipped the step of the optimizer, because a gradient was not finite."""

    def lacks(self, *, max_named: int) -> str:
        """What it lacks to be complete, at most so many ranks named; empty where nothing is missing."""
        if self.state in {IterationState.COMPLETE, IterationState.DROPPED}:
            return ""
        if not self.missing:
            return "every rank has committed it, its iteration commit is not written yet"
        words = [f"rank {rank}: {reason}" for rank, reason in list(self.missing.items())[:max_named]]
        num_missing = max(len(self.missing), len(self.expected_ranks) - len(self.committed_ranks))
        rest = num_missing - len(words)
        return "; ".join(words) + (f"; and {rest} more" if rest > 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """Whether a run holds the iterations it guaranteed."""

    met: bool
    """Whether at least `required` iterations are stored complete, or were until they were removed."""
    required: int
    """The guaranteed minimum."""
    complete: list[int]
    """The iterations that are stored complete, over all attempts."""
    missing: list[str]
    """What is missing, one line for each iteration that is not complete."""
    final: bool
    """Whether the coordinator has closed the attempt; before that the answer may still change."""
    num_dropped: int = 0
    """Iterations that were stored complete and have been removed since; they count for the minimum."""
    ended: str = ""
    """What has ended the training or the capture, where that was asked for; else empty."""
    num_triggers: int | None = None
    """Of a flight recorder, which guarantees nothing: the things that happened; None for other captures."""

    def message(self) -> str:
        """One line for a person."""
        if self.num_triggers is not None:
            return self._recorder_message(self.num_triggers)
        have = f"{len(self.complete)} of {self.required} guaranteed iterations are stored complete"
        if self.num_dropped and len(self.complete) < self.required:
            have += f", {self.num_dropped} more were until they were removed"
        ended = f"; {self.ended}" if self.ended else ""
        if self.met:
            return f"minimum met: {have}" + (f" ({_listed(self.complete)})" if self.complete else "") + ended
        missing = "; ".join(self.missing[:_MAX_NAMED]) or "no iteration was begun"
        rest = len(self.missing) - _MAX_NAMED
        return f"minimum not met: {have}; {missing}" + (f"; and {rest} more" if rest > 0 else "") + ended

    def _recorder_message(self, num_triggers: int) -> str:
        if not num_triggers:
            return "flight recorder: nothing triggered, and no iteration is stored"
        stored = f"flight recorder: {num_triggers} trigger{'s' * (num_triggers != 1)}; stored complete are "
        stored += f"iterations {_listed(self.complete)}" if self.complete else "no iterations"
        missing = "; ".join(self.missing[:_MAX_NAMED])
        return stored + (f"; {missing}" if missing else "")

    def to_json(self) -> dict[str, Any]:
        """A dictionary for JSON and for Zarr attributes."""
        return dataclasses.asdict(self)


_MAX_NAMED = 4
"""Items named in one line before the rest is counted."""


def judge(
    statuses: Sequence[IterationStatus],
    *,
    required: int,
    final: bool,
    notes: Mapping[int, str] | None = None,
    problems: Mapping[str, str] | None = None,
    ended: str = "",
    num_triggers: int | None = None,
    asked: Collection[tuple[int, int]] = (),
) -> RunVerdict:
    """The verdict on a run whose iterations stand as `statuses` say.

    `notes` give ranks' last words and `problems` what the coordinator met; both count where the minimum is not met.
    `num_triggers` is that of a flight recorder.
    `asked` are attempts and iterations that somebody asked for while the training ran: they count for no minimum.
    """
    complete = sorted({status.iteration for status in statuses if status.state is IterationState.COMPLETE})
    # They were stored complete, and removed on purpose: nothing that was promised is missing.
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
        and (status.attempt, status.iteration) not in asked
    }
    is_met = len(planned) >= required
    if not is_met and (extra := sorted(set(complete) - planned)):
        missing.append(f"{_listed(extra)} were asked for while the training ran, and count for no minimum")
    if not is_met:
        missing += [f"{subject}: {problem}" for subject, problem in (problems or {}).items()]
        missing += [f"rank {rank}: {note}" for rank, note in (notes or {}).items()]
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
"""Ranks of which is said, for one iteration, why they have not committed it."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an attempt is, read off its keys."""

    attempt: Attempt
    """The attempt."""
    opened: frozenset[int]
    """Iterations that were begun."""
    marks: dict[int, dict[int, Mark]]
    """For each iteration, each rank's word."""
    complete: frozenset[int]
    """Iterations with an iteration commit."""
    closed: frozenset[int]
    """Ranks that will commit nothing more."""
    dropped: frozenset[int] = frozenset()
    """Iterations that were complete and have been removed."""

    def committed_ranks(self, iteration: int) -> list[int]:
        """The ranks that have committed an iteration, ascending."""
        return sorted(rank for rank, mark in self.marks.get(iteration, {}).items() if mark is Mark.COMMITTED)

    def ready(self) -> list[int]:
        """The iterations that all ranks have committed and that have no iteration commit, ascending."""
        size = self.attempt.launch.world_size
        settled = self.complete | self.dropped
        return sorted(
            iteration
            for iteration in self.marks
            if iteration not in settled and len(self.committed_ranks(iteration)) == size
        )


def read_progress(backend: Backend, attempt: Attempt, *, known: Progress | None = None) -> Progress:
    """How far an attempt is; some LISTs, no document is read.

    What was seen before (`known`) is not looked at again where it is settled: only the markers of iterations are
    that some rank has not had its word on.
    """
    # Before the markers: a rank that is seen to have closed is seen with every word that it had.
    closed = [layout.parse_key(f"closed/{key}") for key in backend.list_keys(f"{attempt.path}/closed")]
    opened, marks = _read_marks(backend, attempt, known=known)
    # In this order: what is removed in between is in the second list.
    committed = committed_iterations(backend, attempt)
    dropped = dropped_iterations(backend, attempt)
    return Progress(
        attempt=attempt,
        opened=frozenset(opened),
        marks=marks,
        complete=committed - dropped,
        closed=frozenset(one.rank for one in closed if one is not None and one.rank >= 0),
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
        marks = {iteration: words for iteration, words in known.marks.items() if len(words) == size}
        opened = set(marks)
        # A name is an iteration's group; what is below it is looked at where it is not settled.
        unsettled = sorted(layout.iterations_named(backend.list_names(top)) - set(marks))
        folders = [layout.opened_path(attempt.path, iteration).removeprefix(f"{top}/") for iteration in unsettled]
        keys = [f"{folder}/{key}" for folder in folders for key in backend.list_keys(f"{top}/{folder}")]
    for found in (layout.parse_key(f"commits/{key}") for key in keys):
        if found is not None and found.iteration >= 0:
            opened.add(found.iteration)
            if found.mark is not None:
                marks.setdefault(found.iteration, {})[found.rank] = found.mark
    return opened, marks


def open_iteration(backend: Backend, *, attempt: Attempt, iteration: int) -> None:
    """Say that an iteration was begun, so that it is missed if no rank commits it."""
    check_attempt(backend, attempt)
    write_group(backend, layout.opened_path(attempt.path, iteration), {"opened": time.time()})


def read_statuses(
    backend: Backend, progress: Progress, *, final: bool, known: Mapping[int, IterationStatus]
) -> list[IterationStatus]:
    """Every iteration that was begun in an attempt, ascending; `final` says that nothing more will come."""
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
    """What earlier looks at a run have read of its complete iterations, which do not change."""

    progresses: dict[str, Progress] = field(default_factory=dict)
    """By the attempt's path, with the words of the ranks on complete iterations alone."""
    statuses: dict[str, dict[int, IterationStatus]] = field(default_factory=dict)
    """By the attempt's path and the iteration."""


def read_verdict(
    backend: Backend,
    *,
    until: str | None = None,
    attempts: list[Attempt] | None = None,
    seen: ProgressCache | None = None,
) -> tuple[RunVerdict, list[IterationStatus]] | None:
    """The verdict on a run, with all its iterations; None for a run in which no attempt has begun.

    With `until`, the path of an attempt, as if none had come after it. `attempts` are those of the run, where they were
    read already. Who looks again and again passes one `seen`, which is filled: only what is not complete is read again.
    """
    seen = seen or ProgressCache()
    attempts = read_attempts(backend) if attempts is None else attempts
    paths = [one.path for one in attempts]
    attempts = attempts[: paths.index(until) + 1] if until in paths else attempts
    if not attempts:
        return None
    last = attempts[-1]
    # Read first: a rank's last words come before it.
    closing, damage = _read_or_damage(backend, layout.verdict_path(last.path), _Words)
    final = closing is not None or bool(damage)
    closing = closing or _Words()
    progresses = [read_progress(backend, attempt, known=seen.progresses.get(attempt.path)) for attempt in attempts]
    statuses: list[IterationStatus] = []
    for progress in progresses:
        complete = {iteration: marks for iteration, marks in progress.marks.items() if iteration in progress.complete}
        seen.progresses[progress.attempt.path] = dataclasses.replace(progress, marks=complete)
        is_over = final or progress.attempt is not last
        known = seen.statuses.get(progress.attempt.path, {})
        found = read_statuses(backend, progress, final=is_over, known=known)
        seen.statuses[progress.attempt.path] = {one.iteration: one for one in found}
        statuses += found
    statuses.sort(key=lambda status: (status.iteration, status.attempt))
    verdict = judge(
        statuses,
        asked={
            (attempt.number, iteration) for attempt in attempts for iteration in _asked_iterations(backend, attempt)
        },
        required=last.min_iterations,
        final=final,
        # Of the first rank that closed; the others' are in the iterations that they did not commit.
        notes={rank: _last_words(backend, last.path, rank) for rank in sorted(progresses[-1].closed)[: int(final)]},
        problems={**closing.problems, **({"the verdict": damage} if damage else {})},
        ended=closing.ended,
        # What guarantees nothing is a flight recorder; its launch may have had several attempts.
        num_triggers=None if last.min_iterations else sum(count_triggers(backend, one) for one in attempts),
    )
    return verdict, statuses


def _asked_iterations(backend: Backend, attempt: Attempt) -> Collection[int]:
    """Those that somebody asked for while the training ran; none where the plan is damaged."""
    try:
        plan = read_plan(backend, attempt=attempt)
    except (DataError, RunFormatError):
        return ()
    return () if plan is None else plan.asked_iterations


def write_verdict(
    backend: Backend, *, attempt: Attempt, problems: Mapping[str, str] | None = None, ended: str = ""
) -> RunVerdict:
    """Close the attempt: the verdict on the run up to it, written to the store.

    Args:
        backend: Where the run is.
        attempt: The attempt that ends.
        problems: What its coordinator met, each with the reason; a verdict that is not met names them.
        ended: What has ended the training or the capture, where that was asked for.

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
    """Write the verdict on an attempt anew, as the run stands; what its coordinator met stays in it."""
    words, damage = _read_or_damage(backend, layout.verdict_path(attempt.path), _Words)
    words = words or _Words(problems={"verdict": "it was damaged, and written again"} if damage else {})
    write_verdict(backend, attempt=attempt, problems=words.problems, ended=words.ended)


def finish_ready(backend: Backend, attempt: Attempt, *, problems: dict[int, str] | None = None) -> list[int]:
    """Write the iteration commits of which only these are missing; the iterations that are complete since then.

    One that is damaged is noted in `problems`.
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
    # Of an iteration that was removed on purpose nothing is missing.
    absent = set() if iteration in progress.dropped else set(expected).difference(committed)
    named = sorted(absent)[:_MAX_REASONS]
    missing = {rank: _reason(backend, progress, iteration, rank, final=final) for rank in named}
    summary, damage = IterationSummary(), ""
    if iteration in progress.dropped:
        state = IterationState.DROPPED
    elif iteration in progress.complete:
        path = layout.iteration_path(attempt.path, iteration)
        found, damage = _read_or_damage(backend, path, IterationSummary)
        summary = found or summary
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
        words, damage = _read_or_damage(backend, marker, _Words)
        return f"{mark}, and {damage}" if damage else (words and words.reason) or mark.value
    if rank in progress.closed:
        return f"ended before it ({_last_words(backend, path, rank) or 'no reason was left'})"
    return "never reported (its host may be lost)" if final else "has not committed yet"


def read_disabled(backend: Backend, *, attempts: list[Attempt] | None = None) -> dict[int, str]:
    """The ranks whose capture disabled itself in the last attempt of a run, each with the reason."""
    reasons = _read_of_ranks(backend, layout.closed_path, "reason", attempts=attempts)
    return {rank: reason for rank, reason in reasons.items() if reason.startswith(DISABLED)}


def read_troubles(backend: Backend, *, attempts: list[Attempt] | None = None) -> dict[int, str]:
    """The ranks that something befell in the last attempt of a run and that went on, each with what it was."""
    return _read_of_ranks(backend, layout.rank_path, "trouble", attempts=attempts)


def _read_of_ranks(
    backend: Backend, path_of: Callable[[str, int], str], name: str, *, attempts: list[Attempt] | None
) -> dict[int, str]:
    """What a field says in the documents that some ranks of the last attempt have at a path."""
    attempts = read_attempts(backend) if attempts is None else attempts
    if not attempts:
        return {}
    path = attempts[-1].path
    ranks = sorted(layout.ranks_named(backend.list_names(path_of(path, 0).rpartition("/")[0])))
    found = for_each(lambda rank: _read_or_damage(backend, path_of(path, rank), _Words), ranks)
    texts = {rank: damage or getattr(words, name, "") for rank, (words, damage) in zip(ranks, found, strict=True)}
    return {rank: text for rank, text in texts.items() if text}


def _last_words(backend: Backend, attempt: str, rank: int) -> str:
    words, damage = _read_or_damage(backend, layout.closed_path(attempt, rank), _Words)
    return damage or (words.reason if words is not None else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """What ranks say in their own document, in markers and when they close; and a coordinator in the verdict."""

    reason: str = ""
    trouble: str = ""
    problems: dict[str, str] = field(default_factory=dict)
    ended: str = ""


def _read_or_damage(backend: Backend, path: str, kind: type[_T]) -> tuple[_T | None, str]:
    """The document at a path, and what is wrong with it: the rest of a run is told of without it."""
    try:
        return read_as(backend, path, kind, max_nbytes=MAX_COMMIT_NBYTES), ""
    except (DataError, RunFormatError) as error:
        return None, f"its document is damaged: {error}"
