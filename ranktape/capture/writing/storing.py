"""Stores staged tensors as records, and handles a store that is slow or does not answer.

A few threads measure and write tensors. Small ones stay in the ring until they are written together. Writes are retried
for `block_timeout_seconds`; after that, the iteration fails, and what it holds is freed at once.
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

MAX_WAITING_NBYTES = 96 << 20
"""Memory for histograms and statistics that wait for the store, in bytes."""

_stops_retrying: ContextVar[Callable[[], bool]] = ContextVar("ranktape_gives_up", default=lambda: False)
"""Returns whether this thread stops retrying. A thread that works for another one may use its context."""

_PAUSE_SECONDS = 0.05
_TOO_LATE = "the store did not take it within --finish-timeout-seconds after the training"


@dataclass(slots=True)
class Staged:
    """An iteration that has started and is not committed."""

    iteration: int
    """Training step."""
    futures: list[Future[Any]] = field(default_factory=list)
    """The submitted work, mostly one item for each tensor."""
    num_tensors: int = 0
    """Number of tensors that were read from the ring, including lost ones."""
    num_stored: int = 0
    """Number of tensors that are stored, or held until they are."""
    num_active: int = 0
    """Number of threads that are working on it."""
    failure: str | None = None
    """Why it will not be committed; None if it has not failed."""
    lacks_space: bool = False
    """Whether it failed because the store is full."""
    notes: list[Slot] = field(default_factory=list)
    """Copies of the slots of `NOTES`, no longer in the ring."""

    def has_failed(self) -> bool:
        """Whether it will not be committed."""
        return self.failure is not None

    def refuse(self, reason: str, *, lacks_space: bool = False) -> None:
        """Set why it will not be committed, unless it has failed already."""
        if self.failure is None:
            self.failure = reason
            self.lacks_space = lacks_space


class Storer:
    """Writes tensors in its own threads; `store` and `fail` never raise."""

    def __init__(self, config: WriterConfig, *, backend: RetryingBackend, attempt: Attempt, ring: RingConsumer) -> None:
        """Open the rank's share of an attempt, and start the threads.

        Raises:
            StorageError: the store cannot be written.
        """
        self.config = config
        self.backend = backend
        """The store without retries, for markers and plans."""
        self.attempt, self.ring = attempt, ring
        options = config.options
        # Whether to retry depends on what a thread is storing (`trying`); the backend asks after each failure.
        give_up = lambda: _stops_retrying.get()()  # noqa: E731, PLW0108  (the context differs between threads and calls)
        self.retrying = backend.with_deadline(timeout_seconds=options.block_timeout_seconds, give_up=give_up)
        """The store with retries."""
        self.spill: SpillDirectory | None = None
        """The directory for iterations that the store does not accept; None if there is none."""
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
        # In a separate thread: the work in the pool may wait for the room that a flush makes.
        self._flushes = ThreadPoolExecutor(1, thread_name_prefix="ranktape-flush")
        self._flush: Future[None] | None = None
        self._room_nbytes = MAX_WAITING_NBYTES
        self._room_lock = threading.Lock()
        self._lock = threading.Lock()
        self._open: dict[int, Staged] = {}
        self.trainer_is_gone = False
        """Whether the trainer has ended, so that it does not wait for room."""
        self.give_up_at: float | None = None
        """Time by `time.monotonic` after which nothing is retried; None if there is none yet."""

    def begin(self, iteration: int) -> Staged:
        """Start an iteration; the first rank writes that into the store."""
        staged = Staged(iteration=iteration)
        with self._lock:
            self._open[iteration] = staged
        if self.config.is_first:
            self.run(staged, partial(self.rank_writer.open, iteration))
        return staged

    def submit(self, slot: Slot, staged: Staged) -> None:
        """Store the tensor in a slot and free the slot, in one of the threads."""
        staged.num_tensors += 1
        staged.futures.append(self._pool.submit(self.store, slot, staged))

    def note(self, slot: Slot, staged: Staged) -> None:
        """Take a slot of `NOTES` for an iteration. A lost tensor counts, because the trainer has counted it."""
        staged.num_tensors += slot.kind is SlotKind.LOST
        staged.notes.append(slot)

    def submit_reduced(self, reduced: np.ndarray[Any, Any], info: RecordInfo, staged: Staged) -> None:
        """Store the array that replaces the values of a tensor whose slot is free already."""
        staged.num_tensors += 1

        def work() -> None:
            self._write_reduced(reduced, info, staged, None)
            with self._lock:
                staged.num_stored += 1

        staged.futures.append(self._pool.submit(self._run, staged, work))

    def run(self, staged: Staged, work: Callable[[], None]) -> None:
        """Run other work for the iteration in one of the threads."""
        staged.futures.append(self._pool.submit(self._run, staged, work))

    def relieve(self) -> None:
        """Write the held small tensors if the trainer waits for room, or if half of the ring is in use."""
        is_waited_for = self.ring.counter(Counter.WAITING) == 1 and not self.trainer_is_gone
        if is_waited_for or self.ring.pending_nbytes > self.ring.capacity // 2:
            self._start_flush()

    def store(self, slot: Slot, staged: Staged) -> None:
        """Store the tensor in a slot. The slot is freed at the latest when the iteration ends."""

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
        """Fail an iteration: its threads stop retrying, and what it holds is freed."""
        with self._lock:
            staged.refuse(reason)
            is_idle = not staged.num_active
            staged.num_active += is_idle
        if is_idle:
            self._release_failed(staged)

    def finish(self, staged: Staged, commit: Callable[[], None] | None = None) -> str | None:
        """Wait until the tensors of an iteration are stored or held, then commit it; without `commit`, drop it.

        Returns:
            Why it could not be committed; None if it was.
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
        """Retry the writes of this thread inside the context.

        Retries stop once the iteration, if given, has failed, `give_up_at` is over, or the store has not answered for
        `block_timeout_seconds`.
        """
        seconds = self.config.options.block_timeout_seconds
        began = time.monotonic()

        def stops_retrying() -> bool:
            since = self.retrying.failing_since
            is_late = since is not None and time.monotonic() - max(since, began) > seconds
            return is_late or (staged is not None and staged.has_failed()) or self._is_over()

        token = _stops_retrying.set(stops_retrying)
        try:
            yield
        finally:
            _stops_retrying.reset(token)

    def shutdown(self) -> None:
        """Wait for the running work, and cancel the rest."""
        self._pool.shutdown(cancel_futures=True)
        self._flushes.shutdown(cancel_futures=True)

    def _run(self, staged: Staged, work: Callable[[], None]) -> bool:
        """Do the work unless the iteration has failed, and fail the iteration if it raises; whether it was started."""
        with self._lock:
            if staged.has_failed():
                return False
            staged.num_active += 1
        failure: Exception | None = None
        try:
            work()
        except RanktapeError as error:
            failure = error
        except Exception as error:  # noqa: BLE001  # a defect of ours fails this iteration, not later ones
            failure = CaptureError(f"{type(error).__name__}: {error}")
            traceback.print_exc()
        with self._lock:
            if failure is not None:
                staged.refuse(str(failure), lacks_space=isinstance(failure, NoSpaceError))
            is_over = staged.has_failed() and staged.num_active == 1
            staged.num_active -= not is_over
        if is_over:
            self._release_failed(staged)
        return True

    def _release_failed(self, staged: Staged) -> None:
        """Free what a failed iteration holds, and then count the calling thread as no longer active."""
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

    def _write_reduced(
        self, reduced: np.ndarray[Any, Any], info: RecordInfo, staged: Staged, slot: Slot | None
    ) -> None:
        """Write the array that replaces the values of a tensor; its slot, if any, is freed at the latest after that."""
        self._make_room(reduced.nbytes, staged)
        with self.trying(staged):
            self.rank_writer.write(reduced, info=info, on_release=partial(self._release_room, reduced.nbytes, slot))

    def _release_room(self, nbytes: int, slot: Slot | None) -> None:
        with self._room_lock:
            self._room_nbytes += nbytes
        if slot is not None:
            self.ring.free(slot)

    def _make_room(self, nbytes: int, staged: Staged) -> None:
        """Take `nbytes` of `MAX_WAITING_NBYTES`, waiting until they are free.

        Raises:
            CaptureError: the iteration has failed, or the time is over.
        """
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
            if not is_running and self.rank_writer.waiting_nbytes:
                self._flush = self._flushes.submit(self._flush_stacks)

    def _flush_stacks(self) -> None:
        with self._lock:
            waiting = [staged for staged in self._open.values() if not staged.has_failed()]
        # Each iteration separately, so that a failure affects no other one.
        for staged in waiting:
            with self.trying(staged):
                self._run(staged, partial(self.rank_writer.flush_stacks, staged.iteration))

    def _is_over(self) -> bool:
        return self.give_up_at is not None and time.monotonic() > self.give_up_at
