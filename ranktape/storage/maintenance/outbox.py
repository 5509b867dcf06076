"""Brings the iterations that wait in a spill directory to the run in the store.

In the directory, each attempt is a run with the keys of the one in the store (`SpillDirectory`), which holds what the
store had not taken. For each rank and iteration, `push_spill` copies the objects that the store lacks, reads every
array of the iteration back from the store, and then writes the commit and the marker. Only after that the iteration is
removed here, its commit last: a push that was interrupted can be repeated.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from ranktape.errors import DataError, StorageError
from ranktape.storage.format import layout
from ranktape.storage.format.arrays import open_stored, read_stored
from ranktape.storage.format.attempt import Attempt, read_attempt
from ranktape.storage.format.commit import mark_committed, open_rank_catalogue, parse_commit
from ranktape.storage.format.documents import MAX_COMMIT_NBYTES, for_each, read_as, read_document
from ranktape.storage.format.layout import KeyKind, Mark, document_key
from ranktape.storage.format.progress import finish_ready, judge_again
from ranktape.storage.maintenance.copy import is_equal
from ranktape.storage.places.backend import Backend
from ranktape.storage.places.local import LocalBackend
from ranktape.storage.query.columns import values_of

SPILLED_KEY = "spilled"
"""The attribute of a rank's marker that says where the iteration waits; what the store has of it is still needed."""

_NUM_THREADS = 8
"""Objects in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    """What one rank of an attempt left in a directory."""

    folder: Path
    """The run in the directory."""
    url: str
    """The run that it belongs to, without credentials."""
    attempt: str
    """The attempt's path."""
    rank: int
    """Global rank."""


@dataclass(slots=True)
class PushReport:
    """What became of a spill."""

    iterations: list[int] = field(default_factory=list)
    """Those of which the rank's commit is in the store now."""
    finished: list[int] = field(default_factory=list)
    """Those that are complete, with all ranks, since then."""
    num_objects: int = 0
    """Objects written to the store."""
    nbytes: int = 0
    """Their bytes."""
    uncommitted: list[int] = field(default_factory=list)
    """Iterations that the rank never committed, and will not: nothing of them is pushed."""
    unfinished: list[int] = field(default_factory=list)
    """Iterations that the rank may still commit: they stay here."""
    problems: dict[int, str] = field(default_factory=dict)
    """For each iteration that stays here: why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """What the document of a run in a spill directory says beside the run's own."""

    spilled_from: str
    """The URL of the run in the store."""


def find_spills(directory: Path) -> list[Spill]:
    """What lies in a spill directory, by attempt and rank.

    Raises:
        DataError: a document there is damaged.
        RunFormatError: a document there says what none does.
        StorageError: the directory cannot be read.
    """
    spills = []
    for folder in sorted(path for path in directory.iterdir() if layout.parse_attempt(path.name) is not None):
        backend = LocalBackend(str(folder))
        origin = read_as(backend, "", _Origin)
        if origin is None:
            raise StorageError(f"{folder} has no {layout.DOCUMENT} of a run: remove it, or give another folder")
        url, found = origin.spilled_from, map(layout.parse_key, backend.list_keys(folder.name))
        ranks = {key.rank for key in found if key is not None and key.rank >= 0}
        # Without a rank, that iterations were begun is all that the store did not take.
        spills += [Spill(folder=folder, url=url, attempt=folder.name, rank=rank) for rank in sorted(ranks) or [0]]
    return spills


def push_spill(spill: Spill, target: Backend, *, keep: bool) -> PushReport:
    """Bring what a rank left to the store, and remove it here unless it is to be kept.

    Args:
        spill: What to bring.
        target: The run.
        keep: Leave everything here, too.

    Raises:
        StorageError: the store cannot be read or written, or has no such attempt.
    """
    attempt = read_attempt(target, spill.attempt)
    if attempt is None:
        raise StorageError(
            f"{target.url} has no {spill.attempt}, which {spill.folder} belongs to: give the run that has by --to"
        )
    push = _Push(spill, target, attempt=attempt, keep=keep)
    push.push()
    return push.report


