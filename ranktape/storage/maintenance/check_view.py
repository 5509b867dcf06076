"""Shows an attempt as its listing and its small documents do, and reads what lies in it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ranktape.errors import DataError
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import Attempt
from ranktape.storage.format.blob import blob_key, split_checksum
from ranktape.storage.format.catalogue import COLUMNS, Catalogue, RecordTable, concatenate
from ranktape.storage.format.documents import (
    MAX_COMMIT_NBYTES,
    decode_document,
    document_checksum,
    read_document,
)
from ranktape.storage.format.layout import DOCUMENT, AttemptKey, KeyKind, Mark
from ranktape.storage.maintenance.finding import FindingKind, Findings
from ranktape.storage.maintenance.work import MemoryBudget
from ranktape.storage.places.backend import Backend, ObjectInfo
from ranktape.storage.query.columns import Column, StringColumn

_PARSED_RATIO = 8
"""A document that was parsed takes so many times the memory of its text."""

_READ_LATER = {KeyKind.ATTEMPT, KeyKind.VERDICT, KeyKind.ITERATION_COMMIT, KeyKind.ITERATION_CATALOGUE}
"""The iterations' own when the commits of their ranks have been read."""


@dataclass(slots=True, kw_only=True)
class AttemptView:
    """An attempt as its listing shows it, with what is needed to look closer."""

    backend: Backend
    attempt: Attempt
    objects: dict[str, ObjectInfo]
    """Everything in the attempt, by keys below the run."""
    is_open: bool
    """Whether ranks may still be writing: what was not listed may be there all the same."""
    deep: bool
    """Whether every byte is read."""
    leaves: ThreadPoolExecutor
    """For single requests; what runs in it hands nothing to it."""
    memory: MemoryBudget = field(default_factory=MemoryBudget)
    """Bytes of objects in memory."""
    groups: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """For each iteration and rank the keys in its group."""
    marks: dict[tuple[int, int], dict[Mark, dict[str, Any] | None]] = field(default_factory=dict)
    """For each iteration and rank what its markers say; None for one that is damaged."""
    iterations: dict[KeyKind, set[int]] = field(
        default_factory=lambda: {KeyKind.OPENED: set(), KeyKind.ITERATION_COMMIT: set(), KeyKind.DROPPED: set()}
    )
    """Those that were begun, that have a commit of their own, and that were removed on purpose."""
    counted: set[int] = field(default_factory=set)
    """Iterations that the verdict counts as complete."""
    documents: dict[str, AttemptKey] = field(default_factory=dict)
    """Those that are part of no commit, and not the verdict."""
    ranks: dict[KeyKind, set[int]] = field(default_factory=lambda: {KeyKind.RANK: set(), KeyKind.CLOSED: set()})
    """Those with a document, and those that left a last word."""
    foreign: list[str] = field(default_factory=list)
    """What no writer of ours makes."""

    def __post_init__(self) -> None:
        """Sort what was listed."""
        for key in self.objects:
            found = layout.parse_key(key[len(self.attempt.path) + 1 :])
            if found is None:
                self.foreign.append(key)
            elif found.kind in {KeyKind.RANK_COMMIT, KeyKind.MEMBER}:
                self.groups.setdefault((found.iteration, found.rank), []).append(key)
            else:
                self.iterations.get(found.kind, set()).add(found.iteration)
                self.ranks.get(found.kind, set()).add(found.rank)
                if found.mark is not None:
                    self.marks.setdefault((found.iteration, found.rank), {})[found.mark] = None
                if found.kind not in _READ_LATER:
                    self.documents[key] = found

    @property
    def complete(self) -> set[int]:
        """Iterations with the document of an iteration commit."""
        return self.iterations[KeyKind.ITERATION_COMMIT]

    @property
    def dropped(self) -> set[int]:
        """Iterations that were removed on purpose."""
        return self.iterations[KeyKind.DROPPED]

    def nbytes(self, key: str) -> int | None:
        """The size of an object; None where there is none."""
        info = self.objects.get(key)
        if info is not None:
            return info.nbytes
        # A listing that was made while ranks write may have passed by what came before the rest that it shows.
        return self.backend.size(key) if self.is_open else None

    def has_object(self, found: Findings, key: str, *, nbytes: int | None, what: str, **fields: Any) -> bool:
        """Whether an object has the size that it must have, or any if that is None; otherwise a finding says so."""
        there = self.nbytes(key)
        if there is None:
            found.error(FindingKind.MISSING, f"{what} lost: the object is missing", key=key, **fields)
        elif not there or nbytes not in {None, there}:
            expected = "some" if nbytes is None else nbytes
            found.error(FindingKind.SIZE, f"the object has {there} bytes instead of {expected}", key=key, **fields)
        else:
            return True
        return False

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
            return None if data is None else decode_stamped(data, key=key, place=self.place(key))


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


def compare_catalogue(
    view: AttemptView, found: Findings, path: str, parts: Sequence[RecordTable] | None, *, what: str, **fields: Any
) -> Catalogue | None:
    """The catalogue at a path, and a finding where its rows are not those of `parts`, where these are known.

    None where it cannot be read, or differs.
    """
    key = blob_key(path)
    place = view.place(key)

    def read() -> tuple[Catalogue, str]:
        data = split_checksum(view.backend.get(key), place=place)
        catalogue = Catalogue.from_bytes(data, place=place, attempt=view.attempt.path)
        return catalogue, "" if parts is None else first_difference(parts, catalogue)

    with view.memory.taken(2 * (view.nbytes(key) or 0)):
        catalogue, difference = found.read(read, key=key, **fields) or (None, "")
    if difference:
        found.error(FindingKind.MISMATCH, f"{what}: {difference}", key=key, **fields)
        return None
    return catalogue


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


def _pair(name: str, parts: Sequence[RecordTable], whole: RecordTable) -> list[np.ndarray[Any, Any]]:
    """A column of the parts and of the whole, as numbers that can be compared: texts by their place in one table."""
    column = concatenate([*(part.column(name) for part in parts), whole.column(name)])
    values = column.codes if isinstance(column, StringColumn) else column
    return [values[: len(values) - whole.num_rows], values[len(values) - whole.num_rows :]]


def _text(column: Column, row: int) -> str:
    return str(column.table[column.codes[row]] if isinstance(column, StringColumn) else column[row])
