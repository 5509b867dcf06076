"""Checks one iteration of an attempt: the commit of each rank and the commit of the iteration.

A rank's commit has its metadata twice: in the catalogue and in the documents of the arrays. The rank's document has the
checksum of the catalogue, the catalogue names every array, and both must agree on each record.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ranktape.errors import DataError, RunFormatError
from ranktape.storage.format import layout
from ranktape.storage.format.arrays import (
    StoredArray,
    blob_key,
    blob_nbytes,
    checksum,
    crc_text,
    parse_array,
    read_stored,
    split_checksum,
)
from ranktape.storage.format.attempt import Attempt
from ranktape.storage.format.catalogue import (
    KINDS,
    Catalogue,
    RecordTable,
    catalogued_columns,
    check_records,
    concatenate,
    documented_columns,
)
from ranktape.storage.format.commit import SUMMARY, RankCommit, parse_commit, summary_of
from ranktape.storage.format.documents import MAX_COMMIT_NBYTES, decode_document, document_checksum, read_document
from ranktape.storage.format.layout import DOCUMENT, AttemptKey, KeyKind, Mark, document_key
from ranktape.storage.maintenance.copy import SPILLED_KEY
from ranktape.storage.maintenance.finding import CheckFinding, FindingKind, Findings, Repair
from ranktape.storage.places.backend import Backend, MemoryBudget, ObjectInfo
from ranktape.storage.query.columns import StringColumn, rows_of, values_of

_MAX_NAMED = 3
"""The number of damaged tensors of a stack, or of ranks, that are named before the rest is counted."""

_MALFORMED = (RunFormatError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""The exceptions that a document raises if ranktape did not write its JSON."""

_PARSED_RATIO = 8
"""The memory of a parsed document, as a multiple of the size of its text."""

_READ_LATER = {KeyKind.VERDICT, KeyKind.ITERATION_COMMIT, KeyKind.ITERATION_CATALOGUE}
"""The kinds that are checked after the commits of ranks."""


