"""Copies a run to another URL, and pushes spilled iterations to the store.

Objects are copied in the order in which a run is written: values, rank commits, markers, iteration commits, documents
of attempts, and last the run's document, so that the copy is a run only when it is complete. An interrupted copy can be
continued. Every object that is written, or that exists already, is read back and compared.

A spill directory has, for each attempt, a run with the same keys as the run in the store (`SpillDirectory`), with the
objects that the store lacks. For each rank and iteration, `push_spill` copies these objects, reads back every array of
the iteration, and then writes the commit and the marker. After that it removes the iteration from the directory, its
commit last, so that an interrupted push can be repeated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ranktape.errors import DataError, NoRecordsError, RunExistsError, StorageError, UsageError
from ranktape.storage.format import layout
from ranktape.storage.format.arrays import open_stored, read_stored
from ranktape.storage.format.attempt import Attempt, Launch, read_attempt, read_attempts, read_run, run_attributes
from ranktape.storage.format.commit import finish_iteration, mark_committed, open_rank_catalogue, parse_commit
from ranktape.storage.format.documents import MAX_COMMIT_NBYTES, for_each, read_as, read_document
from ranktape.storage.format.layout import AttemptKey, KeyKind, Mark, document_key
from ranktape.storage.format.progress import finish_ready, judge_again, open_iteration, write_verdict
from ranktape.storage.maintenance import OnProgress, Work
from ranktape.storage.places.backend import Backend, MemoryBudget
from ranktape.storage.places.local import LocalBackend
from ranktape.storage.places.urls import RetryingBackend
from ranktape.storage.query.columns import values_of
from ranktape.storage.recording.start import begin_attempt, claim_run
from ranktape.storage.recording.writer import RankWriter
from ranktape.storage.records.records import Records
from ranktape.storage.records.run import Run

_NUM_THREADS = 16
"""The number of objects that are copied concurrently."""

_STAGES: dict[KeyKind | None, int] = {
    **dict.fromkeys((KeyKind.RANK, KeyKind.MEMBER, KeyKind.ITERATION_CATALOGUE), 0),
    KeyKind.RANK_COMMIT: 1,
    **dict.fromkeys((KeyKind.MARKER, KeyKind.OPENED), 2),
    KeyKind.ITERATION_COMMIT: 3,
    KeyKind.ATTEMPT: 5,
    None: 6,
}
"""The stage of each kind of object. A stage starts after the one before has finished. None is the run's document."""

_CLOSING = 4
"""The stage of all other kinds, which close an attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One object to copy."""

    key: str
    """Key below the run."""
    nbytes: int
    """Size in the listing, in bytes."""
    kind: KeyKind | None
    """Kind of the object; None for the run's document."""
    iteration: tuple[str, int] | None = None
    """Path of the attempt and number of the iteration of which it is a part; None if it is not part of an iteration."""

    @property
    def stage(self) -> int:
        """The stage in which it is copied."""
        return _STAGES.get(self.kind, _CLOSING)


@dataclass(slots=True, kw_only=True)
class CopyReport:
    """The result of a copy."""

    num_copied: int = 0
    """Number of objects written."""
    nbytes_copied: int = 0
    """Number of bytes written."""
    num_present: int = 0
    """Number of objects that existed already and were equal."""
    nbytes_present: int = 0
    """Size of these objects, in bytes."""
    left_out: list[str] = field(default_factory=list)
    """Keys that are not part of the run, or part of an iteration that was not committed or was removed meanwhile."""


