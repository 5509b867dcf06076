"""Plans the work of a question: which records are known already, and which a worker measures and keeps together."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from ranktape.analyze.engine.cache import Cache, Found, Shelf, record_keys
from ranktape.analyze.engine.cache_object import CacheObject, DamagedObjectError, Measure, Payload
from ranktape.analyze.engine.executors import no_leaving
from ranktape.errors import RanktapeError, StorageError
from ranktape.storage import Record, Records

BATCH_NBYTES = 128 << 20
"""Records are measured together until they have so many bytes."""

BATCH_RECORDS = 1024
"""And no more of them than that."""

KEPT_NBYTES = 64 << 20
"""Freed memory is kept up to here, in blocks of at most half of it: more glibc does not take."""

Answer = TypeVar("Answer")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From <malloc.h>."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Records of one iteration of one rank, measured by one worker."""

    records: tuple[Sequence[Record | RanktapeError], ...]
    """The records, in parts that follow one another; in the place of one that could not be looked at the reason."""
    keys: tuple[str, ...]
    """What they are known by."""
    measure: Measure
    """What is measured of each."""
    shelf: Shelf | None
    """Where the payloads are kept; None where they are not."""
    raises: bool
    """Whether the first record that fails ends the batch."""

    @property
    def module(self) -> str:
        """Where the code is defined that does it."""
        return type(self.measure).__module__


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What came of a batch."""

    payloads: list[Payload | RanktapeError]
    """One for each record, or why it failed."""
    failure: str = ""
    """Why they could not be kept; empty where they were, or were not to be."""


def measure_batch(batch: Batch) -> Measured:
    """Measure the records of a batch, and keep what came of it.

    Raises:
        RanktapeError: what the measure raises, if the batch `raises`.
    """
    keep_freed_memory()
    payloads: list[Payload | RanktapeError] = []
    for record in itertools.chain.from_iterable(map(each_record, batch.records)):
        try:
            payloads.append(batch.measure(unless_failed(record)))
        except RanktapeError as error:
            if batch.raises:
                raise
            payloads.append(error)
    kept = {key: one for key, one in zip(batch.keys, payloads, strict=True) if not isinstance(one, RanktapeError)}
    if batch.shelf is None or not kept:
        return Measured(payloads=payloads)
    try:
        with no_leaving():
            batch.shelf.put(list(kept), list(kept.values()))
    except StorageError as error:
        return Measured(payloads=payloads, failure=str(error))
    return Measured(payloads=payloads)


def each_record(records: Sequence[Record | RanktapeError]) -> Iterator[Record | RanktapeError]:
    """The records, one after the other; in the place of one that cannot be looked at the reason."""
    done = 0
    try:
        for record in records:
            yield record
            done += 1
    except RanktapeError:
        for place in range(done, len(records)):
            try:
                yield records[place]
            except RanktapeError as error:
                yield error


def unless_failed(found: Answer | RanktapeError) -> Answer:
    """What was found.

    Raises:
        RanktapeError: it is the reason why there is nothing.
    """
    if isinstance(found, RanktapeError):
        raise found
    return found


@functools.cache
def keep_freed_memory(nbytes: int = KEPT_NBYTES) -> None:
    """Have the memory of a chunk used again for the next one: its page faults take as long as the counting.

    glibc learns that by itself from the first large block that is freed, but not where MALLOC_TRIM_THRESHOLD_ is set:
    Dask sets it for its workers. Blocks of more than half of so many bytes are given back; older ones take no more than
    the default.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # which other C libraries lack
        mallopt(_M_MMAP_THRESHOLD, nbytes // 2)
        mallopt(_M_TRIM_THRESHOLD, nbytes)


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
    keep_freed_memory()
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


KEY_COLUMNS = ("site", "checksum", "dtype", "compute_dtype", "shape", "sample_dim", "keep", "nbytes")
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
    known: Mapping[int, CacheObject]
    """By place, the object that holds the payload."""
    damaged: tuple[str, ...]
    """Objects of the group that cannot be read, and are to be replaced."""

    def payload(self, place: int) -> Payload | None:
        """The payload of a record that is known; None where it cannot be unpacked."""
        try:
            return self.known[place].payload(self.keys[place - self.places.start])
        except DamagedObjectError:
            return None

    def work(
        self, records: Records, measure: Measure, cache: Cache | None, *, raises: bool
    ) -> tuple[Callable[[Any], Any], Batch] | None:
        """The measuring of the records that are not known; None where all are."""
        missing = [place for place in self.places if place not in self.known]
        if not missing:
            return None
        starts = [place for place, before in zip(missing, [None, *missing], strict=False) if place - 1 != before]
        stops = [place + 1 for place, behind in zip(missing, [*missing[1:], None], strict=True) if place + 1 != behind]
        runs = [records[start:stop] for start, stop in zip(starts, stops, strict=True)]
        return measure_batch, Batch(
            # To look at the records of files is to read them.
            records=tuple(run if run.is_costly else list(each_record(run)) for run in runs),
            keys=tuple(self.keys[place - self.places.start] for place in missing),
            measure=measure,
            shelf=None if cache is None else cache.shelf(self.group, damaged=self.damaged),
            raises=raises,
        )


class WorkPlan:
    """The records of a selection in spans; made from columns, without looking at one record after the other."""

    def __init__(self, records: Records) -> None:
        self._files: Sequence[Any] = getattr(records, "files", ())
        self.groups = [(_FILES, slice(0, len(records)))] if self._files else list(records.groups())
        """The paths of the groups that the records are in, and where in the selection each is."""
        self._columns = [] if self._files else [records.column(name) for name in KEY_COLUMNS]
        self.sizes: list[int] = records.column("nbytes").tolist()
        """Bytes of each record."""

    @property
    def paths(self) -> list[str]:
        """The groups that the records are in, each once."""
        return list(dict.fromkeys(path for path, _ in self.groups))

    def spans(self, cache: Cache | None) -> Generator[RecordSpan, None, None]:
        """All records in their order, in spans whose unknown records are one batch; the cache is looked at ahead."""
        if cache is None:
            for path, places in self.groups:
                yield from self._of_group(path, places, Found(), keys=[""] * int(places.stop - places.start))
            return
        with ThreadPoolExecutor(_LOOKS_AHEAD) as pool:
            ahead: deque[tuple[str, slice, Future[Found]]] = deque()
            try:
                for group in itertools.chain(self.groups, [None] * _LOOKS_AHEAD):
                    if group is not None:
                        ahead.append((*group, pool.submit(cache.find, group[0])))
                    if ahead and (group is None or len(ahead) > _LOOKS_AHEAD):
                        path, places, looked = ahead.popleft()
                        yield from self._of_group(path, places, looked.result(), keys=self.keys(places))
            finally:
                for _, _, looked in ahead:
                    looked.cancel()

    def _of_group(self, path: str, places: slice, found: Found, *, keys: Sequence[str]) -> Iterator[RecordSpan]:
        first = int(places.start)
        known = {place: found.objects[key] for place, key in enumerate(keys, start=first) if key in found.objects}
        # What is known is not read, and fills no batch.
        sizes = [0 if place in known else self.sizes[place] for place in range(first, int(places.stop))]
        for part in shares(sizes):
            own = range(first + part.start, first + part.stop)
            yield RecordSpan(
                group=path,
                places=own,
                keys=keys[part],
                known={place: known[place] for place in own if place in known},
                damaged=tuple(found.damaged),
            )

    def keys(self, places: slice) -> list[str]:
        """What the records at those places of one group are known by."""
        if self._files:
            return record_keys([[_state_of(file) for file in self._files[places]]])
        return record_keys([column[places].tolist() for column in self._columns])


def _state_of(file: Any) -> str:
    """What tells a file from what it was before it was written again."""
    status: os.stat_result | None = None
    with suppress(OSError):  # whoever reads it says why it cannot be
        status = file.path.stat()
    if status is None:
        return f"{file.site}\n{os.urandom(16).hex()}"
    # The two last change where a file was written over by one of the same size, and its time set back or kept.
    return "\n".join(map(str, (file.site, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)))