@dataclass(slots=True, kw_only=True)
class AttemptView:
    """An attempt as listed, and what a check needs to read its objects."""

    backend: Backend
    attempt: Attempt
    objects: dict[str, ObjectInfo]
    """All objects of the attempt, by their keys below the run."""
    is_open: bool
    """Whether ranks may still be writing, so that objects may exist that were not listed."""
    deep: bool
    """Whether every byte is read."""
    leaves: ThreadPoolExecutor
    """The threads for single requests. Their work submits nothing to them."""
    memory: MemoryBudget = field(default_factory=MemoryBudget)
    """The budget for objects in memory."""
    groups: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """The keys in the group of each iteration and rank."""
    marks: dict[tuple[int, int], dict[Mark, dict[str, Any] | None]] = field(default_factory=dict)
    """The attributes of the markers of each iteration and rank; None for a damaged marker."""
    iterations: dict[KeyKind, set[int]] = field(
        default_factory=lambda: {KeyKind.OPENED: set(), KeyKind.ITERATION_COMMIT: set(), KeyKind.DROPPED: set()}
    )
    """The iterations that have started, that have an iteration commit, and that were removed on purpose."""
    counted: set[int] = field(default_factory=set)
    """Iterations that the verdict counts as complete."""
    finishable: set[int] = field(default_factory=set)
    """Iterations without an iteration commit whose rank commits are all intact. The check fills it in."""
    documents: dict[str, AttemptKey] = field(default_factory=dict)
    """The documents that are not part of a commit, without the verdict."""
    ranks: dict[KeyKind, set[int]] = field(default_factory=lambda: {KeyKind.RANK: set(), KeyKind.CLOSED: set()})
    """The ranks with a document, and the ranks that have closed."""
    foreign: list[str] = field(default_factory=list)
    """Keys that ranktape never writes."""

    def __post_init__(self) -> None:
        """Sort the listed keys by their kinds."""
        for key in self.objects:
            parsed = layout.parse_key(key[len(self.attempt.path) + 1 :])
            if parsed is None:
                self.foreign.append(key)
            elif parsed.kind in {KeyKind.RANK_COMMIT, KeyKind.MEMBER}:
                self.groups.setdefault((parsed.iteration, parsed.rank), []).append(key)
            else:
                self.iterations.get(parsed.kind, set()).add(parsed.iteration)
                self.ranks.get(parsed.kind, set()).add(parsed.rank)
                if parsed.mark is not None:
                    self.marks.setdefault((parsed.iteration, parsed.rank), {})[parsed.mark] = None
                if parsed.kind not in _READ_LATER:
                    self.documents[key] = parsed

    @property
    def complete(self) -> set[int]:
        """Iterations with the document of an iteration commit."""
        return self.iterations[KeyKind.ITERATION_COMMIT]

    @property
    def dropped(self) -> set[int]:
        """Iterations that were removed on purpose."""
        return self.iterations[KeyKind.DROPPED]

    def nbytes(self, key: str) -> int | None:
        """The size of an object; None if it does not exist."""
        info = self.objects.get(key)
        if info is not None:
            return info.nbytes
        # A listing that is made while ranks write may lack earlier objects.
        return self.backend.size(key) if self.is_open else None

    def has_object(self, findings: Findings, key: str, *, nbytes: int | None, subject: str, **fields: Any) -> bool:
        """Whether an object exists and has the size `nbytes`, if given; otherwise a finding is added."""
        actual_nbytes = self.nbytes(key)
        if actual_nbytes is None:
            findings.error(FindingKind.MISSING, f"{subject} lost: the object is missing", key=key, **fields)
        elif not actual_nbytes or nbytes not in {None, actual_nbytes}:
            expected = "some" if nbytes is None else nbytes
            findings.error(
                FindingKind.SIZE, f"the object has {actual_nbytes} bytes instead of {expected}", key=key, **fields
            )
        else:
            return True
        return False

    def place(self, key: str) -> str:
        """The URL of a key, for messages."""
        return f"{self.backend.url}/{key}"

    def read(self, key: str) -> bytes | None:
        """The text of a document; None if it does not exist."""
        if self.nbytes(key) is None:
            return None
        return read_document(self.backend, key.removesuffix(f"/{DOCUMENT}"), max_nbytes=MAX_COMMIT_NBYTES)

    def document(self, key: str) -> dict[str, Any] | None:
        """The document at a key after its checksum, which is required, has been compared; None if it does not exist."""
        with self.memory.taken(_PARSED_RATIO * (self.nbytes(key) or 0)):
            data = self.read(key)
            return None if data is None else decode_stamped(data, key=key, place=self.place(key))

    def expect_document(self, findings: Findings, key: str, *, subject: str, **fields: Any) -> dict[str, Any] | None:
        """The document at a key; if it is missing or damaged, a finding is added and the result is None."""
        num_before = len(findings.items)
        document = findings.read(lambda: self.document(key), key=key, **fields)
        if document is None and len(findings.items) == num_before:
            findings.error(FindingKind.MISSING, f"{subject} missing", key=key, **fields)
        return document


def decode_stamped(data: bytes, *, key: str, place: str) -> dict[str, Any]:
    """A document after its checksum, which is required, has been compared."""
    document = decode_document(data, place=place, key=key)
    if document_checksum(data) is None:
        raise DataError(f"{place} is not what was written there: it has lost its checksum")
    return document


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """The result of the check of a readable rank commit."""

    commit: RankCommit
    """Its document."""
    catalogue: Catalogue | None
    """Its records; None if they cannot be read."""
    is_whole: bool
    """Whether the check found no errors."""


def check_rank(view: AttemptView, iteration: int, rank: int) -> tuple[list[CheckFinding], RankResult | None]:
    """The findings on one rank's part of an iteration, and its commit; None without a readable commit."""
    check = _RankCheck(view, iteration, rank)
    return check.findings.items, check.look()