def copy_run(
    source: Backend, target: Backend, *, verify: bool = True, on_progress: OnProgress | None = None
) -> CopyReport:
    """Copy a run. Of a run that is being recorded, committed iterations are copied; a later copy adds the rest.

    Args:
        source: The store of the run.
        target: The store of the copy, which is empty or has an earlier copy of the run.
        verify: Read back written objects and compare existing ones; without it, only sizes are compared.
        on_progress: Called after each object with the number of finished objects and the number of all objects.

    Raises:
        RunNotFoundError: there is no run at the source.
        RunExistsError: there is something else at the target.
        UsageError: one URL is below the other.
    """
    document = read_run(source)
    run_attributes(document, place=source.url)
    _check_target(source, target, document=document)
    items, left_out = list_run(source)
    report = CopyReport(left_out=left_out)
    copy = _RunCopy(source, target, verify=verify)
    work = Work(on_progress, len(items))
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for stage in sorted({item.stage for item in items}):
            due = [item for item in items if item.stage == stage]
            for item, is_new in zip(due, pool.map(copy.copy_item, due), strict=True):
                if is_new is None:
                    report.left_out.append(item.key)
                elif is_new:
                    report.num_copied += 1
                    report.nbytes_copied += item.nbytes
                else:
                    report.num_present += 1
                    report.nbytes_present += item.nbytes
                work.step()
            target.flush()
    report.left_out.sort()
    return report


def list_run(source: Backend) -> tuple[list[Item], list[str]]:
    """The objects of a run, and the other keys, which are not copied."""
    items = []
    left_out = []
    for name in source.list_names(""):
        if name == layout.DOCUMENT:
            items.append(Item(key=name, nbytes=source.size(name) or 0, kind=None))
        elif name == layout.ANALYSIS or layout.parse_lease(name) is not None:
            continue  # digests are computed again, and the copy needs no lease
        elif layout.parse_attempt(name) is None or not source.exists(layout.document_key(name)):
            left_out.append(name)
        else:
            committed_part, passed = _list_attempt(source, name)
            items += committed_part
            left_out += passed
    return items, left_out


def _list_attempt(source: Backend, attempt: str) -> tuple[list[Item], list[str]]:
    """The objects of an attempt. If it is not closed, only iterations that are committed at first are copied."""
    committed: set[AttemptKey | None] | None = None
    if not source.exists(layout.document_key(layout.verdict_path(attempt))):
        # The attempt may be recording: a commit in an earlier listing has all its parts in a later one.
        listed = {group: source.list_keys(f"{attempt}/{group}") for group in ("iterations", "commits")}
        committed = {layout.parse_key(f"{group}/{key}") for group, keys in listed.items() for key in keys}
    items = []
    left_out = []
    for info in source.list_objects(attempt):
        key = f"{attempt}/{info.key}"
        parsed = layout.parse_key(info.key) or AttemptKey(KeyKind.MEMBER)
        # No key may lead out of the target directory.
        is_odd = any(part in {"", ".", ".."} or "\0" in part or "\\" in part for part in info.key.split("/"))
        if is_odd or (committed is not None and not _is_committed(parsed, committed)):
            left_out.append(key)
            continue
        iteration = (attempt, parsed.iteration) if parsed.iteration >= 0 else None
        items.append(Item(key=key, nbytes=info.nbytes, kind=parsed.kind, iteration=iteration))
    return items, left_out


def _is_committed(parsed: AttemptKey, committed: Collection[AttemptKey | None]) -> bool:
    match parsed.kind:
        case KeyKind.VERDICT:
            return False
        case KeyKind.MARKER | KeyKind.OPENED | KeyKind.ITERATION_COMMIT:
            return parsed in committed
        case KeyKind.ITERATION_CATALOGUE:
            return AttemptKey(KeyKind.ITERATION_COMMIT, parsed.iteration) in committed
        case KeyKind.MEMBER | KeyKind.RANK_COMMIT if parsed.iteration >= 0:
            return AttemptKey(KeyKind.MARKER, parsed.iteration, parsed.rank, layout.Mark.COMMITTED) in committed
    return True


