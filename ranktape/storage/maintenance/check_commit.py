"""The check that what one rank committed of one iteration is there, whole, and what its documents say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ranktape.errors import DataError, ObjectTooLargeError, RunFormatError
from ranktape.storage.format import layout
from ranktape.storage.format.blob import blob_key, blob_nbytes, split_checksum
from ranktape.storage.format.catalogue import Catalogue, RecordTable
from ranktape.storage.format.commit import parse_commit
from ranktape.storage.format.decode import StoredArray, parse_array, read_stored
from ranktape.storage.format.documents import is_document_intact, read_attributes
from ranktape.storage.format.encode import checksum
from ranktape.storage.format.layout import Mark
from ranktape.storage.maintenance.check_view import AttemptView, first_difference
from ranktape.storage.maintenance.finding import CheckFinding, FindingKind, Findings, Mend
from ranktape.storage.maintenance.outbox import SPILLED_KEY
from ranktape.storage.query.columns import values_of

if TYPE_CHECKING:
    import numpy as np


MALFORMED = (DataError, RunFormatError, AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
"""What comes of a document whose JSON is not what we write, whoever wrote it."""

_MAX_NAMED = 3
"""Damaged tensors of one stack that are named before the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What was found out about a rank commit that can be read."""

    catalogue: RecordTable
    """Its records, from the documents of its arrays."""
    checksum: str | None
    """Of its document; None where it has none."""
    nbytes: int
    """Bytes of what is kept of its records."""
    silent_sites: dict[str, str]
    """The tensors that were expected and not recorded."""
    is_whole: bool
    """Whether nothing of it is lost or wrong."""


def check_commit(view: AttemptView, iteration: int, rank: int) -> tuple[list[CheckFinding], RankResult | None]:
    """What is wrong with one rank's iteration, and its records where they can be read."""
    found = Findings(attempt=view.attempt.number, iteration=iteration, rank=rank)
    group = layout.rank_iteration_path(view.attempt.path, rank, iteration)
    key = layout.document_key(group)
    try:
        data = view.read(key)
        if data is None:
            _check_uncommitted(view, found, group)
            return found.items, None
        document = view.decode(data, key)
        commit = parse_commit(document, place=view.place(key), attempt=view.attempt.path)
    except MALFORMED as error:
        found.error(FindingKind.DAMAGED, f"its document cannot be read: {error}", key=key)
        return found.items, None
    attributes = document["attributes"]
    stated = (attributes.get("complete"), attributes.get("iteration"), attributes.get("rank"))
    if stated != (True, iteration, rank):
        found.error(
            FindingKind.DAMAGED,
            f"its document is of another commit: (complete, iteration, rank) is {stated}",
            key=key,
        )
    if attributes.get("nbytes") != commit.nbytes:
        found.error(
            FindingKind.MISMATCH,
            f"its document says {attributes.get('nbytes')} bytes, its records have {commit.nbytes}",
            key=key,
        )
    members: Mapping[str, Any] = document.get("consolidated_metadata", {}).get("metadata", {})
    expected = {key}
    # The copies in a commit that is not the one that was marked are of another time, and must not replace anything.
    is_named = _marked_checksum(view, (iteration, rank)) in (None, commit.checksum)
    mend = Mend.RESTORE_DOCUMENT if is_named else None
    check_member = partial(_check_member, view, found, group, commit=data, mend=mend)
    records = _records_of(commit.catalogue)
    jobs = [
        view.leaves.submit(check_member, name, member, names=records.get(name, [])) for name, member in members.items()
    ]
    for job in jobs:
        items, keys = job.result()
        found.items += items
        expected |= keys
    if layout.CATALOGUE in members:
        path = f"{group}/{layout.CATALOGUE}"
        _check_catalogue(view, found, path, commit.catalogue, member=members[layout.CATALOGUE])
    _check_unnamed(view, found, expected)
    is_whole = not found.has_errors
    result = RankResult(
        catalogue=commit.catalogue,
        checksum=commit.checksum,
        nbytes=commit.nbytes,
        silent_sites=commit.silent_sites,
        is_whole=is_whole,
    )
    _check_marker(view, found, result)
    return found.items, result


