"""The commits of an iteration: one by each rank, and the iteration commit that merges them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ranktape.errors import DataError
from ranktape.storage.format import layout
from ranktape.storage.format.arrays import blob_document, blob_key, blob_parts, open_blob
from ranktape.storage.format.attempt import Attempt, check_attempt
from ranktape.storage.format.catalogue import Catalogue, merge_catalogues
from ranktape.storage.format.documents import (
    MAX_COMMIT_NBYTES,
    Count,
    converted,
    decode_document,
    document_checksum,
    encode_document,
    for_each,
    read_as,
    read_document,
    write_group,
)
from ranktape.storage.format.layout import Mark
from ranktape.storage.places.backend import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommit:
    """The document of a rank's commit of one iteration."""

    num_records: Count
    """Number of records."""
    nbytes: Count
    """Size of the stored records, in bytes, before compression."""
    checksum: str | None
    """Checksum of the document; None if it has none."""
    silent_sites: dict[str, str] = field(default_factory=dict)
    """The expected tensors that were not recorded, each with the reason."""
    catalogue: str = ""
    """Checksum of the rank's catalogue; empty in runs of early versions."""
    num_expected: Count | None = None
    """Number of expected tensors; None if the recorder did not count."""
    num_missing: Count | None = None
    """Number of expected tensors that were not recorded."""
    compiled: str = ""
    """How compiled code was recorded; empty if none ran."""
    step_skipped: bool = False
    """Whether a gradient scaler skipped the optimizer's step because a gradient was not finite."""
    cut_off: str = ""
    """Why the rank did not finish the iteration; empty if it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSummary:
    """The document of an iteration commit, which sums up the commits of its ranks."""

    num_records: Count = 0
    """Number of records of all ranks."""
    nbytes: Count = 0
    """Size of the stored records, in bytes, before compression."""
    silent_sites: dict[Count, dict[str, str]] = field(default_factory=dict)
    """The expected tensors that were not recorded, each with the reason, by rank."""
    num_expected: Count | None = None
    """Number of expected tensors on all ranks; None if a rank did not count."""
    num_missing: Count | None = None
    """Number of expected tensors that were not recorded."""
    compiled: str = ""
    """The ways in which compiled code was recorded; empty if none ran."""
    step_skipped_ranks: tuple[Count, ...] = ()
    """The ranks on which a gradient scaler skipped the optimizer's step."""
    cut_off: dict[Count, str] = field(default_factory=dict)
    """The reason for each rank that did not finish the iteration."""

    @property
    def num_recorded(self) -> int | None:
        """Number of expected tensors that were recorded; None if it is not known."""
        if self.num_expected is None or self.num_missing is None:
            return None
        return self.num_expected - self.num_missing


def finish_iteration(backend: Backend, *, attempt: Attempt, iteration: int) -> None:
    """Write the iteration commit: the merged catalogue of all ranks, then the document that makes it valid.

    Two writers of one commit write the same bytes, and the second one keeps the document of the first. An iteration
    that was removed stays removed.
    """
    check_attempt(backend, attempt)
    if _is_dropped(backend, attempt, iteration):
        return
    ranks = attempt.launch.ranks
    commits = for_each(lambda rank: read_commit(backend, attempt.path, rank, iteration), ranks)
    known = dict(zip(ranks, commits, strict=True))
    parts = for_each(lambda rank: open_rank_catalogue(backend, attempt.path, rank, iteration, known[rank]), ranks)
    data = merge_catalogues([catalogue.load for catalogue in parts])
    attributes = {
        "complete": True,
        "iteration": iteration,
        "attempt": attempt.number,
        "expected_ranks": list(ranks),
        **summary_of(known),
        "committed": time.time(),
    }
    path = layout.iteration_path(attempt.path, iteration)
    backend.put(blob_key(path), blob_parts(data))
    backend.flush()
    check_attempt(backend, attempt)
    key = layout.document_key(path)
    backend.create(key, encode_document(blob_document(data, attributes=attributes), key=key))
    # A removal writes its mark before it deletes the commit. If the mark is absent here, the deletion is still to come.
    if _is_dropped(backend, attempt, iteration):
        backend.delete(path)
    backend.flush()


_COUNTS = ("num_expected", "num_missing")

