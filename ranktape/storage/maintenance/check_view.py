"""An attempt as its listing and its small documents show it, before one looks closer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.errors import DataError
from ranktape.storage.format import layout
from ranktape.storage.format.catalogue import COLUMNS, RecordTable, concatenate
from ranktape.storage.format.documents import (
    MAX_COMMIT_NBYTES,
    decode_document,
    document_checksum,
    read_document,
)
from ranktape.storage.format.layout import DOCUMENT, AttemptKey, KeyKind, Mark
from ranktape.storage.maintenance.copy import MemoryBudget
from ranktape.storage.query.columns import StringColumn, values_of

if TYPE_CHECKING:
    from ranktape.storage.format.attempt import Attempt
    from ranktape.storage.places.backend import Backend, ObjectInfo
    from ranktape.storage.query.columns import Column

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


@dataclass(slots=True, kw_only=True)
class Listing:
    """The objects of an attempt, sorted; what belongs to iterations is in its view."""

    documents: list[str] = field(default_factory=list)
    """Those that are part of no commit, and not the verdict."""
    plain: set[str] = field(default_factory=set)
    """Those of them that say nothing but that there is a group."""
    markers: dict[str, AttemptKey] = field(default_factory=dict)
    """Those of them that are a rank's word on an iteration."""
    ranks: set[int] = field(default_factory=set)
    """Ranks with a document."""
    closed: set[int] = field(default_factory=set)
    """Ranks that left a last word."""
    foreign: list[str] = field(default_factory=list)
    """What no writer of ours makes."""


_PLAIN = {KeyKind.GROUP, KeyKind.OPENED}
_READ_LATER = {KeyKind.ATTEMPT, KeyKind.VERDICT, KeyKind.ITERATION_COMMIT, KeyKind.ITERATION_CATALOGUE}
"""The iterations' own when the commits of their ranks have been read."""


def sort_keys(view: AttemptView) -> Listing:
    """The objects of an attempt by what they are; fills in the iterations of the view."""
    listing = Listing()
    prefix = len(view.attempt.path) + 1
    iterations = {
        KeyKind.ITERATION_COMMIT: view.complete,
        KeyKind.OPENED: view.opened,
        KeyKind.DROPPED: view.dropped,
    }
    ranks = {KeyKind.RANK: listing.ranks, KeyKind.CLOSED: listing.closed}
    for key in view.objects:
        found = layout.parse_key(key[prefix:])
        if found is None:
            listing.foreign.append(key)
        elif found.kind in {KeyKind.RANK_COMMIT, KeyKind.MEMBER}:
            view.groups.setdefault((found.iteration, found.rank), []).append(key)
        else:
            iterations.get(found.kind, set()).add(found.iteration)
            ranks.get(found.kind, set()).add(found.rank)
            if found.mark is not None:
                view.marks.setdefault((found.iteration, found.rank), {})[found.mark] = None
                listing.markers[key] = found
            if found.kind in _PLAIN:
                listing.plain.add(key)
            if found.kind not in _READ_LATER:
                listing.documents.append(key)
    return listing


_REPLICATE = "replicate"
_PARTIAL = "partial"

WEIGHTS = frozenset({"weight", "bias"})
"""The names of tensors that all data-parallel ranks hold; others hold parts of them."""

_WHAT = ("rank", "site", "placement", "checksum", "tensor_name", "shape", "dtype", "keep")


def first_difference(parts: Sequence[RecordTable], whole: RecordTable) -> str:
    """Where the rows of some catalogues, taken together, are not those of another; empty where they are.

    The order of the rows does not count: records are told apart by rank and path.

    Raises:
        RunFormatError: a column is missing or damaged.
    """
    num_rows = sum(part.num_rows for part in parts)
    if num_rows != whole.num_rows:
        return f"{whole.num_rows} records instead of {num_rows}"
    ranks, sites = (_pair(name, parts, whole) for name in ("rank", "site"))
    orders = [np.lexsort((sites[side], ranks[side])) for side in (0, 1)]
    for name in COLUMNS:
        left, right = _pair(name, parts, whole)
        left, right = left[orders[0]], right[orders[1]]
        is_float = left.dtype.kind == "f" and right.dtype.kind == "f"
        differs = ~((left == right) | (np.isnan(left) & np.isnan(right)) if is_float else left == right)
        if differs.any():
            row = int(orders[1][int(np.flatnonzero(differs)[0])])
            text = f"{name} of {int(differs.sum())} records differs"
            return f"{text}, first of rank {_text(whole.column('rank'), row)} {_text(whole.column('site'), row)}"
    return ""


def differing_replicas(table: RecordTable) -> Iterator[tuple[str, bool, list[int]]]:
    """The tensors of an iteration whose copies on several ranks differ: path, whether they must agree, the ranks.

    Copies must agree where their placement says that they are replicas. A `weight` without a placement is a copy
    where training is data-parallel and a part where it is not: nobody knows, and so it need not agree.
    """
    columns = {name: values_of(table.column(name)) for name in _WHAT}
    keys: dict[str, str | None] = {}
    copies: dict[tuple[Any, ...], dict[int, Any]] = {}
    for row in range(table.num_rows):
        placement = columns["placement"][row]
        if placement not in keys:
            keys[placement] = replica_key(placement)
        must_agree = keys[placement] is not None
        if not must_agree and (placement != "null" or columns["tensor_name"][row] not in WEIGHTS):
            continue
        form = tuple(columns[name][row] for name in ("site", "shape", "dtype", "keep"))
        copy = copies.setdefault((*form, must_agree, keys[placement]), {})
        copy[int(columns["rank"][row])] = columns["checksum"][row]
    for (site, *_, must_agree, _), checksums in copies.items():
        if len(set(checksums.values())) > 1:
            yield site, must_agree, sorted(checksums)


def replica_key(placement: str) -> str | None:
    """What copies of one part of a tensor have in common, from the JSON of a placement; None where there are none.

    All of the placement but the coordinates along mesh axes over which the tensor is replicated. A sum that is
    not made yet (`partial`) has no copies.
    """
    document = json.loads(placement)
    if not isinstance(document, dict) or document.get(_PARTIAL):
        return None
    placements = document.get("placements")
    coordinates = document.get("coordinates")
    if not isinstance(placements, list) or not isinstance(coordinates, list) or len(placements) != len(coordinates):
        return None
    words = [str(word).lower() for word in placements]
    if any(word.startswith(_PARTIAL) for word in words) or not any(word.startswith(_REPLICATE) for word in words):
        return None
    fixed = [None if word.startswith(_REPLICATE) else at for word, at in zip(words, coordinates, strict=True)]
    return json.dumps({**document, "coordinates": fixed}, sort_keys=True)


def _pair(name: str, parts: Sequence[RecordTable], whole: RecordTable) -> list[np.ndarray[Any, Any]]:
    """A column of the parts and of the whole, as numbers that can be compared: texts by their place in one table."""
    column = concatenate([*(part.column(name) for part in parts), whole.column(name)])
    values = column.codes if isinstance(column, StringColumn) else column
    return [values[: len(values) - whole.num_rows], values[len(values) - whole.num_rows :]]


def _text(column: Column, row: int) -> str:
    return str(column.table[column.codes[row]] if isinstance(column, StringColumn) else column[row])