def _check_uncommitted(view: AttemptView, found: Findings, group: str) -> None:
    assert found.iteration is not None
    assert found.rank is not None
    place = (found.iteration, found.rank)
    keys = view.groups.get(place, [])
    key = layout.document_key(group)
    if Mark.COMMITTED in view.marks.get(place, {}):
        found.error(FindingKind.MISSING, "the rank has committed it, but the commit's document is missing", key=key)
    elif found.iteration in view.complete:
        found.error(FindingKind.MISSING, "the iteration is complete, but this rank's commit is missing", key=key)
    elif keys and (words := _word_of_failure(view, place)).get(SPILLED_KEY) is not None:
        # What lies here is a part of it: it must not be removed before the rest is brought.
        what = (
            f"{len(keys)} objects of an iteration of which the rest waits in {words[SPILLED_KEY]} for 'ranktape push'"
        )
        found.note(FindingKind.UNFINISHED, what, key=f"{group}/", modified=view.modified(keys))
    elif keys:
        nbytes = sum(view.objects[name].nbytes for name in keys)
        what = "of an iteration that the rank has not committed"
        if view.is_open:
            what += ": it is being recorded, or its processes were lost"
        found.note(
            FindingKind.UNFINISHED if view.is_open else FindingKind.DEBRIS,
            f"{len(keys)} objects ({nbytes} bytes) {what}",
            key=f"{group}/",
            mend=Mend.REMOVE_OBJECTS,
            modified=view.modified(keys),
        )


def _marked_checksum(view: AttemptView, place: tuple[int, int]) -> str | None:
    """The checksum of the commit that the rank's marker names; None where no marker names one."""
    attributes = view.marks.get(place, {}).get(Mark.COMMITTED)
    return None if attributes is None else attributes.get("commit")


def _word_of_failure(view: AttemptView, place: tuple[int, int]) -> dict[str, Any]:
    """What a rank said of an iteration that it failed to store."""
    if Mark.FAILED not in view.marks.get(place, {}):
        return {}
    try:
        return read_attributes(view.backend, layout.marker_path(view.attempt.path, *place, Mark.FAILED)) or {}
    except (DataError, RunFormatError):
        return {}  # the marker itself is looked at elsewhere


def _check_member(
    view: AttemptView,
    outer: Findings,
    group: str,
    name: str,
    member: dict[str, Any],
    *,
    names: list[tuple[str, str]],
    commit: bytes,
    mend: Mend | None,
) -> tuple[list[CheckFinding], set[str]]:
    """What is wrong with one array or group of a commit, and the keys that are a part of it."""
    found = Findings(attempt=outer.attempt, iteration=outer.iteration, rank=outer.rank)
    path = f"{group}/{name}"
    key = layout.document_key(path)
    record = "" if name == layout.CATALOGUE or member.get("node_type") != "array" else name
    _check_own_document(view, found, member, key=key, record=record, commit=commit, mend=mend)
    if member.get("node_type") != "array":
        return found.items, {key}
    try:
        stored = parse_array(member, path=path, place=view.place(key))
        if "captures" in stored.attributes and len(names) != stored.shape[0]:
            raise ValueError(f"it names {len(names)} tensors and has room for {stored.shape[0]}")
    except MALFORMED as error:
        found.error(FindingKind.DAMAGED, f"the commit describes no array that we read: {error}", key=key, record=record)
        return found.items, {key}
    _check_object(view, found, stored, names=names, record=record)
    return found.items, {key, stored.key}


def _check_own_document(
    view: AttemptView,
    found: Findings,
    member: dict[str, Any],
    *,
    key: str,
    record: str,
    commit: bytes,
    mend: Mend | None,
) -> None:
    fields: dict[str, Any] = {"key": key, "record": record, "mend": mend}
    try:
        data = view.read(key)
        if data is None:
            found.error(FindingKind.MISSING, "its document is missing; the commit has a copy", **fields)
            return
        # Most are in the commit byte by byte, and need not be parsed for being compared.
        document = member if data in commit and is_document_intact(data, key=key) else view.decode(data, key)
    except (DataError, RunFormatError) as error:
        found.error(FindingKind.DAMAGED, str(error), **fields)
        return
    if document != member:
        found.error(FindingKind.MISMATCH, "its document is not the one that was committed", **fields)


def _records_of(catalogue: RecordTable) -> dict[str, list[tuple[str, str]]]:
    """For each array of a commit the path and the checksum of each of its records."""
    sites, stacks, indices, crcs = (
        values_of(catalogue.column(name)) for name in ("site", "stack", "index", "checksum")
    )
    found: dict[str, list[tuple[int, str, str]]] = {}
    for site, stack, index, crc in zip(sites, stacks, indices, crcs, strict=True):
        found.setdefault(stack or site, []).append((index, site, f"crc32c:{crc:08x}"))
    return {name: [(site, crc) for _, site, crc in sorted(records)] for name, records in found.items()}


def _check_object(
    view: AttemptView, found: Findings, stored: StoredArray, *, names: list[tuple[str, str]], record: str
) -> None:
    if not math.prod(stored.shape):
        return
    exact = stored.object_nbytes()
    nbytes = view.nbytes(stored.key)
    what = f"the values of {len(names)} tensors" if len(names) > 1 else "its values"
    if nbytes is None:
        found.error(FindingKind.MISSING, f"{what} are lost: the object is missing", key=stored.key, record=record)
    elif (exact is not None and nbytes != exact) or not nbytes:
        say = exact if exact is not None else "some"
        found.error(FindingKind.SIZE, f"the object has {nbytes} bytes instead of {say}", key=stored.key, record=record)
    elif view.deep and names:
        with view.memory.taken(2 * nbytes):
            _check_values(view, found, stored, names)


