"""Checks that what one rank committed of one iteration is there, whole, and what its documents say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ranktape.errors import DataError, RunFormatError
from ranktape.storage.format import layout
from ranktape.storage.format.blob import blob_key, blob_nbytes
from ranktape.storage.format.commit import RankCommit, parse_commit
from ranktape.storage.format.decode import StoredArray, parse_array, read_stored
from ranktape.storage.format.documents import is_document_intact, read_attributes
from ranktape.storage.format.encode import checksum
from ranktape.storage.format.layout import Mark
from ranktape.storage.maintenance.check_view import AttemptView, compare_catalogue, decode_stamped
from ranktape.storage.maintenance.finding import CheckFinding, FindingKind, Findings, Mend
from ranktape.storage.maintenance.outbox import SPILLED_KEY
from ranktape.storage.query.columns import values_of

if TYPE_CHECKING:
    import numpy as np

    from ranktape.storage.format.catalogue import RecordTable

MALFORMED = (DataError, RunFormatError, AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
"""What comes of a document whose JSON is not what we write, whoever wrote it."""

_MAX_NAMED = 3
"""Damaged tensors of one stack that are named before the rest is counted."""

Names = list[tuple[str, str]]
"""The path and the checksum of each record of an array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What was found out about a rank commit that can be read."""

    commit: RankCommit
    """What it says, from the documents of its arrays."""
    is_whole: bool
    """Whether nothing of it is lost or wrong."""


def check_commit(view: AttemptView, iteration: int, rank: int) -> tuple[list[CheckFinding], RankResult | None]:
    """What is wrong with one rank's iteration, and its records where they can be read."""
    check = _CommitCheck(view, iteration, rank)
    return check.found.items, check.look()


