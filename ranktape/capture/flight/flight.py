"""The flight recorder in a writer process: holds what the trainer stages, and commits it after a trigger.

    held      the last iterations: values in the ring while there is room, histograms or statistics after that
    trigger   an event on this rank (a tensor, the trainer's report, its death) or on another one (`watch.py`)
    window    the iteration of the trigger, the last ones recorded before it (`record_last`), and the one after it

All ranks commit the same window, each from what it holds. A rank reports the iterations that it does not hold.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ranktape.capture.flight.held import ROOM_FOR_NEXT, HeldIteration, TensorInFlight, cut_off
from ranktape.capture.flight.rules import Hit, judge
from ranktape.capture.flight.watch import TriggerWatch
from ranktape.capture.staging.ring_file import NOTES, Counter, Slot, SlotKind, iteration_of, noted
from ranktape.capture.writing.coordinator import ENDED
from ranktape.capture.writing.counting import staged_record, statistics_in
from ranktape.capture.writing.storing import MAX_WAITING_NBYTES
from ranktape.storage.format.layout import Mark
from ranktape.storage.format.live import MAX_STORED, MAX_TEXT, Trigger, TriggerKind
from ranktape.storage.recording.writer import STORE_CONCURRENCY

if TYPE_CHECKING:
    from ranktape.capture.writing.committing import Committer
    from ranktape.capture.writing.storing import Storer

_AFTER = 1
"""Number of iterations of the cadence that are stored after that of a trigger."""

_MIN_POLLS = 4
"""Smallest number of polls for triggers of other ranks while an iteration is held, however fast the training steps."""

_GRACE_SECONDS = 10.0
"""Shortest time that an iteration is held while there is room, because ranks on a busy machine poll late."""

_MAX_EXTRA = 64
"""Largest number of iterations that are held only for these two reasons."""

_FREE_SHARE = 0.5
"""Largest share of the ring that is kept free for the next iteration."""

_NOT_HELD = "this rank no longer had it: the ring was full while the store did not take iterations, or its writer died"

_LAST_POLL_SECONDS = 20.0
_QUIET_SECONDS = 2.0
"""Longest duration of the last poll, if this rank had a trigger and if not. `_QUIET_SECONDS` is also the shortest pause
before it, in which other ranks may report triggers of the last iteration."""


class Flight:
    """Holds the iterations of a rank, and commits or drops them. It is not thread-safe, except for `request`."""

    def __init__(self, storer: Storer, *, committer: Committer, report: Callable[..., None]) -> None:
        """Start to watch for triggers; nothing is held yet."""
        config, options = storer.config, storer.config.options
        assert options.record_last is not None
        self._before = options.record_last
        self._config, self._ring, self._attempt = config, storer.ring, storer.attempt
        self._storer, self._committer, self._report = storer, committer, report
        self._cadence = config.cadence
        self._triggers = options.triggers
        self._pool = ThreadPoolExecutor(STORE_CONCURRENCY, thread_name_prefix="ranktape-judge")
        self._watch = TriggerWatch(
            storer.backend,
            attempt=storer.attempt,
            rank=config.rank,
            report=report,
            is_successor=config.attempt is not None,
        )
        self._held: dict[int, HeldIteration] = {}
        self._queue: deque[tuple[HeldIteration, TensorInFlight]] = deque()
        """The tensors that are being judged, in the order of their arrival."""
        self._last_hit_of: dict[str, int] = {}
        """The last iteration with a hit, by rule."""
        self._wanted: set[int] = set()
        self._settled: set[int] = set()
        self._last_end: dict[str, Any] = {}
        self._newest = self._released_until = -1
        self._stored_for: defaultdict[TriggerKind, set[int]] = defaultdict(set)
        """The iterations with stored triggers of all ranks, by kind."""
        self._num_posted: defaultdict[TriggerKind, int] = defaultdict(int)
        """The number of triggers of this rank with a document of their own, by kind."""
        self._repeated: dict[TriggerKind, Trigger] = {}
        """The trigger of this rank that counts the later ones, by kind."""
        self._reported_iterations: set[int] = set()
        self._has_failed = False
        self._iteration_nbytes = 0
        self._other_ranks = 0
        self._num_signals = storer.ring.counter(Counter.SIGNALS)
        self._requests: deque[str] = deque()
        self._accepts_requests = True
        self._requests_lock = threading.Lock()

    def handle(self, slot: Slot) -> None:
        """Handle a slot that the trainer has published."""
        iteration = int(slot.header["iteration"])
        if slot.kind is SlotKind.TRIGGER:
            self._wait_for_judged()  # the tensors may show the cause of this trigger
            self._trigger_from(slot.header)
            self._ring.free(slot)
            return
        self._newest = max(self._newest, iteration)
        held = self._held.get(iteration)
        if held is None:
            held = self._held[iteration] = HeldIteration(iteration=iteration)
        if slot.kind is SlotKind.TENSOR:
            tensor = TensorInFlight(slot=slot, judged=self._judge(slot))
            held.tensors.append(tensor)
            held.nbytes += slot.payload.nbytes
            self._queue.append((held, tensor))
        elif slot.kind in NOTES:
            held.notes.append(slot.copy())
            self._ring.free(slot)
        elif slot.kind is SlotKind.BEGIN:
            held.other_slots.append(slot)
        else:
            held.close(slot, skip=str(slot.header["reason"]) if slot.kind is SlotKind.SKIP else None)
            self._iteration_nbytes = max(self._iteration_nbytes, held.nbytes)
            if held.end is not None:
                self._last_end = held.end.header
            # Not only when the ring is empty: it never is if the training is faster than this writer.
            self.tick()
            return
        self._read_judged()

    def request(self, by: str) -> str | None:
        """Request that the held iterations be stored soon. Any thread may call it.

        Returns:
            Why the request is refused; None if it is accepted.
        """
        with self._requests_lock:
            if not self._accepts_requests:
                return ENDED
            if len(self._stored_for[TriggerKind.USER]) + len(self._requests) >= MAX_STORED:
                return f"it was stored for {MAX_STORED} triggers of the kind {TriggerKind.USER}, which is the most"
            self._requests.append(by)
            return None

    def tick(self) -> None:
        """Read the triggers of other ranks, commit what is due, and make room. Called repeatedly."""
        self._read_judged()
        if (count := self._ring.counter(Counter.SIGNALS)) != self._num_signals:
            self._num_signals = count
            name = signal.Signals(count & 0xFF).name
            text = f"the process was sent {name}"
            self._trigger(TriggerKind.SIGNAL, self._step, text, signal_name=name)
        self._read_requests()
        self._read_other_ranks()
        self._commit_due()
        self._release_old()
        self._make_room()

    def end(self, reason: str, *, death: str | None, unsent: Iterable[Mapping[str, Any]] = ()) -> None:
        """Commit the wanted iterations and drop the others, after the trainer has ended.

        Args:
            reason: Why the capture is over.
            death: How the training process died; None if it ended the capture itself.
            unsent: Headers of triggers that could not pass through the ring.
        """
        self._wait_for_judged()
        for header in unsent:
            self._trigger_from(header)
        with self._requests_lock:
            self._accepts_requests = False
        self._read_requests()
        if death is not None:
            text = f"the training process died in iteration {self._step}: {death}"
            self._trigger(TriggerKind.DEATH, self._step, text, signal_name=death.rpartition(" ")[2])
        if self._attempt.launch.world_size > 1:
            time.sleep(max(_QUIET_SECONDS, 2 * self._watch.seconds))
        self._watch.last_poll(seconds=_LAST_POLL_SECONDS if self._num_posted else _QUIET_SECONDS)
        self._read_other_ranks()
        self._watch.stop()
        for held in sorted(self._held.values(), key=lambda held: held.iteration):
            if held.is_over or held.iteration not in self._wanted:
                continue
            if held.tensors or self._has_failed:
                self._commit(held, cut_off(held, like=self._last_end, reason=f"cut off: {death or reason}"))
            else:
                self._settled.add(held.iteration)
                self._committer.mark(held.iteration, Mark.FAILED, f"nothing of it was recorded: {reason}")
        self._commit_due()
        for iteration in sorted(self._wanted - self._settled - self._held.keys()):
            if iteration < self._step:
                self._committer.mark(iteration, Mark.FAILED, _NOT_HELD)
        for iteration in list(self._held):
            self._release(iteration)
        self._pool.shutdown()

    @property
    def _step(self) -> int:
        """The current iteration of the training."""
        return max(self._newest, self._ring.counter(Counter.STEP))

    @property
    def _needed_nbytes(self) -> int:
        """Bytes of the ring to keep free for the next iteration."""
        capacity = self._ring.capacity
        return max(capacity // 16, min(int(_FREE_SHARE * capacity), int(ROOM_FOR_NEXT * self._iteration_nbytes)))

    def _read_other_ranks(self) -> None:
        if (elsewhere := self._ring.counter(Counter.ELSEWHERE)) != self._other_ranks:
            self._other_ranks = elsewhere
            self._request_window(iteration_of(elsewhere))
        for trigger in self._watch.new_triggers():
            if not trigger.is_stored:
                continue
            self._stored_for[trigger.kind].add(trigger.iteration)
            self._num_posted[trigger.kind] += trigger.rank == self._config.rank
            self._request_window(trigger.iteration)
            self._report_once(trigger.iteration, f"the held iterations are stored: {trigger.message()}")

    def _read_requests(self) -> None:
        while self._requests:
            self._trigger(TriggerKind.USER, self._step, f"{self._requests.popleft()} requested it (ranktape trigger)")

    def _judge(self, slot: Slot) -> Future[list[Hit]]:
        if slot.header.get("taken"):
            # The trainer has computed the statistics: judging them takes less time than waking up a thread.
            done: Future[list[Hit]] = Future()
            done.set_result(self._hits(slot))
            return done
        return self._pool.submit(self._hits, slot)

    def _hits(self, slot: Slot) -> list[Hit]:
        array, info = staged_record(slot, rank=self._config.rank, attempt=self._attempt.number)
        return list(judge(self._triggers, info, lambda: statistics_in(slot, array)))

    def _wait_for_judged(self) -> None:
        for _, tensor in self._queue:
            tensor.judged.exception()  # returns once it is judged
        self._read_judged()

    def _read_judged(self) -> None:
        """Handle the hits of judged tensors, in the order of their arrival."""
        while self._queue and self._queue[0][1].judged.done():
            held, tensor = self._queue.popleft()
            for hit in tensor.judged.result():
                self._on_hit(held.iteration, hit)
        self._ring.set_counter(Counter.JUDGING, self._queue[0][0].iteration + 1 if self._queue else 0)

    def _on_hit(self, iteration: int, hit: Hit) -> None:
        last = self._last_hit_of.get(hit.rule)
        self._last_hit_of[hit.rule] = iteration
        if last is not None and (last == iteration or last in self._previous(iteration, count=1)):
            return  # the condition persists
        self._trigger(hit.kind, iteration, hit.text, where={**hit.where}, metric=hit.metric, value=hit.value)

    def _trigger_from(self, header: Mapping[str, Any]) -> None:
        kind, traceback = TriggerKind(header["kind"]), str(header.get("traceback", ""))
        self._trigger(kind, int(header["iteration"]), str(header["text"]), traceback=traceback)

    def _trigger(self, kind: TriggerKind, iteration: int, text: str, *, signal_name: str = "", **evidence: Any) -> None:
        self._has_failed |= kind in {TriggerKind.EXCEPTION, TriggerKind.DEATH}
        known = self._stored_for[kind]
        is_new = iteration not in known
        is_stored = not is_new or len(known) < MAX_STORED
        if is_stored:
            known.add(iteration)
            self._request_window(iteration)
        trigger = Trigger(
            kind=kind,
            iteration=iteration,
            rank=self._config.rank,
            text=text[:MAX_TEXT],
            signal=signal_name if signal_name.startswith("SIG") else "",
            time=time.time(),
            attempt=self._attempt.number,
            **evidence,
        )
        # If the other ranks know of the iteration already, further triggers in it need no documents of their own.
        if not is_stored or (self._num_posted[kind] >= MAX_STORED and not is_new):
            self._repeat(trigger)
            return
        self._num_posted[kind] += 1
        self._watch.post(trigger)
        self._ring.set_counter(Counter.HAPPENED, noted(self._ring.counter(Counter.HAPPENED), iteration))
        self._report_once(iteration, f"the held iterations are stored: {trigger.message()}")

    def _repeat(self, trigger: Trigger) -> None:
        """Count a trigger in the one document of its kind for triggers for which nothing is stored."""
        first = self._repeated.get(trigger.kind)
        if first is None:
            repeated = dataclasses.replace(trigger, is_stored=False)
            self._report(notice=f"{repeated.message()}; further triggers of this kind are counted")
        else:
            repeated = dataclasses.replace(first, count=first.count + 1, last_iteration=trigger.iteration)
        self._repeated[trigger.kind] = repeated
        self._watch.post(repeated)

    def _report_once(self, iteration: int, text: str) -> None:
        """Print the first message of an iteration on the trainer's console; later ones would hide the cause."""
        if iteration not in self._reported_iterations:
            self._reported_iterations.add(iteration)
            self._report(notice=text)

    def _request_window(self, iteration: int) -> None:
        """Request the window around an iteration; its lost iterations are marked as failed."""
        before = self._previous(iteration, count=self._before)
        current = [iteration] if self._cadence.due(iteration) else []
        after = self._cadence.following(iteration, count=_AFTER)
        window = {*before, *current, *after}
        self._wanted |= window
        for lost in sorted(window - self._settled - self._held.keys()):
            if lost <= self._released_until:
                self._settled.add(lost)
                reason = "it was dropped before this rank was informed of the trigger"
                self._committer.mark(lost, Mark.FAILED, reason)

    def _previous(self, iteration: int, *, count: int) -> list[int]:
        """The last `count` recorded iterations before one, the latest first; fewer at the start of the training."""
        iterations: list[int] = []
        span = count * self._cadence.every
        for earlier in range(iteration - 1, max(self._cadence.first, iteration - span) - 1, -1):
            if len(iterations) == count:
                break
            if self._cadence.due(earlier):
                iterations.append(earlier)
        return iterations

    def _commit_due(self) -> None:
        for held in sorted(self._held.values(), key=lambda held: held.iteration):
            if held.is_over and held.iteration in self._wanted:
                self._commit(held, None)

    def _commit(self, held: HeldIteration, header: dict[str, Any] | None) -> None:
        """Commit a held iteration; `header` replaces the end of one that did not finish, otherwise None."""
        del self._held[held.iteration]
        self._settled.add(held.iteration)
        if held.skip is not None:
            self._committer.mark(held.iteration, Mark.SKIPPED, held.skip)
            held.release(self._ring)
            return
        held.free_other_slots(self._ring)
        staged = self._storer.begin(held.iteration)
        for note in held.notes:
            self._storer.note(note, staged)
        for tensor in held.tensors:
            if tensor.slot is not None:
                self._storer.submit(tensor.slot, staged)
            elif tensor.reduced is not None:
                self._storer.submit_reduced(*tensor.reduced, staged)
        if header is None:
            self._committer.commit(staged, held.end)
        else:
            self._committer.commit_cut_off(staged, header)

    def _release_old(self) -> None:
        """Drop the iterations that no trigger can request any more."""
        over = [held for held in self._held.values() if held.is_over and held.is_judged]
        # A tensor that is not judged yet may cause a trigger.
        oldest_new = min(self._queue[0][0].iteration, self._newest) if self._queue else self._newest
        oldest_needed = min(self._previous(oldest_new, count=self._before), default=oldest_new)
        now = time.monotonic()
        grace = 0.0
        if self._attempt.launch.world_size > 1:
            is_crowded = self._ring.capacity - self._ring.pending_nbytes < self._needed_nbytes
            grace = max(_MIN_POLLS * self._watch.seconds, 0.0 if is_crowded else _GRACE_SECONDS)
        extra = [held for held in over if held.iteration < oldest_needed]
        for number, held in enumerate(sorted(extra, key=lambda held: held.iteration)):
            is_young = held.ended_at is not None and now - held.ended_at < grace
            if is_young and len(extra) - number <= _MAX_EXTRA:
                break
            self._release(held.iteration)

    def _release(self, iteration: int) -> None:
        held = self._held.pop(iteration)
        held.release(self._ring)
        self._released_until = max(self._released_until, iteration)
        if held.is_over:
            self._committer.pass_over()

    def _make_room(self) -> None:
        """Reduce the values of the oldest iterations until there is room for the next one."""
        capacity = self._ring.capacity
        is_waiting = self._ring.counter(Counter.WAITING) == 1
        needed_nbytes = self._needed_nbytes
        total_nbytes = sum(held.reduced_nbytes for held in self._held.values())
        for held in sorted(self._held.values(), key=lambda held: held.iteration):
            if not is_waiting and capacity - self._ring.pending_nbytes >= needed_nbytes:
                return
            if not held.is_over and not is_waiting:
                return
            due = held.in_ring
            if not due:
                continue
            # Slots are freed in order: an iteration's first slot blocks those of its tensors.
            held.free_other_slots(self._ring)
            room_nbytes = max(0, MAX_WAITING_NBYTES - total_nbytes) // len(due)
            reduce = lambda tensor, room_nbytes=room_nbytes: tensor.reduce(  # noqa: E731
                self._ring, rank=self._config.rank, attempt=self._attempt.number, room_nbytes=room_nbytes
            )
            num_bytes = sum(self._pool.map(reduce, due))
            held.reduced_nbytes += num_bytes
            total_nbytes += num_bytes
            is_waiting = is_waiting and self._ring.counter(Counter.WAITING) == 1