class _RankCheck:
    """The check of one rank's part of an iteration."""

    def __init__(self, view: AttemptView, iteration: int, rank: int) -> None:
        self._view = view
        self._place = (iteration, rank)
        self._marks = view.marks.get(self._place, {})
        self._keys = view.groups.get(self._place, [])
        self._group = layout.rank_iteration_path(view.attempt.path, rank, iteration)
        self._key = document_key(self._group)
        self._columns: dict[str, list[Any]] = {}
        self.findings = self._findings()

    def look(self) -> RankResult | None:
        findings, view, key = self.findings, self._view, self._key
        try:
            data = view.read(key)
            if data is None:
                self._check_uncommitted()
                return None
            decode_stamped(data, key=key, place=view.place(key))
            commit = parse_commit(data, place=view.place(key), key=key)
        except (DataError, RunFormatError) as error:
            findings.error(FindingKind.DAMAGED, f"its document cannot be read: {error}", key=key)
            return None
        catalogue = self._check_catalogue(commit)
        if catalogue is not None:
            self._columns = catalogued_columns(catalogue)
            self._check_members()
        result = RankResult(
            commit=commit, catalogue=catalogue, is_whole=not any(finding.is_error for finding in findings.items)
        )
        self._check_marker(result)
        return result

    def _findings(self) -> Findings:
        iteration, rank = self._place
        return Findings(attempt=self._view.attempt.number, iteration=iteration, rank=rank)

    def _check_uncommitted(self) -> None:
        findings, view, keys = self.findings, self._view, self._keys
        place = {"key": f"{self._group}/", "modified": max((view.objects[key].modified for key in keys), default=0.0)}
        if Mark.COMMITTED in self._marks or self._place[0] in view.complete:
            reason = "the rank has committed it" if Mark.COMMITTED in self._marks else "the iteration is complete"
            message = f"{reason}, but the document of the rank's commit is missing"
            findings.error(FindingKind.MISSING, message, key=self._key)
        elif keys and (waits := (self._marks.get(Mark.FAILED) or {}).get(SPILLED_KEY)) is not None:
            # The objects here are a part of the iteration and must not be removed before the rest is pushed.
            message = f"{len(keys)} objects of an iteration whose other objects are in {waits}: run 'ranktape push'"
            findings.note(FindingKind.UNFINISHED, message, **place)
        elif keys:
            nbytes = sum(view.objects[name].nbytes for name in keys)
            message = f"{len(keys)} objects ({nbytes} bytes) of an iteration that the rank has not committed"
            message += ": it is being recorded, or its processes were lost" if view.is_open else ""
            kind = FindingKind.UNFINISHED if view.is_open else FindingKind.DEBRIS
            findings.note(kind, message, mend=Repair.REMOVE_OBJECTS, **place)

    def _check_marker(self, result: RankResult) -> None:
        findings, view = self.findings, self._view
        key = document_key(layout.marker_path(view.attempt.path, *self._place, Mark.COMMITTED))
        fields: dict[str, Any] = {"key": key, "mend": Repair.RESTORE_MARKER if result.is_whole else None}
        if Mark.COMMITTED in self._marks:
            marker = self._marks[Mark.COMMITTED]
            if marker is None:
                findings.error(FindingKind.DAMAGED, "the rank's marker is not what was written", **fields)
            elif marker.get("commit") != result.commit.checksum:
                message = (
                    f"the rank's marker is of the commit {marker.get('commit')}, there is {result.commit.checksum}"
                )
                findings.error(FindingKind.MISMATCH, message, **fields)
        elif view.nbytes(key) is None:
            message = "the rank's commit is there, its marker is"
            if self._place[0] in view.complete:
                findings.error(FindingKind.MISSING, f"{message} missing", **fields)
            else:
                message += " not yet: it is being recorded, or the rank was lost"
                findings.note(FindingKind.UNFINISHED, message, **fields)

    def _check_catalogue(self, commit: RankCommit) -> Catalogue | None:
        """The catalogue of the rank; None if it is not the committed one."""
        findings, view, path = self.findings, self._view, f"{self._group}/{layout.CATALOGUE}"
        document = view.expect_document(findings, document_key(path), subject="the document of the rank's catalogue is")
        message = "the rank's catalogue is"
        catalogue = read_catalogue(view, findings, path, document, subject=message, expected=commit.catalogue)
        if catalogue is None:
            return None
        stated, actual = commit.nbytes, sum(values_of(catalogue.column("nbytes")))
        if (catalogue.num_rows, actual) == (commit.num_records, stated):
            return catalogue
        message = f"it says {commit.num_records} records of {stated} bytes, its catalogue has {catalogue.num_rows}"
        findings.error(FindingKind.MISMATCH, f"{message} of {actual} bytes", key=self._key)
        return None

    def _check_members(self) -> None:
        """Check all arrays that the catalogue names, and the other objects beside them."""
        findings, view, group = self.findings, self._view, self._group
        rows: dict[str, list[int]] = {}
        for row, (stack, site) in enumerate(zip(self._columns["stack"], self._columns["site"], strict=True)):
            rows.setdefault(stack or site, []).append(row)
        jobs = [view.leaves.submit(self._check_array, name, some) for name, some in rows.items()]
        catalogue = f"{group}/{layout.CATALOGUE}"
        expected = {self._key, document_key(catalogue), blob_key(catalogue)}
        for parent in sorted(
            {document_key(f"{group}/{parent_path}") for name in rows for parent_path in layout.parents_of(name)}
        ):
            expected.add(parent)
            view.expect_document(findings, parent, subject="the document of a group between tensors is")
        for job in jobs:
            items, keys = job.result()
            findings.items += items
            expected |= keys
        # The values of an array whose document is lost must not be removed.
        lost = tuple(
            f"{parent_path.key.removesuffix(DOCUMENT)}c" for parent_path in findings.items if parent_path.is_error
        )
        for key in self._keys:
            if key not in expected and not key.startswith(lost):
                fields = {"mend": Repair.REMOVE_OBJECTS, "modified": view.objects[key].modified}
                findings.note(FindingKind.DEBRIS, "an object that the commit does not name", key=key, **fields)

    def _check_array(self, name: str, rows: list[int]) -> tuple[list[CheckFinding], set[str]]:
        """The findings on one array of the commit, and the keys of its objects."""
        findings, view, columns = self._findings(), self._view, self._columns
        path, key = f"{self._group}/{name}", document_key(f"{self._group}/{name}")
        rows = sorted(rows, key=columns["index"].__getitem__)
        fields: dict[str, Any] = {"key": key, "record": "" if columns["stack"][rows[0]] else name}
        document = view.expect_document(findings, subject="the document of its array is", **fields)
        if document is None:
            return findings.items, {key}
        try:
            stored = parse_array(document, path=path, place=view.place(key))
            documented = documented_columns(stored.attributes, name=name)
        except _MALFORMED as error:
            subject = f"its document is not one of an array of tensors: {error}"
            findings.error(FindingKind.DAMAGED, subject, **fields)
            return findings.items, {key}
        wrong = [column for column, values in documented.items() if values != [columns[column][row] for row in rows]]
        is_stack = "captures" in stored.attributes
        if wrong or (is_stack and len(rows) != stored.shape[0]):
            differences = f"in {', '.join(wrong[:_MAX_NAMED])}" if wrong else "in the number of tensors"
            subject = f"the document of its array and the rank's catalogue differ {differences}"
            findings.error(FindingKind.MISMATCH, subject, **fields)
        if math.prod(stored.shape):
            subject = f"the values of {len(rows)} tensors are" if len(rows) > 1 else "its values are"
            fields |= {"key": stored.key, "nbytes": stored.object_nbytes(), "subject": subject}
            if view.has_object(findings, **fields) and view.deep and not wrong:
                names = [(columns["site"][row], columns["checksum"][row]) for row in rows]
                with view.memory.taken(2 * (view.nbytes(stored.key) or 0)):
                    findings.read(functools.partial(_read_values, view, findings, stored, names), key=stored.key)
        return findings.items, {key, stored.key}


