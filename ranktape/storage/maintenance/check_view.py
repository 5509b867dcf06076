"""An attempt as its listing and its small documents show it, before one looks closer."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ranktape.errors import DataError
from ranktape.storage.format import layout
from ranktape.storage.format.documents import chunk_key, decode_document, document_checksum
from ranktape.storage.format.group_documents import MAX_COMMIT_NBYTES, read_document
from ranktape.storage.format.layout import DOCUMENT, Mark, Marker
from ranktape.storage.maintenance.copy import MemoryBudget

if TYPE_CHECKING:
    from ranktape.storage.format.attempt import Attempt
    from ranktape.storage.places.backend import Backend, ObjectInfo

_PARSED_RATIO = 8
"""A document that was parsed takes so many times the memory of its text."""


@dataclass(slots=True, kw_only=True)
class AttemptView:
    """An attempt as its listing shows it, with what is needed to look closer."""

    backend: Backend
    """Where the run is."""
    attempt: Attempt
    """Its document."""
    objects: dict[str, ObjectInfo]
    """Everything in the attempt, by keys below the run."""
    is_open: bool
    """Whether ranks may still be writing: what was not listed may be there all the same."""
    is_closed: bool
    """Whether its coordinator has written a verdict."""
    deep: bool
    """Whether every byte is read."""
    leaves: ThreadPoolExecutor
    """For single requests; what runs in it hands nothing to it."""
    memory: MemoryBudget
    """Bytes of objects in memory."""
    groups: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """For each iteration and rank the keys in its group."""
    marks: dict[tuple[int, int], dict[Mark, dict[str, Any] | None]] = field(default_factory=dict)
    """For each iteration and rank what its markers say; None for one that is damaged."""
    opened: set[int] = field(default_factory=set)
    """Iterations that were begun."""
    complete: set[int] = field(default_factory=set)
    """Iterations with the document of an iteration commit."""
    dropped: set[int] = field(default_factory=set)
    """Iterations that were removed on purpose."""
    counted: set[int] = field(default_factory=set)
    """Iterations that the verdict counts as complete."""

    def nbytes(self, key: str) -> int | None:
        """The size of an object; None where there is none."""
        info = self.objects.get(key)
        if info is not None:
            return info.nbytes
        # A listing that was made while ranks write may have passed by what came before the rest that it shows.
        return self.backend.size(key) if self.is_open else None

    def modified(self, keys: list[str]) -> float:
        """When the youngest of some objects was written."""
        return max((self.objects[key].modified for key in keys if key in self.objects), default=0.0)

    def place(self, key: str) -> str:
        """A key, for messages."""
        return f"{self.backend.url}/{key}"

    def read(self, key: str) -> bytes | None:
        """The text of a document; None where there is none.

        Raises:
            RunFormatError: it is larger than it can be.
        """
        if self.nbytes(key) is None:
            return None
        return read_document(self.backend, key.removesuffix(f"/{DOCUMENT}"), max_nbytes=MAX_COMMIT_NBYTES)

    def document(self, key: str) -> dict[str, Any] | None:
        """The document at a key, compared with its checksum; None where there is none.

        Raises:
            DataError: it is not what was written there.
            RunFormatError: it is not a document of Zarr, or larger than it can be.
        """
        with self.memory.taken(_PARSED_RATIO * (self.nbytes(key) or 0)):
            data = self.read(key)
            return None if data is None else self.decode(data, key)

    def decode(self, data: bytes, key: str) -> dict[str, Any]:
        """A document, compared with its checksum.

        Raises:
            DataError: it is not what was written there.
            RunFormatError: it is not a document of Zarr.
        """
        return decode_stamped(data, key=key, place=self.place(key))


def decode_stamped(data: bytes, *, key: str, place: str) -> dict[str, Any]:
    """A document, compared with its checksum, which it must have.

    Raises:
        DataError: it is not what was written there.
        RunFormatError: it is not a document of Zarr.
    """
    document = decode_document(data, place=place, key=key)
    if document_checksum(data) is None:
        raise DataError(f"{place} is not what was written there: it has lost its checksum")
    return document


_RANK = re.compile(r"rank_(\d+)")


@dataclass(slots=True, kw_only=True)
class Listing:
    """The objects of an attempt, sorted; what belongs to iterations is in its view."""

    documents: list[str] = field(default_factory=list)
    """Those that are part of no commit, and not the verdict."""
    plain: set[str] = field(default_factory=set)
    """Those of them that say nothing but that there is a group."""
    markers: dict[str, Marker] = field(default_factory=dict)
    """Those of them that are a rank's word on an iteration."""
    ranks: set[int] = field(default_factory=set)
    """Ranks with a document."""
    closed: set[int] = field(default_factory=set)
    """Ranks that left a last word."""
    foreign: list[str] = field(default_factory=list)
    """What no writer of ours makes."""


