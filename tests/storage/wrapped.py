"""How does a test watch, or change, what passes between the code under test and its store?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ranktape.storage.places.backend import Backend
from ranktape.storage.records.records import Records
from ranktape.storage.records.run import RunReader


def wrapped(backend: Backend, **verbs: Callable[..., Any]) -> Any:
    """A backend in which some verbs do something else."""
    return _Wrapped(backend, verbs)


class _Wrapped:
    def __init__(self, backend: Backend, verbs: dict[str, Callable[..., Any]]) -> None:
        self._backend = backend
        self._verbs = verbs

    def __getattr__(self, name: str) -> Any:
        return self._verbs.get(name) or getattr(self._backend, name)


class CountingReader(RunReader):
    """Notes which records were read, and which sample of them."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.reads: list[tuple[int, int, int, int | None]] = []

    def read(self, record: Any, *, sample: int | None) -> np.ndarray[Any, Any]:
        self.reads.append((record.iteration, record.rank, record.layer_idx, sample))
        return super().read(record, sample=sample)

    def of(self, records: Records) -> Records:
        """The same records, read through this."""
        listings, rows = records.listed()
        return Records([dataclasses.replace(listing, reader=self) for listing in listings], rows)