def _check_values(view: AttemptView, found: Findings, stored: StoredArray, names: list[tuple[str, str]]) -> None:
    is_stack = "captures" in stored.attributes
    try:
        values = read_stored(view.backend, stored)
    except (DataError, RunFormatError) as error:
        if not is_stack:
            found.error(FindingKind.DAMAGED, str(error), key=stored.key, record=names[0][0])
            return
        damaged = [
            (name, reason)
            for index, (name, stated) in enumerate(names)
            if (reason := _try(view, stored, index, stated))
        ]
        _say_damaged(found, stored, damaged or [(names[0][0], str(error))])
        return
    slices = list(values) if is_stack else [values]
    damaged = [
        (name, reason)
        for (name, stated), array in zip(names, slices, strict=True)
        if (reason := _differs(array, stated))
    ]
    _say_damaged(found, stored, damaged)


def _try(view: AttemptView, stored: StoredArray, index: int, stated: str) -> str:
    try:
        return _differs(read_stored(view.backend, stored, index=index), stated)
    except (DataError, RunFormatError) as error:
        return str(error)


def _differs(array: np.ndarray[Any, Any], stated: str) -> str:
    there = checksum(array)
    return "" if there == stated else f"the values are not those captured: their checksum is {there}, not {stated}"


def _say_damaged(found: Findings, stored: StoredArray, damaged: list[tuple[str, str]]) -> None:
    for name, reason in damaged[:_MAX_NAMED]:
        found.error(FindingKind.DAMAGED, reason, key=stored.key, record=name)
    rest = damaged[_MAX_NAMED:]
    if rest:
        listed = ", ".join(name for name, _ in rest)
        found.error(
            FindingKind.DAMAGED, f"{len(rest)} more tensors of the object are damaged: {listed}", key=stored.key
        )


def _check_catalogue(
    view: AttemptView, found: Findings, path: str, expected: RecordTable, *, member: Mapping[str, Any]
) -> None:
    key = blob_key(path)
    place = view.place(key)
    if view.nbytes(key) != blob_nbytes(member):
        # The look at its object has said so.
        return
    try:
        data = split_checksum(view.backend.get(key), place=place)
        catalogue = Catalogue.from_bytes(data, place=place, attempt=view.attempt.path)
        difference = first_difference([expected], catalogue)
    except (DataError, RunFormatError) as error:
        found.error(FindingKind.DAMAGED, str(error), key=key)
        return
    except ObjectTooLargeError as error:
        found.note(FindingKind.UNCHECKED, str(error), key=key)
        return
    if difference:
        found.error(FindingKind.MISMATCH, f"the rank's catalogue is not that of its tensors: {difference}", key=key)


def _check_unnamed(view: AttemptView, found: Findings, expected: set[str]) -> None:
    assert found.iteration is not None
    assert found.rank is not None
    for key in view.groups.get((found.iteration, found.rank), []):
        if key not in expected:
            found.note(
                FindingKind.DEBRIS,
                "an object that the commit does not name",
                key=key,
                mend=Mend.REMOVE_OBJECTS,
                modified=view.objects[key].modified,
            )


def _check_marker(view: AttemptView, found: Findings, result: RankResult) -> None:
    assert found.iteration is not None
    assert found.rank is not None
    marks = view.marks.get((found.iteration, found.rank), {})
    key = layout.document_key(layout.marker_path(view.attempt.path, found.iteration, found.rank, Mark.COMMITTED))
    mend = Mend.RESTORE_MARKER if result.is_whole else None
    if Mark.COMMITTED not in marks:
        if view.is_open and view.nbytes(key) is not None:
            return
        if found.iteration in view.complete:
            found.error(FindingKind.MISSING, "the rank's commit is there, its marker is missing", key=key, mend=mend)
        else:
            found.note(
                FindingKind.UNFINISHED,
                "the rank's commit is there, its marker is not yet: it is being recorded, or the rank was lost",
                key=key,
                mend=mend,
            )
        return
    attributes = marks[Mark.COMMITTED]
    if attributes is None:
        found.error(FindingKind.DAMAGED, "the rank's marker is not what was written", key=key, mend=mend)
        return
    stated = {name: attributes.get(name) for name in ("num_records", "nbytes")}
    actual: dict[str, Any] = {"num_records": result.catalogue.num_rows, "nbytes": result.nbytes}
    if result.checksum is not None and "commit" in attributes:
        stated["commit"], actual["commit"] = attributes["commit"], result.checksum
    if stated != actual:
        found.error(
            FindingKind.MISMATCH,
            f"the rank's marker is of another commit: it says {stated}, the commit has {actual}",
            key=key,
            mend=mend,
        )
