"""Makes sure that enough iterations are complete on all ranks, and answers requests for further ones.

It runs in the writer process of rank 0, so that it outlives the trainers. It learns the state of all ranks only from
the store. When all ranks have committed an iteration, it writes the iteration commit. If too few of the planned
iterations become complete, it plans further ones. At the end, it writes the verdict. It uses no collectives, and no
rank waits for it.

Each request changes the plan, from an iteration on that no rank has reached. Its answer names the iterations. The plan
contains the request of each iteration, so that the successor of a killed coordinator gives the same answers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping

from ranktape.capture.settings.cadence import Cadence
from ranktape.capture.settings.options import CaptureOptions
from ranktape.errors import DataError, RanktapeError, RunFormatError, StorageError, UsageError
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import (
    Attempt,
    IterationPlan,
    RequestedIterations,
    is_attempt_there,
    is_whole,
    read_attempts,
    whole_iterations,
    write_plan,
)
from ranktape.storage.format.commit import finish_iteration
from ranktape.storage.format.documents import for_each
from ranktape.storage.format.layout import Mark
from ranktape.storage.format.live import Answer, Request, list_requests, read_request, write_answer
from ranktape.storage.format.progress import Progress, RunVerdict, read_progress, write_verdict
from ranktape.storage.maintenance.prune import drop_iteration, finish_drops
from ranktape.storage.places.backend import Backend

ASK_SECONDS = 1.0
"""Shortest time between two polls of a writer for a new plan, once all planned iterations are settled."""

_LEAST_NOTICE_SECONDS = 2.0

_REQUEST_POLL_SECONDS = 2.0
"""Time between two polls of the coordinator for requests."""

_RANKS_PER_SECOND = 100.0
"""Number of polls for new plans per second, of all ranks together, if there are many ranks."""


def max_ask_seconds(world_size: int) -> float:
    """Longest time between two polls of a writer for a new plan. It grows with the ranks, to limit the store's load."""
    return max(2.0, world_size / _RANKS_PER_SECOND)


_POLL_SECONDS = 0.25

QUIET_SECONDS = 20.0
"""Longest wait for ranks of which nothing arrives in the store, after the training has failed."""

_MAX_COUNTED_RANKS = 64
"""Largest number of ranks whose keys are counted."""

_MAX_POLL_SECONDS = 5.0


MAX_REQUESTED = 10_000
"""Largest number of requested iterations of an attempt. The plan, which all ranks read, contains all of them."""

MAX_REPLACED = 3
"""How often further iterations are planned for a request, if ranks learned of the previous ones too late."""

ENDED = "the training has ended"
"""The refusal of requests after the end of the training."""

_RECORDER = "a flight recorder stores the iterations that it holds: give neither a number of iterations nor settings"