def _check_target(source: Backend, target: Backend, *, document: bytes | None) -> None:
    inner, outer = f"{target.url}/", f"{source.url}/"
    if inner.startswith(outer) or outer.startswith(inner):
        raise UsageError(f"{target.url} overlaps with {source.url}: copy to a URL outside of it")
    existing = read_run(target)
    if existing is not None and existing != document:
        raise RunExistsError(f"another run, or something else, is at {target.url}: choose another URL")
    source_names = set(source.list_names(""))
    foreign = [] if existing is not None else [name for name in target.list_names("") if name not in source_names]
    if foreign:
        raise RunExistsError(
            f"{target.url} is not empty and holds no copy of the run (there is {foreign[0]!r}): choose another URL"
        )


class _RunCopy:
    """A copy in progress."""

    def __init__(self, source: Backend, target: Backend, *, verify: bool) -> None:
        self._source, self._target = source, target
        self._verify = verify
        self._removed: set[tuple[str, int]] = set()
        self._memory = MemoryBudget()

    def copy_item(self, item: Item) -> bool | None:
        """Make the target's object equal to the source's. True if it was written, None if it is left out."""
        source, target, key = self._source, self._target, item.key
        is_left_out = item.iteration in self._removed
        if item.kind is KeyKind.DROPPED and item.iteration is not None:
            # An iteration that was removed from the source after an earlier copy stays complete in the copy.
            is_left_out = target.exists(layout.document_key(layout.iteration_path(*item.iteration)))
        if is_left_out:
            return None
        if not self._verify and item.stage == 0 and target.size(key) == item.nbytes:
            return False
        with self._memory.taken(2 * item.nbytes):
            data = source.get(key)
            if data is None:
                # The iteration is being removed, its commit first, so that the rest is not copied either.
                if item.iteration is None:
                    raise DataError(f"{source.url}/{key} was removed while the run was copied: copy it again")
                self._removed.add(item.iteration)
                return None
            if is_equal(target, key, data):
                return False
            target.put(key, [data])
            if self._verify and not is_equal(target, key, data):
                raise DataError(
                    f"{target.url}/{key} does not read back as it was written: the store lost or changed it"
                )
            return True


def is_equal(backend: Backend, key: str, data: bytes) -> bool:
    """Whether an object exists and has these bytes."""
    return backend.size(key) == len(data) and backend.get(key) == data


LEFT_OUT = "(other records)"
"""The name of omitted records in the commits of a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionReport:
    """The result of a copy of selected records."""

    num_records: int
    """Number of copied records."""
    nbytes: int
    """Size of the copied records, in bytes, before compression."""
    num_left_out: int
    """Number of other records in the copied iterations."""
    iterations: tuple[int, ...]
    """The copied iterations, in ascending order."""


def copy_records(
    source: Backend,
    target: RetryingBackend,
    *,
    run: Run,
    records: Records,
    filters: str,
    on_progress: OnProgress | None = None,
) -> SelectionReport:
    """Copy selected records of a run into a new run with one attempt. Ranks and iterations do not change.

    An iteration of the copy is complete if all its selected records are copied. The commit of each rank has the number
    of omitted records and the filters. Checksums of the values are compared.

    Args:
        source: The store of the run.
        target: The store of the copy, which must be empty.
        run: The run.
        records: A selection of its records.
        filters: The filters of the selection as text, for the commits.
        on_progress: Called with the number of copied records and the number of all selected records.

    Raises:
        NoRecordsError: the selection is empty.
        RunExistsError: the target is not empty.
    """
    if not len(records):
        raise NoRecordsError(f"no record of {run.url} matches {filters}: nothing is copied")
    iterations = tuple(sorted({int(iteration) for iteration in records.column("iteration")}))
    size = max(attempt.launch.world_size for attempt in read_attempts(source))
    launch = Launch(launch_id=f"copy-{uuid.uuid4().hex}", restart=0, world_size=size)
    options = {"min_iterations": len(iterations), "copied_from": run.url, "filters": filters}
    work, num_left_out = Work(on_progress, len(records)), 0
    with claim_run(target, launch=launch, resume=False, overwrite=False):
        attributes: dict[str, Any] = {"options": options, "environment": run.attributes.get("environment") or {}}
        attempt = begin_attempt(target, launch=launch, resume=False, overwrite=False, **attributes)
        writers = [RankWriter(target, attempt=attempt, rank=rank, environment={}) for rank in range(size)]
        for iteration in iterations:
            open_iteration(target, attempt=attempt, iteration=iteration)
            chosen, everything = records.select(iteration=iteration), run.select(iteration=iteration)
            for rank, writer in enumerate(writers):
                of_rank = chosen.select(rank=rank)
                for record in of_rank:
                    values = record.read()
                    writer.write(values, info=dataclasses.replace(record.info, attempt=attempt.number))
                    work.step()
                num_others = len(everything.select(rank=rank)) - len(of_rank)
                reason = f"{num_others} records were left out of the copy: {filters}"
                writer.commit(iteration, expected=[], silent_sites={LEFT_OUT: reason} if num_others else {})
                num_left_out += num_others
            finish_iteration(target, attempt=attempt, iteration=iteration)
        for writer in writers:
            writer.close(reason="everything was copied")
        write_verdict(target, attempt=attempt)
    nbytes = int(records.column("nbytes").sum())
    return SelectionReport(num_records=len(records), nbytes=nbytes, num_left_out=num_left_out, iterations=iterations)


SPILLED_KEY = "spilled"
"""The attribute of a rank's marker with the place of a spilled iteration. Its objects in the store are still needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    """The objects of one rank of an attempt in a spill directory."""

    folder: Path
    """Path of the run in the directory."""
    url: str
    """URL of the run in the store, without credentials."""
    attempt: str
    """Path of the attempt below the run."""
    rank: int
    """Global rank."""


