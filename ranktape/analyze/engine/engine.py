"""Measures the records of a question: in this process, in several of this machine, or on a Dask cluster.

Whatever the number of workers, results come in the order of what was asked for, and are the same to the last bit.
What takes long to make, and follows from more than the columns of a measure, is kept as values: of each record, of
keys, or of records together. A value is anything that JSON in Python holds, NaN and infinities among it, or an array.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.console import passing_line, say
from ranktape.analyze.engine.cache import (
    Cache,
    CacheObject,
    Columns,
    Keys,
    Payload,
    Shelf,
    name_of_text,
    record_keys,
)
from ranktape.analyze.engine.executors import ADDRESS, Workers, in_order, no_leaving, workers_of
from ranktape.errors import RanktapeError, StorageError, UsageError
from ranktape.storage import Record, Records
from ranktape.storage.places.failures import printable
from ranktape.storage.records.record import RecordOrigin

if TYPE_CHECKING:
    from rich.progress import Progress

BATCH_NBYTES = 128 << 20
"""Records are measured together up to so many bytes."""

BATCH_RECORDS = 1024
"""Records that are measured together at most."""

KEPT_NBYTES = 64 << 20
"""Freed memory is kept up to here, in blocks of at most half of it: glibc takes no more."""

PARTS_IN_TURN = 4
"""Parts at least into which tasks are divided, for each that is given out at once."""

KEY_COLUMNS = ("site", "checksum", "dtype", "compute_dtype", "shape", "sample_dim", "keep", "nbytes")
"""What tells a record of a run from every other one at the same path, and from what it was before."""

MAX_ROWS = 1 << 13
"""Values of one object: who ends a question early loses no more."""

_LOOKS_AHEAD = 8
"""Groups whose cached objects are fetched before they are needed."""

_FILES = "files"
"""The group of the records of a folder."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From <malloc.h>."""

Task = TypeVar("Task")
Result = TypeVar("Result")
Answer = TypeVar("Answer")


class Measure(Protocol):
    """Something that is measured of records; it can be pickled."""

    @property
    def name(self) -> str:
        """The name in the cache: two measures of one name give the same columns of the same record.

        It holds the measure's version and every parameter, in letters that a key of an object may have.
        """
        ...

    def __call__(self, records: Iterable[Record], /) -> Columns:
        """Read the records, one after the other, and measure them.

        Raises:
            DataError: the bytes of a record are missing or damaged.
            StorageError: the store cannot be read.
            UsageError: what was kept of a record does not answer the question.
        """
        ...


Measured = tuple[Columns, dict[int, RanktapeError], str]
"""The columns of the records of a batch that did not fail; by the place of a record why it failed; and why the columns
could not be written, empty if they were, or were not to be."""


def measure_batch(records: Records, keys: Keys, measure: Measure, shelf: Shelf | None, *, raises: bool) -> Measured:
    """Measure records, and write their columns to the cache.

    Raises:
        RanktapeError: what the measure raises, if the first record that fails `raises`.
    """
    keep_freed_memory()
    errors: dict[int, RanktapeError] = {}
    try:
        columns = measure(records)
    except RanktapeError:
        if raises:
            raise
        parts = []
        for place, record in enumerate(each_record(records)):
            try:
                parts.append(measure([unless_failed(record)]))
            except RanktapeError as error:
                errors[place] = error
        columns = Columns.join(parts)
    if shelf is None or not columns.num_records:
        return columns, errors, ""
    good = np.setdiff1d(np.arange(len(keys)), list(errors)) if errors else slice(None)
    try:
        with no_leaving():
            shelf.put(keys[good], columns)
    except StorageError as error:
        return columns, errors, str(error)
    return columns, errors, ""


