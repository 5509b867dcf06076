"""`ranktape status`: what is stored of a run, what is missing and why, and whether its guaranteed minimum is stored."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ranktape.analyze.console import say
from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import CheckFoundError, RunNotFoundError, expect_least
from ranktape.launch.place import MAX_NAMED, CommandAnswer, by_reason, command_of, count_text, shown
from ranktape.storage import IterationStatus, RunVerdict
from ranktape.storage.places.backend import Backend, nbytes_text
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from ranktape.storage.format.attempt import Attempt
    from ranktape.storage.format.live import Trigger
    from ranktape.storage.format.progress import ProgressCache

COLUMNS = (
    Column(name="iteration", kind=Kind.INTEGER),
    Column(name="attempt", kind=Kind.INTEGER, is_key=True),
    Column(name="state", kind=Kind.TEXT),
    Column(name="committed", kind=Kind.INTEGER, unit="ranks"),
    Column(name="expected", kind=Kind.INTEGER, unit="ranks"),
    Column(name="records", kind=Kind.INTEGER),
    Column(name="size", kind=Kind.NBYTES, unit="bytes"),
    Column(name="tensors", kind=Kind.TEXT, head="expected tensors recorded"),
    Column(name="missing", kind=Kind.TEXT),
)
"""The columns of the table, which has one row for each iteration of each attempt."""

COUNTED = (
    "a record is one tensor of one microbatch and call; an expected tensor is counted once on each rank, however many "
    "records it has"
)
"""The note that explains the two counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The state of a run."""

    run: str
    """URL or path of the run as given, without credentials."""
    iterations: Sequence[IterationStatus]
    """The state of each iteration of each attempt."""
    verdict: RunVerdict | None
    """Verdict on the guaranteed minimum; None if there is none."""
    disabled: Mapping[int, str] = field(default_factory=dict)
    """The ranks whose capture failed with an internal error, each with the reason."""
    troubles: Mapping[int, str] = field(default_factory=dict)
    """The ranks that had a problem and continued, each with the problem."""
    triggers: Sequence[Trigger] = ()
    """The triggers of a flight recorder, sorted by `order`."""

    @property
    def is_met(self) -> bool:
        """Whether the guaranteed minimum is stored complete."""
        return self.verdict is not None and self.verdict.met

    def table(self) -> Table:
        """A table with one row for each iteration of each attempt, and the verdict as its last note."""
        rows = tuple(
            (
                *(status.iteration, status.attempt, status.state.value),
                *(len(status.committed_ranks), len(status.expected_ranks)),
                *(status.num_records, status.nbytes, _tensors_text(status), missing),
            )
            for status in self.iterations
            # The ranks that have not committed, each with the reason, and any problem of the commit.
            for missing in ["; ".join(filter(None, [status.lacks(max_named=MAX_NAMED), status.problem]))]
        )
        statuses = self.iterations
        compiled = ((status.compiled, f"{status.iteration}") for status in statuses if status.compiled)
        silent = (
            (reason, site)
            for status in statuses
            for sites in status.silent_sites.values()
            for site, reason in sites.items()
        )
        ranks = [
            ((reason, f"rank {rank}") for rank, reason in reasons.items()) for reasons in (self.troubles, self.disabled)
        ]
        notes = (
            *_trigger_notes(self.triggers),
            *((COUNTED,) if any(status.num_expected for status in statuses) else ()),
            *_notes("compiled code was recorded {reason} (iterations {items})", compiled),
            *_notes("not recorded ({reason}): {items}", silent),
            *(note for pairs in ranks for note in _notes("{reason} ({items})", pairs)),
            verdict_line(self.verdict),
        )
        return Table(title=printable(self.run), columns=COLUMNS, rows=rows, notes=notes)

    def to_json(self) -> dict[str, Any]:
        """The state as a dictionary for JSON, with all names."""
        return {
            "run": self.run,
            "iterations": [dataclasses.asdict(status) for status in self.iterations],
            "disabled": dict(self.disabled),
            "troubles": dict(self.troubles),
            "triggers": [trigger.to_json() for trigger in self.triggers],
            "verdict": self.verdict.to_json() if self.verdict else None,
        }


_SHORTEST_SECONDS = 0.05
"""Shortest allowed interval between two polls, each of which takes several requests to the store."""

RESTART_SECONDS = 30.0
"""Time for which `--follow` waits for a restarted worker group, if a run was closed without its minimum."""


def status(
    run: str,
    *,
    follow: bool = False,
    interval: float = 2.0,
    require_minimum: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    on_line: Callable[[str], object] = lambda line: say(line, err=True),
) -> RunStatus:
    """Show the state of each iteration of RUN, and what is missing.

    RUN is a URL or a path. An iteration is complete (every rank has it), partial (a rank is missing or was cut off,
    and will not be completed), skipped (a rank could not take it), dropped (it was complete, and removed to keep the
    run small) or open. Sizes are before compression, which is strong for histograms.

    Args:
        follow: First write a line on stderr for each change, until the run is closed.
        interval (SECONDS): With `follow`: the time between two polls.
        require_minimum: Exit with 3 unless the guaranteed minimum is stored complete.
        on_line: Called with each line of `follow`.
    """
    from ranktape.storage.format.attempt import read_attempts, read_run, run_attributes
    from ranktape.storage.format.documents import for_each
    from ranktape.storage.format.live import read_triggers
    from ranktape.storage.format.progress import read_disabled, read_troubles
    from ranktape.storage.maintenance.runs import suggest_nearest
    from ranktape.storage.places.urls import open_backend

    expect_least(_SHORTEST_SECONDS, interval=interval)
    with suggest_nearest(run, storage_options=storage_options):
        backend = open_backend(run, storage_options=storage_options)
        run_attributes(read_run(backend), place=backend.url)
    if follow:
        _follow(backend, interval=interval, on_line=on_line)
    attempts = read_attempts(backend)
    verdict, statuses = _judge(backend, attempts)
    triggers = itertools.chain(*for_each(lambda attempt: read_triggers(backend, attempt), attempts))
    result = RunStatus(
        run=shown(run),
        iterations=statuses,
        verdict=verdict,
        disabled=read_disabled(backend, attempts=attempts),
        troubles=read_troubles(backend, attempts=attempts),
        triggers=sorted(triggers, key=lambda trigger: trigger.order),
    )
    if require_minimum and not result.is_met:
        raise CheckFoundError(verdict_line(result.verdict))
    return result


def _judge(
    backend: Backend, attempts: list[Attempt], *, seen: ProgressCache | None = None
) -> tuple[RunVerdict, list[IterationStatus]]:
    """The verdict on a run and the states of its iterations, from the same reads.

    Raises:
        RunNotFoundError: the run has no attempt.
    """
    from ranktape.storage.format.progress import read_verdict

    judged = read_verdict(backend, attempts=attempts, seen=seen)
    if judged is None:
        raise RunNotFoundError(f"the run at {backend.url} has no attempt yet: no rank has started to record")
    return judged


def _follow(backend: Backend, *, interval: float, on_line: Callable[[str], object]) -> None:
    """Pass each change of a run to `on_line` until the run is closed."""
    from ranktape.storage.format.attempt import read_attempts
    from ranktape.storage.format.progress import ProgressCache

    seen = ProgressCache()
    known: dict[tuple[int, int], str] = {}
    closed_at: float | None = None
    while True:
        (verdict, statuses), now = _judge(backend, read_attempts(backend), seen=seen), time.monotonic()
        for status in statuses:
            line = (
                f"iteration {status.iteration}: {status.state.value}, {len(status.committed_ranks)} of "
                f"{count_text(len(status.expected_ranks), 'rank')}, {count_text(status.num_records, 'record')}, "
                f"{nbytes_text(status.nbytes)}"
            )
            if known.get((status.attempt, status.iteration)) != line:
                known[status.attempt, status.iteration] = line
                on_line(line)
        closed_at = (closed_at or now) if verdict.final else None
        if closed_at is not None and (verdict.met or now - closed_at >= RESTART_SECONDS):
            return
        time.sleep(interval)


@command_of(status, for_answer=["require_minimum"])
def status_command(result: RunStatus, given: Mapping[str, Any]) -> CommandAnswer:
    """The table; it is a problem if the minimum is required and not stored."""
    problem = verdict_line(result.verdict) if given["require_minimum"] and not result.is_met else None
    return CommandAnswer(text=result.table(), document=result.to_json(), problem=problem)


def verdict_line(verdict: RunVerdict | None) -> str:
    """The verdict in one line."""
    if verdict is None:
        return "minimum not known: no attempt of this run has recorded what it guarantees"
    so_far = "" if verdict.final else " (so far: the run is not closed)"
    return printable(verdict.message()) + so_far


def summary_line(backend: Backend, *, url: str) -> str:
    """A summary of a run and the commands to analyse it, in one line."""
    from ranktape.storage.format.progress import read_verdict

    judged = read_verdict(backend)
    statuses = [] if judged is None else judged[1]
    complete = {status.iteration: status for status in statuses if status.state.value == "complete"}
    num_ranks = max((len(status.expected_ranks) for status in complete.values()), default=0)
    size = nbytes_text(sum(status.nbytes for status in complete.values()))
    quoted = shlex.quote(shown(url))
    return (
        f"{printable(shown(url))} has {count_text(len(complete), 'iteration')} of {count_text(num_ranks, 'rank')}, "
        f"{size}: ranktape status {quoted}; ranktape analyze report {quoted} -o report.html"
    )


def _tensors_text(status: IterationStatus) -> str:
    """The number of recorded and expected tensors; empty if they were not counted."""
    if status.num_expected is None or status.num_recorded is None:
        return ""
    return f"{status.num_recorded} of {status.num_expected}"


def _notes(template: str, pairs: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """A line for each reason with its items, given pairs of a reason and an item."""
    return tuple(printable(template.format(reason=reason, items=items)) for reason, items in by_reason(pairs).items())


def _trigger_notes(triggers: Sequence[Trigger]) -> tuple[str, ...]:
    """One line for each of the first triggers, with its repetitions, and a count of the others."""
    from ranktape.storage.format.live import merge_repeated

    events = merge_repeated(triggers)
    lines = [printable(f"{trigger.kind}: {trigger.message()}") for trigger in events[:MAX_NAMED]]
    num_more = len(events) - len(lines)
    return (*lines, *([f"and {num_more} more trigger{'s' * (num_more > 1)}"] if num_more else []))