class Coordinator:
    """Watches one attempt in a separate thread."""

    def __init__(
        self,
        backend: Backend,
        *,
        attempt: Attempt,
        options: CaptureOptions,
        cadence: Cadence,
        plan: IterationPlan,
        step: Callable[[], int],
        given_up: Callable[[], Mapping[int, str]] = dict,
        lost: Callable[[], str | None] = lambda: None,
        store_held: Callable[[str], int | str] = lambda _: ENDED,
        is_successor: bool = False,
    ) -> None:
        """Prepare to watch.

        Args:
            backend: The store of the run.
            attempt: The attempt to watch.
            options: The options of the capture.
            cadence: The iterations that may be captured.
            plan: The plan that all ranks know: the iterations that they capture without a request.
            step: Returns the current iteration of the training.
            given_up: Returns the ranks that record nothing, each with the reason.
            lost: Returns the reason why nothing more may be captured; None if there is none.
            store_held: Makes all ranks of a flight recorder store what they hold, given who requests it. It returns the
                current iteration of the training, or the refusal as text.
            is_successor: Whether a previous coordinator of the attempt was killed. All ranks may have settled
                iterations since.
        """
        self._backend = backend
        self._attempt = attempt
        self._options = options
        self._cadence = cadence
        self._step = step
        self._given_up = given_up
        self._lost = lost
        self._plan = dataclasses.replace(plan, is_done=False)
        self._store_held = store_held
        self._answered: set[str] = set()
        self._num_replaced: dict[str, int] = {}
        self._next_poll_at = 0.0
        self._poll_took_seconds = 0.0
        self._poll_began: float | None = None
        self._notices = 0
        self._started = (time.monotonic(), step())
        self._last_poll = self._started
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ranktape-coordinator", daemon=True)
        self._undecided = set(plan.iterations)
        self._committed: set[int] = set()
        self._not_recorded: set[int] = set()
        self._must_write_plan = is_successor
        self._seen: Progress | None = None
        self._lock = threading.Lock()
        self._earlier: list[tuple[Attempt, int]] | None = None
        self._is_whole: dict[int, bool] = {}
        self.complete: set[int] = set()
        self.problems: dict[str, str] = {}

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def note_commit(self, iteration: int) -> None:
        """Note that this rank has settled an iteration: it may now be complete on all ranks."""
        self._committed.add(iteration)
        if self._options.keep_last is not None:
            # Before the rank commits another iteration, so that there are never more than are kept.
            self._poll_progress()

    def finish(self, *, ended: str = "", has_failed: Callable[[], bool] = lambda: False) -> RunVerdict:
        """Stop watching, wait for the other ranks for at most `finish_timeout_seconds`, and write the verdict.

        Args:
            ended: What ended the training or the capture on purpose; empty if nothing did.
            has_failed: Returns whether the training has failed. If so, the wait ends when nothing more of the other
                ranks arrives in the store.
        """
        self._stop.set()
        self._thread.join()
        deadline = time.monotonic() + self._options.finish_timeout_seconds
        self._next_poll_at = 0.0
        size = self._attempt.launch.world_size
        pause, seen = _POLL_SECONDS, None
        arrived, arrived_at = None, time.monotonic()
        while True:
            self._answer(refusal=ENDED)
            progress = self._poll_progress()
            if progress is not None:
                if not is_attempt_there(self._backend, self._attempt):
                    break  # deleted or replaced: writing the verdict says so
                given_up = self._given_up()
                self.problems |= {f"rank {rank}": text for rank, text in given_up.items() if text}
                all_closed = len(progress.closed | given_up.keys()) == size
                done = progress.complete | progress.dropped
                is_planned = self._options.record_last is None
                is_enough = is_planned and len(done | set(self._attempt.completed)) >= self._options.target_iterations
                if all_closed or (progress.opened <= done and is_enough):
                    break
            now = time.monotonic()
            num_arrived = self._count_arrived(progress) if has_failed() else None
            if num_arrived is None or num_arrived != arrived:
                arrived, arrived_at = num_arrived, now
            if now > deadline or now - arrived_at > QUIET_SECONDS:
                break
            pause, seen = _pause_after(pause, is_news=progress != seen), progress
            time.sleep(pause)
        return write_verdict(self._backend, attempt=self._attempt, problems=self.problems, ended=ended)

    def _count_arrived(self, progress: Progress | None) -> list[int] | None:
        """The amount that the ranks that are not closed have stored, for comparison; None if the store fails."""
        if progress is None:
            return None
        ranks = sorted(set(self._attempt.launch.ranks) - progress.closed)[:_MAX_COUNTED_RANKS]
        try:
            keys = for_each(lambda rank: self._count_keys(progress, rank), ranks)
        except StorageError:
            return None
        return [*ranks, *keys, sum(map(len, progress.marks.values()))]

    def _count_keys(self, progress: Progress, rank: int) -> int:
        """The number of keys of the iterations that a rank has not settled."""
        path = self._attempt.path
        begun = layout.iterations_named(self._backend.list_names(layout.rank_path(path, rank)))
        unsettled = [iteration for iteration in begun if rank not in progress.marks.get(iteration, {})]
        groups = [layout.rank_iteration_path(path, rank, iteration) for iteration in unsettled]
        return sum(len(self._backend.list_keys(group)) for group in groups)

    def _watch(self) -> None:
        pause = _POLL_SECONDS
        seen = None
        while not self._stop.wait(pause):
            self._answer()
            is_news = bool(self._committed - self.complete - self._not_recorded)
            if self._plan.is_done or not (is_news or self._must_write_plan or self._lost()):
                pause = _POLL_SECONDS
                continue
            progress = self._poll_progress()
            pause, seen = _pause_after(pause, is_news=progress != seen), progress
            if progress is None:
                continue
            try:
                self._decide(progress)
                self._must_write_plan = False
                self.problems.pop("plan", None)
            except StorageError as error:  # it could not be announced
                self._must_write_plan = True
                self.problems["plan"] = str(error)

    def _answer(self, *, refusal: str | None = None) -> None:
        """Answer new requests, if it is time for a poll."""
        now = time.monotonic()
        if now < self._next_poll_at:
            return
        self._poll_began = now
        try:
            reason = refusal or self._lost()
            self._answer_all(refusal=reason)
            self._undecided |= set(self._plan.iterations) - self.complete - self._not_recorded
            self.problems.pop("requests", None)
        except StorageError as error:
            self.problems["requests"] = str(error)
        ended, self._poll_began = time.monotonic(), None
        self._poll_took_seconds = ended - now
        self._last_poll = ended, self._step()
        self._next_poll_at = ended + _REQUEST_POLL_SECONDS

    def _answer_all(self, *, refusal: str | None) -> None:
        """Answer all requests without an answer, with `refusal` if given. What fails is retried at the next poll."""
        names, answered = list_requests(self._backend, self._attempt)
        for name in names:
            if name in answered or name in self._answered:
                continue
            try:
                request = read_request(self._backend, attempt=self._attempt, name=name)
            except (DataError, RunFormatError) as error:
                answer = Answer(refusal=f"the request is damaged: {error}")
            else:
                if request is None:
                    continue  # it was withdrawn
                answer = self._plan_request(name, request, refusal=refusal)
            write_answer(self._backend, attempt=self._attempt, name=name, answer=answer)
            self._answered.add(name)

    def _plan_request(self, name: str, request: Request, *, refusal: str | None) -> Answer:
        """Plan the requested iterations and give the answer."""
        known = next((request_plan for request_plan in self._plan.asked if request_plan.name == name), None)
        if known is not None:
            return Answer(iterations=known.iterations)
        refusal = refusal or self._refusal(request)
        if refusal is not None:
            return Answer(refusal=refusal)
        if self._options.record_last is not None:
            refusal_or_iteration = self._store_held(request.by)
            return (
                Answer(refusal=refusal_or_iteration)
                if isinstance(refusal_or_iteration, str)
                else Answer(iterations=(refusal_or_iteration,), is_held=True)
            )
        iterations = self._free(request.num_iterations)
        planned = RequestedIterations(
            name=name, iterations=iterations, num_iterations=request.num_iterations, settings=dict(request.settings)
        )
        self._add(iterations, asked=(*self._plan.asked, planned))
        return Answer(iterations=iterations)

    def _refusal(self, request: Request) -> str | None:
        """Why a request is refused; None if it is not."""
        if self._options.manual:
            return "the program saves tensors by hand: no hooks are attached in any iteration"
        if self._options.record_last is not None:
            is_plain = request.num_iterations == 1 and not request.settings
            return None if is_plain else _RECORDER
        num_requested = sum(len(planned.iterations) for planned in self._plan.asked)
        if num_requested + request.num_iterations > MAX_REQUESTED:
            return f"{num_requested} iterations were already requested, and at most {MAX_REQUESTED} are allowed"
        try:
            self._options.for_request(request.settings)
        except UsageError as error:
            return str(error)
        return None

    def _replace_lost(self) -> None:
        """Plan further iterations for requests of which some were not recorded on all ranks."""
        for request in self._plan.asked:
            lost = request.num_iterations - len(set(request.iterations) & self.complete)
            num_replaced = self._num_replaced.get(request.name, 0)
            is_open = bool(set(request.iterations) - self.complete - self._not_recorded)
            if is_open or lost <= 0 or num_replaced >= MAX_REPLACED:
                continue
            self._num_replaced[request.name] = num_replaced + 1
            further = self._free(lost, num_late=num_replaced + 1)
            replaced = dataclasses.replace(request, iterations=(*request.iterations, *further))
            self._add(
                further, asked=tuple(replaced if each.name == request.name else each for each in self._plan.asked)
            )

    def _free(self, count: int, *, num_late: int = 0) -> tuple[int, ...]:
        """The next `count` iterations that no rank has reached and that are not planned already."""
        planned = {*self._plan.iterations, *self._attempt.completed}
        later = (iteration for iteration in itertools.count(self._first_unknown(num_late)) if iteration not in planned)
        return tuple(itertools.islice(later, count))

    def _add(self, iterations: tuple[int, ...], *, asked: tuple[RequestedIterations, ...]) -> None:
        named = tuple(sorted({*self._plan.iterations, *iterations}))
        self._announce(dataclasses.replace(self._plan, iterations=named, asked=asked, is_done=False))

    def _poll_progress(self) -> Progress | None:
        with self._lock:
            try:
                # Reads only what was not settled at the last poll.
                progress = read_progress(self._backend, self._attempt, known=self._seen)
                if (reason := self._lost()) is not None:
                    # What becomes complete from now on would be mixed with the iterations of another training.
                    self.problems["launch"] = reason
                    return progress
                complete, dropped = set(progress.complete), set(progress.dropped)
                for iteration in progress.ready():
                    try:
                        finish_iteration(self._backend, attempt=self._attempt, iteration=iteration)
                    except StorageError:
                        raise
                    except RanktapeError as error:
                        self.problems[f"iteration {iteration}"] = str(error)
                        continue
                    complete.add(iteration)
                    self._retain(complete, dropped)
                self._retain(complete, dropped)
            except StorageError as error:
                # The store may recover. If it does not, the verdict reports this.
                self.problems["coordinator"] = str(error)
                return None
            self._seen = dataclasses.replace(progress, complete=frozenset(complete), dropped=frozenset(dropped))
            self.problems.pop("coordinator", None)
            return self._seen

    def _retain(self, complete: set[int], dropped: set[int]) -> None:
        """Remove the oldest complete iterations beyond `keep_last`, and update the two sets."""
        keep_last = self._options.keep_last
        if keep_last is None:
            return
        if self._earlier is None:
            earlier = [attempt for attempt in read_attempts(self._backend) if attempt.number < self._attempt.number]
            for attempt in earlier:
                finish_drops(self._backend, attempt=attempt)
            self._earlier = [
                (attempt, number) for attempt in earlier for number in whole_iterations(self._backend, attempt)
            ]
        for number in complete - self._is_whole.keys():
            self._is_whole[number] = is_whole(self._backend, self._attempt, number)
        # A partial iteration, which was cut off, is kept and does not count.
        current = [(self._attempt, number) for number in sorted(complete) if self._is_whole[number]]
        stored = [*self._earlier, *current]
        for attempt, iteration in stored[: max(0, len(stored) - keep_last)]:
            drop_iteration(self._backend, attempt=attempt, iteration=iteration)
            if attempt is self._attempt:
                complete.remove(iteration)
                dropped.add(iteration)
            else:
                self._earlier.remove((attempt, iteration))

    def _decide(self, progress: Progress) -> None:
        self.complete |= progress.complete | progress.dropped
        self._not_recorded |= {
            iteration
            for iteration, marks in progress.marks.items()
            if any(mark is not Mark.COMMITTED for mark in marks.values())
        }
        # An iteration will not be complete if a rank has closed without settling it.
        self._not_recorded |= {
            iteration for iteration in self._undecided if progress.closed - progress.marks.get(iteration, {}).keys()
        }
        self._undecided -= self.complete | self._not_recorded
        if self._options.record_last is not None:
            return  # it stores without a plan
        requested = self._plan.requested_iterations
        # Requested iterations do not count towards the target.
        num_complete = len((self.complete - requested) | set(self._attempt.completed))
        is_enough = num_complete >= self._options.target_iterations
        is_over = bool(self._lost() or (progress.closed and not self._undecided))
        if not is_over:
            self._replace_lost()
            self._undecided |= set(self._plan.iterations) - self.complete - self._not_recorded
        is_done = is_over or (is_enough and not self._undecided & requested)
        if is_done or (is_enough and not self._plan.is_enough):
            self._announce(dataclasses.replace(self._plan, is_done=is_done, is_enough=is_enough))
        elif not (is_enough or self._undecided - requested):
            further = self._further(self._options.target_iterations - num_complete)
            if further:
                named = tuple(sorted({*self._plan.iterations, *further}))
                self._announce(dataclasses.replace(self._plan, iterations=named, is_done=False))
                self._undecided |= set(further)

    def _further(self, count: int) -> tuple[int, ...]:
        """The next iterations of the cadence that no rank has reached, estimated by the pace of this rank."""
        before = self._plan.iterations
        after = max(max(before, default=0), self._first_unknown(self._notices) - 1)
        self._notices += 1
        return self._cadence.following(after, count=count, without=self._attempt.completed)

    def _first_unknown(self, num_late: int = 0) -> int:
        """An estimate of the first iteration that all ranks learn of before they reach it.

        The notice is doubled `num_late` times: ranks may have learned of earlier iterations too late.
        """
        step, now = self._step(), time.monotonic()
        since = [start for start in (self._started, self._last_poll) if now - start[0] > _POLL_SECONDS] or [
            self._started
        ]
        pace = max((step - first) / max(now - began, 1e-3) for began, first in since)
        longest = max_ask_seconds(self._attempt.launch.world_size)
        # A slow store delays the ranks as long as this one: by the duration of the last poll, or of this one so far.
        poll_took_seconds = max(self._poll_took_seconds, 0.0 if self._poll_began is None else now - self._poll_began)
        seconds = (_LEAST_NOTICE_SECONDS + longest + 2 * poll_took_seconds) * float(1 << num_late)
        return step + math.ceil(pace * seconds) + 1

    def _announce(self, plan: IterationPlan) -> None:
        write_plan(self._backend, attempt=self._attempt, plan=plan)
        self._plan = plan


def _pause_after(pause: float, *, is_news: bool) -> float:
    """The pause before the next poll. It grows while nothing changes, because a poll takes several LIST requests."""
    return _POLL_SECONDS if is_news else min(_MAX_POLL_SECONDS, 1.5 * pause)