def sort_keys(view: AttemptView) -> Listing:
    """The objects of an attempt by what they are; fills in the iterations of the view."""
    listing = Listing()
    for key in view.objects:
        if not _place(view, listing, key):
            listing.foreign.append(key)
    return listing


def _place(view: AttemptView, listing: Listing, key: str) -> bool:
    """Put a key where it belongs; False for one that no writer of ours makes."""
    path = view.attempt.path
    group, _, rest = key.removeprefix(f"{path}/").partition("/")
    match = _RANK.fullmatch(group)
    if match is not None:
        return _place_in_rank(view, listing, key, rank=int(match[1]))
    if group == layout.DOCUMENT or (group == "verdict" and rest == layout.DOCUMENT):
        return True
    if rest == layout.DOCUMENT:
        return _place_group(listing, key, group)
    places = {
        "commits": _place_in_commits,
        "iterations": _place_in_iterations,
        "closed": _place_in_closed,
        "dropped": _place_in_dropped,
    }
    return group in places and places[group](view, listing, key, rest)


def _place_in_rank(view: AttemptView, listing: Listing, key: str, *, rank: int) -> bool:
    path = layout.rank_path(view.attempt.path, rank)
    if key == layout.document_key(path):
        listing.ranks.add(rank)
        listing.documents.append(key)
        return True
    name = key.removeprefix(f"{path}/").partition("/")[0]
    iteration = layout.parse_iteration(f"{name}/{layout.DOCUMENT}")
    if iteration is None or not key.startswith(layout.rank_iteration_path(view.attempt.path, rank, iteration) + "/"):
        return False
    view.groups.setdefault((iteration, rank), []).append(key)
    return True


def _place_group(listing: Listing, key: str, group: str) -> bool:
    if group in layout.ATTEMPT_GROUPS:
        listing.plain.add(key)
    elif group != "plan":
        return False
    listing.documents.append(key)
    return True


def _place_in_commits(view: AttemptView, listing: Listing, key: str, rest: str) -> bool:
    path = view.attempt.path
    marker = layout.parse_marker(rest)
    if marker is not None:
        if key != layout.document_key(layout.marker_path(path, marker.iteration, marker.rank, marker.mark)):
            return False
        view.marks.setdefault((marker.iteration, marker.rank), {})[marker.mark] = None
        listing.markers[key] = marker
    else:
        iteration = layout.parse_iteration(rest)
        if iteration is None or key != layout.document_key(layout.opened_path(path, iteration)):
            return False
        view.opened.add(iteration)
        listing.plain.add(key)
    listing.documents.append(key)
    return True


def _place_in_iterations(view: AttemptView, _listing: Listing, key: str, rest: str) -> bool:
    iteration = layout.parse_iteration(f"{rest.partition('/')[0]}/{layout.DOCUMENT}")
    if iteration is None:
        return False
    path = layout.iteration_path(view.attempt.path, iteration)
    if key == layout.document_key(path):
        view.complete.add(iteration)
    # The document is read when the commits of its ranks have been.
    return key in {layout.document_key(path), f"{path}/{chunk_key(1)}"}


def _place_in_closed(view: AttemptView, listing: Listing, key: str, rest: str) -> bool:
    rank = layout.parse_closed(rest)
    if rank is None or key != layout.document_key(layout.closed_path(view.attempt.path, rank)):
        return False
    listing.closed.add(rank)
    listing.documents.append(key)
    return True


def _place_in_dropped(view: AttemptView, listing: Listing, key: str, rest: str) -> bool:
    iteration = layout.parse_iteration(rest)
    if iteration is None or key != layout.document_key(layout.dropped_path(view.attempt.path, iteration)):
        return False
    view.dropped.add(iteration)
    listing.documents.append(key)
    return True
