"""Keeps iterations that the store cannot take in a directory of the host, and brings them to the store later.

In the directory they have the keys that they would have had: the rest of their tensors, the commit and the marker. What
the store had taken before stays there, so that it never holds a commit whose tensors are elsewhere. `ranktape push`
brings the rest: for each rank and iteration the tensors first, then everything that its commit names is read back from
the store and compared, then the commit, then the marker. What was pushed is removed here only after that, the commit
last, so that a push that was interrupted can be repeated.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ranktape.errors import DataError, StorageError, UnreachableError
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import Attempt, read_attempt
from ranktape.storage.format.commit import mark_committed, open_rank_catalogue, parse_commit
from ranktape.storage.format.decode import open_stored, read_stored
from ranktape.storage.format.documents import MAX_COMMIT_NBYTES, for_each, read_document
from ranktape.storage.format.layout import Mark, document_key
from ranktape.storage.format.progress import finish_ready, judge_again
from ranktape.storage.format.validation import parse_json
from ranktape.storage.places.backend import Backend, Buffer, ForwardingBackend, Result
from ranktape.storage.places.local import LocalBackend
from ranktape.storage.places.retry import RetryingBackend
from ranktape.storage.query.columns import values_of

_NUM_THREADS = 8
"""Objects on their way at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    """What one rank of an attempt left in a directory."""

    manifest: Path
    """The file that says so."""
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


def find_spills(directory: Path) -> list[Spill]:
    """What lies in a spill directory, by attempt and rank.

    Raises:
        StorageError: a file there is damaged.
    """
    return [_read_manifest(path) for path in sorted(directory.glob("*/rank_*.spill.json"))]


