"""Has the work of a question done: by this process, several of this machine, or a Dask cluster.

Whatever the number of workers, results come in the order of what was asked for, and are the same to the last bit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ranktape.analyze.console import passing_line, say
from ranktape.analyze.engine.cache import Cache
from ranktape.analyze.engine.executors import Workers, in_order, workers_of
from ranktape.analyze.engine.plan import BATCH_NBYTES, Calls, RecordSpan, WorkPlan, call_all, shares, unless_failed
from ranktape.errors import RanktapeError
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from rich.progress import Progress

    from ranktape.analyze.engine.cache_object import Measure, Payload
    from ranktape.storage import Records


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A span of the records of one source."""

    span: RecordSpan
    records: Records
    """Those that the places of the span are in."""
    cache: Cache | None
    nbytes: int
    """Of the span."""


def _spans(parts: Sequence[tuple[Records, WorkPlan]], caches: Sequence[Cache | None]) -> Generator[_Piece, None, None]:
    for (records, plan), cache in zip(parts, caches, strict=True):
        with closing(plan.spans(cache)) as spans:
            for span in spans:
                nbytes = sum(plan.sizes[span.places.start : span.places.stop])
                yield _Piece(span=span, records=records, cache=cache, nbytes=nbytes)


def _measured(measure: Measure, records: Records, place: int) -> Payload | RanktapeError:
    try:
        return measure(records[place])
    except RanktapeError as error:
        return error


PARTS_IN_TURN = 4
"""Parts at least into which tasks are divided, for each that is given out at once."""

Task = TypeVar("Task")
Result = TypeVar("Result")


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

    def measure(self, records: Records, measure: Measure) -> Iterator[Payload]:
        """What a measure finds in each record, in their order; what is known already is not read again.

        The arrays may not be written to. At any time no more than a few batches of them are held.

        Raises:
            DataError: a record's bytes are missing or damaged.
            StorageError: the store cannot be read.
            UsageError: what was kept of a record does not answer the question; or of the engine itself, as
                `workers_of` says.
            WorkersError: the processes or the cluster cannot be had, or were lost.
        """
        yield from map(unless_failed, self._measure(records, measure, raises=True))

    def measure_each(self, records: Records, measure: Measure) -> Iterator[Payload | RanktapeError]:
        """The same; in the place of a record that fails the reason, and the rest goes on.

        Raises:
            UsageError: of the engine itself, as `workers_of` says.
            WorkersError: the processes or the cluster cannot be had, or were lost.
        """
        return self._measure(records, measure, raises=False)

    def _measure(self, records: Records, measure: Measure, *, raises: bool) -> Iterator[Payload | RanktapeError]:
        if not len(records):
            return
        parts = [(part.records, WorkPlan(part.records)) for part in records.parts()]
        caches = self._caches(parts, measure)
        accepts: Callable[[Payload], bool] = getattr(measure, "accepts", lambda _: True)
        total = sum(sum(plan.sizes) for _, plan in parts)
        with (
            bytes_left(total, is_shown=self.show_progress, description="counting") as advance,
            closing(_spans(parts, caches)) as spans,
        ):
            works = ((one, one.span.work(one.records, measure, one.cache, raises=raises)) for one in spans)
            for one, measured in in_order(works, start=self._workers):
                span, cache = one.span, one.cache
                advance(one.nbytes)
                if measured is not None and measured.failure and cache is not None:
                    cache.give_up(measured.failure)
                fresh = iter(() if measured is None else measured.payloads)
                for place in span.places:
                    if place not in span.known:
                        yield next(fresh)
                        continue
                    payload = span.payload(place)
                    # One that nobody can have measured is measured again.
                    is_good = payload is not None and accepts(payload)
                    yield payload if payload is not None and is_good else _measured(measure, one.records, place)

    def _caches(self, parts: Sequence[tuple[Records, WorkPlan]], measure: Measure) -> list[Cache | None]:
        """For each part what is known of its source: of one that comes in several parts it is looked up once."""
        if not self.use_cache:
            return [None] * len(parts)
        paths: dict[str, list[str]] = {}
        for records, plan in parts:
            paths.setdefault(records.reader.url, []).extend(plan.paths)
        found: dict[str, Cache] = {}
        for records, _ in parts:
            url = records.reader.url
            if url not in found:
                found[url] = Cache(records.reader, name=measure.name, groups=paths[url], warn=warn_once)
        return [found[records.reader.url] for records, _ in parts]

    def _workers(self) -> Workers:
        return workers_of(workers=self.workers, scheduler=self.scheduler)

    def map(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], *, sizes: Sequence[int] | None = None
    ) -> Iterator[Result]:
        """What a function makes of each task, in their order; both can be pickled. `sizes` are bytes that each reads.

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
            works = ((part, (call_all, Calls(function=function, tasks=tasks[part]))) for part in together)
            for part, results in in_order(works, start=lambda: workers):
                advance(sum((sizes or ())[part]))
                yield from results


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


@contextlib.contextmanager
def progress(total: int, *, description: str) -> Iterator[Callable[[], object]]:
    """A function to call after each of `total` pieces of work; it moves a bar if stderr is a terminal.

    Where `total` is 0 there is none: the work shows itself.
    """
    with work_bar(description) if total else contextlib.nullcontext(lambda *_: None) as show:
        numbers = itertools.count(1)
        yield lambda: show(next(numbers), total)


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
