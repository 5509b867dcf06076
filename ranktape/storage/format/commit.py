"""What each rank committed of an iteration, and how that becomes the iteration's own commit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ranktape.errors import DataError
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import Attempt, check_attempt
from ranktape.storage.format.blob import blob_document, blob_key, blob_parts, open_blob
from ranktape.storage.format.catalogue import Catalogue, merge_catalogues
from ranktape.storage.format.documents import (
    MAX_COMMIT_NBYTES,
    decode_document,
    document_checksum,
    encode_document,
    for_each,
    read_attributes,
    read_document,
    write_group,
)
from ranktape.storage.format.layout import Mark
from ranktape.storage.format.validation import Fields
from ranktape.storage.places.backend import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommit:
    """What the document of a rank's commit says of one iteration."""

    num_records: int
    """Its records."""
    nbytes: int
    """Bytes of what is kept of them."""
    silent_sites: dict[str, str]
    """The tensors that were expected and not recorded, each with the reason."""
    checksum: str | None
    """Of the document; None where it has none."""
    catalogue: str
    """The checksum of the rank's catalogue; empty in runs of early versions."""
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
        DataError: a rank's commit is not there, or does not say what it should.
        StorageError: the run was deleted or replaced, or cannot be read or written.
    """
    check_attempt(backend, attempt)
    if _is_dropped(backend, attempt, iteration):
        return
    ranks = attempt.launch.ranks
    parts = for_each(lambda rank: _read_part(backend, attempt.path, rank, iteration), ranks)
    data = merge_catalogues([catalogue.load for _, catalogue in parts])
    attributes = {
        "complete": True,
        "iteration": iteration,
        "attempt": attempt.number,
        "expected_ranks": list(ranks),
        **summary_of({rank: commit for rank, (commit, _) in zip(ranks, parts, strict=True)}),
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
        "num_records": sum(commit.num_records for commit in commits.values()),
        "nbytes": sum(commit.nbytes for commit in commits.values()),
        "silent_sites": {str(rank): commit.silent_sites for rank, commit in commits.items() if commit.silent_sites},
        **({name: sum(commit.counts[name] for commit in commits.values()) for name in _COUNTS} if are_counted else {}),
        **({"compiled": compiled} if compiled else {}),
        **({"step_skipped_ranks": skipped} if skipped else {}),
        **({"cut_off": cut_off} if cut_off else {}),
        "commits": [commit.checksum for commit in commits.values()],
    }


def _is_dropped(backend: Backend, attempt: Attempt, iteration: int) -> bool:
    # Not `exists`, which some file systems answer from a listing they remember.
    return read_document(backend, layout.dropped_path(attempt.path, iteration)) is not None


def read_commit(backend: Backend, attempt: str, rank: int, iteration: int) -> RankCommit:
    """One rank's commit of an iteration; `attempt` is the attempt's path.

    Raises:
        DataError: there is no commit, or its document is damaged.
        RunFormatError: its document says what no commit does.
    """
    group = layout.rank_iteration_path(attempt, rank, iteration)
    data = read_document(backend, group, max_nbytes=MAX_COMMIT_NBYTES)
    if data is None:
        raise DataError(f"rank {rank} has no commit of iteration {iteration}: {backend.url}/{group} has no document")
    return parse_commit(data, place=f"{backend.url}/{group}", key=layout.document_key(group))


def parse_commit(data: bytes, *, place: str, key: str) -> RankCommit:
    """What the document of a rank's commit, which lies under a key, says.

    Raises:
        DataError: it is not what was written there.
        RunFormatError: it says what no commit does.
    """
    fields = Fields(decode_document(data, place=place, key=key).get("attributes", {}), place=place)
    has_counts = all(name in fields for name in _COUNTS)
    return RankCommit(
        num_records=fields.integer("num_records"),
        nbytes=fields.integer("nbytes"),
        silent_sites=fields.texts("silent_sites", default={}),
        checksum=document_checksum(data),
        catalogue=fields.text("catalogue", default=""),
        counts={name: fields.integer(name) for name in _COUNTS} if has_counts else {},
        compiled=fields.text("compiled", default=""),
        step_skipped=fields.flag("step_skipped", default=False),
        cut_off=fields.text("cut_off", default=""),
    )


def _read_part(backend: Backend, attempt: str, rank: int, iteration: int) -> tuple[RankCommit, Catalogue]:
    commit = read_commit(backend, attempt, rank, iteration)
    return commit, open_rank_catalogue(backend, attempt, rank, iteration, commit)


def open_rank_catalogue(backend: Backend, attempt: str, rank: int, iteration: int, commit: RankCommit) -> Catalogue:
    """What a rank's commit of an iteration holds; `attempt` is the attempt's path.

    Raises:
        DataError: it is missing or damaged, or has another number of records.
        RunFormatError: it is not a catalogue.
    """
    path = layout.catalogue_path(attempt, rank, iteration)
    catalogue = _open(backend, path, attempt)
    if catalogue.num_rows != commit.num_records:
        raise DataError(
            f"{backend.url}/{path} has {catalogue.num_rows} records, the rank's commit says {commit.num_records}: "
            f"the commit is damaged; see 'ranktape check'"
        )
    return catalogue


def open_catalogue(backend: Backend, attempt: str, iteration: int) -> Catalogue:
    """The catalogue of a complete iteration; `attempt` is the attempt's path.

    Raises:
        DataError: it is missing or damaged.
        RunFormatError: it is not a catalogue.
    """
    return _open(backend, layout.iteration_path(attempt, iteration), attempt)


def _open(backend: Backend, path: str, attempt: str) -> Catalogue:
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
    """Leave the marker of a commit that is stored, from its document, instead of any other word of the rank."""
    others = (layout.marker_path(attempt, iteration, rank, mark) for mark in (Mark.FAILED, Mark.SKIPPED))
    backend.delete_keys([layout.document_key(path) for path in others])
    marker = layout.marker_path(attempt, iteration, rank, Mark.COMMITTED)
    write_group(backend, marker, {"commit": document_checksum(commit)})
