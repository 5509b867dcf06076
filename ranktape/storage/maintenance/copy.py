"""Copies a run to another place, where it is a run only when it is whole, and brings spilled iterations to the store.

Object by object, in the order in which a run is written: values, rank commits, markers, iteration commits, the
attempts' documents, and last that of the run. A copy that was interrupted goes on where it stopped; every object
that is written, or that was there, is read back and compared.

A spill directory has, for each attempt, a run with the keys of the one in the store (`SpillDirectory`), which holds
what the store had not taken. For each rank and iteration, `push_spill` copies the objects that the store lacks, reads
every array of the iteration back, and then writes the commit and the marker. Only after that the iteration is removed
from the directory, its commit last: a push that was interrupted can be repeated.
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
"""Objects in flight."""

_STAGES: dict[KeyKind | None, int] = {
    **dict.fromkeys((KeyKind.RANK, KeyKind.MEMBER, KeyKind.ITERATION_CATALOGUE), 0),
    KeyKind.RANK_COMMIT: 1,
    **dict.fromkeys((KeyKind.MARKER, KeyKind.OPENED), 2),
    KeyKind.ITERATION_COMMIT: 3,
    KeyKind.ATTEMPT: 5,
    None: 6,
}
"""When each kind of object is copied: all of one number before the next begins. None is the run's document."""

_CLOSING = 4
"""The stage of the others, which close an attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One object to be copied."""

    key: str
    """Below the run."""
    nbytes: int
    """Its size when it was listed."""
    kind: KeyKind | None
    """What it is; None for the run's document."""
    iteration: tuple[str, int] | None = None
    """The attempt's path and the iteration that it is a part of, if it is."""

    @property
    def stage(self) -> int:
        """When it is copied; everything of one stage is there before the next begins."""
        return _STAGES.get(self.kind, _CLOSING)


@dataclass(slots=True, kw_only=True)
class CopyReport:
    """What a copy did."""

    num_copied: int = 0
    """Objects written."""
    nbytes_copied: int = 0
    """Bytes written."""
    num_present: int = 0
    """Objects that were there already, and equal."""
    nbytes_present: int = 0
    """Bytes of them."""
    left_out: list[str] = field(default_factory=list)
    """Keys that are no part of the run, or of an iteration that was not committed or was removed meanwhile."""


def copy_run(
    source: Backend,
    target: Backend,
    *,
    verify: bool = True,
    on_progress: OnProgress | None = None,
) -> CopyReport:
    """Copy a run; what is being recorded is copied as far as it is committed, and the next copy brings the rest.

    Args:
        source: Where the run is.
        target: Where its copy is to be: nothing, or an earlier copy of the same run.
        verify: Read back what was written, and compare what is there already; without it sizes are trusted.
        on_progress: Called after each object with the number of objects done and of all.

    Raises:
        RunNotFoundError: there is no run at the source.
        RunExistsError: something else is at the target.
        UsageError: one place lies in the other.
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
    """The objects that are a run, and the keys beside them that are not copied."""
    items = []
    left_out = []
    for name in source.list_names(""):
        if name == layout.DOCUMENT:
            items.append(Item(key=name, nbytes=source.size(name) or 0, kind=None))
        elif name == layout.ANALYSIS or layout.parse_lease(name) is not None:
            continue  # what analysis has counted is counted again, and nobody records into the copy
        elif layout.parse_attempt(name) is None or not source.exists(layout.document_key(name)):
            left_out.append(name)
        else:
            taken, passed = _list_attempt(source, name)
            items += taken
            left_out += passed
    return items, left_out


def _list_attempt(source: Backend, attempt: str) -> tuple[list[Item], list[str]]:
    """Those of an attempt; of one that is not closed, what was not committed when one looked first is not copied."""
    committed: set[AttemptKey | None] | None = None
    if not source.exists(layout.document_key(layout.verdict_path(attempt))):
        # It may be recorded just now: what is committed in an earlier listing has all its parts in a later one.
        listed = {group: source.list_keys(f"{attempt}/{group}") for group in ("iterations", "commits")}
        committed = {layout.parse_key(f"{group}/{key}") for group, keys in listed.items() for key in keys}
    items = []
    left_out = []
    for info in source.list_objects(attempt):
        key = f"{attempt}/{info.key}"
        found = layout.parse_key(info.key) or AttemptKey(KeyKind.MEMBER)
        # No key may leave the folder where it is copied to.
        is_odd = any(part in {"", ".", ".."} or "\0" in part or "\\" in part for part in info.key.split("/"))
        if is_odd or (committed is not None and not _is_committed(found, committed)):
            left_out.append(key)
            continue
        iteration = (attempt, found.iteration) if found.iteration >= 0 else None
        items.append(Item(key=key, nbytes=info.nbytes, kind=found.kind, iteration=iteration))
    return items, left_out


def _is_committed(found: AttemptKey, committed: Collection[AttemptKey | None]) -> bool:
    match found.kind:
        case KeyKind.VERDICT:
            return False
        case KeyKind.MARKER | KeyKind.OPENED | KeyKind.ITERATION_COMMIT:
            return found in committed
        case KeyKind.ITERATION_CATALOGUE:
            return AttemptKey(KeyKind.ITERATION_COMMIT, found.iteration) in committed
        case KeyKind.MEMBER | KeyKind.RANK_COMMIT if found.iteration >= 0:
            return AttemptKey(KeyKind.MARKER, found.iteration, found.rank, layout.Mark.COMMITTED) in committed
    return True


def _check_target(source: Backend, target: Backend, *, document: bytes | None) -> None:
    inner, outer = f"{target.url}/", f"{source.url}/"
    if inner.startswith(outer) or outer.startswith(inner):
        raise UsageError(f"{target.url} is or lies in {source.url}, or the other way round: copy to another place")
    there = read_run(target)
    if there is not None and there != document:
        raise RunExistsError(f"another run, or something else, is at {target.url}: choose another URL")
    ours = set(source.list_names(""))
    foreign = [] if there is not None else [name for name in target.list_names("") if name not in ours]
    if foreign:
        raise RunExistsError(
            f"{target.url} is not empty and holds no copy of the run (there is {foreign[0]!r}): choose another URL"
        )


class _RunCopy:
    """One copy on its way."""

    def __init__(self, source: Backend, target: Backend, *, verify: bool) -> None:
        self._source, self._target = source, target
        self._verify = verify
        self._removed: set[tuple[str, int]] = set()
        self._memory = MemoryBudget()

    def copy_item(self, item: Item) -> bool | None:
        """Have one object at the target, equal to the source's: whether it was not yet; None where it is left out."""
        source, target, key = self._source, self._target, item.key
        is_left_out = item.iteration in self._removed
        if item.kind is KeyKind.DROPPED and item.iteration is not None:
            # What a retention removed at the source since an earlier copy stays complete in that copy.
            is_left_out = target.exists(layout.document_key(layout.iteration_path(*item.iteration)))
        if is_left_out:
            return None
        if not self._verify and item.stage == 0 and target.size(key) == item.nbytes:
            return False
        with self._memory.taken(2 * item.nbytes):
            data = source.get(key)
            if data is None:
                # A retention removes whole iterations, their commit first: the rest of this one is not copied either.
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
    """Whether an object is there and holds these bytes."""
    return backend.size(key) == len(data) and backend.get(key) == data