@dataclass(slots=True)
class PushReport:
    """The result of pushing a spill."""

    iterations: list[int] = field(default_factory=list)
    """Iterations whose rank commit is now in the store."""
    finished: list[int] = field(default_factory=list)
    """Iterations that became complete on all ranks."""
    num_objects: int = 0
    """Number of objects written to the store."""
    nbytes: int = 0
    """Size of these objects, in bytes."""
    uncommitted: list[int] = field(default_factory=list)
    """Iterations that the rank did not commit before it closed. They are not pushed."""
    unfinished: list[int] = field(default_factory=list)
    """Iterations that the rank may still commit. They stay in the directory."""
    problems: dict[int, str] = field(default_factory=dict)
    """The reason for each iteration that stays in the directory because of an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """The attributes that the run's document in a spill directory has in addition."""

    spilled_from: str
    """The URL of the run in the store."""


def find_spills(directory: Path) -> list[Spill]:
    """The spills in a directory, by attempt and rank."""
    spills = []
    for folder in sorted(path for path in directory.iterdir() if layout.parse_attempt(path.name) is not None):
        backend = LocalBackend(str(folder))
        origin = read_as(backend, "", _Origin)
        if origin is None:
            raise StorageError(f"{folder} has no {layout.DOCUMENT} of a run: remove it, or give another folder")
        url, parsed = origin.spilled_from, map(layout.parse_key, backend.list_keys(folder.name))
        ranks = {key.rank for key in parsed if key is not None and key.rank >= 0}
        # Without a rank, the only objects that the store lacks are those that note the start of iterations.
        spills += [Spill(folder=folder, url=url, attempt=folder.name, rank=rank) for rank in sorted(ranks) or [0]]
    return spills


