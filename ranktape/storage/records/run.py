"""A run opened for reading: its complete iterations, their state, and their records, whose checksums are compared."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pickle
import platform
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.errors import DataError, RunFormatError, RunNotFoundError
from ranktape.storage.format.arrays import (
    StoredArray,
    can_hold,
    checksum,
    combine,
    crc_text,
    fetch_object,
    open_stored,
    read_rows,
    read_runs,
    read_slices,
    read_stored,
    split,
)
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
from ranktape.storage.format.layout import document_key, dropped_path
from ranktape.storage.format.live import Trigger, read_triggers
from ranktape.storage.format.progress import IterationStatus, RunVerdict, read_disabled, read_troubles, read_verdict
from ranktape.storage.format.record_info import RUN, Compression
from ranktape.storage.places.backend import Backend, ForwardingBackend, Result
from ranktape.storage.places.failures import printable
from ranktape.storage.places.urls import open_backend
from ranktape.storage.query.columns import Mask
from ranktape.storage.query.filters import parse_filter
from ranktape.storage.records.records import Records
from ranktape.storage.records.tables import fields_html, spans

if TYPE_CHECKING:
    from ranktape.storage.records.record import Record


_NUM_CATALOGUES = 4
"""The number of iterations whose catalogue is cached while shards of tensors are assembled."""

_NUM_DOCUMENTS = 1024
"""The number of cached documents of arrays. Many records share one."""


_RECENT_NBYTES = 64 << 20
"""The size of the cache of objects that contain many records, in bytes."""

_NUM_SEEN = 4096


class RecentObjects(ForwardingBackend):
    """A backend that fetches an object as a whole when a second part of it is requested, and caches it."""

    def __init__(self, backend: Backend) -> None:
        self.url, self.is_shared = backend.url, backend.is_shared
        self._backend = backend
        self._held: dict[str, bytes] = {}
        self._seen: dict[str, None] = {}
        self._lock = threading.Lock()

    def forward(self, work: Callable[[Backend], Result]) -> Result:
        """Do anything but read a part of an object."""
        return work(self._backend)

    def get_range(self, key: str, start: int, nbytes: int) -> bytes | None:
        """Some bytes of an object."""
        data = self._whole(key, is_new=start < 0)
        if data is None:
            return self._backend.get_range(key, start, nbytes)
        first = max(0, len(data) + start) if start < 0 else start
        return data[first : first + nbytes]

    def _whole(self, key: str, *, is_new: bool) -> bytes | None:
        """The object if it is cached. Reading a record starts at the end of its object, where the index is."""
        with self._lock:
            if key in self._held:
                self._held[key] = self._held.pop(key)
                return self._held[key]
            if not is_new or key not in self._seen:
                self._seen[key] = None
                while len(self._seen) > _NUM_SEEN:
                    self._seen.pop(next(iter(self._seen)))
                return None
        size = self._backend.size(key)
        data = None if size is None or size > _RECENT_NBYTES // 2 else fetch_object(self._backend, key, size)
        if data is not None:
            with self._lock:
                self._held[key] = data
                while sum(map(len, self._held.values())) > _RECENT_NBYTES:
                    self._held.pop(next(iter(self._held)))
        return data


class RunReader:
    """Reads the values of a run's records, which share its backend and its cached documents of arrays."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.url = backend.url
        self._stored = functools.lru_cache(_NUM_DOCUMENTS)(self._open)
        self._objects = RecentObjects(backend)
        self._catalogue = functools.lru_cache(_NUM_CATALOGUES)(functools.partial(open_catalogue, backend))

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return _shared_reader, (pickle.dumps(self.backend),)

    def read(self, record: Record, *, sample: int | None) -> np.ndarray[Any, Any]:
        """The stored part of a record; with `sample`, that of one sample without the sample dimension.

        Raises:
            DataError: bytes are missing or were changed.
        """
        info, location = record.info, record.location
        expected = info.checksum
        is_sample = False
        with self._explained(record):
            stored = self._opened(record)
            if location.stack:
                values = read_stored(self._objects, stored, index=location.index)
            elif sample is not None and info.sample_dim == stored.cut_axis:
                is_sample = True
                values = read_stored(self.backend, stored, index=sample, axis=stored.cut_axis or 0)
                expected = (stored.sample_checksums or ())[sample]
            else:
                values = read_stored(self.backend, stored)
        self._expect(record, checksum(values), expected)
        return values if sample is None or is_sample else values.take(sample, axis=info.sample_dim)

    def read_stack(
        self, record: Record, indices: Sequence[int], checksums: Sequence[int]
    ) -> np.ndarray[Any, Any] | None:
        """The stored part of several records of the stack of `record`, along the first axis.

        None if bytes are missing or were changed; `read` then names the record.

        Raises:
            DataError: the document of the stack is missing or was changed.
        """
        with self._explained(record):
            stored = self._opened(record)
        if 0 <= min(indices) <= max(indices) < stored.shape[0]:
            with contextlib.suppress(DataError):
                values = read_rows(self._objects, stored, indices)
                if values is not None and all(
                    checksum(one) == crc_text(expected) for one, expected in zip(values, checksums, strict=True)
                ):
                    return values
        return None

    def parts(self, record: Record) -> Iterator[np.ndarray[Any, Any]]:
        """The values of a record in parts: see `Record.parts`.

        Raises:
            DataError: bytes are missing or were changed.
        """
        info = record.info
        with self._explained(record):
            stored = self._opened(record)
        is_alone = not record.location.stack and stored.chunk_nbytes
        is_plain = stored.cut_axis is None and stored.compression is Compression.NONE
        if is_alone and info.sample_dim is not None and info.sample_dim == stored.cut_axis:
            yield from self._samples(record, stored)
        elif is_alone and info.sample_dim is None and is_plain and stored.chunk_nbytes > RUN * stored.row.itemsize:
            # The checksum of the whole record is compared after the last part.
            with self._explained(record):
                crc = yield from read_runs(self.backend, stored, num_elements=RUN)
            self._expect(record, crc_text(crc), info.checksum)
        else:
            yield from split(self.read(record, sample=None), sample_dim=info.sample_dim)

    def _samples(self, record: Record, stored: StoredArray) -> Iterator[np.ndarray[Any, Any]]:
        """The samples one by one, each compared with its checksum; the record's is also compared if possible."""
        crcs = []
        slices = read_slices(self.backend, stored)
        for expected in stored.sample_checksums or ():
            with self._explained(record):
                values, crc = next(slices)
            self._expect(record, crc_text(crc), expected)
            crcs.append(crc)
            yield values[np.newaxis]
        if stored.cut_axis == 0:
            whole = combine(crcs, part_nbytes=stored.chunk_nbytes)
            self._expect(record, crc_text(whole), record.info.checksum)

    def siblings(self, record: Record) -> Records:
        """The records of all ranks at the site of a record, in its iteration and attempt.

        Raises:
            RunFormatError: the iteration's catalogue is damaged.
        """
        attempt = record.location.group.partition("/")[0]
        catalogue = self._catalogue(attempt, record.info.iteration)
        return Records.of(self, [catalogue]).select(site=record.location.site)

    @contextlib.contextmanager
    def _explained(self, record: Record) -> Iterator[None]:
        """Add the name of the record to an error, or that its iteration was removed on purpose."""
        try:
            yield
        except (DataError, RunFormatError) as error:
            iteration = record.info.iteration
            attempt = record.location.group.partition("/")[0]
            if self.backend.exists(document_key(dropped_path(attempt, iteration))):
                message = f"iteration {iteration} was removed from {self.url} (--keep-last): refresh the run"
                raise DataError(message) from error
            if not self.backend.exists(document_key("")):
                message = f"there is no run at {self.url}, seen from {platform.node()}, which was to read {record!r}"
                raise DataError(f"{message}: it was removed, or that machine cannot see it ({error})") from error
            raise DataError(f"{record!r} is damaged: {error}") from error

    def _expect(self, record: Record, actual: str, expected: str) -> None:
        """Raise if the checksum of the values differs from the recorded one."""
        if actual != expected:
            raise DataError(
                f"{record!r} in {self.url}/{record.location.array_path} is not what was captured: "
                f"its checksum is {actual}, {expected} was recorded; see 'ranktape check'"
            )

    def _open(self, path: str) -> StoredArray:
        # The attributes of a stack's records are also in the catalogue, and would take much memory.
        return dataclasses.replace(open_stored(self.backend, path, without_records=True), attributes={})

    def _opened(self, record: Record) -> StoredArray:
        """The array of a record, after a comparison of its document with the catalogue."""
        info, location = record.info, record.location
        stored = self._stored(location.array_path)
        shape = stored.shape[1:] if location.stack else stored.shape
        is_there = not location.stack or (stored.cut_axis == 0 and 0 <= location.index < stored.shape[0])
        samples = stored.sample_checksums
        is_there &= samples is None or len(samples) == stored.num_chunks
        if not is_there or not can_hold(info, shape=shape, dtype=stored.row.name):
            raise DataError(
                f"{self.url}/{stored.path} has {stored.row.name}{list(stored.shape)}, the catalogue says {info.keep} "
                f"of {info.dtype}{list(info.shape)}: the commit is damaged; see 'ranktape check'"
            )
        return stored


