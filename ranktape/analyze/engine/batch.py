"""Gives the batches of records that workers measure and keep."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ranktape.analyze.engine.executors import no_leaving
from ranktape.errors import StorageError

if TYPE_CHECKING:
    from ranktape.analyze.engine.cache import Shelf
    from ranktape.analyze.engine.cache_object import Measure, Payload
    from ranktape.storage import Record

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


def shares(sizes: Sequence[int]) -> list[slice]:
    """Neighbours that are done together, by their sizes in bytes: one, or as many as stay below the bounds."""
    found = []
    start, total = 0, 0
    for place, size in enumerate(sizes):
        if place > start and (total + size > BATCH_NBYTES or place - start >= BATCH_RECORDS):
            found.append(slice(start, place))
            start, total = place, 0
        total += size
    return [*found, slice(start, len(sizes))] if sizes else []