def _read_manifest(path: Path) -> Spill:
    try:
        fields = parse_json(path.read_text())
        spill = Spill(manifest=path, url=str(fields["url"]), attempt=str(fields["attempt"]), rank=int(fields["rank"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{path} is not the file of a spill ({error!r}): remove it, or give another folder"
        ) from error
    match = _MANIFEST.fullmatch(path.name)
    # Names in a file must not lead out of its folder.
    if match is None or spill.attempt != path.parent.name or spill.rank != int(match[1]):
        raise StorageError(f"{path} does not say what its name says: remove it, or give another folder")
    return spill


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
            f"{target.url} has no {spill.attempt}, which {spill.manifest} belongs to: give the run that has by --to"
        )
    push = _Push(spill, target, attempt=attempt)
    for iteration in push.iterations():
        push.iteration(iteration, keep=keep)
    push.rest(keep=keep)
    return push.report


class _Push:
    """One spill on its way."""

    def __init__(self, spill: Spill, target: Backend, *, attempt: Attempt) -> None:
        self._spill = spill
        self._source = LocalBackend(str(spill.manifest.parents[1]))
        self._target = target
        self._attempt = attempt
        self.report = PushReport()

    def iterations(self) -> list[int]:
        """Those of which something lies here, ascending."""
        # Of files, as folders that are empty stay behind.
        keys = self._source.list_keys(layout.rank_path(self._attempt.path, self._spill.rank))
        return sorted(layout.iterations_named({key.partition("/")[0] for key in keys}))

    def iteration(self, iteration: int, *, keep: bool) -> None:
        """Push one iteration; a damaged one stays here, and is named in the report."""
        attempt, rank = self._attempt.path, self._spill.rank
        group = layout.rank_iteration_path(attempt, rank, iteration)
        commit_key = layout.document_key(group)
        commit = read_document(self._source, group, max_nbytes=MAX_COMMIT_NBYTES)
        if commit is not None:
            try:
                self._push_committed(iteration, group=group, commit=commit)
            except DataError as error:
                self.report.problems[iteration] = str(error)
                return
            self.report.iterations.append(iteration)
        elif not self._is_settled(iteration):
            self.report.unfinished.append(iteration)
            return
        elif read_document(self._target, group, max_nbytes=MAX_COMMIT_NBYTES) is None:
            self.report.uncommitted.append(iteration)
        if not keep:
            others = [key for key in self._keys(group) if key != commit_key]
            markers = self._keys(layout.opened_path(attempt, iteration))
            own = [key for key in markers if f"/rank_{rank:05d}." in key or rank == self._attempt.launch.first_rank]
            self._source.delete_keys([*others, *own])
            self._source.delete_keys([commit_key])

    def _is_settled(self, iteration: int) -> bool:
        """Whether the rank will write nothing more of an iteration."""
        attempt, rank = self._attempt.path, self._spill.rank
        paths = [layout.marker_path(attempt, iteration, rank, mark) for mark in Mark]
        keys = [layout.document_key(path) for path in (*paths, layout.closed_path(attempt, rank))]
        return any(place.exists(key) for place in (self._target, self._source) for key in keys)

    def rest(self, *, keep: bool) -> None:
        """Push what belongs to no iteration, complete the iterations that have all ranks, and judge the run anew."""
        attempt, rank = self._attempt.path, self._spill.rank
        paths = [layout.rank_path(attempt, rank), layout.closed_path(attempt, rank)]
        keys = [layout.document_key(path) for path in paths]
        if rank == self._attempt.launch.first_rank:
            # That an iteration was begun, where that was all that the store did not take.
            keys += self._keys(layout.commits_path(attempt))
        for key in keys:
            if self._source.exists(key) and self._target.size(key) is None:
                self._put(key)
        if not keep and not self.iterations():
            self._source.delete_keys(keys)
        self.report.finished = finish_ready(self._target, self._attempt, problems=self.report.problems)
        verdict = layout.document_key(layout.verdict_path(attempt))
        if self.report.finished and self._target.exists(verdict):
            judge_again(self._target, self._attempt)
        if not keep and not self._keys(layout.rank_path(attempt, rank)):
            self._spill.manifest.unlink(missing_ok=True)
            _remove_empty(self._spill.manifest.parent)

    def _push_committed(self, iteration: int, *, group: str, commit: bytes) -> None:
        commit_key = layout.document_key(group)
        # Compared with its checksum before anything is brought.
        said = parse_commit(commit, place=f"{self._source.url}/{commit_key}", key=commit_key)
        for_each(self._put, [key for key in self._keys(group) if key != commit_key], at_once=_NUM_THREADS)
        self._target.flush()
        catalogue = open_rank_catalogue(self._target, self._attempt.path, self._spill.rank, iteration, said)
        places = zip(*(values_of(catalogue.column(name)) for name in ("stack", "site")), strict=True)
        arrays = {f"{group}/{stack or site}" for stack, site in places}
        for_each(self._compare, arrays, at_once=_NUM_THREADS)
        self._put(commit_key)
        self._target.flush()
        opened = layout.document_key(layout.opened_path(self._attempt.path, iteration))
        if self._source.exists(opened):
            self._put(opened)
        mark_committed(self._target, self._attempt.path, self._spill.rank, iteration, commit=commit)

    def _compare(self, path: str) -> None:
        """Read an array from the store that a commit names."""
        read_stored(self._target, open_stored(self._target, path))

    def _keys(self, path: str) -> list[str]:
        return [f"{path}/{key}" for key in self._source.list_keys(path)]

    def _put(self, key: str) -> None:
        data = self._source.get(key)
        assert data is not None, key
        self._target.put(key, [data])
        self.report.num_objects += 1
        self.report.nbytes += len(data)


def _remove_empty(folder: Path) -> None:
    """Remove a folder and those below it, as far as they hold no file."""
    for path in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        if not any(path.iterdir()):
            path.rmdir()
    if not any(folder.iterdir()):
        folder.rmdir()


_MANIFEST = re.compile(r"rank_(\d+)\.spill\.json")
"""The name of the file, beside the groups of an attempt, that says whose they are."""

SPILLED_KEY = "spilled"
"""The attribute of a rank's marker that says where the iteration waits; what the store has of it is still needed."""

PROBE_SECONDS = 10.0
"""Once the store has failed it is asked no more often than this."""

_PROBE_TIMEOUT_SECONDS = 5.0

_ITERATION = re.compile(r"(?:rank_\d+|commits)/iter_(\d+)/")


class SpillingBackend(ForwardingBackend):
    """The store of one rank, with a directory for what it cannot take; a `Backend`.

    A write that fails, after all that was tried, goes into the directory, and so does what follows of its
    iteration.
    """

    def __init__(self, backend: RetryingBackend, *, directory: Path, attempt: Attempt, rank: int) -> None:
        """Prepare; the directory is made when it is needed."""
        self.url = backend.url
        self.is_shared = backend.is_shared
        self.place = f"{socket.gethostname()}:{directory.absolute()}"
        """The host and the directory, for people."""
        self._backend = backend
        self._probing = backend.with_deadline(timeout_seconds=_PROBE_TIMEOUT_SECONDS)
        self._spill = LocalBackend(str(directory))
        self._manifest = f"rank_{rank:05d}.spill.json"
        self._fields = {"url": backend.url, "attempt": attempt.path, "rank": rank, "host": socket.gethostname()}
        self._prefix = f"{attempt.path}/"
        self._attempt_key = document_key(attempt.path)
        self._attempt_document = read_document(backend, attempt.path)
        self._lock = threading.Lock()
        self._reasons: dict[int | None, str] = {}
        self._ask_again_at: float | None = None
        self._is_unflushed = False

    def why_spilled(self, iteration: int) -> str | None:
        """Why an iteration, or a part of it, is in the directory; None where it is not."""
        return self._reasons.get(iteration)

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """Write an object into the store, or else into the directory."""
        iteration = self._iteration_of(key)
        if iteration is None or iteration not in self._reasons:
            try:
                # Rather asked in vain than an iteration kept from a store that is there again.
                self._reach(lambda backend: self._put(backend, key, parts), is_urgent=True)
            except StorageError as error:
                self._note(iteration, str(error))
            else:
                return
        self._spill.put(key, parts)

    def get(self, key: str, *, max_nbytes: int | None = None) -> bytes | None:
        """The bytes of an object in the store; None where there is none.

        The attempt's document counts as there as long as the store does not say otherwise.
        """
        try:
            return self._reach(lambda backend: backend.get(key, max_nbytes=max_nbytes))
        except StorageError:
            if key != self._attempt_key:
                raise
            return self._attempt_document

    def flush(self) -> None:
        """Make what was written survive a loss of power, here and there."""
        try:
            self._reach(lambda backend: backend.flush())
        except StorageError:
            # No commit goes to the store before it could be flushed: the next one, too, goes into the directory, and
            # bringing it to the store compares all that the store has of it.
            self._is_unflushed = True
        if self._reasons:
            self._spill.flush()

    def forward(self, work: Callable[[RetryingBackend], Result]) -> Result:
        """Of all other verbs: what the store answers."""
        return work(self._backend)

    def _put(self, backend: RetryingBackend, key: str, parts: Sequence[Buffer]) -> None:
        if self._is_unflushed:
            backend.flush()
            self._is_unflushed = False
        backend.put(key, parts)

    def _reach(self, work: Callable[[RetryingBackend], Result], *, is_urgent: bool = False) -> Result:
        """What the store answers; once it has failed it is asked briefly, and now and then unless it is urgent."""
        with self._lock:
            was_down = self._ask_again_at is not None
            if self._ask_again_at is not None:
                if time.monotonic() < self._ask_again_at and not is_urgent:
                    raise UnreachableError(f"{self.url} does not answer: it is asked again soon")
                self._ask_again_at = time.monotonic() + PROBE_SECONDS
        try:
            if was_down:
                self._probing.get(self._attempt_key)
            result = work(self._backend)
        except StorageError:
            with self._lock:
                self._ask_again_at = time.monotonic() + PROBE_SECONDS
            raise
        with self._lock:
            self._ask_again_at = None
        return result

    def _note(self, iteration: int | None, reason: str) -> None:
        with self._lock:
            is_new = iteration not in self._reasons
            self._reasons.setdefault(iteration, reason)
        if is_new:
            # Each time: what was there may have been brought to the store, and the file with it.
            key = f"{self._prefix}{self._manifest}"
            self._spill.put(key, [json.dumps({**self._fields, "written": time.time()}, indent=1).encode()])

    def _iteration_of(self, key: str) -> int | None:
        match = _ITERATION.match(key.removeprefix(self._prefix))
        return int(match[1]) if match else None