def read_catalogue(
    view: AttemptView,
    findings: Findings,
    path: str,
    document: Mapping[str, Any] | None,
    *,
    subject: str,
    expected: str = "",
) -> Catalogue | None:
    """The catalogue at a path after every column has been read; None if it is damaged."""
    key, place = blob_key(path), view.place(blob_key(path))
    nbytes = None if document is None else blob_nbytes(document) or -1
    if not view.has_object(findings, key, nbytes=nbytes, subject=subject):
        return None

    def read() -> Catalogue:
        data = split_checksum(view.backend.get(key), place=place)
        if expected not in {"", checksum(data)}:
            raise DataError(f"{place} is not the catalogue that the commit names, {expected}")
        catalogue = Catalogue.from_bytes(data, place=place, attempt=view.attempt.path)
        for name in KINDS:
            catalogue.column(name)
        try:
            check_records(catalogue.column)
        except ValueError as error:
            raise DataError(f"{place} is damaged: {error}") from error
        return catalogue

    with view.memory.taken(2 * (view.nbytes(key) or 0)):
        return findings.read(read, key=key)


def _read_values(view: AttemptView, findings: Findings, stored: StoredArray, names: Sequence[tuple[str, int]]) -> None:
    """Compare all values of an array with the checksums of its records."""
    is_stack = "captures" in stored.attributes
    try:
        values = read_stored(view.backend, stored)
        arrays = values if is_stack else [values]
        reasons = [_differs(array, stated) for array, (_, stated) in zip(arrays, names, strict=True)]
    except (DataError, RunFormatError) as error:
        # Some tensors of a stack may be intact, so that they are read one by one.
        reasons = [_try(view, stored, index, stated) for index, (_, stated) in enumerate(names)] if is_stack else []
        if not any(reasons):
            reasons = [str(error)]
    damaged = [(name, reason) for (name, _), reason in zip(names, reasons, strict=False) if reason]
    for name, reason in damaged[:_MAX_NAMED]:
        findings.error(FindingKind.DAMAGED, reason, key=stored.key, record=name)
    if not_listed := damaged[_MAX_NAMED:]:
        listed = ", ".join(name for name, _ in not_listed)
        message = f"{len(not_listed)} more tensors of the object are damaged: {listed}"
        findings.error(FindingKind.DAMAGED, message, key=stored.key)