class _CommitCheck:
    """The check of one rank's part of an iteration."""

    def __init__(self, view: AttemptView, iteration: int, rank: int) -> None:
        self.found = Findings(attempt=view.attempt.number, iteration=iteration, rank=rank)
        self._view = view
        self._place = (iteration, rank)
        self._marks = view.marks.get(self._place, {})
        self._group = layout.rank_iteration_path(view.attempt.path, rank, iteration)
        self._key = layout.document_key(self._group)
        self._data = b""
        self._mend: Mend | None = None

    def look(self) -> RankResult | None:
        found, view = self.found, self._view
        try:
            data = view.read(self._key)
            if data is None:
                self._look_at_uncommitted()
                return None
            document = decode_stamped(data, key=self._key, place=view.place(self._key))
            commit = parse_commit(document, place=view.place(self._key), attempt=view.attempt.path)
        except MALFORMED as error:
            found.error(FindingKind.DAMAGED, f"its document cannot be read: {error}", key=self._key)
            return None
        attributes = document["attributes"]
        stated = (attributes.get("complete"), attributes.get("iteration"), attributes.get("rank"))
        if stated != (True, *self._place):
            what = f"its document is of another commit: (complete, iteration, rank) is {stated}"
            found.error(FindingKind.DAMAGED, what, key=self._key)
        if attributes.get("nbytes") != commit.nbytes:
            what = f"its document says {attributes.get('nbytes')} bytes, its records have {commit.nbytes}"
            found.error(FindingKind.MISMATCH, what, key=self._key)
        members: Mapping[str, Any] = document.get("consolidated_metadata", {}).get("metadata", {})
        # The copies in a commit that is not the one that was marked are of another time, and must not replace anything.
        marked = (self._marks.get(Mark.COMMITTED) or {}).get("commit")
        # What a marker says may be of any type.
        is_marked = marked is None or marked == commit.checksum
        self._data, self._mend = data, Mend.RESTORE_DOCUMENT if is_marked else None
        records = _records_of(commit.catalogue)
        jobs = [view.leaves.submit(self._look_at_member, *item, records.get(item[0], [])) for item in members.items()]
        expected = {self._key}
        for job in jobs:
            items, keys = job.result()
            found.items += items
            expected |= keys
        catalogue = f"{self._group}/{layout.CATALOGUE}"
        # Where the size is another one, the look at its object has said so.
        if layout.CATALOGUE in members and view.nbytes(blob_key(catalogue)) == blob_nbytes(members[layout.CATALOGUE]):
            what = "the rank's catalogue is not that of its tensors"
            compare_catalogue(view, found, catalogue, [commit.catalogue], what=what)
        for key in view.groups.get(self._place, []):
            if key in expected:
                continue
            found.note(
                FindingKind.DEBRIS,
                "an object that the commit does not name",
                key=key,
                mend=Mend.REMOVE_OBJECTS,
                modified=view.objects[key].modified,
            )
        result = RankResult(commit=commit, is_whole=not found.has_errors)
        self._look_at_marker(result)
        return result

    def _look_at_uncommitted(self) -> None:
        found, view = self.found, self._view
        keys = view.groups.get(self._place, [])
        group = {
            "key": f"{self._group}/",
            "modified": max((view.objects[key].modified for key in keys), default=0.0),
        }
        if Mark.COMMITTED in self._marks:
            what = "the rank has committed it, but the commit's document is missing"
            found.error(FindingKind.MISSING, what, key=self._key)
        elif self._place[0] in view.complete:
            what = "the iteration is complete, but this rank's commit is missing"
            found.error(FindingKind.MISSING, what, key=self._key)
        elif keys and (place := self._spilled_to()) is not None:
            # What lies here is a part of it: it must not be removed before the rest is brought.
            what = f"{len(keys)} objects of an iteration of which the rest waits in {place} for 'ranktape push'"
            found.note(FindingKind.UNFINISHED, what, **group)
        elif keys:
            nbytes = sum(view.objects[name].nbytes for name in keys)
            what = f"{len(keys)} objects ({nbytes} bytes) of an iteration that the rank has not committed"
            what += ": it is being recorded, or its processes were lost" if view.is_open else ""
            kind = FindingKind.UNFINISHED if view.is_open else FindingKind.DEBRIS
            found.note(kind, what, mend=Mend.REMOVE_OBJECTS, **group)

    def _spilled_to(self) -> Any:
        """Where the rank says that the iteration waits, which it failed to store."""
        if Mark.FAILED not in self._marks:
            return None
        try:
            path = layout.marker_path(self._view.attempt.path, *self._place, Mark.FAILED)
            words: Mapping[str, Any] = read_attributes(self._view.backend, path) or {}
            return words.get(SPILLED_KEY)
        except (DataError, RunFormatError):
            return None  # the marker itself is looked at elsewhere

    def _look_at_member(self, name: str, member: dict[str, Any], names: Names) -> tuple[list[CheckFinding], set[str]]:
        """What is wrong with one array or group of a commit, and the keys that are a part of it."""
        view, (iteration, rank) = self._view, self._place
        found = Findings(attempt=view.attempt.number, iteration=iteration, rank=rank)
        path = f"{self._group}/{name}"
        key = layout.document_key(path)
        is_array = member.get("node_type") == "array"
        record = name if is_array and name != layout.CATALOGUE else ""
        self._compare_document(found, member, key=key, record=record)
        if not is_array:
            return found.items, {key}
        try:
            stored = parse_array(member, path=path, place=view.place(key))
            if "captures" in stored.attributes and len(names) != stored.shape[0]:
                raise ValueError(f"it names {len(names)} tensors and has room for {stored.shape[0]}")
        except MALFORMED as error:
            what = f"the commit describes no array that we read: {error}"
            found.error(FindingKind.DAMAGED, what, key=key, record=record)
            return found.items, {key}
        if math.prod(stored.shape):
            what = f"the values of {len(names)} tensors are" if len(names) > 1 else "its values are"
            is_there = view.has_object(found, stored.key, nbytes=stored.object_nbytes(), what=what, record=record)
            if is_there and view.deep and names:
                with view.memory.taken(2 * (view.nbytes(stored.key) or 0)):
                    _read_values(view, found, stored, names)
        return found.items, {key, stored.key}

    def _compare_document(self, found: Findings, member: dict[str, Any], *, key: str, record: str) -> None:
        fields: dict[str, Any] = {"key": key, "record": record, "mend": self._mend}
        num_before = len(found.items)

        def read() -> dict[str, Any] | None:
            data = self._view.read(key)
            if data is None or (data in self._data and is_document_intact(data, key=key)):
                # Most are in the commit byte by byte, and need not be parsed for being compared.
                return None if data is None else member
            return decode_stamped(data, key=key, place=self._view.place(key))

        document = found.read(read, **fields)
        if document is not None and document != member:
            found.error(FindingKind.MISMATCH, "its document is not the one that was committed", **fields)
        elif document is None and len(found.items) == num_before:
            found.error(FindingKind.MISSING, "its document is missing; the commit has a copy", **fields)

    def _look_at_marker(self, result: RankResult) -> None:
        found, view, commit = self.found, self._view, result.commit
        key = layout.document_key(layout.marker_path(view.attempt.path, *self._place, Mark.COMMITTED))
        fields: dict[str, Any] = {"key": key, "mend": Mend.RESTORE_MARKER if result.is_whole else None}
        if Mark.COMMITTED not in self._marks:
            what = "the rank's commit is there, its marker is"
            if view.is_open and view.nbytes(key) is not None:
                return
            if self._place[0] in view.complete:
                found.error(FindingKind.MISSING, f"{what} missing", **fields)
            else:
                found.note(
                    FindingKind.UNFINISHED, f"{what} not yet: it is being recorded, or the rank was lost", **fields
                )
            return
        attributes = self._marks[Mark.COMMITTED]
        if attributes is None:
            found.error(FindingKind.DAMAGED, "the rank's marker is not what was written", **fields)
            return
        actual: dict[str, Any] = {"num_records": commit.catalogue.num_rows, "nbytes": commit.nbytes}
        if commit.checksum is not None and "commit" in attributes:
            actual["commit"] = commit.checksum
        stated = {name: attributes.get(name) for name in actual}
        if stated != actual:
            what = f"the rank's marker is of another commit: it says {stated}, the commit has {actual}"
            found.error(FindingKind.MISMATCH, what, **fields)