class _Push:
    """One spill on its way."""

    def __init__(self, spill: Spill, target: Backend, *, attempt: Attempt, keep: bool) -> None:
        self._spill, self._keep = spill, keep
        self._source, self._target = LocalBackend(str(spill.folder)), target
        self._attempt = attempt
        self.report = PushReport()

    def push(self) -> None:
        """Push each iteration, then what belongs to none, finish the iterations, and judge the run again."""
        rank = self._spill.rank
        for iteration in sorted({found.iteration for found in self._keys().values() if found.rank == rank} - {-1}):
            self._push_iteration(iteration)
        others = {
            key: found
            for key, found in self._keys().items()
            if found.kind is KeyKind.OPENED or (found.kind is KeyKind.CLOSED and found.rank == rank)
        }
        for key in others:
            if self._target.size(key) is None:
                self._copy(key)
        if not self._keep:
            is_staying = any(found.rank == rank for key, found in self._keys().items() if key not in others)
            # Of a rank of which something stays it must be known here that it has closed.
            due = [key for key, found in others.items() if found.kind is KeyKind.OPENED or not is_staying]
            self._source.delete_keys(due)
        self.report.finished = finish_ready(self._target, self._attempt, problems=self.report.problems)
        if self.report.finished and self._target.exists(document_key(layout.verdict_path(self._attempt.path))):
            judge_again(self._target, self._attempt)
        if not self._keep and not self._keys().keys() - {document_key(self._attempt.path)}:
            self._source.delete_keys([document_key(self._attempt.path), document_key("")])
            with contextlib.suppress(OSError):  # another rank has spilled meanwhile
                self._spill.folder.rmdir()

    def _keys(self) -> dict[str, layout.AttemptKey]:
        """The keys of the attempt that lie here, with what they say."""
        attempt = self._attempt.path
        parsed = ((f"{attempt}/{key}", layout.parse_key(key)) for key in self._source.list_keys(attempt))
        return {key: found for key, found in parsed if found is not None}

    def _push_iteration(self, iteration: int) -> None:
        """Push one iteration; a damaged one stays here, and is named in the report."""
        attempt, rank, report = self._attempt.path, self._spill.rank, self.report
        group = layout.rank_iteration_path(attempt, rank, iteration)
        commit = read_document(self._source, group, max_nbytes=MAX_COMMIT_NBYTES)
        if commit is not None:
            try:
                self._push_committed(iteration, group=group, commit=commit)
            except DataError as error:
                report.problems[iteration] = str(error)
                return
            report.iterations.append(iteration)
        elif not self._is_settled(iteration):
            report.unfinished.append(iteration)
            return
        elif read_document(self._target, group, max_nbytes=MAX_COMMIT_NBYTES) is None:
            report.uncommitted.append(iteration)
        if not self._keep:
            own = [key for key, found in self._keys().items() if (found.iteration, found.rank) == (iteration, rank)]
            self._source.delete_keys([key for key in own if key != document_key(group)])
            self._source.delete_keys([document_key(group)])

    def _is_settled(self, iteration: int) -> bool:
        """Whether the rank will write nothing more of an iteration."""
        attempt, rank = self._attempt.path, self._spill.rank
        paths = [layout.marker_path(attempt, iteration, rank, mark) for mark in Mark]
        keys = [document_key(path) for path in (*paths, layout.closed_path(attempt, rank))]
        return any(place.exists(key) for place in (self._target, self._source) for key in keys)

    def _push_committed(self, iteration: int, *, group: str, commit: bytes) -> None:
        key = document_key(group)
        # Compared with its checksum before anything is brought.
        said = parse_commit(commit, place=f"{self._source.url}/{key}", key=key)
        values = [f"{group}/{name}" for name in self._source.list_keys(group) if name != layout.DOCUMENT]
        for_each(self._copy, values, at_once=_NUM_THREADS)
        self._target.flush()
        catalogue = open_rank_catalogue(self._target, self._attempt.path, self._spill.rank, iteration, said)
        places = zip(*(values_of(catalogue.column(name)) for name in ("stack", "site")), strict=True)
        arrays = {f"{group}/{stack or site}" for stack, site in places}
        for_each(lambda path: read_stored(self._target, open_stored(self._target, path)), arrays, at_once=_NUM_THREADS)
        self._copy(key)
        self._target.flush()
        mark_committed(self._target, self._attempt.path, self._spill.rank, iteration, commit=commit)

    def _copy(self, key: str) -> None:
        """Write one object to the store, where that does not have it."""
        data = self._source.get(key)
        assert data is not None, key
        if not is_equal(self._target, key, data):
            self._target.put(key, [data])
            self.report.num_objects += 1
            self.report.nbytes += len(data)