def _try(view: AttemptView, stored: StoredArray, index: int, stated: int) -> str:
    try:
        return _differs(read_stored(view.backend, stored, index=index), stated)
    except (DataError, RunFormatError) as error:
        return str(error)


def _differs(array: np.ndarray[Any, Any], stated: int) -> str:
    actual, expected = checksum(array), crc_text(stated)
    return (
        "" if actual == expected else f"the values are not those captured: their checksum is {actual}, not {expected}"
    )


def check_iteration(view: AttemptView, iteration: int, results: Mapping[int, RankResult | None]) -> list[CheckFinding]:
    """The findings on the commit of an iteration, given the results for its ranks."""
    findings = Findings(attempt=view.attempt.number, iteration=iteration)
    opened = document_key(layout.opened_path(view.attempt.path, iteration))
    is_opened = iteration in view.iterations[KeyKind.OPENED]
    has_marks = any(step == iteration for step, _ in view.marks)
    if iteration in view.dropped:
        if has_marks or is_opened or iteration in view.complete or any(step == iteration for step, _ in view.groups):
            message = "the iteration was removed to keep the run small, and parts of it are left"
            key = document_key(layout.dropped_path(view.attempt.path, iteration))
            findings.note(FindingKind.DEBRIS, message, key=key, mend=Repair.FINISH_REMOVAL)
        return findings.items
    if has_marks and not is_opened and view.nbytes(opened) is None:
        # Another process writes the document and may have died before. No reader needs it.
        message = "ranks have left markers, but the document that says that it was begun is missing"
        findings.note(FindingKind.UNFINISHED, message, key=opened)
    ranks = view.attempt.launch.ranks
    known = {rank: result for rank in ranks if (result := results.get(rank)) is not None}
    can_finish = len(known) == len(ranks) and all(result.is_whole for result in known.values())
    key = document_key(layout.iteration_path(view.attempt.path, iteration))
    if view.nbytes(key) is None:
        _check_missing(view, findings, results, key=key, can_finish=can_finish)
        return findings.items
    num_absent = len(set(ranks) - results.keys())
    if num_absent and not view.is_open:
        findings.error(
            FindingKind.MISSING, f"the iteration is complete, but {num_absent} more ranks have no commit in it"
        )
    _check_complete(view, findings, known if len(known) == len(ranks) else None, key=key)
    return findings.items


