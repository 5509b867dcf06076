"""How far each iteration of a run is, what is missing, and whether the guaranteed minimum is there."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DISABLED = "capture disabled itself"
"""Begins the last words of a rank that recorded nothing more after a failure inside of the capture."""

MAX_TEXT = 2000
"""Characters of a text in a trigger."""


class TriggerKind(enum.StrEnum):
    """What kind of thing happened."""

    NAN = "nan"
    """A recorded tensor held a NaN."""
    INF = "inf"
    """A recorded tensor held an infinity."""
    METRIC = "metric"
    """A metric of a recorded tensor was beyond a limit that was given (`--trigger`)."""
    USER = "user"
    """The program said so (`capture.trigger`)."""
    SIGNAL = "signal"
    """A signal asked for it."""
    EXCEPTION = "exception"
    """The training ended with an error: an uncaught exception, as of a collective that timed out."""
    DEATH = "death"
    """The training process died, without a word."""


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
