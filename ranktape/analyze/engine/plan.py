"""Plans the work of a question: which records are known already, and which a worker measures and keeps together."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ranktape.analyze.engine.cache import Cache, Found, record_keys
from ranktape.analyze.engine.executors import no_leaving
from ranktape.errors import StorageError

if TYPE_CHECKING:
    from ranktape.analyze.engine.cache import Shelf
    from ranktape.analyze.engine.cache_object import CacheObject, Measure, Payload
    from ranktape.storage import Record, Records

BATCH_NBYTES = 128 << 20
"""Records are measured together until they have so many bytes."""

BATCH_RECORDS = 1024
"""And no more of them than that."""

KEPT_NBYTES = 64 << 20
"""Freed memory is kept up to here, in blocks of at most half of it: more glibc does not take."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From <malloc.h>."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Records of one iteration of one rank, measured by one worker."""

    records: tuple[Iterable[Record], ...]
    """The records, in parts that follow one another."""
    keys: tuple[str, ...]
    """What they are known by."""
    measure: Measure
    """What is measured of each."""
    shelf: Shelf | None
    """Where the payloads are kept; None where they are not."""

    @property
    def module(self) -> str:
        """Where the code is defined that does it."""
        return type(self.measure).__module__


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What came of a batch."""

    payloads: list[Payload]
    """One for each record."""
    failure: str = ""
    """Why they could not be kept; empty where they were, or were not to be."""


def measure_batch(batch: Batch) -> Measured:
    """Measure the records of a batch, and keep what came of it.

    Raises:
        RanktapeError: what the measure raises.
    """
    _keep_freed_memory()
    payloads = [batch.measure(record) for record in itertools.chain.from_iterable(batch.records)]
    if batch.shelf is None:
        return Measured(payloads=payloads)
    try:
        with no_leaving():
            batch.shelf.put(batch.keys, payloads)
    except StorageError as error:
        return Measured(payloads=payloads, failure=str(error))
    return Measured(payloads=payloads)


@functools.cache
def _keep_freed_memory() -> None:
    """Have the memory of a chunk used again for the next one: its page faults take as long as the counting.

    glibc learns that by itself from the first large block that is freed, but not where MALLOC_TRIM_THRESHOLD_ is set:
    Dask sets it for its workers.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # which other C libraries lack
        mallopt(_M_MMAP_THRESHOLD, KEPT_NBYTES // 2)
        mallopt(_M_TRIM_THRESHOLD, KEPT_NBYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """A function and some of its tasks, done by one worker."""

    function: Callable[[Any], Any]
    """What is called."""
    tasks: Sequence[Any]
    """With each of them."""

    @property
    def module(self) -> str:
        """Where the code is defined that does it."""
        return str(getattr(self.function, "__module__", ""))


def call_all(calls: Calls) -> list[Any]:
    """What the function makes of each task.

    Raises:
        RanktapeError: what the function raises.
    """
    _keep_freed_memory()
    return [calls.function(task) for task in calls.tasks]


def shares(sizes: Sequence[int], *, max_nbytes: int = BATCH_NBYTES, max_number: int = BATCH_RECORDS) -> list[slice]:
    """Neighbours that are done together, by their sizes in bytes: one, or as many as stay below the bounds."""
    found = []
    start, total = 0, 0
    for place, size in enumerate(sizes):
        if place > start and (total + size > max_nbytes or place - start >= max_number):
            found.append(slice(start, place))
            start, total = place, 0
        total += size
    return [*found, slice(start, len(sizes))] if sizes else []


_COLUMNS = ("site", "checksum", "dtype", "compute_dtype", "shape", "sample_dim", "keep", "nbytes")
"""What tells a record of a run from every other one at the same path, and from what it was before."""

_LOOKS_AHEAD = 8
"""Groups whose cached objects are fetched before they are needed."""

_FILES = "files"
"""The group of the records of a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSpan:
    """Neighbouring records of one group, some of which are known."""

    group: str
    """The path of the group."""
    places: range
    """Where in the selection they are."""
    keys: Sequence[str]
    """What they are known by."""
    sizes: Sequence[int]
    """Their bytes."""
    known: Mapping[int, CacheObject]
    """By place, the object that holds the payload."""
    damaged: tuple[str, ...]
    """Objects of the group that cannot be read, and are to be replaced."""

    @property
    def missing(self) -> list[int]:
        """The places of those that are to be measured."""
        return [place for place in self.places if place not in self.known]

    def key(self, place: int) -> str:
        """What a record is known by."""
        return self.keys[place - self.places.start]

    def size(self, place: int) -> int:
        """The bytes of a record."""
        return self.sizes[place - self.places.start]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    path: str
    places: slice


