"""Opens a run: its complete iterations, its records, and how far it is."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranktape.errors import RunNotFoundError
from ranktape.storage.format.attempt import (
    Attempt,
    complete_iterations,
    read_attempts,
    read_run,
    run_attributes,
    shown_attempts,
)
from ranktape.storage.format.catalogue import Catalogue, empty_catalogue
from ranktape.storage.format.commit import open_catalogue
from ranktape.storage.format.documents import for_each
from ranktape.storage.format.live import Trigger, read_triggers
from ranktape.storage.format.progress import read_disabled, read_troubles, read_verdict
from ranktape.storage.format.status import IterationStatus, RunVerdict
from ranktape.storage.places.backend import Backend
from ranktape.storage.places.failures import printable
from ranktape.storage.places.urls import open_backend
from ranktape.storage.query.columns import Mask
from ranktape.storage.query.filters import parse_filter
from ranktape.storage.records.notebook import fields_html, spans
from ranktape.storage.records.reader import RunReader
from ranktape.storage.records.records import Records

_KEPT_RECORDS = 500_000
"""Records of which a run keeps the columns that were read, beside those that selections hold: some 100 MB."""


class _Catalogues:
    """The catalogues of a run's iterations: those that selections hold, and those that were asked for last."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._held: weakref.WeakValueDictionary[tuple[str, int], Catalogue] = weakref.WeakValueDictionary()
        self._kept: dict[tuple[str, int], Catalogue] = {}

    def at(self, places: Sequence[tuple[str, int]]) -> list[Catalogue]:
        """Those of attempts and iterations, in that order."""
        found = {place: catalogue for place in places if (catalogue := self._held.get(place)) is not None}
        unread = [place for place in places if place not in found]
        found |= zip(unread, for_each(lambda place: open_catalogue(self._backend, *place), unread), strict=True)
        self._held.update(found)
        # What was asked for last comes last.
        self._kept = {place: one for place, one in self._kept.items() if place not in found} | found
        room = sum(catalogue.num_rows for catalogue in self._kept.values()) - _KEPT_RECORDS
        while room > 0:
            room -= self._kept.pop(next(iter(self._kept))).num_rows
        return [found[place] for place in places]


