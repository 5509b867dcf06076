"""How a staged tensor becomes a record, and what becomes of it when the store is slow or does not answer.

A few threads measure tensors and write them. Small ones stay in the ring until the rank's writer puts them into the
store together. Writes are tried again until `block_timeout_seconds` are over; then the iteration fails, and what is
left of it is given back at once.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranktape.capture.staging.ring_file import Counter, Slot, SlotKind
from ranktape.capture.writing.counting import is_taken, reduce_to, staged_record
from ranktape.errors import CaptureError, NoSpaceError, RanktapeError
from ranktape.storage.format.record_info import RecordInfo
from ranktape.storage.recording.writer import STORE_CONCURRENCY, RankWriter, SpillDirectory

if TYPE_CHECKING:
    import numpy as np

    from ranktape.capture.staging.process import WriterConfig
    from ranktape.capture.staging.ring import RingConsumer
    from ranktape.storage.format.attempt import Attempt
    from ranktape.storage.places.urls import RetryingBackend

HELD_NBYTES = 96 << 20
"""Memory for histograms and statistics that wait for the store."""

_gives_up: ContextVar[Callable[[], bool]] = ContextVar("ranktape_gives_up", default=lambda: False)
"""Whether this thread is to try no more; one that works for another may be given its context."""

_PAUSE_SECONDS = 0.05
_TOO_LATE = "the store did not take it within --finish-timeout-seconds after the training"


@dataclass(slots=True)
class Staged:
    """An iteration that has begun and is not committed."""

    iteration: int
    """Training step."""
    futures: list[Future[Any]] = field(default_factory=list)
    """One for each tensor on its way to the store."""
    num_tensors: int = 0
    """Tensors that came out of the ring."""
    num_stored: int = 0
    """Those that are stored, or held to be stored."""
    num_active: int = 0
    """Threads that are storing one of its tensors."""
    failure: str | None = None
    """Why it will not be committed."""
    lacks_space: bool = False
    """Whether that is because the store is full."""
    notes: list[Slot] = field(default_factory=list)
    """What was said of it between its tensors, no longer in the ring."""

    def has_failed(self) -> bool:
        """Whether there is such a reason."""
        return self.failure is not None

    def refuse(self, reason: str, *, lacks_space: bool = False) -> None:
        """Say why it will not be committed; the first reason stands."""
        if self.failure is None:
            self.failure = reason
            self.lacks_space = lacks_space


class Storer:
    """Writes tensors in threads of its own; `store` and `fail` never raise."""

    def __init__(self, config: WriterConfig, *, backend: RetryingBackend, attempt: Attempt, ring: RingConsumer) -> None:
        """Open the rank's share of an attempt, and start the threads.

        Raises:
            StorageError: the store cannot be written.
        """
        self.config = config
        self.backend = backend
        """The store, asked once: for markers and plans."""
        self.attempt, self.ring = attempt, ring
        options = config.options
        # Whether to try again depends on what a thread is storing (`trying`): the store asks after each failure.
        give_up = lambda: _gives_up.get()()  # noqa: E731, PLW0108  (each thread and each time anew)
        self.retrying = backend.with_deadline(timeout_seconds=options.block_timeout_seconds, give_up=give_up)
        """The same, tried again."""
        self.spill: SpillDirectory | None = None
        """Takes the iterations that the store does not take; None without one."""
        if options.spill_dir is not None:
            self.spill = SpillDirectory(self.retrying, directory=Path(options.spill_dir), attempt=attempt)
        self.rank_writer = RankWriter(
            self.retrying,
            attempt=attempt,
            rank=config.rank,
            environment=config.environment,
            trouble=config.trouble,
            compression=options.compression,
            spill=self.spill,
        )
        self._pool = ThreadPoolExecutor(STORE_CONCURRENCY, thread_name_prefix="ranktape-store")
        # Not behind the tensors that wait in the pool: they may be waiting for the room that this makes.
        self._flushes = ThreadPoolExecutor(1, thread_name_prefix="ranktape-flush")
        self._flush: Future[None] | None = None
        self._room_nbytes = HELD_NBYTES
        self._room_lock = threading.Lock()
        self._lock = threading.Lock()
        self._open: dict[int, Staged] = {}
        self.trainer_is_gone = False
        """Whether nobody waits for room any more."""
        self.give_up_at: float | None = None
        """When nothing is tried again any more, by `time.monotonic`."""

    def begin(self, iteration: int) -> Staged:
        """An iteration begins; the first rank says so in the store."""
        staged = Staged(iteration=iteration)
        with self._lock:
            self._open[iteration] = staged
        if self.config.is_first:
            self.run(staged, partial(self.rank_writer.open, iteration))
        return staged

    def submit(self, slot: Slot, staged: Staged) -> None:
        """Store the tensor in a slot, and free the slot, in one of the threads."""
        staged.num_tensors += 1
        staged.futures.append(self._pool.submit(self.store, slot, staged))

    def note(self, slot: Slot, staged: Staged) -> None:
        """Take over what a slot says of the iteration; the trainer has counted a lost tensor."""
        staged.num_tensors += slot.kind is SlotKind.LOST
        staged.notes.append(slot)

    def submit_reduced(self, kept: np.ndarray[Any, Any], info: RecordInfo, staged: Staged) -> None:
        """Store what stands for a tensor that is in the ring no more."""
        staged.num_tensors += 1

        def work() -> None:
            self._write_reduced(kept, info, staged, None)
            with self._lock:
                staged.num_stored += 1

        staged.futures.append(self._pool.submit(self._run, staged, work))

    def run(self, staged: Staged, work: Callable[[], None]) -> None:
        """Do something else for the iteration in one of the threads."""
        staged.futures.append(self._pool.submit(self._run, staged, work))

    def relieve(self) -> None:
        """Write the small tensors that are held, where they are in the way of the training."""
        is_waited_for = self.ring.counter(Counter.WAITING) == 1 and not self.trainer_is_gone
        if is_waited_for or self.ring.pending_nbytes > self.ring.capacity // 2:
            self._start_flush()

    def store(self, slot: Slot, staged: Staged) -> None:
        """Store the tensor in a slot and free the slot, at the latest when the iteration ends."""

        def work() -> None:
            try:
                self._store(slot, staged)
            except BaseException:
                self.ring.free(slot)
                raise
            with self._lock:
                staged.num_stored += 1

        if not self._run(staged, work):
            self.ring.free(slot)

    def fail(self, staged: Staged, reason: str) -> None:
        """The iteration will not be committed; its threads stop trying, and what is held of it is given back."""
        with self._lock:
            staged.refuse(reason)
            is_idle = not staged.num_active
            staged.num_active += is_idle
        if is_idle:
            self._give_back(staged)

    def finish(self, staged: Staged, commit: Callable[[], None] | None = None) -> str | None:
        """Wait until the tensors of an iteration are stored or held, then commit it, or forget it where it has no end.

        Why it could not be committed; None says that it is.
        """
        for future in staged.futures:
            future.result()
        is_committed = False

        def work() -> None:
            nonlocal is_committed
            if commit is not None:
                with self.trying(staged):
                    commit()
            is_committed = True

        self._run(staged, work)
        with self._lock:
            self._open.pop(staged.iteration, None)
        self.rank_writer.abandon(staged.iteration)
        return None if is_committed else staged.failure

    @contextmanager
    def trying(self, staged: Staged | None = None) -> Iterator[None]:
        """While this thread writes: each write is tried again as long as there is hope.

        There is none once the iteration, if it is one, has failed, the time is over, or the store has not answered for
        too long.
        """
        seconds = self.config.options.block_timeout_seconds
        began = time.monotonic()

        def gives_up() -> bool:
            since = self.retrying.failing_since
            is_late = since is not None and time.monotonic() - max(since, began) > seconds
            return is_late or (staged is not None and staged.has_failed()) or self._is_over()

        token = _gives_up.set(gives_up)
        try:
            yield
        finally:
            _gives_up.reset(token)

    def shutdown(self) -> None:
        """Wait for what is being stored; nothing new is begun."""
        self._pool.shutdown(cancel_futures=True)
        self._flushes.shutdown(cancel_futures=True)

    def _run(self, staged: Staged, work: Callable[[], None]) -> bool:
        """Whether the work was begun: nothing is done for an iteration that has failed."""
        with self._lock:
            if staged.has_failed():
                return False
            staged.num_active += 1
        failure: Exception | None = None
        try:
            work()
        except RanktapeError as error:
            failure = error
        except Exception as error:  # noqa: BLE001  # a defect of ours must cost the iteration, not what comes after it
            failure = CaptureError(f"{type(error).__name__}: {error}")
            traceback.print_exc()
        with self._lock:
            if failure is not None:
                staged.refuse(str(failure), lacks_space=isinstance(failure, NoSpaceError))
            is_over = staged.has_failed() and staged.num_active == 1
            staged.num_active -= not is_over
        if is_over:
            self._give_back(staged)
        return True

    def _give_back(self, staged: Staged) -> None:
        """Let go of what is held of an iteration that failed; the caller counts as at work on it until then."""
        try:
            self.rank_writer.abandon(staged.iteration)
        finally:
            with self._lock:
                staged.num_active -= 1

    def _store(self, slot: Slot, staged: Staged) -> None:
        array, info = staged_record(slot, rank=self.config.rank, attempt=self.attempt.number)
        keep = str(slot.header.get("keep", ""))
        reduced = (array.copy(), info) if is_taken(slot) else reduce_to(keep, array, info=info)
        if reduced is not None:
            self.ring.free(slot)
            self._write_reduced(*reduced, staged, slot)
            return
        with self.trying(staged):
            self.rank_writer.write(array, info=info, on_release=partial(self.ring.free, slot))

    def _write_reduced(self, kept: np.ndarray[Any, Any], info: RecordInfo, staged: Staged, slot: Slot | None) -> None:
        """Write what stands for a tensor; its slot is free then, at the latest."""
        self._make_room(kept.nbytes, staged)
        with self.trying(staged):
            self.rank_writer.write(kept, info=info, on_release=partial(self._let_go, kept.nbytes, slot))

    def _let_go(self, nbytes: int, slot: Slot | None) -> None:
        with self._room_lock:
            self._room_nbytes += nbytes
        if slot is not None:
            self.ring.free(slot)

    def _make_room(self, nbytes: int, staged: Staged) -> None:
        """Take so much of the budget for what is held."""
        while True:
            with self._room_lock:
                if nbytes <= self._room_nbytes:
                    self._room_nbytes -= nbytes
                    return
            self._start_flush()
            if staged.has_failed() or self._is_over():
                raise CaptureError(staged.failure or _TOO_LATE)
            time.sleep(_PAUSE_SECONDS)

    def _start_flush(self) -> None:
        with self._lock:
            is_running = self._flush is not None and not self._flush.done()
            if not is_running and self.rank_writer.held_nbytes:
                self._flush = self._flushes.submit(self._flush_stacks)

    def _flush_stacks(self) -> None:
        with self._lock:
            waiting = [staged for staged in self._open.values() if not staged.has_failed()]
        # One after the other, so that one that fails takes none of the others with it.
        for staged in waiting:
            with self.trying(staged):
                self._run(staged, partial(self.rank_writer.flush_stacks, staged.iteration))

    def _is_over(self) -> bool:
        return self.give_up_at is not None and time.monotonic() > self.give_up_at