class WorkPlan:
    """The records of a selection in spans; made from columns, without looking at one record after the other."""

    def __init__(self, records: Records) -> None:
        self._files: Sequence[Any] = getattr(records, "files", ())
        if self._files:
            self._groups = [_Group(path=_FILES, places=slice(0, len(records)))]
        else:
            self._groups = [_Group(path=path, places=places) for path, places in records.groups()]
        self._sizes: list[int] = records.column("nbytes").tolist()
        self._columns = [] if self._files else [records.column(name) for name in _COLUMNS]

    @property
    def paths(self) -> list[str]:
        """The groups that the records are in."""
        return [group.path for group in self._groups]

    @property
    def nbytes(self) -> int:
        """Of all records."""
        return sum(self._sizes)

    def spans(self, cache: Cache | None) -> Generator[RecordSpan, None, None]:
        """All records in their order, in spans whose unknown records are one batch; the cache is looked at ahead."""
        with ThreadPoolExecutor(_LOOKS_AHEAD) as pool:
            ahead: list[tuple[_Group, Future[Found] | None]] = []
            groups = iter(self._groups)
            try:
                for group in itertools.chain(groups, [None] * _LOOKS_AHEAD):
                    if group is not None:
                        ahead.append((group, None if cache is None else pool.submit(cache.find, group.path)))
                    if ahead and (group is None or len(ahead) > _LOOKS_AHEAD):
                        first, looked = ahead.pop(0)
                        if looked is None:
                            yield from self._of_group(first, Found(), keys=[""] * _length(first.places))
                        else:
                            yield from self._of_group(first, looked.result(), keys=self._keys(first.places))
            finally:
                for _, looked in ahead:
                    if looked is not None:
                        looked.cancel()

    def _of_group(self, group: _Group, found: Found, *, keys: Sequence[str]) -> Iterator[RecordSpan]:
        first = group.places.start
        start, num_missing, nbytes = first, 0, 0
        for place in range(first, group.places.stop):
            is_known = keys[place - first] in found.objects
            size = 0 if is_known else self._sizes[place]
            is_full = num_missing and nbytes + size > BATCH_NBYTES
            if place > start and (is_full or place - start >= BATCH_RECORDS):
                yield self._span(group, start, place, keys, found)
                start, num_missing, nbytes = place, 0, 0
            num_missing += not is_known
            nbytes += size
        yield self._span(group, start, group.places.stop, keys, found)

    def _span(self, group: _Group, start: int, stop: int, keys: Sequence[str], found: Found) -> RecordSpan:
        own = keys[start - group.places.start : stop - group.places.start]
        known = {
            place: found.objects[key]
            for place, key in zip(range(start, stop), own, strict=True)
            if key in found.objects
        }
        return RecordSpan(
            group=group.path,
            places=range(start, stop),
            keys=own,
            sizes=self._sizes[start:stop],
            known=known,
            damaged=tuple(found.damaged),
        )

    def _keys(self, places: slice) -> list[str]:
        if self._files:
            return record_keys([[_state_of(file) for file in self._files[places]]])
        return record_keys([column[places].tolist() for column in self._columns])


def _length(places: slice) -> int:
    return int(places.stop - places.start)


def _state_of(file: Any) -> str:
    """What tells a file from what it was before it was written again."""
    status: os.stat_result | None = None
    with suppress(OSError):  # whoever reads it says why it cannot be
        status = file.path.stat()
    if status is None:
        return f"{file.site}\n{os.urandom(16).hex()}"
    # The two last change where a file was written over by one of the same size, and its time set back or kept.
    return "\n".join(map(str, (file.site, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)))
