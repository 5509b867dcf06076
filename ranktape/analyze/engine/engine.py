"""Measures records in this process, in several processes of this machine, or on a Dask cluster.

Results come in the order of the records or tasks and are bit-identical for any number of workers. Slow results that
depend on more than one measure's columns are cached as values: of records, of keys, or of several records together. A
value is an array or anything that Python's JSON can represent, including NaN and infinities.
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
    CacheWriter,
    Columns,
    Keys,
    Payload,
    record_keys,
    text_digest,
)
from ranktape.analyze.engine.executors import ADDRESS, Workers, deferring_exit, get_workers, in_order
from ranktape.errors import RanktapeError, StorageError, UsageError
from ranktape.storage import Record, Records
from ranktape.storage.places.failures import printable
from ranktape.storage.records.record import RecordOrigin

if TYPE_CHECKING:
    from rich.progress import Progress

BATCH_NBYTES = 128 << 20
"""Maximum size of a batch of records that are measured together, in bytes."""

BATCH_RECORDS = 1024
"""Maximum number of records that are measured together."""

RETAINED_NBYTES = 64 << 20
"""Amount of freed memory that the allocator retains, in bytes. glibc allows blocks of at most half of it."""

MIN_PARTS_PER_SLOT = 4
"""Minimum number of parts into which tasks are divided, for each part that may be in flight."""

KEY_COLUMNS = ("site", "checksum", "dtype", "compute_dtype", "shape", "sample_dim", "keep", "nbytes")
"""The columns that identify a record and its content among the records of a group."""

MAX_ROWS = 1 << 13
"""Maximum number of values in one object, and so the most that an interrupted question loses."""

_LOOKS_AHEAD = 8
"""Number of groups whose cached objects are fetched in advance."""

_FILES = "files"
"""The group of the records of a folder."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`, from <malloc.h>."""

Task = TypeVar("Task")
Result = TypeVar("Result")
Value = TypeVar("Value")


class Measure(Protocol):
    """A measurement of records. It can be pickled."""

    @property
    def name(self) -> str:
        """The name in the cache. Two measures with the same name give the same columns for a record.

        It contains the version of the measure and all its parameters, in characters that are allowed in a key.
        """
        ...

    def __call__(self, records: Iterable[Record], /) -> Columns:
        """Read the records one by one and measure them.

        Raises:
            DataError: the bytes of a record are missing or damaged.
            StorageError: the store cannot be read.
            UsageError: the stored data of a record is not sufficient.
        """
        ...


Measured = tuple[Columns, dict[int, RanktapeError], str]
"""The columns of the records of a batch that did not fail, the error of each record that failed by its index, and why
the columns could not be written to the cache (empty if they were written, or if there is no cache)."""


def measure_batch(
    records: Records, keys: Keys, measure: Measure, writer: CacheWriter | None, *, raises: bool
) -> Measured:
    """Measure records and write their columns to the cache.

    Raises:
        RanktapeError: what the measure raises for the first record that fails, if `raises` is set.
    """
    keep_freed_memory()
    errors: dict[int, RanktapeError] = {}
    try:
        columns = measure(records)
    except RanktapeError:
        if raises:
            raise
        parts = []
        for index, record in enumerate(each_record(records)):
            try:
                parts.append(measure([raise_if_error(record)]))
            except RanktapeError as error:
                errors[index] = error
        columns = Columns.join(parts)
    if writer is None or not columns.num_records:
        return columns, errors, ""
    measured = np.setdiff1d(np.arange(len(keys)), list(errors)) if errors else slice(None)
    try:
        with deferring_exit():
            writer.put(keys[measured], columns)
    except StorageError as error:
        return columns, errors, str(error)
    return columns, errors, ""


def each_record(records: Sequence[Record | RanktapeError]) -> Iterator[Record | RanktapeError]:
    """The records in order, with the error in place of each record that cannot be opened."""
    num_yielded = 0
    try:
        for record in records:
            yield record
            num_yielded += 1
    except RanktapeError:
        for index in range(num_yielded, len(records)):
            try:
                yield records[index]
            except RanktapeError as error:
                yield error


def raise_if_error(value: Value | RanktapeError) -> Value:
    """The argument, unless it is an error.

    Raises:
        RanktapeError: the argument, if it is an error.
    """
    if isinstance(value, RanktapeError):
        raise value
    return value


