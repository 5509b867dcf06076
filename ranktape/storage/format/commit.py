"""What each rank committed of an iteration, and how that becomes the iteration's own commit."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ranktape.errors import DataError
from ranktape.fields import FieldKind
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import Attempt, check_attempt
from ranktape.storage.format.blob import blob_document, blob_key, blob_parts, open_blob
from ranktape.storage.format.catalogue import (
    KINDS,
    Catalogue,
    CatalogueEntry,
    columns_of,
    merge_catalogues,
)
from ranktape.storage.format.documents import (
    CHECKSUM_KEY,
    MAX_COMMIT_NBYTES,
    decode_document,
    document_checksum,
    encode_document,
    for_each,
    read_attributes,
    read_document,
    write_group,
)
from ranktape.storage.format.layout import SITE_FIELDS, Mark, TensorSite, site_path
from ranktape.storage.format.record_info import EXTREMES, RecordInfo
from ranktape.storage.format.validation import Fields, check_document, check_records, parse_json, used_texts
from ranktape.storage.places.backend import Backend
from ranktape.storage.query.columns import values_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommit:
    """What one rank committed of one iteration."""

    catalogue: Catalogue
    """Its records."""
    nbytes: int
    """Bytes of what is kept of them."""
    silent_sites: dict[str, str]
    """The tensors that were expected and not recorded, each with the reason."""
    checksum: str | None
    """Of the commit's document; None where it has none."""
    counts: dict[str, int]
    """`num_expected` tensors, and `num_missing` of them that were not recorded; empty where it says nothing."""
    compiled: str
    """How compiled code was recorded; empty where none ran."""
    step_skipped: bool
    """Whether a gradient scaler skipped the step of the optimizer, because a gradient was not finite."""
    cut_off: str
    """Why the rank did not end the iteration; empty where it did."""


def finish_iteration(backend: Backend, *, attempt: Attempt, iteration: int) -> None:
    """Write the iteration commit: the merged catalogue of all ranks, then the document that makes it count.

    Two writers of one commit write the same bytes, and the second leaves the first one's document. An iteration that
    was removed stays removed.

    Raises:
        DataError: a rank left its marker, but its commit is not there or does not say what it should.
        StorageError: the run was deleted or replaced, or cannot be read or written.
    """
    check_attempt(backend, attempt)
    if _is_dropped(backend, attempt, iteration):
        return
    ranks = attempt.launch.ranks
    commits = for_each(lambda rank: read_commit(backend, attempt.path, rank, iteration), ranks)
    data = merge_catalogues([commit.catalogue.load for commit in commits])
    attributes = {
        "complete": True,
        "iteration": iteration,
        "attempt": attempt.number,
        "expected_ranks": list(ranks),
        **summary_of(dict(zip(ranks, commits, strict=True))),
        "committed": time.time(),
    }
    path = layout.iteration_path(attempt.path, iteration)
    backend.put(blob_key(path), blob_parts(data))
    backend.flush()
    check_attempt(backend, attempt)
    key = layout.document_key(path)
    backend.create(key, encode_document(blob_document(data, attributes=attributes), key=key))
    # Who removes it says so first and deletes the commit then: it was made before that, or is known for removed now.
    if _is_dropped(backend, attempt, iteration):
        backend.delete(path)
    backend.flush()


_COUNTS = ("num_expected", "num_missing")

SUMMARY = ("num_records", "nbytes", "silent_sites", *_COUNTS, "compiled", "step_skipped_ranks", "cut_off", "commits")
"""The attributes of an iteration commit that follow from the commits of its ranks."""


def summary_of(commits: Mapping[int, RankCommit]) -> dict[str, Any]:
    """The attributes of `SUMMARY`, without those that say nothing."""
    are_counted = all(commit.counts for commit in commits.values())
    compiled = "; ".join(dict.fromkeys(commit.compiled for commit in commits.values() if commit.compiled))
    skipped = [rank for rank, commit in commits.items() if commit.step_skipped]
    cut_off = {str(rank): commit.cut_off for rank, commit in commits.items() if commit.cut_off}
    return {
        "num_records": sum(commit.catalogue.num_rows for commit in commits.values()),
        "nbytes": sum(commit.nbytes for commit in commits.values()),
        "silent_sites": {str(rank): commit.silent_sites for rank, commit in commits.items() if commit.silent_sites},
        **({name: sum(commit.counts[name] for commit in commits.values()) for name in _COUNTS} if are_counted else {}),
        **({"compiled": compiled} if compiled else {}),
        **({"step_skipped_ranks": skipped} if skipped else {}),
        **({"cut_off": cut_off} if cut_off else {}),
        "commits": [commit.checksum for commit in commits.values()],
    }


