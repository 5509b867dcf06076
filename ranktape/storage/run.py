"""What is in a run, and how far is it?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ranktape.errors import RunNotFoundError
from ranktape.storage import layout
from ranktape.storage.attempt import Attempt, complete_iterations, read_attempts, run_attributes
from ranktape.storage.backend import Backend
from ranktape.storage.catalogue import Catalogue, empty_catalogue
from ranktape.storage.columns import Mask
from ranktape.storage.documents import chunk_key
from ranktape.storage.filters import parse_filter
from ranktape.storage.progress import read_verdict, split_checksum
from ranktape.storage.records import Records, RunReader
from ranktape.storage.status import IterationStatus, Verdict
from ranktape.storage.urls import open_backend

_NUM_THREADS = 16


class Run:
    """A recorded training; shows complete iterations only. What is committed later is seen by opening it again."""

    def __init__(self, backend: Backend) -> None:
        """Read the run's document and the names of its commits.

        Raises:
            RunNotFoundError: there is no run.
            RunFormatError: it is not a run, or of a later schema.
            StorageError: the store cannot be read.
        """
        self._reader = RunReader(backend)
        self._backend = backend
        self.attributes = run_attributes(backend.get(layout.document_key("")), place=backend.url)
        """What the run's document says: schema, options, environment, launch."""
        self._attempts_of: dict[int, list[Attempt]] = {}
        for attempt in read_attempts(backend):
            for iteration in complete_iterations(backend, attempt):
                self._attempts_of.setdefault(iteration, []).append(attempt)
        self._catalogues: dict[tuple[int, str], Catalogue] = {}

    def __repr__(self) -> str:
        return f"<Run {self.url}: {len(self.iterations)} complete iterations>"

    @property
    def url(self) -> str:
        """Where the run is, without credentials."""
        return self._backend.url

    @property
    def iterations(self) -> list[int]:
        """The iterations that are stored complete, ascending."""
        return sorted(self._attempts_of)

    def status(self) -> list[IterationStatus]:
        """Every iteration that was begun, in every attempt: how far it is, what is missing and why."""
        judged = read_verdict(self._backend)
        return [] if judged is None else judged[1]

    def verdict(self) -> Verdict:
        """Whether the run holds the iterations it guaranteed, as it is now.

        Raises:
            RunNotFoundError: no attempt has begun in the run.
        """
        judged = read_verdict(self._backend)
        if judged is None:
            raise RunNotFoundError(f"the run at {self.url} has no attempt yet: no rank has started to record")
        return judged[0]

    def select(self, **filters: Any) -> Records:
        """The records whose fields have the values asked for, of the latest attempt of each complete iteration.

        `attempt` in the filters makes all attempts count. Values are as in `Records.select`; no array is opened.

        Raises:
            UnknownFieldError: a filter names no field.
            UsageError: a field cannot have such a value.
            StorageError: a catalogue cannot be read.
        """
        places = [
            (iteration, attempt.path)
            for iteration in self.iterations
            for attempt in (self._attempts_of[iteration] if "attempt" in filters else self._attempts_of[iteration][-1:])
        ]
        if "iteration" in filters and places:
            wanted = parse_filter("iteration", filters["iteration"])
            mask: Mask = wanted.mask(lambda _: np.array([iteration for iteration, _ in places]), len(places))
            places = [place for place, is_wanted in zip(places, mask, strict=True) if is_wanted]
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            catalogues = list(pool.map(self._catalogue, places)) or [empty_catalogue()]
        rows = np.arange(sum(catalogue.num_rows for catalogue in catalogues))
        return Records(self._reader, catalogues, rows).select(**filters)

    def _catalogue(self, place: tuple[int, str]) -> Catalogue:
        if place not in self._catalogues:
            iteration, attempt = place
            key = f"{layout.iteration_path(attempt, iteration)}/{chunk_key(1)}"
            data = split_checksum(self._backend.get(key), place=f"{self.url}/{key}")
            self._catalogues[place] = Catalogue(data, place=f"{self.url}/{key}")
        return self._catalogues[place]


def open_run(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Run:
    """The run at a URL: a directory, or any URL that fsspec knows.

    Raises:
        RunNotFoundError: there is no run.
        RunFormatError: what is there is not a run, or of a later schema.
        StorageError: the store cannot be reached or read.
        UsageError: the URL or the options are not usable.
    """
    return Run(open_backend(url, storage_options=storage_options))