@functools.cache
def keep_freed_memory(nbytes: int = RETAINED_NBYTES) -> None:
    """Make the allocator reuse the memory of a chunk, because page faults take as long as the counting.

    glibc does so by itself after the first large block is freed, unless MALLOC_TRIM_THRESHOLD_ is set, which Dask does
    for its workers. Blocks of more than half of `nbytes` are returned to the system. Older versions of glibc accept at
    most the default.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries lack it
        mallopt(_M_MMAP_THRESHOLD, nbytes // 2)
        mallopt(_M_TRIM_THRESHOLD, nbytes)


def call_all(function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
    """The results of a function for several tasks."""
    keep_freed_memory()
    return [function(task) for task in tasks]


def split_by_size(
    sizes: Sequence[int], *, max_nbytes: int = BATCH_NBYTES, max_number: int = BATCH_RECORDS
) -> list[slice]:
    """Consecutive slices of items with these sizes in bytes; each has one item or stays within both bounds."""
    slices = []
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and (total + size > max_nbytes or index - start >= max_number):
            slices.append(slice(start, index))
            start, total = index, 0
        total += size
    return [*slices, slice(start, len(sizes))] if sizes else []


class WorkPlan:
    """The groups, keys and sizes of the records of one source, from columns alone."""

    def __init__(self, records: Records) -> None:
        """Read the columns."""
        self._files: Sequence[Any] = getattr(records, "files", ())
        self.groups = [(_FILES, slice(0, len(records)))] if self._files else list(records.groups())
        """The path of each group of records, and its slice of the selection."""
        self._records = records
        self.sizes: list[int] = records.column("nbytes").tolist()
        """Size of each record, in bytes."""

    @property
    def paths(self) -> list[str]:
        """The distinct groups of the records."""
        return list(dict.fromkeys(path for path, _ in self.groups))

    @functools.cached_property
    def keys(self) -> Keys:
        """The keys of the records."""
        if self._files:
            return record_keys([[_file_state(file) for file in self._files]])
        return record_keys([self._records.stored(name) for name in KEY_COLUMNS])


def _file_state(file: Any) -> str:
    """A text that changes when a file is written again."""
    status: os.stat_result | None = None
    with suppress(OSError):  # reading the file reports the error
        status = file.path.stat()
    if status is None:
        return f"{file.site}\n{os.urandom(16).hex()}"
    # The last two change even if a file is overwritten by one of the same size and modification time.
    return "\n".join(map(str, (file.site, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Span:
    """Consecutive records of one group of one source. Those that are not cached are measured together."""

    cached: Sequence[tuple[Columns, NDArray[np.int64]]]
    """Cached objects with some of its records, and the index of each record in the object, or -1."""
    missing: NDArray[np.int64]
    """Indices in the span of the records that are not cached."""
    work: tuple[Any, ...] | None
    """The function that measures these and its arguments; None if all are cached."""
    cache: Cache | None
    num_records: int
    nbytes: int
    """Size of all its records, in bytes."""

    def joined(self, measured: Measured | None) -> tuple[Columns, dict[int, RanktapeError]]:
        """The columns of the records that did not fail, and the errors of the others by their index in the span."""
        parts, indices = [], [np.zeros(0, dtype=np.int64)]
        is_open = np.ones(self.num_records, dtype=np.bool_)
        for columns, object_rows in self.cached:
            (rows,) = np.nonzero((object_rows >= 0) & is_open)
            is_open[rows] = False
            if rows.size:
                parts.append(columns.take(object_rows[rows]))
                indices.append(rows)
        errors: dict[int, RanktapeError] = {}
        if measured is not None:
            columns, failed, _ = measured
            errors = {int(self.missing[index]): error for index, error in failed.items()}
            if columns.num_records:
                parts.append(columns)
                indices.append(np.setdiff1d(self.missing, list(errors)))
        return Columns.join(parts).take(np.argsort(np.concatenate(indices))), errors


def _spans(
    records: Records, plan: WorkPlan, cache: Cache | None, measure: Measure, *, raises: bool
) -> Generator[_Span, None, None]:
    """The spans of all records of one source, in order."""
    for (path, group), (objects, damaged) in zip(plan.groups, _prefetched_objects(plan, cache), strict=True):
        first, last = int(group.start), int(group.stop)
        keys = np.zeros((last - first, 2), dtype=np.uint64) if cache is None else plan.keys[first:last]
        lookups = [(cache_object.columns, cache_object.index_of(keys)) for cache_object in objects]
        is_cached = np.zeros(last - first, dtype=np.bool_)
        for _, object_rows in lookups:
            is_cached |= object_rows >= 0
        sizes = np.array(plan.sizes[first:last], dtype=np.int64)
        # Cached records are not read and do not count towards the size of a batch.
        for part in split_by_size(np.where(is_cached, 0, sizes).tolist()):
            missing, work = np.flatnonzero(~is_cached[part]), None
            if missing.size:
                chosen = records.take((first + part.start + missing).tolist())
                writer = None if cache is None else cache.writer(path, damaged=damaged)
                work = (partial(measure_batch, raises=raises), chosen, keys[part][missing], measure, writer)
            yield _Span(
                cached=[
                    (columns, object_rows[part]) for columns, object_rows in lookups if (object_rows[part] >= 0).any()
                ],
                missing=missing,
                work=work,
                cache=cache,
                num_records=part.stop - part.start,
                nbytes=int(sizes[part].sum()),
            )


def _prefetched_objects(plan: WorkPlan, cache: Cache | None) -> Iterator[tuple[Sequence[CacheObject], Sequence[str]]]:
    """The results of `Cache.find` for all groups in order. Some are fetched in advance."""
    if cache is None:
        yield from itertools.repeat(((), ()), len(plan.groups))
        return
    with ThreadPoolExecutor(_LOOKS_AHEAD) as pool:
        pending = deque[Future[tuple[Sequence[CacheObject], Sequence[str]]]]()
        try:
            for path, _ in plan.groups:
                pending.append(pool.submit(cache.find, path))
                if len(pending) > _LOOKS_AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How questions are answered: the workers, the cache and the progress bar."""

    workers: int = 1
    """Number of processes of this machine that read and count; with 1, only this process does."""
    scheduler: str | None = None
    """Address of a Dask scheduler, whose workers replace processes of this machine."""
    use_cache: bool = True
    """Whether measurements are cached beside the run and read from there."""
    show_progress: bool = False
    """Whether a bar shows bytes, rate and remaining time, if stderr is a terminal."""

    def __post_init__(self) -> None:
        """Check the arguments, even if every answer turns out to be cached.

        Raises:
            UsageError: `workers` is less than 1, or `scheduler` is not a valid address.
        """
        if self.workers < 1:
            raise UsageError(f"workers={self.workers} is not a number of processes: give 1 or more")
        if self.scheduler is not None and not ADDRESS.fullmatch(self.scheduler):
            raise UsageError(f"scheduler {self.scheduler!r} is no address of a Dask scheduler: give tcp://HOST:PORT")

    def columns(self, records: Records, measure: Measure) -> Iterator[Columns]:
        """The columns of a measure for the records in order, a few hundred at a time, from the cache if possible.

        Raises:
            DataError: a record's bytes are missing or damaged.
            StorageError: the store cannot be read.
            UsageError: the stored data of a record is not sufficient, or Dask is not installed.
            WorkersError: the processes or the cluster are not available, or were lost.
        """
        for columns, _ in self._measure(records, measure, raises=True):
            yield columns

    def measure(self, records: Records, measure: Measure) -> Iterator[Payload]:
        """The result of a measure for each record, in order. Raises the errors of `columns`."""
        for columns in self.columns(records, measure):
            yield from columns.payloads()

    def measure_each(self, records: Records, measure: Measure) -> Iterator[Payload | RanktapeError]:
        """The result of a measure for each record, in order, with the error in place of each record that fails.

        Raises:
            UsageError: Dask is not installed.
            WorkersError: the processes or the cluster are not available, or were lost.
        """
        for columns, errors in self._measure(records, measure, raises=False):
            payloads = iter(columns.payloads())
            for index in range(columns.num_records + len(errors)):
                yield errors[index] if index in errors else next(payloads)

    def _measure(
        self, records: Records, measure: Measure, *, raises: bool
    ) -> Iterator[tuple[Columns, dict[int, RanktapeError]]]:
        if not len(records):
            return
        parts = [(part.records, WorkPlan(part.records)) for part in records.parts()]
        caches: dict[str, Cache | None] = {source_records.reader.url: None for source_records, _ in parts}
        for url in caches if self.use_cache else ():
            same_source = [(source_records, plan) for source_records, plan in parts if source_records.reader.url == url]
            groups = [path for _, plan in same_source for path in plan.paths]
            caches[url] = Cache(same_source[0][0].reader, name=measure.name, groups=groups, warn=warn_once)
        spans = itertools.chain.from_iterable(
            _spans(source_records, plan, caches[source_records.reader.url], measure, raises=raises)
            for source_records, plan in parts
        )
        total = sum(sum(plan.sizes) for _, plan in parts)
        works = ((span, span.work) for span in spans)
        with (
            bytes_progress(total, is_shown=self.show_progress, description="counting") as advance,
            closing(in_order(works, start=self._workers)) as done,
        ):
            for span, measured in done:
                advance(span.nbytes)
                if measured is not None and measured[-1] and span.cache is not None:
                    span.cache.stop_writing(measured[-1])
                yield span.joined(measured)

    def _workers(self) -> Workers:
        return get_workers(workers=self.workers, scheduler=self.scheduler)

    def map(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], *, sizes: Sequence[int] | None = None
    ) -> Iterator[Result]:
        """The results of a function for each task, in order. The function and the tasks can be pickled.

        `sizes` are the bytes that each task reads. If they are given, small tasks are sent together.

        Raises:
            RanktapeError: what the function raises.
            WorkersError: the processes or the cluster are not available, or were lost.
        """
        if not tasks:
            return
        workers = self._workers()
        batches = [slice(index, index + 1) for index in range(len(tasks))]
        if sizes is not None and workers.in_flight > 1:
            # All workers should be busy until near the end.
            batches = split_by_size(
                sizes, max_nbytes=min(BATCH_NBYTES, sum(sizes) // (MIN_PARTS_PER_SLOT * workers.in_flight))
            )
        is_shown = self.show_progress and sizes is not None
        with bytes_progress(sum(sizes or ()), is_shown=is_shown, description="reading") as advance:
            works = ((part, (call_all, function, tasks[part])) for part in batches)
            for part, results in in_order(works, start=lambda: workers):
                advance(sum((sizes or ())[part]))
                yield from results


def _payload(value: Any) -> Payload:
    if isinstance(value, np.ndarray):
        return {"array": value}
    return {"json": np.frombuffer(json.dumps(value, default=lambda scalar: scalar.item()).encode(), dtype=np.uint8)}


def _value(payload: Payload) -> Any:
    return payload["array"] if "array" in payload else json.loads(payload["json"].tobytes())


def cached_record_values(
    records: Records, compute: Callable[[Records], Iterator[Any]], *, name: str, engine: Engine
) -> list[Any]:
    """The value of each record, or its `RanktapeError`. Values that are not cached are computed and cached.

    Args:
        records: The records.
        compute: Computes the values of a selection, in order.
        name: A name like that of a `Measure`, with every version and every parameter.
        engine: Determines whether the cache is used.
    """
    if not engine.use_cache or not len(records):
        return list(compute(records))
    values: list[Any] = [None] * len(records)
    for part in records.by_source():
        plan, source_records = WorkPlan(part.records), part.records

        def compute_missing(indices: Sequence[int], source_records: Records = source_records) -> Iterator[Any]:
            return compute(source_records if len(indices) == len(source_records) else source_records.take(indices))

        part_values = cached_values(source_records.reader, plan.groups, plan.keys, compute_missing, name=name)
        for index, value in zip(part.places.tolist(), part_values, strict=True):
            values[index] = value
    return values


def cached_values(  # location, subject, and method
    reader: RecordOrigin,
    groups: Sequence[tuple[str, slice]],
    keys: Keys,
    make: Callable[[Sequence[int]], Iterator[Any]],
    *,
    name: str,
    max_rows: int = MAX_ROWS,
) -> list[Any]:
    """The value of each key. Values that are not cached are computed in order and cached, except errors.

    Args:
        reader: The origin of the records, which determines the location of the cache.
        groups: The path of each group, and its slice of the keys.
        keys: The keys.
        make: Computes the values of the keys at the given indices, with a `RanktapeError` in place of one that fails.
        name: A name like that of a `Measure`, with every version and every parameter.
        max_rows: Maximum number of values in one object.
    """
    cache = Cache(reader, name=name, groups={path for path, _ in groups}, warn=warn_once)
    values: dict[int, Any] = {}
    for path, group in groups:
        for cache_object in cache.find(path)[0]:
            object_rows = cache_object.index_of(keys[group])
            (cached,) = np.nonzero(object_rows >= 0)
            loaded = map(_value, cache_object.columns.take(object_rows[cached]).payloads())
            values |= zip((int(group.start) + cached).tolist(), loaded, strict=True)
    missing = [index for index in range(len(keys)) if index not in values]
    computed = make(missing) if missing else iter(())
    for path, group in groups:
        group_missing = [index for index in range(int(group.start), int(group.stop)) if index not in values]
        for start in range(0, len(group_missing), max_rows):
            chosen = group_missing[start : start + max_rows]
            fresh = dict(zip(chosen, itertools.islice(computed, len(chosen)), strict=True))
            values |= fresh
            valid = [index for index, value in fresh.items() if not isinstance(value, RanktapeError)]
            if valid:
                cache.write(path, keys[valid], Columns.of_payloads([_payload(fresh[index]) for index in valid]))
    return [values[index] for index in range(len(keys))]


def cached_joint_value(
    records: Sequence[Records], parameters: Sequence[str], make: Callable[[], Any], *, name: str
) -> Any:
    """A value that depends on several selections of records, from the cache or from `make`.

    The key consists of the keys of the records and `about`. A `RanktapeError` is not cached. `name` contains the
    version. The value is cached with the first selection.
    """
    texts = [text for selection in records for text in (str(len(selection)), WorkPlan(selection).keys.tobytes().hex())]
    path = f"together/{text_digest(chr(0).join([*texts, *parameters]))}"
    keys = np.zeros((1, 2), dtype=np.uint64)
    (value,) = cached_values(records[0].reader, [(path, slice(0, 1))], keys, lambda _: iter([make()]), name=name)
    return value


@functools.cache
def warn_once(text: str) -> None:
    """Print a warning on stderr, once for each text, about something that costs time but does not change the answer."""
    say(f"warning: {printable(text)}", err=True)


@contextlib.contextmanager
def work_bar(description: str) -> Iterator[Callable[[int, int], object]]:
    """A function that takes the numbers of finished and of known items. It moves a bar if stderr is a terminal."""
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
    """A progress display on the terminal, and the number of concurrent questions that use it."""

    progress: Progress
    num_users: int = 0


_screens: list[_Screen] = []
"""The current display, if there is one. A terminal has only one."""


_steps: ContextVar[list[int] | None] = ContextVar("steps", default=None)
"""The number of the current step and the number of steps; None if the work has no steps."""


@contextlib.contextmanager
def steps(total: int) -> Iterator[None]:
    """Divide the work into steps, each of which starts with `next_step`. Progress bars show the step's number."""
    token = _steps.set([0, total])
    try:
        yield
    finally:
        _steps.reset(token)


def next_step() -> None:
    """Start the next step, if the work has steps."""
    if (step := _steps.get()) is not None:
        step[0] += 1


@contextlib.contextmanager
def step_line(description: str, *, is_shown: bool) -> Iterator[None]:
    """Run the next step. A line names it if the work has steps, `is_shown` is set and stderr is a terminal.

    The line is removed when the step is finished, before anything else is printed.
    """
    next_step()
    step = _steps.get()
    if step is None or not is_shown or not sys.stderr.isatty():
        yield
        return
    with passing_line(f"{step[0]} of {step[1]}: {description}"):
        yield


@contextlib.contextmanager
def bytes_progress(total: int, *, is_shown: bool, description: str) -> Iterator[Callable[[int], object]]:
    """A function to call with the number of bytes, of `total`, that have been read or were cached.

    It moves a bar with bytes, rate and remaining time if `is_shown` is set and stderr is a terminal. Each question has
    its own line, which is removed when the question is answered. If the work has steps, the line starts with the number
    of the step.
    """
    if not is_shown or not sys.stderr.isatty():
        yield lambda _: None
        return
    if not _screens:
        _screens.append(_Screen(_start_progress()))
    screen = _screens[0]
    screen.num_users += 1
    number = "" if (step := _steps.get()) is None else f"{step[0]} of {step[1]}: "
    task = screen.progress.add_task(number + description, total=total)
    try:
        yield lambda nbytes: screen.progress.advance(task, nbytes)
    finally:
        screen.num_users -= 1
        screen.progress.refresh()
        screen.progress.remove_task(task)
        if not screen.num_users:
            _screens.clear()
            screen.progress.stop()


def _start_progress() -> Progress:
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
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    progress.start()
    return progress
