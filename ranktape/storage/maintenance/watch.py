"""Follows a run that is being recorded: how far it is, and how fast data come in.

Looking again costs a few LISTs and one GET for each marker that was not there the last time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ranktape.errors import RunNotFoundError
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import Attempt, read_attempts, read_run, run_attributes
from ranktape.storage.format.documents import MAX_COMMIT_NBYTES, for_each, read_attributes
from ranktape.storage.format.layout import Mark
from ranktape.storage.format.progress import Progress, read_progress
from ranktape.storage.places.backend import Backend


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


class Watcher:
    """Looks at a run again and again; remembers what cannot change."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._seen: dict[str, Progress] = {}
        self._amounts: dict[tuple[str, int, int], tuple[int, int]] = {}
        """By attempt, iteration and rank: the records and the bytes that the rank's commit says."""

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
        progress = self._seen[attempt.path] = read_progress(self._backend, attempt)
        new = [
            (attempt.path, iteration, rank)
            for iteration in progress.marks
            for rank in progress.committed_ranks(iteration)
            if (attempt.path, iteration, rank) not in self._amounts
        ]
        self._amounts.update(zip(new, for_each(self._amount, new), strict=True))

    def _amount(self, place: tuple[str, int, int]) -> tuple[int, int]:
        attempt, iteration, rank = place
        path = layout.rank_iteration_path(attempt, rank, iteration)
        fields = read_attributes(self._backend, path, max_nbytes=MAX_COMMIT_NBYTES)
        if fields is None:
            # It was there a moment ago: a retention that keeps the last iterations has taken it away.
            return 0, 0
        return fields.integer("num_records", default=0), fields.integer("nbytes", default=0)

    def _snapshot(self, attempts: list[Attempt], *, is_closed: bool) -> Snapshot:
        last = attempts[-1]
        progress = self._seen[last.path]
        amounts = {place: amount for place, amount in self._amounts.items() if place[0] in self._seen}
        return Snapshot(
            seconds=time.monotonic(),
            attempt=last.number,
            ranks=tuple(self._rank_watch(progress, rank) for rank in last.launch.ranks),
            waiting={
                iteration: tuple(progress.committed_ranks(iteration))
                for iteration in sorted(progress.opened - progress.complete)
            },
            complete=tuple(sorted(frozenset().union(*(seen.complete for seen in self._seen.values())))),
            required=last.min_iterations,
            num_records=sum(
                num_records
                for (path, iteration, _), (num_records, _) in amounts.items()
                if iteration in self._seen[path].complete
            ),
            nbytes=sum(nbytes for _, nbytes in amounts.values()),
            is_closed=is_closed,
        )

    def _rank_watch(self, progress: Progress, rank: int) -> RankWatch:
        marks = {iteration: marks[rank] for iteration, marks in progress.marks.items() if rank in marks}
        committed = sorted(iteration for iteration, mark in marks.items() if mark is Mark.COMMITTED)
        amounts = [self._amounts[progress.attempt.path, iteration, rank] for iteration in committed]
        return RankWatch(
            rank=rank,
            iterations=tuple(committed),
            num_records=sum(num_records for num_records, _ in amounts),
            nbytes=sum(nbytes for _, nbytes in amounts),
            num_lost=len(marks) - len(committed),
            is_closed=rank in progress.closed,
        )
