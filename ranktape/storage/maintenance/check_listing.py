"""Which object of an attempt is what, by its key alone?"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ranktape.storage.format import layout
from ranktape.storage.format.documents import chunk_key
from ranktape.storage.format.layout import Marker

if TYPE_CHECKING:
    from ranktape.storage.maintenance.check_view import AttemptView

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
