"""What each rank committed of an iteration, and how that becomes the iteration's own commit."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.errors import DataError
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import check_attempt
from ranktape.storage.format.blob import blob_document, blob_key, blob_parts, open_blob
from ranktape.storage.format.catalogue import (
    SOURCES,
    Catalogue,
    CatalogueEntry,
    check_numbers,
    encode_text,
    merge_catalogues,
)
from ranktape.storage.format.documents import (
    CHECKSUM_KEY,
    MAX_COMMIT_NBYTES,
    decode_document,
    document_checksum,
    encode_document,
    read_attributes,
    read_document,
    write_group,
)
from ranktape.storage.format.layout import CATALOGUE, SITE_FIELDS, Mark, TensorSite, site_path
from ranktape.storage.format.record_info import EXTREMES, RecordInfo
from ranktape.storage.format.validation import Fields, check_documents, check_records

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ranktape.storage.format.attempt import Attempt
    from ranktape.storage.places.backend import Backend
    from ranktape.storage.query.columns import Column

_NUM_THREADS = 16
"""Requests in flight."""


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
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        commits = list(pool.map(lambda rank: read_commit(backend, attempt.path, rank, iteration), ranks))
    data = merge_catalogues([commit.catalogue.load for commit in commits])
    attributes = {
        "complete": True,
        "iteration": iteration,
        "attempt": attempt.number,
        "expected_ranks": list(ranks),
        "num_records": sum(commit.catalogue.num_rows for commit in commits),
        "nbytes": sum(commit.nbytes for commit in commits),
        "silent_sites": {
            str(rank): commit.silent_sites for rank, commit in zip(ranks, commits, strict=True) if commit.silent_sites
        },
        **_total_counts(commits),
        "commits": [commit.checksum for commit in commits],
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


def _counts(fields: Fields) -> dict[str, int]:
    counts = {name: fields.count(name) for name in ("num_expected", "num_missing")}
    known = {name: count for name, count in counts.items() if count is not None}
    return known if len(known) == len(counts) else {}


def _total_counts(commits: list[RankCommit]) -> dict[str, int]:
    counts = [commit.counts for commit in commits]
    return {name: sum(one[name] for one in counts) for name in counts[0]} if all(counts) else {}


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
    marker = read_attributes(backend, path, max_nbytes=MAX_COMMIT_NBYTES) or {}
    fields = Fields(marker, place=f"{backend.url}/{layout.document_key(path)}")
    if "commit" not in marker:
        # It was lost: the commit's document says the same.
        return read_whole_commit(backend, attempt, rank, iteration)
    if backend.size(layout.document_key(group)) is None:
        raise DataError(_lost_message(backend, group, rank=rank, iteration=iteration))
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
    )


def mark_committed(backend: Backend, attempt: str, rank: int, iteration: int, *, commit: bytes) -> None:
    """Leave the marker of a commit that is stored, from its document, instead of any other word of the rank.

    Raises:
        DataError: the document is damaged.
    """
    group = layout.rank_iteration_path(attempt, rank, iteration)
    key = layout.document_key(group)
    attributes = decode_document(commit, place=f"{backend.url}/{key}", key=key)["attributes"]
    names = ("num_records", "nbytes", "silent_sites", "num_expected", "num_missing")
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
        raise DataError(_lost_message(backend, group, rank=rank, iteration=iteration))
    return parse_commit(decode_document(data, place=place, key=key), place=place, attempt=attempt)


def parse_commit(document: Mapping[str, Any], *, place: str, attempt: str) -> RankCommit:
    """What the document of a rank's commit says, and the copies in it of the documents of its arrays.

    Raises:
        DataError: it says what none does.
        RunFormatError: a field is not what it must be.
    """
    fields = Fields(document.get("attributes", {}), place=place)
    try:
        columns = commit_columns(document.get("consolidated_metadata", {}).get("metadata", {}))
        catalogue = Catalogue(columns, place=place, attempt=attempt)
        check_records(columns.__getitem__)
        check_documents(columns.__getitem__)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise DataError(f"{place} is damaged: {error!r}: see 'ranktape check'") from error
    num_records = fields.integer("num_records")
    if num_records != catalogue.num_rows:
        raise DataError(f"{place} says {num_records} records and holds {catalogue.num_rows}: the commit is damaged")
    return RankCommit(
        catalogue=catalogue,
        nbytes=sum(columns["nbytes"].tolist()),
        silent_sites=fields.texts("silent_sites", default={}),
        checksum=fields.text(CHECKSUM_KEY, default="") or None,
        counts=_counts(fields),
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
    return [CatalogueEntry(site=_site_of(info), stack=name, index=index, info=info) for index, info in enumerate(infos)]


def _site_of(info: RecordInfo) -> str:
    return site_path(TensorSite.of(info))


def _lost_message(backend: Backend, group: str, *, rank: int, iteration: int) -> str:
    return f"rank {rank} marked iteration {iteration} as committed, but {backend.url}/{group} has no document"


def commit_columns(members: Mapping[str, Any]) -> dict[str, Any]:
    """Every stored column of a catalogue, from the documents of a commit's arrays; in the order of recording.

    Raises:
        ArithmeticError, AttributeError, LookupError, TypeError, ValueError: a document is none of ours.
    """
    described = [_Described.of(name, member) for name, member in members.items() if _holds_records(name, member)]
    fields: dict[str, list[Any]] = {
        name: [value for one in described for value in one.values(source.path.split(".")[1:], convert=_converter(name))]
        for name, source in SOURCES.items()
        if source.path.startswith("info.")
    }
    fields["stack"] = [one.stack for one in described for _ in one.captures]
    fields["index"] = [index if one.stack else -1 for one in described for index in range(len(one.captures))]
    names = [one.site for one in described for _ in one.captures]
    sites = map(_site_path, *(fields[name] for name in SITE_FIELDS))
    fields["site"] = [name or site for name, site in zip(names, sites, strict=True)]
    order = sorted(range(len(names)), key=lambda row: (fields["counter"][row], fields["site"][row]))
    if order != list(range(len(names))):
        fields = {name: [values[row] for row in order] for name, values in fields.items()}
    return {name: _column(name, fields[name]) for name in SOURCES}


def _holds_records(name: str, member: Mapping[str, Any]) -> bool:
    return member["node_type"] == "array" and name != CATALOGUE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Described:
    """What the document of an array says of its records."""

    site: str
    """The path of its one record; empty for a stack."""
    stack: str
    """The name of a stack; empty for an array of one record."""
    common: Mapping[str, Any]
    """What is the same for all of them."""
    captures: Sequence[Mapping[str, Any]]
    """What is not, one for each record."""

    @classmethod
    def of(cls, name: str, member: Mapping[str, Any]) -> _Described:
        attributes = member["attributes"]
        if "captures" in attributes:
            return cls(site="", stack=name, common=attributes["common"], captures=attributes["captures"])
        return cls(site=name, stack="", common={}, captures=[attributes])

    def values(self, path: Sequence[str], *, convert: Any) -> list[Any]:
        """What is at a path in each record."""
        name, *inner = path
        if not any(name in capture for capture in self.captures):
            return [convert(_inner(self.common[name], inner))] * len(self.captures)
        parents = [capture if name in capture else self.common for capture in self.captures]
        return [convert(_inner(parent[name], inner)) for parent in parents]


def _inner(value: Any, path: Sequence[str]) -> Any:
    for name in path:
        value = value[name]
    return value


def _converter(name: str) -> Any:
    """From a value in JSON to one of a column."""
    source = SOURCES[name]
    if source.dtype is np.float64:
        # Infinities are texts in JSON, and nothing else is.
        return _extreme if name.removeprefix("overflow.") in EXTREMES else _optional
    convert = source.convert or _same
    return (lambda value: convert(tuple(value))) if name == "shape" else convert


def _same(value: Any) -> Any:
    return value


def _optional(value: Any) -> Any:
    return math.nan if value is None else value


def _extreme(value: Any) -> float:
    return math.nan if value is None else float(value)


def _column(name: str, values: list[Any]) -> Column:
    dtype = SOURCES[name].dtype
    if dtype is None:
        if not {*map(type, values)} <= {str}:
            raise TypeError(f"its {name} are no texts")
        return encode_text(values)
    # Without a dtype: numpy makes numbers of texts, and whole ones of fractions, where it is told to.
    column = np.array(values) if values else np.empty(0, dtype=dtype)
    if dtype is np.float64 and column.dtype.kind == "i":
        column = column.astype(dtype)
    check_numbers(name, column)
    return column.astype(dtype, copy=False)


@functools.lru_cache(maxsize=1 << 14)
def _site_path(*fields: Any) -> str:
    return site_path(TensorSite(**dict(zip(SITE_FIELDS, fields, strict=True))))
