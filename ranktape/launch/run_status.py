"""Gives `ranktape status`: what of a run is stored, what is missing and why, and whether its minimum is there."""

from __future__ import annotations

import dataclasses
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
"""One row is one iteration of one attempt."""

COUNTED = (
    "a record is one tensor of one microbatch and call; an expected tensor is counted once on each rank, however many "
    "records it has"
)
"""What is said where both are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """How far a run is."""

    run: str
    """Where it is, as it was given, without credentials."""
    iterations: Sequence[IterationStatus]
    """Each iteration of each attempt."""
    verdict: RunVerdict | None
    """On its minimum; None where it has promised none."""
    disabled: Mapping[int, str] = field(default_factory=dict)
    """The ranks whose capture failed inside, and why."""
    troubles: Mapping[int, str] = field(default_factory=dict)
    """Those that went on, and what went wrong."""
    triggers: Sequence[Trigger] = ()
    """What a flight recorder stored iterations for; what came first before."""

    @property
    def is_met(self) -> bool:
        """Whether the guaranteed minimum is stored complete."""
        return self.verdict is not None and self.verdict.met

    def table(self) -> Table:
        """One row for each iteration of each attempt, the verdict below."""
        rows = tuple(
            (
                *(status.iteration, status.attempt, status.state.value),
                *(len(status.committed_ranks), len(status.expected_ranks)),
                *(status.num_records, status.nbytes, _tensors_text(status), missing),
            )
            for status in self.iterations
            # The ranks that have not committed, each with the reason, and what is wrong with the commit.
            for missing in ["; ".join(filter(None, [status.lacks(max_named=MAX_NAMED), status.problem]))]
        )
        statuses = self.iterations
        ways = ((status.compiled, f"{status.iteration}") for status in statuses if status.compiled)
        silent = (
            (why, site) for status in statuses for sites in status.silent_sites.values() for site, why in sites.items()
        )
        ranks = [((why, f"rank {rank}") for rank, why in one.items()) for one in (self.troubles, self.disabled)]
        notes = (
            *_trigger_notes(self.triggers),
            *((COUNTED,) if any(status.num_expected for status in statuses) else ()),
            *_notes("compiled code was recorded {reason} (iterations {named})", ways),
            *_notes("not recorded ({reason}): {named}", silent),
            *(note for pairs in ranks for note in _notes("{reason} ({named})", pairs)),
            verdict_line(self.verdict),
        )
        return Table(title=printable(self.run), columns=COLUMNS, rows=rows, notes=notes)

    def to_json(self) -> dict[str, Any]:
        """The same for programs, with everything named."""
        return {
            "run": self.run,
            "iterations": [dataclasses.asdict(status) for status in self.iterations],
            "disabled": dict(self.disabled),
            "troubles": dict(self.troubles),
            "triggers": [trigger.to_json() for trigger in self.triggers],
            "verdict": self.verdict.to_json() if self.verdict else None,
        }


_SHORTEST_SECONDS = 0.05
"""Between two looks: each of them costs the store some requests."""

RESTART_SECONDS = 30.0
"""A restarted worker group may take up a run that was closed without its minimum for so long."""


def status(
    run: str,
    *,
    follow: bool = False,
    interval: float = 2.0,
    require_minimum: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    on_line: Callable[[str], object] = lambda line: say(line, err=True),
) -> RunStatus:
    """Show how far each iteration of RUN is, and what is missing.

    RUN is a URL or a path. An iteration is complete (every rank has it), partial (a rank is missing or was cut off,
    and what is missing will not come), skipped (a rank could not take it), dropped (it was complete, and removed to
    keep the run small) or open. Sizes are before compression, which leaves little of kept histograms.

    Args:
        follow: First write a line on stderr for each change, until the run is closed.
        interval (SECONDS): With `follow`: from one look to the next.
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
    triggers = for_each(lambda attempt: read_triggers(backend, attempt), attempts)
    found = RunStatus(
        run=shown(run),
        iterations=statuses,
        verdict=verdict,
        disabled=read_disabled(backend, attempts=attempts),
        troubles=read_troubles(backend, attempts=attempts),
        triggers=sorted((one for found in triggers for one in found), key=lambda one: one.order),
    )
    if require_minimum and not found.is_met:
        raise CheckFoundError(verdict_line(found.verdict))
    return found