def push_spill(spill: Spill, target: Backend, *, keep: bool) -> PushReport:
    """Push a rank's spill to the store, and remove it from the directory.

    Args:
        spill: The spill.
        target: The store of the run.
        keep: Do not remove it from the directory.
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
    """A push in progress."""

    def __init__(self, spill: Spill, target: Backend, *, attempt: Attempt, keep: bool) -> None:
        self._spill, self._keep = spill, keep
        self._source, self._target = LocalBackend(str(spill.folder)), target
        self._attempt = attempt
        self.report = PushReport()

    def push(self) -> None:
        """Push each iteration, then the other objects, write iteration commits, and update the verdict."""
        rank = self._spill.rank
        for iteration in sorted({parsed.iteration for parsed in self._keys().values() if parsed.rank == rank} - {-1}):
            self._push_iteration(iteration)
        deletable = {
            key: parsed
            for key, parsed in self._keys().items()
            if parsed.kind is KeyKind.OPENED or (parsed.kind is KeyKind.CLOSED and parsed.rank == rank)
        }
        for key in deletable:
            if self._target.size(key) is None:
                self._copy(key)
        if not self._keep:
            is_staying = any(parsed.rank == rank for key, parsed in self._keys().items() if key not in deletable)
            # If iterations stay, so does the document that the rank has closed.
            due = [key for key, parsed in deletable.items() if parsed.kind is KeyKind.OPENED or not is_staying]
            self._source.delete_keys(due)
        self.report.finished = finish_ready(self._target, self._attempt, problems=self.report.problems)
        if self.report.finished and self._target.exists(document_key(layout.verdict_path(self._attempt.path))):
            judge_again(self._target, self._attempt)
        if not self._keep and not self._keys().keys() - {document_key(self._attempt.path)}:
            self._source.delete_keys([document_key(self._attempt.path), document_key("")])
            with contextlib.suppress(OSError):  # another rank has spilled in the meantime
                self._spill.folder.rmdir()

    def _keys(self) -> dict[str, layout.AttemptKey]:
        """The parsed keys of the attempt in the directory."""
        attempt = self._attempt.path
        parsed = ((f"{attempt}/{key}", layout.parse_key(key)) for key in self._source.list_keys(attempt))
        return {key: parsed_key for key, parsed_key in parsed if parsed_key is not None}

    def _push_iteration(self, iteration: int) -> None:
        """Push one iteration. A damaged one stays in the directory and is named in the report."""
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
            keys = [key for key, parsed in self._keys().items() if (parsed.iteration, parsed.rank) == (iteration, rank)]
            self._source.delete_keys([key for key in keys if key != document_key(group)])
            self._source.delete_keys([document_key(group)])

    def _is_settled(self, iteration: int) -> bool:
        """Whether the rank will write nothing more of an iteration."""
        attempt, rank = self._attempt.path, self._spill.rank
        paths = [layout.marker_path(attempt, iteration, rank, mark) for mark in Mark]
        keys = [document_key(path) for path in (*paths, layout.closed_path(attempt, rank))]
        return any(place.exists(key) for place in (self._target, self._source) for key in keys)

    def _push_committed(self, iteration: int, *, group: str, commit: bytes) -> None:
        key = document_key(group)
        # Checksums are compared before anything is pushed.
        committed = parse_commit(commit, place=f"{self._source.url}/{key}", key=key)
        values = [f"{group}/{name}" for name in self._source.list_keys(group) if name != layout.DOCUMENT]
        for_each(self._copy, values)
        self._target.flush()
        catalogue = open_rank_catalogue(self._target, self._attempt.path, self._spill.rank, iteration, committed)
        stack_sites = zip(*(values_of(catalogue.column(name)) for name in ("stack", "site")), strict=True)
        arrays = {f"{group}/{stack or site}" for stack, site in stack_sites}
        for_each(lambda path: read_stored(self._target, open_stored(self._target, path)), arrays)
        self._copy(key)
        self._target.flush()
        mark_committed(self._target, self._attempt.path, self._spill.rank, iteration, commit=commit)

    def _copy(self, key: str) -> None:
        """Write one object to the store if the store lacks it."""
        data = self._source.get(key)
        assert data is not None, key
        if not is_equal(self._target, key, data):
            self._target.put(key, [data])
            self.report.num_objects += 1
            self.report.nbytes += len(data)
