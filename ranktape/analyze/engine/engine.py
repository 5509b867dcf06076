"""Who does the work of a question: this process, several of this machine, or a Dask cluster?

Whatever the number of workers, results come in the order of what was asked for, and are the same to the last bit.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ranktape.analyze.console import say
from ranktape.analyze.engine.batch import Batch, Calls, call_all, measure_batch, shares
from ranktape.analyze.engine.cache import Cache
from ranktape.analyze.engine.cache_object import DamagedObjectError
from ranktape.analyze.engine.executors import ended_on_failure, executor_of
from ranktape.analyze.engine.plan import Plan, Span
from ranktape.analyze.engine.progress import BytesLeft, bytes_left
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from ranktape.analyze.engine.executors import Executor, Promise
    from ranktape.analyze.engine.measure import Measure, Payload
    from ranktape.storage import Record, Records

Task = TypeVar("Task")
Result = TypeVar("Result")

_SPANS_AHEAD = 32
"""Spans that are held back at most while a piece of work is waited for."""


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
                `executor_of` says.
            WorkersError: the processes or the cluster cannot be had, or were lost.
        """
        if not len(records):
            return
        plan = Plan(records)
        cache = None
        if self.use_cache:
            cache = Cache(records.reader, measure, groups=plan.paths, warn=_warn_once)
        with bytes_left(is_shown=self.show_progress, description="counting") as bar:
            work = _Measuring(self, records, measure, cache=cache, bar=bar)
            yield from work.payloads(plan)

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
        executor = executor_of(workers=self.workers, scheduler=self.scheduler)
        alone = [slice(place, place + 1) for place in range(len(tasks))]
        together = alone if sizes is None or executor.in_flight == 1 else shares(sizes)
        promises: deque[tuple[slice, Promise]] = deque()
        with bytes_left(is_shown=self.show_progress and sizes is not None, description="reading") as bar:
            bar.expect(sum(sizes or ()))
            with ended_on_failure(lambda: executor, lambda: [promise for _, promise in promises]):
                for part in [*together, None]:
                    if part is not None:
                        calls = Calls(function=function, tasks=tasks[part])
                        promises.append((part, executor.submit(call_all, calls)))
                    while promises and (part is None or len(promises) >= executor.in_flight):
                        done, promise = promises[0]
                        results = promise.result()
                        promises.popleft()
                        bar.advance(sum((sizes or ())[done]))
                        yield from results


class _Measuring:
    """One question to the records of a selection."""

    def __init__(
        self, engine: Engine, records: Records, measure: Measure, *, cache: Cache | None, bar: BytesLeft
    ) -> None:
        self._engine = engine
        self._records = records
        self._measure = measure
        self._cache = cache
        self._bar = bar
        self._accepts: Callable[[Payload], bool] = getattr(measure, "accepts", lambda _: True)
        self._given_out: deque[tuple[Span, Promise | None]] = deque()
        self._executor: Executor | None = None

    def payloads(self, plan: Plan) -> Iterator[Payload]:
        """The payload of each record."""
        self._bar.expect(plan.nbytes)
        num_promised = 0
        spans = plan.spans(self._cache)
        with closing(spans), ended_on_failure(lambda: self._executor, self._promises):
            for span in spans:
                promise = self._promised(span)
                num_promised += promise is not None
                self._given_out.append((span, promise))
                in_flight = 1 if self._executor is None else self._executor.in_flight
                # What is known is given at once, where nothing is waited for in front of it.
                while self._given_out and (
                    self._given_out[0][1] is None or num_promised >= in_flight or len(self._given_out) > _SPANS_AHEAD
                ):
                    num_promised -= self._given_out[0][1] is not None
                    yield from self._taken()
            while self._given_out:
                yield from self._taken()

    def _promised(self, span: Span) -> Promise | None:
        """Have the records measured that are not known."""
        missing = span.missing
        self._bar.advance(sum(span.size(place) for place in span.known))
        if not missing:
            return None
        if self._executor is None:
            self._executor = executor_of(workers=self._engine.workers, scheduler=self._engine.scheduler)
        shelf = None if self._cache is None else self._cache.shelf(span.group, damaged=span.damaged)
        batch = Batch(
            records=self._some(missing),
            keys=tuple(map(span.key, missing)),
            measure=self._measure,
            shelf=shelf,
        )
        return self._executor.submit(measure_batch, batch)

    def _some(self, places: Sequence[int]) -> tuple[Iterable[Record], ...]:
        """The records at some places, ascending; fit to be sent."""
        starts = [place for place, before in zip(places, [None, *places], strict=False) if place - 1 != before]
        stops = [place + 1 for place, behind in zip(places, [*places[1:], None], strict=True) if place + 1 != behind]
        runs = [self._records[start:stop] for start, stop in zip(starts, stops, strict=True)]
        # To look at the records of files is to read them.
        return tuple(run if run.is_costly else list(run) for run in runs)

    def _taken(self) -> Iterator[Payload]:
        """The payloads of the span that was given out first."""
        span, promise = self._given_out[0]
        measured: dict[int, Payload] = {}
        if promise is not None:
            result = promise.result()
            if result.failure and self._cache is not None:
                self._cache.give_up(result.failure)
            measured = dict(zip(span.missing, result.payloads, strict=True))
            self._bar.advance(sum(map(span.size, measured)))
        self._given_out.popleft()
        for place in span.places:
            yield measured.pop(place) if place in measured else self._known(span, place)

    def _known(self, span: Span, place: int) -> Payload:
        """A payload out of the cache; one that nobody can have measured is measured again."""
        try:
            payload = span.known[place].payload(span.key(place))
        except DamagedObjectError:
            return self._measure(self._records[place])
        return payload if self._accepts(payload) else self._measure(self._records[place])

    def _promises(self) -> list[Any]:
        return [promise for _, promise in self._given_out if promise is not None]


@functools.cache
def _warn_once(text: str) -> None:
    """Say on stderr what costs time and no answer."""
    say(f"warning: {printable(text)}", err=True)