class Run:
    """A recorded training; shows iterations that all ranks have committed. `refresh` shows what was committed since."""

    def __init__(self, backend: Backend) -> None:
        """Read the run's document and the names of its commits.

        Raises:
            RunNotFoundError: there is no run.
            RunFormatError: it is not a run, or of another schema.
            StorageError: the store cannot be read.
        """
        self._reader = RunReader(backend)
        self._backend = backend
        self.attributes = run_attributes(read_run(backend), place=backend.url)
        """What the run's document says: schema, options, environment, launch."""
        self._attempts_of: dict[int, list[Attempt]] = {}
        self._catalogues = _Catalogues(backend)
        self.refresh()

    def __repr__(self) -> str:
        return f"<Run {printable(self.url)}: iterations {spans(self.iterations)}>"

    def _repr_html_(self) -> str:
        environment, options = (self.attributes.get(name) for name in ("environment", "options"))
        shown = {
            "url": self.url,
            "iterations": spans(self.iterations),
            "schema": self.attributes.get("ranktape_schema"),
            "quant_type": options.get("quant_type") if isinstance(options, dict) else None,
        }
        known = environment if isinstance(environment, dict) else {}
        return fields_html("Run", shown) + fields_html("its environment", known, is_unfolded=False)

    @property
    def url(self) -> str:
        """Where the run is, without credentials."""
        return self._backend.url

    @property
    def iterations(self) -> list[int]:
        """The iterations that can be read, ascending: those that all ranks have committed.

        They are complete, but for those of a flight recorder in which a rank was cut off: `status` tells.
        """
        return sorted(self._attempts_of)

    def refresh(self) -> list[int]:
        """Look again which iterations are complete; those that were not when it was looked last, ascending.

        Selections that were made before stay what they are. An iteration that was removed since is not shown any
        more.

        Raises:
            StorageError: the store cannot be read.
        """
        known = set(self._attempts_of)
        attempts = read_attempts(self._backend)
        complete = for_each(lambda attempt: complete_iterations(self._backend, attempt), attempts)
        self._attempts_of = {}
        for attempt, iterations in zip(attempts, complete, strict=True):
            for iteration in iterations:
                self._attempts_of.setdefault(iteration, []).append(attempt)
        self._shown = {iteration: shown_attempts(held) for iteration, held in self._attempts_of.items()}
        return sorted(set(self._attempts_of) - known)

    def status(self) -> list[IterationStatus]:
        """Every iteration that was begun, in every attempt: how far it is, what is missing and why."""
        judged = read_verdict(self._backend)
        return [] if judged is None else judged[1]

    def environment(self) -> dict[str, Any]:
        """What the run was recorded with; `compiled` is how compiled code was, each way once, where any ran."""
        compiled = "; ".join(dict.fromkeys(one.compiled for one in self.status() if one.compiled))
        return {**(self.attributes.get("environment") or {}), **({"compiled": compiled} if compiled else {})}

    def verdict(self) -> RunVerdict:
        """Whether the run holds the iterations it guaranteed, as it is now.

        Raises:
            RunNotFoundError: no attempt has begun in the run.
        """
        judged = read_verdict(self._backend)
        if judged is None:
            raise RunNotFoundError(f"the run at {self.url} has no attempt yet: no rank has started to record")
        return judged[0]

    def disabled(self) -> dict[int, str]:
        """The ranks that recorded nothing more after a failure inside of the capture, each with the reason."""
        return read_disabled(self._backend)

    def troubles(self) -> dict[int, str]:
        """The ranks whose writer was killed and that went on with another one, each with when and how."""
        return read_troubles(self._backend)

    def triggers(self) -> list[Trigger]:
        """What happened, for which a flight recorder stored what it held (`--record-last`); what came first before."""
        attempts = read_attempts(self._backend)
        found = for_each(lambda attempt: read_triggers(self._backend, attempt), attempts)
        return sorted((one for triggers in found for one in triggers), key=lambda one: one.order)

    def select(self, **filters: Any) -> Records:
        """The records whose fields have the values asked for, of the latest attempt of each complete iteration.

        An attempt that adds to the run does not hide what it adds to; `attempt` in the filters makes all count. Values
        are as in `Records.select`; no array is opened.

        Raises:
            UnknownFieldError: a filter names no field.
            UsageError: a field cannot have such a value.
            StorageError: a catalogue cannot be read.
        """
        places = [
            (attempt.path, iteration)
            for iteration in self.iterations
            for attempt in (self._attempts_of if "attempt" in filters else self._shown)[iteration]
        ]
        if "iteration" in filters and places:
            wanted = parse_filter("iteration", filters["iteration"])
            mask: Mask = wanted.mask(lambda _: np.array([iteration for _, iteration in places]), len(places))
            places = [place for place, is_wanted in zip(places, mask, strict=True) if is_wanted]
        catalogues = self._catalogues.at(places) or [empty_catalogue()]
        return Records.of(self._reader, catalogues).select(**filters)


def open_run(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Run:
    """The run at a URL: a directory, or any URL that fsspec knows.

    Where zarr has been imported, it knows the run's data types from then on; else call `ranktape.storage.register()`
    before plain zarr opens a run.

    Raises:
        RunNotFoundError: there is no run.
        RunFormatError: what is there is not a run, or of another schema.
        StorageError: the store cannot be reached or read.
        UsageError: the URL or the options are not usable.
    """
    if "zarr" in sys.modules:
        from ranktape.storage.format.zarr_floats import register

        register()
    return Run(open_backend(url, storage_options=storage_options))
