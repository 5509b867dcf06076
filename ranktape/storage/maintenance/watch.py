"""Follows a run that is being recorded: how far it is, and how fast data come in.

Looking again costs a few LISTs and one GET for each marker that was not there the last time.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ranktape.errors import RunNotFoundError
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import read_attempts, read_run, run_attributes
from ranktape.storage.format.documents import MAX_COMMIT_NBYTES, read_attributes
from ranktape.storage.format.layout import Mark
from ranktape.storage.format.progress import Progress, read_progress

if TYPE_CHECKING:
    from ranktape.storage.format.attempt import Attempt
    from ranktape.storage.places.backend import Backend

_NUM_THREADS = 16
"""Requests in flight while markers are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWatch:
    """What one rank has committed in the latest attempt."""

    rank: int
    """Global rank."""
    iterations: tuple[int, ...]
    """The iterations it has committed, ascending."""
    num_records: int
    """Records in them."""
    nbytes: int
    """Bytes of their values."""
    num_lost: int
    """Iterations that it skipped or could not end."""
    is_closed: bool
    """Whether it will commit nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run at one moment."""

    seconds: float
    """When it was looked at, on a clock of this process that only goes on."""
    attempt: int
    """The latest attempt."""
    ranks: tuple[RankWatch, ...]
    """Every rank of the latest attempt."""
    waiting: dict[int, tuple[int, ...]]
    """For each iteration of the latest attempt that is begun and not complete: the ranks that have committed it."""
    complete: tuple[int, ...]
    """The iterations that are stored complete, over all attempts, ascending."""
    required: int
    """The guaranteed minimum."""
    num_records: int
    """Records in complete iterations, over all attempts."""
    nbytes: int
    """Bytes that all ranks have committed, over all attempts, of iterations that are complete or not."""
    is_closed: bool
    """Whether the coordinator has closed the latest attempt."""

    @property
    def is_met(self) -> bool:
        """Whether the guaranteed minimum is stored complete."""
        return len(self.complete) >= self.required


@dataclass(slots=True)
class _SeenAttempt:
    """What is known of one attempt."""

    progress: Progress
    amounts: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """By iteration and rank: the records and the bytes that the rank's marker says of what it committed."""


class Watcher:
    """Looks at a run again and again; remembers what cannot change."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._seen: dict[str, _SeenAttempt] = {}

    def look(self) -> Snapshot | None:
        """The run as it is now; None while no attempt has begun in it.

        Raises:
            RunNotFoundError: there is no run.
            RunFormatError: what is there is not a run, or is damaged.
        """
        backend = self._backend
        if not self._seen:
            run_attributes(read_run(backend), place=backend.url)
        attempts = read_attempts(backend)
        if not attempts:
            if self._seen:
                raise RunNotFoundError(f"the run at {backend.url} was deleted while it was watched")
            return None
        last = attempts[-1]
        # Read first: what a rank committed last comes before it.
        is_closed = backend.exists(layout.document_key(layout.verdict_path(last.path)))
        known = {attempt.path for attempt in attempts}
        self._seen = {path: seen for path, seen in self._seen.items() if path in known}
        for attempt in attempts:
            # What an earlier attempt's coordinator left to others is finished before a later one begins.
            if attempt is last or attempt.path not in self._seen:
                self._look_at(attempt)
        return self._snapshot(attempts, is_closed=is_closed)

    def _look_at(self, attempt: Attempt) -> None:
        progress = read_progress(self._backend, attempt)
        seen = self._seen.get(attempt.path)
        if seen is None:
            seen = self._seen[attempt.path] = _SeenAttempt(progress=progress)
        seen.progress = progress
        new = [
            (iteration, rank)
            for iteration in progress.marks
            for rank in progress.committed_ranks(iteration)
            if (iteration, rank) not in seen.amounts
        ]
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            amounts = pool.map(lambda place: self._amounts(attempt, *place), new)
            seen.amounts.update(zip(new, amounts, strict=True))

    def _amounts(self, attempt: Attempt, iteration: int, rank: int) -> tuple[int, int]:
        path = layout.marker_path(attempt.path, iteration, rank, Mark.COMMITTED)
        fields = read_attributes(self._backend, path, max_nbytes=MAX_COMMIT_NBYTES)
        if fields is None:
            # It was there a moment ago: a retention that keeps the last iterations has taken it away.
            return 0, 0
        return fields.integer("num_records", default=0), fields.integer("nbytes", default=0)

    def _snapshot(self, attempts: list[Attempt], *, is_closed: bool) -> Snapshot:
        last = attempts[-1]
        everything = [self._seen[attempt.path] for attempt in attempts]
        current = everything[-1]
        progress = current.progress
        return Snapshot(
            seconds=time.monotonic(),
            attempt=last.number,
            ranks=tuple(_rank_watch(current, rank) for rank in last.launch.ranks),
            waiting={
                iteration: tuple(progress.committed_ranks(iteration))
                for iteration in sorted(progress.opened - progress.complete)
            },
            complete=tuple(sorted({iteration for seen in everything for iteration in seen.progress.complete})),
            required=last.min_iterations,
            num_records=sum(
                num_records
                for seen in everything
                for (iteration, _), (num_records, _) in seen.amounts.items()
                if iteration in seen.progress.complete
            ),
            nbytes=sum(nbytes for seen in everything for _, nbytes in seen.amounts.values()),
            is_closed=is_closed,
        )


def _rank_watch(seen: _SeenAttempt, rank: int) -> RankWatch:
    progress = seen.progress
    committed = sorted(iteration for iteration, marks in progress.marks.items() if marks.get(rank) is Mark.COMMITTED)
    amounts = [seen.amounts[iteration, rank] for iteration in committed]
    marks = [marks[rank] for marks in progress.marks.values() if rank in marks]
    return RankWatch(
        rank=rank,
        iterations=tuple(committed),
        num_records=sum(num_records for num_records, _ in amounts),
        nbytes=sum(nbytes for _, nbytes in amounts),
        num_lost=sum(mark is not Mark.COMMITTED for mark in marks),
        is_closed=rank in progress.closed,
    )
