"""What do the markers of an attempt say, and which iterations can be closed?

The coordinator, `status` and every reader look at the same keys through this module. One LIST of the
markers tells the state of every iteration on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import google_crc32c

from ranktape.errors import DataError, RunNotFoundError
from ranktape.storage import layout
from ranktape.storage.attempt import (
    check_attempt,
    complete_iterations,
    is_attempt_there,
    lost_message,
    read_attempts,
)
from ranktape.storage.catalogue import Entry, encode_catalogue
from ranktape.storage.documents import array_document, chunk_key, decode_document, encode_document, group_document
from ranktape.storage.layout import Mark
from ranktape.storage.record import RecordInfo
from ranktape.storage.status import IterationState, IterationStatus, Verdict, judge

if TYPE_CHECKING:
    from ranktape.storage.attempt import Attempt
    from ranktape.storage.backend import Backend

_NUM_THREADS = 16
"""Requests in flight when many small documents are read."""


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

    def committed_ranks(self, iteration: int) -> list[int]:
        """The ranks that have committed an iteration, ascending."""
        return sorted(rank for rank, mark in self.marks.get(iteration, {}).items() if mark is Mark.COMMITTED)

    def ready(self) -> list[int]:
        """The iterations that all ranks have committed and that have no iteration commit, ascending."""
        size = self.attempt.launch.world_size
        return sorted(
            iteration
            for iteration in self.marks
            if iteration not in self.complete and len(self.committed_ranks(iteration)) == size
        )


def read_progress(backend: Backend, attempt: Attempt) -> Progress:
    """How far an attempt is; three LISTs, no document is read."""
    opened: set[int] = set()
    marks: dict[int, dict[int, Mark]] = {}
    for key in backend.list_keys(layout.commits_path(attempt.path)):
        marker = layout.parse_marker(key)
        iteration = layout.parse_iteration(key) if marker is None else marker.iteration
        if iteration is not None:
            opened.add(iteration)
        if marker is not None:
            marks.setdefault(marker.iteration, {})[marker.rank] = marker.mark
    closed = (layout.parse_closed(key) for key in backend.list_keys(f"{attempt.path}/closed"))
    return Progress(
        attempt=attempt,
        opened=frozenset(opened),
        marks=marks,
        complete=frozenset(complete_iterations(backend, attempt)),
        closed=frozenset(rank for rank in closed if rank is not None),
    )


def open_iteration(backend: Backend, *, attempt: Attempt, iteration: int) -> None:
    """Say that an iteration was begun, so that it is missed if no rank commits it.

    Raises:
        StorageError: the run was deleted or replaced, or cannot be written.
    """
    check_attempt(backend, attempt)
    key = layout.document_key(layout.opened_path(attempt.path, iteration))
    backend.put(key, [encode_document(group_document({"opened": time.time()}))])


def finish_iteration(backend: Backend, *, attempt: Attempt, iteration: int) -> None:
    """Write the iteration commit: the merged catalogue of all ranks, then the document that makes it count.

    Two writers of one commit write the same bytes, and the second leaves the first one's document.

    Raises:
        DataError: a rank left its marker, but its commit is not there or does not say what it should.
        StorageError: the run was deleted or replaced, or cannot be read or written.
    """
    check_attempt(backend, attempt)
    ranks = range(attempt.launch.world_size)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        commits = list(pool.map(lambda rank: read_commit(backend, attempt.path, rank, iteration), ranks))
    entries = [entry for commit in commits for entry in commit.entries]
    catalogue = encode_catalogue(entries)
    path = layout.iteration_path(attempt.path, iteration)
    # The catalogue lies in the array's only chunk, after which the array's own checksum stands.
    document = array_document(
        shape=[len(catalogue)],
        data_type="uint8",
        fill_value=0,
        itemsize=1,
        inner_chunk=None,
        dimension_names=[f"byte_{len(catalogue)}"],
        attributes={
            "complete": True,
            "iteration": iteration,
            "attempt": attempt.number,
            "expected_ranks": list(ranks),
            "num_records": len(entries),
            "nbytes": sum(entry.info.nbytes for entry in entries),
            "silent_sites": {
                str(rank): commit.silent_sites for rank, commit in enumerate(commits) if commit.silent_sites
            },
            "committed": time.time(),
        },
    )
    backend.put(f"{path}/{chunk_key(1)}", with_checksum(catalogue))
    backend.flush()
    check_attempt(backend, attempt)
    backend.create(layout.document_key(path), encode_document(document))
    backend.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommit:
    """What one rank committed of one iteration."""

    entries: list[Entry]
    """Its records."""
    silent_sites: dict[str, str]
    """The tensors that were expected and not recorded, each with the reason."""


def read_commit(backend: Backend, attempt: str, rank: int, iteration: int) -> RankCommit:
    """One rank's commit of an iteration; `attempt` is the attempt's path.

    Raises:
        DataError: there is no commit, or it does not hold as many records as it says.
    """
    path = layout.rank_iteration_path(attempt, rank, iteration)
    place = f"{backend.url}/{path}"
    data = backend.get(layout.document_key(path))
    if data is None:
        raise DataError(f"rank {rank} marked iteration {iteration} as committed, but {place} has no document")
    document = decode_document(data, place=place)
    members = document.get("consolidated_metadata", {}).get("metadata", {})
    entries = [
        Entry(path=f"{path}/{name}", info=RecordInfo.from_json(member["attributes"]))
        for name, member in members.items()
        if member["node_type"] == "array"
    ]
    stated = document["attributes"].get("num_records")
    if stated != len(entries):
        raise DataError(f"{place} says {stated} records and holds {len(entries)}: the commit is damaged")
    return RankCommit(entries=entries, silent_sites=document["attributes"].get("silent_sites", {}))


def read_statuses(backend: Backend, progress: Progress, *, final: bool) -> list[IterationStatus]:
    """Every iteration that was begun in an attempt, ascending; `final` says that nothing more will come."""
    iterations = sorted(progress.opened | progress.complete)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return list(pool.map(lambda iteration: _status(backend, progress, iteration, final=final), iterations))


def read_verdict(backend: Backend) -> tuple[Verdict, list[IterationStatus]] | None:
    """The verdict on a run, with all its iterations; None for a run in which no attempt has begun."""
    attempts = read_attempts(backend)
    if not attempts:
        return None
    last = attempts[-1]
    # Read first: a rank's last words come before it.
    closing = _verdict_attributes(backend, last)
    final = closing is not None
    progresses = [read_progress(backend, attempt) for attempt in attempts]
    statuses = [
        status
        for progress in progresses
        for status in read_statuses(backend, progress, final=final or progress.attempt is not last)
    ]
    statuses.sort(key=lambda status: (status.iteration, status.attempt))
    verdict = judge(
        statuses,
        required=last.min_iterations,
        final=final,
        notes=_closing_notes(backend, progresses[-1]) if final else {},
        problems=(closing or {}).get("problems", {}),
    )
    return verdict, statuses


def write_verdict(backend: Backend, *, attempt: Attempt, problems: Mapping[str, str] | None = None) -> Verdict:
    """Close the attempt: the verdict on the run as it stands, written to the store.

    Args:
        backend: Where the run is.
        attempt: The attempt that ends.
        problems: What its coordinator met, each with the reason; a verdict that is not met names them.

    Raises:
        RunNotFoundError: the run was deleted or replaced.
        StorageError: the store cannot be read or written.
    """
    if not is_attempt_there(backend, attempt):
        raise RunNotFoundError(lost_message(backend))
    key = layout.document_key(layout.verdict_path(attempt.path))
    closing = {"problems": dict(problems or {}), "written": time.time()}
    backend.put(key, [encode_document(group_document(closing))])
    judged = read_verdict(backend)
    if judged is None or not is_attempt_there(backend, attempt):
        raise RunNotFoundError(lost_message(backend))
    verdict = judged[0]
    backend.put(key, [encode_document(group_document({**verdict.to_json(), **closing}))])
    backend.flush()
    return verdict


def with_checksum(data: bytes) -> list[bytes]:
    """The bytes and, as the codec `crc32c` has it, their CRC-32C behind them."""
    return [data, google_crc32c.value(data).to_bytes(4, "little")]


def split_checksum(data: bytes | None, *, place: str) -> bytes:
    """The bytes that `with_checksum` protected.

    Raises:
        DataError: they are missing or not what was written.
    """
    if data is None:
        raise DataError(f"{place} is committed, but missing: the run is damaged")
    content, stored = data[:-4], data[-4:]
    if google_crc32c.value(content).to_bytes(4, "little") != stored:
        raise DataError(f"{place} is not what was written: its checksum differs")
    return content


def _status(backend: Backend, progress: Progress, iteration: int, *, final: bool) -> IterationStatus:
    attempt = progress.attempt
    expected = list(range(attempt.launch.world_size))
    marks = progress.marks.get(iteration, {})
    committed = progress.committed_ranks(iteration)
    is_complete = iteration in progress.complete
    missing = {
        rank: _reason(backend, progress, iteration, rank, final=final) for rank in expected if rank not in committed
    }
    if is_complete:
        state = IterationState.COMPLETE
    elif Mark.SKIPPED in marks.values():
        state = IterationState.SKIPPED
    elif final or Mark.FAILED in marks.values() or set(missing) & progress.closed:
        state = IterationState.PARTIAL
    else:
        state = IterationState.OPEN
    summary = _attributes(backend, layout.iteration_path(attempt.path, iteration)) if is_complete else {}
    silent = {int(rank): sites for rank, sites in summary.get("silent_sites", {}).items()}
    return IterationStatus(
        iteration=iteration,
        attempt=attempt.number,
        state=state,
        expected_ranks=expected,
        committed_ranks=committed,
        missing=missing,
        silent_sites=silent,
        num_records=int(summary.get("num_records", 0)),
        nbytes=int(summary.get("nbytes", 0)),
    )


def _reason(backend: Backend, progress: Progress, iteration: int, rank: int, *, final: bool) -> str:
    path = progress.attempt.path
    mark = progress.marks.get(iteration, {}).get(rank)
    if mark is not None:
        attributes = _attributes(backend, layout.marker_path(path, iteration, rank, mark))
        return str(attributes.get("reason", mark))
    if rank in progress.closed:
        attributes = _attributes(backend, layout.closed_path(path, rank))
        return f"ended before it ({attributes.get('reason', 'no reason was left')})"
    return "never reported (its host may be lost)" if final else "has not committed yet"


def _closing_notes(backend: Backend, progress: Progress) -> dict[int, str]:
    """The last words of the first rank that closed; the others' are in the iterations that they did not commit."""
    path = progress.attempt.path
    return {
        rank: str(_attributes(backend, layout.closed_path(path, rank)).get("reason", ""))
        for rank in sorted(progress.closed)[:1]
    }


def _verdict_attributes(backend: Backend, attempt: Attempt) -> dict[str, Any] | None:
    """What the document that closes an attempt says; None for one that is not closed."""
    key = layout.document_key(layout.verdict_path(attempt.path))
    data = backend.get(key)
    return None if data is None else dict(decode_document(data, place=f"{backend.url}/{key}").get("attributes", {}))


def _attributes(backend: Backend, path: str) -> dict[str, Any]:
    key = layout.document_key(path)
    data = backend.get(key)
    return {} if data is None else dict(decode_document(data, place=f"{backend.url}/{key}").get("attributes", {}))
