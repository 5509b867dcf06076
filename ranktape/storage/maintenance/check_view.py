"""An attempt as its listing and its small documents show it, before one looks closer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ranktape.errors import DataError
from ranktape.storage.format.documents import decode_document, document_checksum
from ranktape.storage.format.group_documents import MAX_COMMIT_NBYTES, read_document
from ranktape.storage.format.layout import DOCUMENT, Mark
from ranktape.storage.maintenance.copy import Budget

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
    memory: Budget
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