def _judge(
    backend: Backend, attempts: list[Attempt], *, seen: ProgressCache | None = None
) -> tuple[RunVerdict, list[IterationStatus]]:
    """The verdict on a run with its iterations, from one reading."""
    from ranktape.storage.format.progress import read_verdict

    judged = read_verdict(backend, attempts=attempts, seen=seen)
    if judged is None:
        raise RunNotFoundError(f"the run at {backend.url} has no attempt yet: no rank has started to record")
    return judged


def _follow(backend: Backend, *, interval: float, on_line: Callable[[str], object]) -> None:
    """Report each change of a run until it is closed."""
    from ranktape.storage.format.attempt import read_attempts
    from ranktape.storage.format.progress import ProgressCache

    seen = ProgressCache()
    known: dict[tuple[int, int], str] = {}
    closed_at: float | None = None
    while True:
        (verdict, statuses), now = _judge(backend, read_attempts(backend), seen=seen), time.monotonic()
        for one in statuses:
            line = (
                f"iteration {one.iteration}: {one.state.value}, {len(one.committed_ranks)} of "
                f"{count_text(len(one.expected_ranks), 'rank')}, {count_text(one.num_records, 'record')}, "
                f"{nbytes_text(one.nbytes)}"
            )
            if known.get((one.attempt, one.iteration)) != line:
                known[one.attempt, one.iteration] = line
                on_line(line)
        closed_at = (closed_at or now) if verdict.final else None
        if closed_at is not None and (verdict.met or now - closed_at >= RESTART_SECONDS):
            return
        time.sleep(interval)


@command_of(status, apart=["require_minimum"])
def status_command(found: RunStatus, given: Mapping[str, Any]) -> CommandAnswer:
    """The table, and whether the minimum that was asked for is there."""
    problem = verdict_line(found.verdict) if given["require_minimum"] and not found.is_met else None
    return CommandAnswer(text=found.table(), document=found.to_json(), problem=problem)


def verdict_line(verdict: RunVerdict | None) -> str:
    """Whether the guaranteed minimum is there, in one line."""
    if verdict is None:
        return "minimum not known: no attempt of this run has said what it guarantees"
    so_far = "" if verdict.final else " (so far: the run is not closed)"
    return printable(verdict.message()) + so_far


def holdings_line(backend: Backend, *, url: str) -> str:
    """What a run holds, and the commands to ask it, in one line."""
    from ranktape.storage.format.progress import read_verdict

    judged = read_verdict(backend)
    statuses = [] if judged is None else judged[1]
    complete = {status.iteration: status for status in statuses if status.state.value == "complete"}
    num_ranks = max((len(status.expected_ranks) for status in complete.values()), default=0)
    size = nbytes_text(sum(status.nbytes for status in complete.values()))
    place = shlex.quote(shown(url))
    return (
        f"{printable(shown(url))} holds {count_text(len(complete), 'iteration')} of {count_text(num_ranks, 'rank')}, "
        f"{size}: ranktape status {place}; ranktape analyze report {place} -o report.html"
    )


def _tensors_text(status: IterationStatus) -> str:
    """How many of the expected tensors were recorded; empty where nobody counted."""
    if status.num_expected is None or status.num_recorded is None:
        return ""
    return f"{status.num_recorded} of {status.num_expected}"


def _notes(words: str, pairs: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """A line for each reason, the first of each pair, with what has it."""
    return tuple(printable(words.format(reason=reason, named=named)) for reason, named in by_reason(pairs).items())


def _trigger_notes(triggers: Sequence[Trigger]) -> tuple[str, ...]:
    """What happened, the first things one line each, with how often they were repeated."""
    from ranktape.storage.format.live import merge_repeated

    events = merge_repeated(triggers)
    shown_ones = [printable(f"{trigger.kind}: {trigger.message()}") for trigger in events[:MAX_NAMED]]
    rest = len(events) - len(shown_ones)
    return (*shown_ones, *([f"and {rest} more trigger{'s' * (rest > 1)}"] if rest else []))
