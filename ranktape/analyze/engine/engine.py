"""Has the work of a question done: by this process, several of this machine, or a Dask cluster.

Whatever the number of workers, results come in the order of what was asked for, and are the same to the last bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ranktape.analyze.console import say
from ranktape.analyze.engine.cache import Cache
from ranktape.analyze.engine.cache_object import DamagedObjectError
from ranktape.analyze.engine.executors import in_order, workers_of
from ranktape.analyze.engine.plan import Batch, Calls, RecordSpan, WorkPlan, call_all, measure_batch, shares
from ranktape.analyze.engine.progress import BytesLeft, bytes_left
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from ranktape.analyze.engine.cache_object import Measure, Payload
    from ranktape.analyze.engine.executors import Workers
    from ranktape.analyze.engine.plan import Measured
    from ranktape.storage import Record, Records

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
        if not len(records):
            return
        plan = WorkPlan(records)
        cache = Cache(records.reader, measure, groups=plan.paths, warn=_warn_once) if self.use_cache else None
        with bytes_left(is_shown=self.show_progress, description="counting") as bar:
            question = _Question(records, measure, cache=cache, bar=bar)
            bar.expect(plan.nbytes)
            with closing(plan.spans(cache)) as spans:
                works = ((span, question.work(span)) for span in spans)
                for span, measured in in_order(works, start=self._workers):
                    yield from question.payloads(span, measured)

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
        together = alone if sizes is None or workers.in_flight == 1 else shares(sizes)
        with bytes_left(is_shown=self.show_progress and sizes is not None, description="reading") as bar:
            bar.expect(sum(sizes or ()))
            works = ((part, (call_all, Calls(function=function, tasks=tasks[part]))) for part in together)
            for part, results in in_order(works, start=lambda: workers):
                bar.advance(sum((sizes or ())[part]))
                yield from results


class _Question:
    """What is measured of the records of a selection."""

    def __init__(self, records: Records, measure: Measure, *, cache: Cache | None, bar: BytesLeft) -> None:
        self._records = records
        self._measure = measure
        self._cache = cache
        self._bar = bar
        self._accepts: Callable[[Payload], bool] = getattr(measure, "accepts", lambda _: True)

    def work(self, span: RecordSpan) -> tuple[Callable[[Any], Any], Any] | None:
        """The measuring of the records that are not known; None where all are."""
        self._bar.advance(sum(span.size(place) for place in span.known))
        if not span.missing:
            return None
        shelf = None if self._cache is None else self._cache.shelf(span.group, damaged=span.damaged)
        keys = tuple(map(span.key, span.missing))
        return measure_batch, Batch(records=self._some(span.missing), keys=keys, measure=self._measure, shelf=shelf)

    def _some(self, places: Sequence[int]) -> tuple[Iterable[Record], ...]:
        """The records at some places, ascending; fit to be sent."""
        starts = [place for place, before in zip(places, [None, *places], strict=False) if place - 1 != before]
        stops = [place + 1 for place, behind in zip(places, [*places[1:], None], strict=True) if place + 1 != behind]
        runs = [self._records[start:stop] for start, stop in zip(starts, stops, strict=True)]
        # To look at the records of files is to read them.
        return tuple(run if run.is_costly else list(run) for run in runs)

    def payloads(self, span: RecordSpan, result: Measured | None) -> Iterator[Payload]:
        """The payloads of a span, of which the result has those that were not known."""
        measured: dict[int, Payload] = {}
        if result is not None:
            if result.failure and self._cache is not None:
                self._cache.give_up(result.failure)
            measured = dict(zip(span.missing, result.payloads, strict=True))
            self._bar.advance(sum(map(span.size, measured)))
        for place in span.places:
            yield measured.pop(place) if place in measured else self._known(span, place)

    def _known(self, span: RecordSpan, place: int) -> Payload:
        """A payload out of the cache; one that nobody can have measured is measured again."""
        try:
            payload = span.known[place].payload(span.key(place))
        except DamagedObjectError:
            return self._measure(self._records[place])
        return payload if self._accepts(payload) else self._measure(self._records[place])


@functools.cache
def _warn_once(text: str) -> None:
    """Say on stderr what costs time and no answer."""
    say(f"warning: {printable(text)}", err=True)