def _counts(fields: Fields) -> dict[str, int]:
    return {name: fields.integer(name) for name in _COUNTS} if all(name in fields for name in _COUNTS) else {}


def _is_dropped(backend: Backend, attempt: Attempt, iteration: int) -> bool:
    # Not `exists`, which some file systems answer from a listing they remember.
    return read_document(backend, layout.dropped_path(attempt.path, iteration)) is not None


def read_commit(backend: Backend, attempt: str, rank: int, iteration: int) -> RankCommit:
    """One rank's commit of an iteration, from its marker and its catalogue; `attempt` is the attempt's path.

    Raises:
        DataError: there is no commit, or it does not hold as many records as it says.
        RunFormatError: its marker or its catalogue says what none does.
    """
    group = layout.rank_iteration_path(attempt, rank, iteration)
    path = layout.marker_path(attempt, iteration, rank, Mark.COMMITTED)
    fields = read_attributes(backend, path, max_nbytes=MAX_COMMIT_NBYTES)
    if fields is None or "commit" not in fields:
        # It was lost: the commit's document says the same.
        return read_whole_commit(backend, attempt, rank, iteration)
    if backend.size(layout.document_key(group)) is None:
        raise _lost(backend, group, rank=rank, iteration=iteration)
    path = layout.catalogue_path(attempt, rank, iteration)
    place = f"{backend.url}/{path}"
    catalogue = Catalogue(open_blob(backend, path), place=place, attempt=attempt)
    num_records = fields.integer("num_records")
    if catalogue.num_rows != num_records:
        raise DataError(
            f"{place} has {catalogue.num_rows} records, the rank's marker says {num_records}: "
            f"the commit is damaged; see 'ranktape check'"
        )
    return RankCommit(
        catalogue=catalogue,
        nbytes=fields.integer("nbytes"),
        silent_sites=fields.texts("silent_sites"),
        checksum=fields.text("commit"),
        counts=_counts(fields),
        compiled=fields.text("compiled", default=""),
        step_skipped=fields.flag("step_skipped", default=False),
        cut_off=fields.text("cut_off", default=""),
    )


def open_catalogue(backend: Backend, attempt: str, iteration: int) -> Catalogue:
    """The catalogue of a complete iteration; `attempt` is the attempt's path.

    Raises:
        DataError: it is missing or damaged.
        RunFormatError: it is not a catalogue.
    """
    path = layout.iteration_path(attempt, iteration)
    return Catalogue(open_blob(backend, path), place=f"{backend.url}/{path}", attempt=attempt)


def read_skipped_ranks(backend: Backend, attempt: str, iteration: int) -> tuple[int, ...]:
    """The ranks of a complete iteration on which a gradient scaler skipped the step; `attempt` is the attempt's path.

    Raises:
        DataError: the iteration has no commit, or it is damaged.
        RunFormatError: its document says what none does.
    """
    path = layout.iteration_path(attempt, iteration)
    fields = read_attributes(backend, path)
    if fields is None:
        raise DataError(f"{backend.url}/{path} has no document; see 'ranktape check'")
    return skipped_ranks(fields)


def skipped_ranks(fields: Fields) -> tuple[int, ...]:
    """The same, from the attributes of an iteration commit."""
    return fields.integers("step_skipped_ranks") if "step_skipped_ranks" in fields else ()


def mark_committed(backend: Backend, attempt: str, rank: int, iteration: int, *, commit: bytes) -> None:
    """Leave the marker of a commit that is stored, from its document, instead of any other word of the rank.

    Raises:
        DataError: the document is damaged.
    """
    group = layout.rank_iteration_path(attempt, rank, iteration)
    key = layout.document_key(group)
    attributes = decode_document(commit, place=f"{backend.url}/{key}", key=key)["attributes"]
    names = ("num_records", "nbytes", "silent_sites", *_COUNTS, "compiled", "step_skipped", "cut_off")
    words = {name: attributes[name] for name in names if name in attributes}
    others = (layout.marker_path(attempt, iteration, rank, mark) for mark in (Mark.FAILED, Mark.SKIPPED))
    backend.delete_keys([layout.document_key(path) for path in others])
    marker = layout.marker_path(attempt, iteration, rank, Mark.COMMITTED)
    write_group(backend, marker, {**words, "commit": document_checksum(commit)})