def _check_missing(
    view: AttemptView, findings: Findings, results: Mapping[int, RankResult | None], *, key: str, can_finish: bool
) -> None:
    """Check an iteration without an iteration commit."""
    mend = Repair.FINISH_ITERATION if can_finish else None
    assert findings.iteration is not None
    if can_finish:
        view.finishable.add(findings.iteration)
    if findings.iteration in view.counted:
        message = "the verdict counts it, but the iteration commit is missing"
        findings.error(FindingKind.MISSING, message, key=key, mend=mend)
    elif can_finish:
        message = "all ranks have committed it, and the iteration commit is not there: readers do not see it"
        findings.note(FindingKind.UNFINISHED, message, key=key, mend=mend)
    elif without := [rank for rank in view.attempt.launch.ranks if results.get(rank) is None]:
        given_up = {Mark.SKIPPED, Mark.FAILED}
        num_lost = sum(bool(given_up & view.marks.get((findings.iteration, rank), {}).keys()) for rank in without)
        verb = "has not committed it" if len(without) == 1 else "have not committed it"
        more = f" ({num_lost} skipped or failed)" if num_lost else ""
        findings.note(FindingKind.UNFINISHED, f"not complete: {_ranks(without)} {verb}{more}")


def _check_complete(view: AttemptView, findings: Findings, known: Mapping[int, RankResult] | None, *, key: str) -> None:
    """Check the commit of an iteration; `known` are the commits of all ranks, None if one is missing."""
    document = view.expect_document(findings, key, subject="the iteration commit is")
    if document is None:
        return
    attributes = document.get("attributes", {})
    actual = {} if known is None else summary_of({rank: result.commit for rank, result in known.items()})
    for name in SUMMARY if known is not None else ():
        # An early version did not write checksums of commits.
        if attributes.get(name) != actual.get(name) and (name != "commits" or name in attributes):
            message = f"{name} of the iteration commit does not match the commits of the ranks"
            findings.error(FindingKind.MISMATCH, message, key=key)
    path = layout.iteration_path(view.attempt.path, findings.iteration or 0)
    catalogue = read_catalogue(view, findings, path, document, subject="the iteration's catalogue is")
    if catalogue is None or known is None:
        return
    parts = [result.catalogue for result in known.values() if result.catalogue is not None]
    if len(parts) == len(known) and (difference := first_difference(parts, catalogue)):
        message = f"the iteration's catalogue is not that of its ranks: {difference}"
        findings.error(FindingKind.MISMATCH, message, key=blob_key(path))


def first_difference(parts: Sequence[RecordTable], merged: RecordTable) -> str:
    """Where the concatenated rows of some catalogues differ from those of another; empty if they are equal."""
    num_rows = sum(part.num_rows for part in parts)
    if num_rows != merged.num_rows:
        return f"{merged.num_rows} records instead of {num_rows}"
    for name in KINDS:
        column = concatenate([*(part.column(name) for part in parts), merged.column(name)])
        values = column.codes if isinstance(column, StringColumn) else column
        left, right = values[:num_rows], values[num_rows:]
        differs = (left != right) & ((left == left) | (right == right))  # noqa: PLR0124  # NaN is not itself
        if differs.any():
            row = int(np.flatnonzero(differs)[0])
            where = " ".join(
                str(values_of(rows_of(merged.column(field), np.array([row])))[0]) for field in ("rank", "site")
            )
            return f"{name} of {int(differs.sum())} records differs, first of rank {where}"
    return ""


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[: 2 * _MAX_NAMED]))
    return f"rank{'s' if len(ranks) > 1 else ''} {named}" + (", ..." if len(ranks) > 2 * _MAX_NAMED else "")