def each_record(records: Sequence[Record | RanktapeError]) -> Iterator[Record | RanktapeError]:
    """The records, one after the other; the reason in the place of one that cannot be looked at."""
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
    """Use the memory of a chunk again for the next one: its page faults take as long as the counting.

    glibc does so by itself after the first large block is freed, but not where MALLOC_TRIM_THRESHOLD_ is set: Dask sets
    it for its workers. Blocks of more than half of so many bytes are returned; older versions of glibc take no more
    than the default.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # which other C libraries lack
        mallopt(_M_MMAP_THRESHOLD, nbytes // 2)
        mallopt(_M_TRIM_THRESHOLD, nbytes)


def call_all(function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
    """What the function returns for each task."""
    keep_freed_memory()
    return [function(task) for task in tasks]


def shares(sizes: Sequence[int], *, max_nbytes: int = BATCH_NBYTES, max_number: int = BATCH_RECORDS) -> list[slice]:
    """Neighbours that are done together, by their sizes in bytes: one, or as many as are below the bounds."""
    found = []
    start, total = 0, 0
    for place, size in enumerate(sizes):
        if place > start and (total + size > max_nbytes or place - start >= max_number):
            found.append(slice(start, place))
            start, total = place, 0
        total += size
    return [*found, slice(start, len(sizes))] if sizes else []


class WorkPlan:
    """The groups, keys and sizes of the records of one source, from columns alone."""

    def __init__(self, records: Records) -> None:
        """Look at the columns."""
        self._files: Sequence[Any] = getattr(records, "files", ())
        self.groups = [(_FILES, slice(0, len(records)))] if self._files else list(records.groups())
        """The paths of the groups that the records are in, and where in the selection each is."""
        self._records = records
        self.sizes: list[int] = records.column("nbytes").tolist()
        """Bytes of each record."""

    @property
    def paths(self) -> list[str]:
        """The groups that the records are in, each once."""
        return list(dict.fromkeys(path for path, _ in self.groups))

    @functools.cached_property
    def keys(self) -> Keys:
        """The keys of the records."""
        if self._files:
            return record_keys([[_state_of(file) for file in self._files]])
        return record_keys([self._records.stored(name) for name in KEY_COLUMNS])


def _state_of(file: Any) -> str:
    """What tells a file from what it was before it was written again."""
    status: os.stat_result | None = None
    with suppress(OSError):  # whoever reads it says why it cannot be
        status = file.path.stat()
    if status is None:
        return f"{file.site}\n{os.urandom(16).hex()}"
    # The two last change where a file was written over by one of the same size, and its time set back or kept.
    return "\n".join(map(str, (file.site, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Span:
    """Neighbouring records of one group of one source; those that are not known are measured together."""

    known: Sequence[tuple[Columns, NDArray[np.int64]]]
    """Objects that hold some of its records, and the place of each record in the object, or -1."""
    missing: NDArray[np.int64]
    """Places in the span of the records that are not known."""
    work: tuple[Any, ...] | None
    """The measuring of these; None where all are known."""
    cache: Cache | None
    num_records: int
    nbytes: int
    """Of all its records."""

    def together(self, measured: Measured | None) -> tuple[Columns, dict[int, RanktapeError]]:
        """The columns of the span, without the records that failed; and by their places in the span why they did."""
        parts, places = [], [np.zeros(0, dtype=np.int64)]
        left = np.ones(self.num_records, dtype=np.bool_)
        for columns, found in self.known:
            (own,) = np.nonzero((found >= 0) & left)
            left[own] = False
            if own.size:
                parts.append(columns.take(found[own]))
                places.append(own)
        errors: dict[int, RanktapeError] = {}
        if measured is not None:
            columns, failed, _ = measured
            errors = {int(self.missing[place]): error for place, error in failed.items()}
            if columns.num_records:
                parts.append(columns)
                places.append(np.setdiff1d(self.missing, list(errors)))
        return Columns.join(parts).take(np.argsort(np.concatenate(places))), errors


def _spans(
    records: Records, plan: WorkPlan, cache: Cache | None, measure: Measure, *, raises: bool
) -> Generator[_Span, None, None]:
    """All records of one source in their order."""
    for (path, places), (objects, damaged) in zip(plan.groups, _looked_up(plan, cache), strict=True):
        first, last = int(places.start), int(places.stop)
        keys = np.zeros((last - first, 2), dtype=np.uint64) if cache is None else plan.keys[first:last]
        looked = [(one.columns, one.look_up(keys)) for one in objects]
        is_known = np.zeros(last - first, dtype=np.bool_)
        for _, found in looked:
            is_known |= found >= 0
        sizes = np.array(plan.sizes[first:last], dtype=np.int64)
        # What is known is not read, and fills no batch.
        for part in shares(np.where(is_known, 0, sizes).tolist()):
            missing, work = np.flatnonzero(~is_known[part]), None
            if missing.size:
                chosen = records.take((first + part.start + missing).tolist())
                shelf = None if cache is None else cache.shelf(path, damaged=damaged)
                work = (partial(measure_batch, raises=raises), chosen, keys[part][missing], measure, shelf)
            yield _Span(
                known=[(columns, found[part]) for columns, found in looked if (found[part] >= 0).any()],
                missing=missing,
                work=work,
                cache=cache,
                num_records=part.stop - part.start,
                nbytes=int(sizes[part].sum()),
            )


def _looked_up(plan: WorkPlan, cache: Cache | None) -> Iterator[tuple[Sequence[CacheObject], Sequence[str]]]:
    """What `Cache.find` gives of each group, some of them ahead."""
    if cache is None:
        yield from itertools.repeat(((), ()), len(plan.groups))
        return
    with ThreadPoolExecutor(_LOOKS_AHEAD) as pool:
        ahead = deque[Future[tuple[Sequence[CacheObject], Sequence[str]]]]()
        try:
            for path, _ in plan.groups:
                ahead.append(pool.submit(cache.find, path))
                if len(ahead) > _LOOKS_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for looked in ahead:
                looked.cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Where questions are answered."""

    workers: int = 1
    """Processes of this machine that read and count; 1 is this process alone."""
    scheduler: str | None = None
    """Address of a Dask scheduler, whose workers take the place of processes of this machine."""
    use_cache: bool = True
    """Whether measurements are kept beside the run, and taken from there."""
    show_progress: bool = False
    """Whether a bar on a terminal's stderr shows bytes, rate and the time left."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, also where every answer is kept and nothing is left to do.

        Raises:
            UsageError: `workers` is less than 1, or `scheduler` is no address.
        """
        if self.workers < 1:
            raise UsageError(f"workers={self.workers} is not a number of processes: give 1 or more")
        if self.scheduler is not None and not ADDRESS.fullmatch(self.scheduler):
            raise UsageError(f"scheduler {self.scheduler!r} is no address of a Dask scheduler: give tcp://HOST:PORT")

    def columns(self, records: Records, measure: Measure) -> Iterator[Columns]:
        """What a measure finds in the records, in their order, some hundred at a time; what is known is not read again.

        Raises:
            DataError: a record's bytes are missing or damaged.
            StorageError: the store cannot be read.
            UsageError: what was kept of a record does not answer the question; Dask is not installed.
            WorkersError: the processes or the cluster cannot be had, or were lost.
        """
        for columns, _ in self._measure(records, measure, raises=True):
            yield columns

    def measure(self, records: Records, measure: Measure) -> Iterator[Payload]:
        """What a measure finds in each record, in their order. Raises as `columns`."""
        for columns in self.columns(records, measure):
            yield from columns.payloads()

    def measure_each(self, records: Records, measure: Measure) -> Iterator[Payload | RanktapeError]:
        """The same; in the place of a record that fails the reason, and the rest goes on.

        Raises:
            UsageError: Dask is not installed.
            WorkersError: the processes or the cluster cannot be had, or were lost.
        """
        for columns, errors in self._measure(records, measure, raises=False):
            payloads = iter(columns.payloads())
            for place in range(columns.num_records + len(errors)):
                yield errors[place] if place in errors else next(payloads)

    def _measure(
        self, records: Records, measure: Measure, *, raises: bool
    ) -> Iterator[tuple[Columns, dict[int, RanktapeError]]]:
        if not len(records):
            return
        parts = [(part.records, WorkPlan(part.records)) for part in records.parts()]
        caches: dict[str, Cache | None] = {own.reader.url: None for own, _ in parts}
        for url in caches if self.use_cache else ():
            same = [(own, plan) for own, plan in parts if own.reader.url == url]
            groups = [path for _, plan in same for path in plan.paths]
            caches[url] = Cache(same[0][0].reader, name=measure.name, groups=groups, warn=warn_once)
        spans = itertools.chain.from_iterable(
            _spans(own, plan, caches[own.reader.url], measure, raises=raises) for own, plan in parts
        )
        total = sum(sum(plan.sizes) for _, plan in parts)
        works = ((span, span.work) for span in spans)
        with (
            bytes_left(total, is_shown=self.show_progress, description="counting") as advance,
            closing(in_order(works, start=self._workers)) as done,
        ):
            for span, measured in done:
                advance(span.nbytes)
                if measured is not None and measured[-1] and span.cache is not None:
                    span.cache.give_up(measured[-1])
                yield span.together(measured)

    def _workers(self) -> Workers:
        return workers_of(workers=self.workers, scheduler=self.scheduler)

    def map(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], *, sizes: Sequence[int] | None = None
    ) -> Iterator[Result]:
        """What a function returns for each task, in order; both can be pickled. `sizes` are bytes that each reads.

        Small tasks whose sizes are given are sent together.

        Raises:
            RanktapeError: what the function raises.
            WorkersError: the processes or the cluster cannot be had, or were lost.
        """
        if not tasks:
            return
        workers = self._workers()
        alone = [slice(place, place + 1) for place in range(len(tasks))]
        together = alone
        if sizes is not None and workers.in_flight > 1:
            # All workers are to be at work until near the end.
            together = shares(sizes, max_nbytes=min(BATCH_NBYTES, sum(sizes) // (PARTS_IN_TURN * workers.in_flight)))
        is_shown = self.show_progress and sizes is not None
        with bytes_left(sum(sizes or ()), is_shown=is_shown, description="reading") as advance:
            works = ((part, (call_all, function, tasks[part])) for part in together)
            for part, results in in_order(works, start=lambda: workers):
                advance(sum((sizes or ())[part]))
                yield from results


def _payload(value: Any) -> Payload:
    if isinstance(value, np.ndarray):
        return {"array": value}
    return {"json": np.frombuffer(json.dumps(value, default=lambda one: one.item()).encode(), dtype=np.uint8)}


def _value(payload: Payload) -> Any:
    return payload["array"] if "array" in payload else json.loads(payload["json"].tobytes())


def values_of_records(
    records: Records, compute: Callable[[Records], Iterator[Any]], *, name: str, engine: Engine
) -> list[Any]:
    """The value of each record, or the `RanktapeError` that is in its place; those not kept are made, and kept.

    Args:
        records: The records.
        compute: Makes the values of a selection, in its order.
        name: As that of a `Measure`: with every version and every parameter.
        engine: Says whether anything is kept.
    """
    if not engine.use_cache or not len(records):
        return list(compute(records))
    values: list[Any] = [None] * len(records)
    for part in records.by_source():
        plan, own = WorkPlan(part.records), part.records

        def make(places: Sequence[int], own: Records = own) -> Iterator[Any]:
            return compute(own if len(places) == len(own) else own.take(places))

        found = values_of_keys(own.reader, plan.groups, plan.keys, make, name=name)
        for place, value in zip(part.places.tolist(), found, strict=True):
            values[place] = value
    return values


def values_of_keys(  # where, of what, and how
    reader: RecordOrigin,
    groups: Sequence[tuple[str, slice]],
    keys: Keys,
    make: Callable[[Sequence[int]], Iterator[Any]],
    *,
    name: str,
    max_rows: int = MAX_ROWS,
) -> list[Any]:
    """The value of each key; those not kept are made, in their order, and kept, but for errors.

    Args:
        reader: What they are kept with.
        groups: The paths of the groups, and which keys each has.
        keys: The keys.
        make: Makes the values of the keys at some places; a `RanktapeError` in the place of one that fails.
        name: As that of a `Measure`: with every version and every parameter.
        max_rows: Values of one object.
    """
    cache = Cache(reader, name=name, groups={path for path, _ in groups}, warn=warn_once)
    values: dict[int, Any] = {}
    for path, places in groups:
        for one in cache.find(path)[0]:
            looked = one.look_up(keys[places])
            (known,) = np.nonzero(looked >= 0)
            found = map(_value, one.columns.take(looked[known]).payloads())
            values |= zip((int(places.start) + known).tolist(), found, strict=True)
    missing = [place for place in range(len(keys)) if place not in values]
    made = make(missing) if missing else iter(())
    for path, places in groups:
        own = [place for place in range(int(places.start), int(places.stop)) if place not in values]
        for start in range(0, len(own), max_rows):
            chosen = own[start : start + max_rows]
            fresh = dict(zip(chosen, itertools.islice(made, len(chosen)), strict=True))
            values |= fresh
            good = [place for place, value in fresh.items() if not isinstance(value, RanktapeError)]
            if good:
                cache.keep(path, keys[good], Columns.of_payloads([_payload(fresh[place]) for place in good]))
    return [values[place] for place in range(len(keys))]


def value_of_all(records: Sequence[Records], about: Sequence[str], make: Callable[[], Any], *, name: str) -> Any:
    """A value of records together, made unless it was kept under the keys of these and all that was asked.

    A `RanktapeError` is not kept. The name holds the version; the value is kept with the first records.
    """
    words = [word for one in records for word in (str(len(one)), WorkPlan(one).keys.tobytes().hex())]
    path = f"together/{name_of_text(chr(0).join([*words, *about]))}"
    keys = np.zeros((1, 2), dtype=np.uint64)
    (value,) = values_of_keys(records[0].reader, [(path, slice(0, 1))], keys, lambda _: iter([make()]), name=name)
    return value


@functools.cache
def warn_once(text: str) -> None:
    """Say on stderr what costs time and no answer."""
    say(f"warning: {printable(text)}", err=True)


@contextlib.contextmanager
def work_bar(description: str) -> Iterator[Callable[[int, int], object]]:
    """A function to call with the pieces of work done and all that are known; a bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@dataclass(slots=True)
class _Screen:
    """What is shown on the terminal, and for how many questions that are asked at the same time."""

    shown: Progress
    num_users: int = 0


_screens: list[_Screen] = []
"""The one that is shown just now, if there is one: a terminal has room for one."""


_steps: ContextVar[list[int] | None] = ContextVar("steps", default=None)
"""The number of the step that is worked on, and how many there are; None for work that has none."""


@contextlib.contextmanager
def steps(total: int) -> Iterator[None]:
    """Work in so many steps, each of which `next_step` begins: bars of bytes say which one it is."""
    token = _steps.set([0, total])
    try:
        yield
    finally:
        _steps.reset(token)


def next_step() -> None:
    """Begin the next step of work that has several."""
    if (known := _steps.get()) is not None:
        known[0] += 1


@contextlib.contextmanager
def one_step(description: str, *, is_shown: bool) -> Iterator[None]:
    """The next step of work that has several; a line says which, if stderr is a terminal and it is to be shown.

    The line is gone when the step is over, so that what is printed then stands alone.
    """
    next_step()
    known = _steps.get()
    if known is None or not is_shown or not sys.stderr.isatty():
        yield
        return
    with passing_line(f"{known[0]} of {known[1]}: {description}"):
        yield


@contextlib.contextmanager
def bytes_left(total: int, *, is_shown: bool, description: str) -> Iterator[Callable[[int], object]]:
    """A function to call with the bytes that have been read, or were known already, out of `total`.

    It moves a bar with bytes, rate and the time left, if stderr is a terminal and it is to be shown. Each question has
    a line of its own, which never runs backwards, and is gone when the question is answered; of work in several steps
    it begins with the number of the step.
    """
    if not is_shown or not sys.stderr.isatty():
        yield lambda _: None
        return
    if not _screens:
        _screens.append(_Screen(_started()))
    screen = _screens[0]
    screen.num_users += 1
    number = "" if (known := _steps.get()) is None else f"{known[0]} of {known[1]}: "
    task = screen.shown.add_task(number + description, total=total)
    try:
        yield lambda nbytes: screen.shown.advance(task, nbytes)
    finally:
        screen.num_users -= 1
        screen.shown.refresh()
        screen.shown.remove_task(task)
        if not screen.num_users:
            _screens.clear()
            screen.shown.stop()


def _started() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    shown = Progress(*columns, console=Console(stderr=True), transient=True)
    shown.start()
    return shown