def read_whole_commit(backend: Backend, attempt: str, rank: int, iteration: int) -> RankCommit:
    """The same, from the documents of all arrays in the commit: slower.

    Raises:
        DataError: there is no commit, or it does not hold as many records as it says.
    """
    group = layout.rank_iteration_path(attempt, rank, iteration)
    key = layout.document_key(group)
    place = f"{backend.url}/{key}"
    data = read_document(backend, group, max_nbytes=MAX_COMMIT_NBYTES)
    if data is None:
        raise _lost(backend, group, rank=rank, iteration=iteration)
    return parse_commit(decode_document(data, place=place, key=key), place=place, attempt=attempt)


def parse_commit(document: Mapping[str, Any], *, place: str, attempt: str) -> RankCommit:
    """What the document of a rank's commit says, and the copies in it of the documents of its arrays.

    Raises:
        DataError: it says what none does.
        RunFormatError: a field is not what it must be.
    """
    fields = Fields(document.get("attributes", {}), place=place)
    try:
        members = document.get("consolidated_metadata", {}).get("metadata", {})
        columns = columns_of(_recorded(members))
        catalogue = Catalogue(columns, place=place, attempt=attempt)
        check_records(columns.__getitem__)
        for name, kind in KINDS.items():
            if kind is FieldKind.JSON and name != "shape":
                for text in used_texts(columns.__getitem__, name):
                    check_document(name, parse_json(text))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"{place} is damaged: {error!r}: see 'ranktape check'") from error
    num_records = fields.integer("num_records")
    if num_records != catalogue.num_rows:
        raise DataError(f"{place} says {num_records} records and holds {catalogue.num_rows}: the commit is damaged")
    return RankCommit(
        catalogue=catalogue,
        nbytes=sum(values_of(columns["nbytes"])),
        silent_sites=fields.texts("silent_sites", default={}),
        checksum=fields.text(CHECKSUM_KEY, default="") or None,
        counts=_counts(fields),
        compiled=fields.text("compiled", default=""),
        step_skipped=fields.flag("step_skipped", default=False),
        cut_off=fields.text("cut_off", default=""),
    )


def entries_of(name: str, member: Mapping[str, Any]) -> list[CatalogueEntry]:
    """The records that an array of a commit holds."""
    if member["node_type"] != "array" or name == layout.CATALOGUE:
        return []
    attributes = member["attributes"]
    if "captures" not in attributes:
        return [CatalogueEntry(site=name, stack="", index=-1, info=RecordInfo.from_json(attributes))]
    common = attributes["common"]
    infos = [RecordInfo.from_json({**common, **capture}) for capture in attributes["captures"]]
    return [
        CatalogueEntry(site=site_path(TensorSite.of(info)), stack=name, index=index, info=info)
        for index, info in enumerate(infos)
    ]


def _recorded(members: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What the documents of a commit's arrays say, column by column, in the order of recording.

    As `entries_of`, in a quarter of the time: a record is never made.
    """
    values: dict[str, list[Any]] = {name: [] for name in KINDS}
    for member, document in members.items():
        if document["node_type"] != "array" or member == layout.CATALOGUE:
            continue
        attributes = document["attributes"]
        is_stack = "captures" in attributes
        common, captures = (attributes["common"], attributes["captures"]) if is_stack else ({}, [attributes])
        number = len(captures)
        places: dict[str, list[Any]] = {
            "stack": [member if is_stack else ""] * number,
            "site": ["" if is_stack else member] * number,
            "index": [*range(number)] if is_stack else [-1],
        }
        for name in KINDS:
            first, *inner = ("shape" if name == "numel" else name).split(".")
            if name in places:
                found = places[name]
            elif any(first in capture for capture in captures):
                found = [(capture if first in capture else common)[first] for capture in captures]
            else:
                found = [common[first]] * number
            for step in inner:
                found = [one[step] for one in found]
            values[name] += found
    values["shape"] = values["numel"] = [*map(tuple, values["shape"])]
    for name in EXTREMES:
        # Infinities are texts in JSON.
        column = values[f"overflow.{name}"]
        column[:] = [float(one) if isinstance(one, str) else one for one in column]
    sites = map(_site_path, *(values[name] for name in SITE_FIELDS))
    values["site"] = [name or site for name, site in zip(values["site"], sites, strict=True)]
    keys = list(zip(values["counter"], values["site"], strict=True))
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return {name: [column[row] for row in order] for name, column in values.items()}


@functools.lru_cache(maxsize=1 << 14)
def _site_path(*fields: Any) -> str:
    return site_path(TensorSite(**dict(zip(SITE_FIELDS, fields, strict=True))))


def _lost(backend: Backend, group: str, *, rank: int, iteration: int) -> DataError:
    return DataError(
        f"rank {rank} marked iteration {iteration} as committed, but {backend.url}/{group} has no document"
    )