SUMMARY = ("num_records", "nbytes", "silent_sites", *_COUNTS, "compiled", "step_skipped_ranks", "cut_off", "commits")
"""The attributes of an iteration commit that are derived from the commits of its ranks."""


def summary_of(commits: Mapping[int, RankCommit]) -> dict[str, Any]:
    """The attributes of `SUMMARY`, without optional ones that are empty."""
    every = commits.values()
    summary = {
        "num_records": sum(commit.num_records for commit in every),
        "nbytes": sum(commit.nbytes for commit in every),
        "silent_sites": {str(rank): commit.silent_sites for rank, commit in commits.items() if commit.silent_sites},
        "compiled": "; ".join(dict.fromkeys(commit.compiled for commit in every if commit.compiled)),
        "step_skipped_ranks": [rank for rank, commit in commits.items() if commit.step_skipped],
        "cut_off": {str(rank): commit.cut_off for rank, commit in commits.items() if commit.cut_off},
    }
    for name in _COUNTS:
        counts = [getattr(commit, name) for commit in every]
        summary |= {} if None in counts else {name: sum(counts)}
    always = {"num_records", "nbytes", "silent_sites", *_COUNTS}
    attributes = {name: value for name, value in summary.items() if value or name in always}
    return {**attributes, "commits": [commit.checksum for commit in every]}


def _is_dropped(backend: Backend, attempt: Attempt, iteration: int) -> bool:
    # Not `exists`, which some file systems answer from a cached listing.
    return read_document(backend, layout.dropped_path(attempt.path, iteration)) is not None


def read_commit(backend: Backend, attempt: str, rank: int, iteration: int) -> RankCommit:
    """One rank's commit of an iteration; `attempt` is the attempt's path."""
    group = layout.rank_iteration_path(attempt, rank, iteration)
    data = read_document(backend, group, max_nbytes=MAX_COMMIT_NBYTES)
    if data is None:
        raise DataError(f"rank {rank} has no commit of iteration {iteration}: {backend.url}/{group} has no document")
    return parse_commit(data, place=f"{backend.url}/{group}", key=layout.document_key(group))


def parse_commit(data: bytes, *, place: str, key: str) -> RankCommit:
    """A rank's commit from the text of its document, whose key is `key`."""
    attributes = {**decode_document(data, place=place, key=key)["attributes"], "checksum": document_checksum(data)}
    return converted(attributes, RankCommit, place=place)


def open_rank_catalogue(backend: Backend, attempt: str, rank: int, iteration: int, commit: RankCommit) -> Catalogue:
    """The catalogue of a rank's commit of an iteration; `attempt` is the attempt's path."""
    path = layout.catalogue_path(attempt, rank, iteration)
    catalogue = Catalogue(open_blob(backend, path), place=f"{backend.url}/{path}", attempt=attempt)
    if catalogue.num_rows != commit.num_records:
        raise DataError(
            f"{backend.url}/{path} has {catalogue.num_rows} records, the rank's commit says {commit.num_records}: "
            f"the commit is damaged; see 'ranktape check'"
        )
    return catalogue


def open_catalogue(backend: Backend, attempt: str, iteration: int) -> Catalogue:
    """The catalogue of a complete iteration; `attempt` is the attempt's path."""
    path = layout.iteration_path(attempt, iteration)
    return Catalogue(open_blob(backend, path), place=f"{backend.url}/{path}", attempt=attempt)


def read_skipped_ranks(backend: Backend, attempt: str, iteration: int) -> tuple[int, ...]:
    """The ranks of a complete iteration on which a gradient scaler skipped the step; `attempt` is its path."""
    path = layout.iteration_path(attempt, iteration)
    summary = read_as(backend, path, IterationSummary)
    if summary is None:
        raise DataError(f"{backend.url}/{path} has no document; see 'ranktape check'")
    return summary.step_skipped_ranks


def mark_committed(backend: Backend, attempt: str, rank: int, iteration: int, *, commit: bytes) -> None:
    """Write the marker of a stored commit, given its document, and delete the rank's other markers of the iteration."""
    other_markers = (layout.marker_path(attempt, iteration, rank, mark) for mark in (Mark.FAILED, Mark.SKIPPED))
    backend.delete_keys([layout.document_key(path) for path in other_markers])
    marker = layout.marker_path(attempt, iteration, rank, Mark.COMMITTED)
    write_group(backend, marker, {"commit": document_checksum(commit)})