@functools.lru_cache(maxsize=8)
def _shared_reader(pickled: bytes) -> RunReader:
    """The reader of a backend that was sent to this process. All records share it and its caches."""
    return RunReader(pickle.loads(pickled))  # noqa: S301  # a part of a pickle that is being loaded already


_MAX_CACHED_RECORDS = 500_000
"""The number of records whose columns a run caches, in addition to those of existing selections: about 100 MB."""


class _Catalogues:
    """The cached catalogues of a run's iterations: those of existing selections and the most recent ones."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._held: weakref.WeakValueDictionary[tuple[str, int], Catalogue] = weakref.WeakValueDictionary()
        self._recent: dict[tuple[str, int], Catalogue] = {}

    def at(self, groups: Sequence[tuple[str, int]]) -> list[Catalogue]:
        """The catalogues of some attempts and iterations, in their order."""
        catalogues = {group: catalogue for group in groups if (catalogue := self._held.get(group)) is not None}
        unread = [group for group in groups if group not in catalogues]
        catalogues |= zip(unread, for_each(lambda group: open_catalogue(self._backend, *group), unread), strict=True)
        self._held.update(catalogues)
        # The most recent ones come last.
        self._recent = {
            group: catalogue for group, catalogue in self._recent.items() if group not in catalogues
        } | catalogues
        num_excess = sum(catalogue.num_rows for catalogue in self._recent.values()) - _MAX_CACHED_RECORDS
        while num_excess > 0:
            num_excess -= self._recent.pop(next(iter(self._recent))).num_rows
        return [catalogues[group] for group in groups]


class Run:
    """A recorded training. It shows the iterations that all ranks have committed; `refresh` adds new ones."""

    def __init__(self, backend: Backend) -> None:
        """Read the run's document and the names of its commits.

        Raises:
            RunNotFoundError: there is no run.
            RunFormatError: the URL is not a run, or a run of another schema.
            StorageError: the store cannot be read.
        """
        self._reader = RunReader(backend)
        self._backend = backend
        self.attributes = run_attributes(read_run(backend), place=backend.url)
        """Attributes of the run's document: schema, options, environment, launch."""
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
        """URL of the run, without credentials."""
        return self._backend.url

    @property
    def iterations(self) -> list[int]:
        """The iterations that can be read, in ascending order: those that all ranks have committed.

        They are complete, except for those of a flight recorder in which a rank was cut off; see `status`.
        """
        return sorted(self._attempts_of)

    def refresh(self) -> list[int]:
        """Read again which iterations are complete, and return the new ones in ascending order.

        Existing selections do not change. Iterations that have been removed are no longer shown.

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
        self._shown = {iteration: shown_attempts(attempts) for iteration, attempts in self._attempts_of.items()}
        return sorted(set(self._attempts_of) - known)

    def status(self) -> list[IterationStatus]:
        """The status of every iteration of every attempt: its state, what is missing and why."""
        judged = read_verdict(self._backend)
        return [] if judged is None else judged[1]

    def environment(self) -> dict[str, Any]:
        """The environment of the recording. `compiled` lists how compiled code was recorded, if any ran."""
        compiled = "; ".join(dict.fromkeys(status.compiled for status in self.status() if status.compiled))
        return {**(self.attributes.get("environment") or {}), **({"compiled": compiled} if compiled else {})}

    def verdict(self) -> RunVerdict:
        """Whether the run now holds the guaranteed number of iterations.

        Raises:
            RunNotFoundError: the run has no attempt.
        """
        judged = read_verdict(self._backend)
        if judged is None:
            raise RunNotFoundError(f"the run at {self.url} has no attempt yet: no rank has started to record")
        return judged[0]

    def disabled(self) -> dict[int, str]:
        """The ranks whose capture failed and recorded nothing more, with the reason of each."""
        return read_disabled(self._backend)

    def troubles(self) -> dict[int, str]:
        """The ranks whose writer was killed and replaced, with the time and the cause of each."""
        return read_troubles(self._backend)

    def triggers(self) -> list[Trigger]:
        """The triggers of a flight recorder (`--record-last`), sorted by what happened first."""
        attempts = read_attempts(self._backend)
        by_attempt = for_each(lambda attempt: read_triggers(self._backend, attempt), attempts)
        return sorted((trigger for triggers in by_attempt for trigger in triggers), key=lambda trigger: trigger.order)

    def select(self, **filters: Any) -> Records:
        """The records whose fields have the given values, from the latest attempt of each complete iteration.

        An attempt that adds to the run does not hide earlier ones. With `attempt` in the filters, all attempts are
        selected from. For values see `Records.select`. No array is opened.

        Raises:
            UnknownFieldError: a filter names a field that records do not have.
            UsageError: a field cannot have the value.
            StorageError: a catalogue cannot be read.
        """
        groups = [
            (attempt.path, iteration)
            for iteration in self.iterations
            for attempt in (self._attempts_of if "attempt" in filters else self._shown)[iteration]
        ]
        if "iteration" in filters and groups:
            wanted = parse_filter("iteration", filters["iteration"])
            mask: Mask = wanted.mask(lambda _: np.array([iteration for _, iteration in groups]), len(groups))
            groups = [group for group, is_wanted in zip(groups, mask, strict=True) if is_wanted]
        catalogues = self._catalogues.at(groups) or [empty_catalogue()]
        return Records.of(self._reader, catalogues).select(**filters)


def open_run(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Run:
    """The run at a URL: a directory, or any URL that fsspec supports.

    If zarr has been imported, the run's data types are registered with it; otherwise call
    `ranktape.storage.register()` before zarr opens a run.

    Raises:
        RunNotFoundError: there is no run.
        RunFormatError: the URL is not a run, or a run of another schema.
        StorageError: the store cannot be reached or read.
        UsageError: the URL or the options are not valid.
    """
    if "zarr" in sys.modules:
        from ranktape.storage.format.zarr_floats import register

        register()
    return Run(open_backend(url, storage_options=storage_options))