LEFT_OUT = "(other records)"
"""Stands for what was left out where a commit says what it does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionReport:
    """What a copy of some records did."""

    num_records: int
    """Records copied."""
    nbytes: int
    """Bytes of what is kept of them."""
    num_left_out: int
    """Other records of the iterations that were copied."""
    iterations: tuple[int, ...]
    """The iterations that were copied, ascending; of others nothing is in the copy."""


def copy_records(
    source: Backend,
    target: RetryingBackend,
    *,
    run: Run,
    records: Records,
    filters: str,
    on_progress: OnProgress | None = None,
) -> SelectionReport:
    """Copy records of a run into a new run of one attempt, with the ranks and iterations that they had.

    An iteration of the copy is complete when all records of it that were selected are there; each rank's commit says
    how many others the source has, and the filters. Values are compared with their checksums when they are read.

    Args:
        source: Where the run is.
        target: Where the copy is to be: nothing may be there.
        run: The run.
        records: A selection of it.
        filters: What selected them, as text, for the commits.
        on_progress: Called with the number of records copied and of all.

    Raises:
        NoRecordsError: there is none.
        RunExistsError: something is at the target.
    """
    if not len(records):
        raise NoRecordsError(f"no record of {run.url} fits {filters}: nothing is copied")
    iterations = tuple(sorted({int(one) for one in records.column("iteration")}))
    size = max(attempt.launch.world_size for attempt in read_attempts(source))
    launch = Launch(launch_id=f"copy-{uuid.uuid4().hex}", restart=0, world_size=size)
    options = {"min_iterations": len(iterations), "copied_from": run.url, "filters": filters}
    work, num_left_out = Work(on_progress, len(records)), 0
    with claim_run(target, launch=launch, resume=False, overwrite=False):
        about: dict[str, Any] = {"options": options, "environment": run.attributes.get("environment") or {}}
        attempt = begin_attempt(target, launch=launch, resume=False, overwrite=False, **about)
        writers = [RankWriter(target, attempt=attempt, rank=rank, environment={}) for rank in range(size)]
        for iteration in iterations:
            open_iteration(target, attempt=attempt, iteration=iteration)
            chosen, everything = records.select(iteration=iteration), run.select(iteration=iteration)
            for rank, writer in enumerate(writers):
                own = chosen.select(rank=rank)
                for record in own:
                    values = record.read()
                    writer.write(values, info=dataclasses.replace(record.info, attempt=attempt.number))
                    work.step()
                rest = len(everything.select(rank=rank)) - len(own)
                reason = f"{rest} records were left out of the copy: {filters}"
                writer.commit(iteration, expected=[], silent_sites={LEFT_OUT: reason} if rest else {})
                num_left_out += rest
            finish_iteration(target, attempt=attempt, iteration=iteration)
        for writer in writers:
            writer.close(reason="everything was copied")
        write_verdict(target, attempt=attempt)
    nbytes = int(records.column("nbytes").sum())
    return SelectionReport(num_records=len(records), nbytes=nbytes, num_left_out=num_left_out, iterations=iterations)


SPILLED_KEY = "spilled"
"""The attribute of a rank's marker that says where the iteration waits; what the store has of it is still needed."""


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
    """What lies in a spill directory, by attempt and rank."""
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
        for_each(self._copy, values)
        self._target.flush()
        catalogue = open_rank_catalogue(self._target, self._attempt.path, self._spill.rank, iteration, said)
        places = zip(*(values_of(catalogue.column(name)) for name in ("stack", "site")), strict=True)
        arrays = {f"{group}/{stack or site}" for stack, site in places}
        for_each(lambda path: read_stored(self._target, open_stored(self._target, path)), arrays)
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