def _records_of(catalogue: RecordTable) -> dict[str, Names]:
    """For each array of a commit the path and the checksum of each of its records."""
    columns = (values_of(catalogue.column(name)) for name in ("site", "stack", "index", "checksum"))
    found: dict[str, list[tuple[int, str, str]]] = {}
    for site, stack, index, crc in zip(*columns, strict=True):
        found.setdefault(stack or site, []).append((index, site, f"crc32c:{crc:08x}"))
    return {name: [(site, crc) for _, site, crc in sorted(records)] for name, records in found.items()}


def _read_values(view: AttemptView, found: Findings, stored: StoredArray, names: Names) -> None:
    """Compare all values of an array with the checksums of its records."""
    is_stack = "captures" in stored.attributes
    try:
        values = read_stored(view.backend, stored)
        arrays = values if is_stack else [values]
        reasons = [_differs(array, stated) for array, (_, stated) in zip(arrays, names, strict=True)]
    except (DataError, RunFormatError) as error:
        # Of a stack some tensors may be whole: one after the other.
        reasons = [_try(view, stored, index, stated) for index, (_, stated) in enumerate(names)] if is_stack else []
        if not any(reasons):
            reasons = [str(error)]
    damaged = [(name, reason) for (name, _), reason in zip(names, reasons, strict=False) if reason]
    for name, reason in damaged[:_MAX_NAMED]:
        found.error(FindingKind.DAMAGED, reason, key=stored.key, record=name)
    if rest := damaged[_MAX_NAMED:]:
        listed = ", ".join(name for name, _ in rest)
        what = f"{len(rest)} more tensors of the object are damaged: {listed}"
        found.error(FindingKind.DAMAGED, what, key=stored.key)


def _try(view: AttemptView, stored: StoredArray, index: int, stated: str) -> str:
    try:
        return _differs(read_stored(view.backend, stored, index=index), stated)
    except (DataError, RunFormatError) as error:
        return str(error)


def _differs(array: np.ndarray[Any, Any], stated: str) -> str:
    there = checksum(array)
    return "" if there == stated else f"the values are not those captured: their checksum is {there}, not {stated}"
