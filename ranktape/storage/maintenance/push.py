"""How do iterations come from a spill directory (`spill.py`) to the store where they belong?

For each rank and iteration: the tensors first, then everything that its commit names is read back from the store
and compared, then the commit, then the marker. What was pushed is removed here only after that, the commit last,
so that a push that was interrupted can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranktape.errors import DataError, StorageError
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import Attempt, read_attempt
from ranktape.storage.format.commit import finish_iteration
from ranktape.storage.format.decode import open_stored, read_stored
from ranktape.storage.format.documents import decode_document, document_checksum
from ranktape.storage.format.group_documents import MAX_COMMIT_NBYTES, read_attributes, read_document, write_group
from ranktape.storage.format.layout import Mark
from ranktape.storage.format.progress import read_progress, write_verdict
from ranktape.storage.maintenance.spill import MANIFEST, read_manifest
from ranktape.storage.places.local import LocalBackend

if TYPE_CHECKING:
    from ranktape.storage.places.backend import Backend

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
    spills = []
    for path in sorted(directory.glob("*/rank_*.spill.json")):
        words = read_manifest(path)
        match = MANIFEST.fullmatch(path.name)
        # Names in a file must not lead out of its folder.
        if match is None or words["attempt"] != path.parent.name or words["rank"] != int(match[1]):
            raise StorageError(f"{path} does not say what its name says: remove it, or give another folder")
        spills.append(Spill(manifest=path, url=words["url"], attempt=words["attempt"], rank=words["rank"]))
    return spills


def push_spill(
    spill: Spill, target: Backend, *, keep: bool, on_iteration: Callable[[int], None] = lambda _: None
) -> PushReport:
    """Bring what a rank left to the store, and remove it here unless it is to be kept.

    Args:
        spill: What to bring.
        target: The run.
        keep: Leave everything here, too.
        on_iteration: Called with each iteration before it is pushed.

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
        on_iteration(iteration)
        push.iteration(iteration, keep=keep)
    push.rest(keep=keep)
    return push.report


def commit_summary(commit: bytes, *, place: str, key: str) -> dict[str, Any]:
    """What a rank's marker says of its commit, whose document is given.

    Raises:
        DataError: the document is damaged.
    """
    attributes = decode_document(commit, place=place, key=key)["attributes"]
    counts = [name for name in ("num_expected", "num_missing") if name in attributes]
    summary = {name: attributes[name] for name in ("num_records", "nbytes", "silent_sites", *counts)}
    return {**summary, "commit": document_checksum(commit)}


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
        names = {key.partition("/")[0] for key in keys}
        found = (layout.parse_iteration(f"{name}/{layout.DOCUMENT}") for name in names)
        return sorted(iteration for iteration in found if iteration is not None)

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
            keys += [key for key in self._keys(layout.commits_path(attempt)) if layout.parse_marker(key) is None]
        for key in keys:
            if self._source.exists(key) and self._target.size(key) is None:
                self._put(key)
        if not keep and not self.iterations():
            self._source.delete_keys(keys)
        for iteration in read_progress(self._target, self._attempt).ready():
            try:
                finish_iteration(self._target, attempt=self._attempt, iteration=iteration)
            except DataError as error:
                self.report.problems.setdefault(iteration, str(error))
            else:
                self.report.finished.append(iteration)
        if self.report.finished:
            self._judge()
        if not keep and not self._keys(layout.rank_path(attempt, rank)):
            self._spill.manifest.unlink(missing_ok=True)
            _remove_empty(self._spill.manifest.parent)

    def _judge(self) -> None:
        closing = read_attributes(self._target, layout.verdict_path(self._attempt.path))
        if closing is not None:
            write_verdict(self._target, attempt=self._attempt, problems=closing.get("problems", {}))

    def _push_committed(self, iteration: int, *, group: str, commit: bytes) -> None:
        commit_key = layout.document_key(group)
        document = decode_document(commit, place=f"{self._source.url}/{commit_key}", key=commit_key)
        self._put_all([key for key in self._keys(group) if key != commit_key])
        self._target.flush()
        self._compare(group, document)
        self._put(commit_key)
        self._target.flush()
        opened = layout.document_key(layout.opened_path(self._attempt.path, iteration))
        if self._source.exists(opened):
            self._put(opened)
        self._target.delete_keys(
            [
                layout.document_key(layout.marker_path(self._attempt.path, iteration, self._spill.rank, mark))
                for mark in (Mark.FAILED, Mark.SKIPPED)
            ]
        )
        marker = layout.marker_path(self._attempt.path, iteration, self._spill.rank, Mark.COMMITTED)
        place = f"{self._source.url}/{commit_key}"
        write_group(self._target, marker, commit_summary(commit, place=place, key=commit_key))

    def _compare(self, group: str, document: dict[str, Any]) -> None:
        """Read everything that a commit names from the store.

        Raises:
            DataError: something is missing, or not what was captured.
        """
        members = document.get("consolidated_metadata", {}).get("metadata", {})
        arrays = [(f"{group}/{name}", member) for name, member in members.items() if member["node_type"] == "array"]

        def compare(item: tuple[str, dict[str, Any]]) -> None:
            path, member = item
            stored = open_stored(self._target, path)
            if dict(stored.attributes) != member["attributes"]:
                raise DataError(f"{self._target.url}/{path} is not the array that the commit of {group} names")
            read_stored(self._target, stored)

        _each(compare, arrays)

    def _keys(self, path: str) -> list[str]:
        return [f"{path}/{key}" for key in self._source.list_keys(path)]

    def _put_all(self, keys: Sequence[str]) -> None:
        _each(self._put, keys)

    def _put(self, key: str) -> None:
        data = self._source.get(key)
        assert data is not None, key
        self._target.put(key, [data])
        self.report.num_objects += 1
        self.report.nbytes += len(data)


def _each(work: Callable[[Any], None], items: Sequence[Any]) -> None:
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        futures = [pool.submit(work, item) for item in items]
        for future in futures:
            future.result()


def _remove_empty(folder: Path) -> None:
    """Remove a folder and those below it, as far as they hold no file."""
    for path in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        if not any(path.iterdir()):
            path.rmdir()
    if not any(folder.iterdir()):
        folder.rmdir()
