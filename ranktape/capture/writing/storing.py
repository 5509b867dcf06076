"""How a staged tensor becomes a record, and what becomes of it when the store is slow or does not answer.

A few threads measure tensors and write them. Small ones stay in the ring until the rank's writer puts them into the
store together. What happens when the ring is in the way of the training, or the store does not answer:

    block, skip   writes are tried again until `store_timeout_seconds` are over; then the iteration fails, and what is
                  left of it is given back at once
    histogram     while the training waits for room, and where a write was given up, large tensors are counted, and
                  the counts wait in memory for the store; too many of them, and the oldest iteration fails
Of a tensor whose header asks for its histogram or its statistics nothing else is kept, whatever the policy.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.numerics.histograms.histogram import measure
from ranktape.capture.settings.table import Policy
from ranktape.capture.writing.counting import is_countable, reduce_to
from ranktape.capture.writing.patience import HeldMemory, Patience
from ranktape.errors import CaptureError, NoSpaceError, RanktapeError, UnreachableError
from ranktape.storage.format.dtypes import numpy_dtype
from ranktape.storage.format.record_info import Keep, RecordInfo

if TYPE_CHECKING:
    from ranktape.capture.staging.ring import RingConsumer
    from ranktape.capture.staging.ring_file import Slot
    from ranktape.storage.recording.writer import RankWriter

COUNT_FROM_NBYTES = 1 << 20
"""Under the policy `histogram` tensors from this size on are not held: their counts take far less than they do."""

HELD_NBYTES = 96 << 20
"""Memory for counts, and under the policy `histogram` for small tensors, that wait for the store."""

HOLD_SECONDS = 900.0
"""Longest time that they wait for it."""

_PAUSE_SECONDS = 0.05
_TOO_MUCH = "the store does not answer, and what waits for it takes more than {nbytes} bytes of memory"
_TOO_LATE = "the store did not take it within --finish-timeout-seconds after the training"


@dataclass(slots=True)
class Staged:
    """An iteration that has begun and is not committed."""

    iteration: int
    """Training step."""
    may_degrade: bool
    """Whether counts may stand for values: the guaranteed minimum is stored."""
    futures: list[Future[None]] = field(default_factory=list)
    """One for each tensor on its way to the store."""
    num_tensors: int = 0
    """Tensors that came out of the ring."""
    num_stored: int = 0
    """Those that are stored, or held to be stored."""
    num_counted: int = 0
    """Those of them of which only a histogram is kept."""
    num_active: int = 0
    """Threads that are storing one of its tensors."""
    failure: str | None = None
    """Why it will not be committed."""
    lacks_space: bool = False
    """Whether that is because the store is full."""

    def has_failed(self) -> bool:
        """Whether it will not be committed."""
        return self.failure is not None

    def refuse(self, reason: str, *, lacks_space: bool = False) -> None:
        """Say why it will not be committed; the first reason stands."""
        if self.failure is None:
            self.failure = reason
            self.lacks_space = lacks_space


@dataclass(frozen=True, slots=True, kw_only=True)
class StoringOptions:
    """What the threads that store must know."""

    rank: int
    """Global rank."""
    attempt: int
    """Number of the attempt."""
    policy: Policy
    """What happens when there is no room."""
    store_timeout_seconds: float
    """How long a write is tried again."""
    store_concurrency: int
    """Tensors in flight to the store."""
    ring_is_kept: bool
    """Whether the ring outlives its processes: what is not stored stays in it then."""
    has_spill: bool
    """Whether what the store does not take goes elsewhere whole, and need not be counted for that."""


def staged_record(slot: Slot, *, rank: int, attempt: int) -> tuple[np.ndarray[Any, Any], RecordInfo]:
    """The tensor in a slot, which lies there still, with its values kept, and what is known of it but the checksum."""
    header = {**slot.header, "keep": Keep.VALUES.value}
    array = np.frombuffer(slot.payload, dtype=numpy_dtype(header["dtype"])).reshape(header["shape"])
    info = RecordInfo(
        **{**header, "shape": tuple(header["shape"])},
        rank=rank,
        attempt=attempt,
        nbytes=array.nbytes,
        overflow=measure(array, sample_dim=header["sample_dim"]),
        checksum="",
    )
    return array, info


class Storer:
    """Writes tensors in threads of its own; `store` and `fail` never raise."""

    def __init__(
        self,
        rank_writer: RankWriter,
        *,
        ring: RingConsumer,
        patience: Patience,
        options: StoringOptions,
        failing_since: Callable[[], float | None],
    ) -> None:
        """Start the threads.

        Args:
            rank_writer: Writes.
            ring: Where the tensors are.
            patience: Asked by the backend under the writer whether to try again.
            options: What is to be done.
            failing_since: Says since when the store has not answered, by `time.monotonic`; None while it does.
        """
        self._rank_writer = rank_writer
        self._ring = ring
        self._patience = patience
        self._options = options
        self._failing_since = failing_since
        self._pool = ThreadPoolExecutor(options.store_concurrency, thread_name_prefix="ranktape-store")
        # Not behind the tensors that wait in the pool: they may be waiting for the room that this makes.
        self._flushes = ThreadPoolExecutor(1, thread_name_prefix="ranktape-flush")
        self._flush: Future[None] | None = None
        self._budget = HeldMemory(HELD_NBYTES)
        self._lock = threading.Lock()
        self._open: dict[int, Staged] = {}
        self.trainer_is_gone = False
        """Whether nobody waits for room any more."""
        self.give_up_at: float | None = None
        """When nothing is tried again any more, by `time.monotonic`."""

    def begin(self, iteration: int, *, may_degrade: bool) -> Staged:
        """An iteration begins."""
        staged = Staged(iteration=iteration, may_degrade=may_degrade)
        with self._lock:
            self._open[iteration] = staged
        return staged

    def submit(self, slot: Slot, staged: Staged) -> None:
        """Store the tensor in a slot, and free the slot, in one of the threads."""
        staged.num_tensors += 1
        staged.futures.append(self._pool.submit(self.store, slot, staged))

    def run(self, staged: Staged, work: Callable[[], None]) -> None:
        """Do something else for the iteration in one of the threads."""
        staged.futures.append(self._pool.submit(self._begin, staged, work))

    def relieve(self) -> None:
        """Write the small tensors that are held, where they are in the way of the training."""
        is_full = self._ring.used_nbytes > self._ring.file.capacity // 2
        if is_full or self._is_waited_for:
            self._start_flush()

    def store(self, slot: Slot, staged: Staged) -> None:
        """Store the tensor in a slot and free the slot, at the latest when the iteration ends."""

        def work() -> None:
            try:
                self._store(slot, staged)
            except BaseException:
                self._ring.free(slot)
                raise
            with self._lock:
                staged.num_stored += 1

        if not self._run(staged, work):
            self._ring.free(slot)

    def fail(self, staged: Staged, reason: str) -> None:
        """The iteration will not be committed; its threads stop trying, and what is held of it is given back."""
        with self._lock:
            staged.refuse(reason)
            is_idle = not staged.num_active
        if is_idle:
            self._rank_writer.abandon(staged.iteration)

    def interrupt(self, staged: Staged) -> int:
        """The iteration will have no end: wait for its tensors, and forget it; how many were stored or held."""
        for future in staged.futures:
            future.result()
        with self._lock:
            self._open.pop(staged.iteration, None)
        self._rank_writer.abandon(staged.iteration)
        return staged.num_stored

    def finish(self, staged: Staged, commit: Callable[[], None]) -> str | None:
        """Wait until the tensors of an iteration are stored or held, then commit it; why that could not be done.

        None says that it is committed.
        """
        for future in staged.futures:
            future.result()
        is_committed = False

        def work() -> None:
            nonlocal is_committed
            with self._patiently(staged):
                commit()
            is_committed = True

        self._run(staged, work)
        with self._lock:
            self._open.pop(staged.iteration, None)
        self._rank_writer.abandon(staged.iteration)
        return None if is_committed else staged.failure

    @contextmanager
    def closing(self) -> Iterator[None]:
        """While this thread writes what belongs to no iteration."""
        none = Staged(iteration=-1, may_degrade=False)
        with self._patience.while_storing(self._gives_up(none, seconds=self._options.store_timeout_seconds)):
            yield

    def shutdown(self) -> None:
        """Wait for what is being stored; nothing new is begun."""
        self._pool.shutdown(cancel_futures=True)
        self._flushes.shutdown(cancel_futures=True)

    @property
    def _is_waited_for(self) -> bool:
        return self._ring.is_waited_for and not self.trainer_is_gone

    def _begin(self, staged: Staged, work: Callable[[], None]) -> None:
        self._run(staged, work)

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
            staged.num_active -= 1
            is_over = staged.has_failed() and not staged.num_active
        if is_over:
            self._rank_writer.abandon(staged.iteration)
        return True

    def _store(self, slot: Slot, staged: Staged) -> None:
        array, info = staged_record(slot, rank=self._options.rank, attempt=self._options.attempt)
        reduced = reduce_to(slot.header.get("keep", ""), array, info=info)
        if reduced is not None:
            if not self._options.ring_is_kept:
                self._ring.free(slot)
            self._write_reduced(*reduced, staged, slot)
            return
        if self._rank_writer.holds(array):
            self._hold(array, info=info, slot=slot, staged=staged)
            return
        may_count = self._may_count(info, staged)
        if not (may_count and self._is_waited_for):
            gives_up = self._gives_up(staged, seconds=self._options.store_timeout_seconds)
            try:
                with self._patience.while_storing(lambda: gives_up() or (may_count and self._is_waited_for)):
                    self._rank_writer.write(array, info=info)
            except UnreachableError:
                # With a place to spill into, the error is that place's: there is nothing left to hope for.
                if not may_count or self._options.has_spill or staged.has_failed():
                    raise
            else:
                self._ring.free(slot)
                return
        self._count(array, info=info, staged=staged)
        self._ring.free(slot)

    def _hold(self, array: np.ndarray[Any, Any], *, info: RecordInfo, slot: Slot, staged: Staged) -> None:
        release: Callable[[], None] = partial(self._ring.free, slot)
        # What is held in the ring keeps the room behind it, too; counting would not help the training then.
        is_to_move = self._options.policy is Policy.HISTOGRAM and not self._options.ring_is_kept
        if is_to_move and self._budget.take(array.nbytes):
            release = partial(self._budget.give_back, array.nbytes)
            array = array.copy()
            self._ring.free(slot)
        with self._patiently(staged):
            self._rank_writer.write(array, info=info, on_release=release)

    def _may_count(self, info: RecordInfo, staged: Staged) -> bool:
        return self._options.policy is Policy.HISTOGRAM and staged.may_degrade and is_countable(info)

    def _count(self, array: np.ndarray[Any, Any], *, info: RecordInfo, staged: Staged) -> None:
        reduced = reduce_to(Keep.HISTOGRAM.value, array, info=info)
        assert reduced is not None
        self._write_reduced(*reduced, staged, None)
        with self._lock:
            staged.num_counted += 1

    def _write_reduced(self, kept: np.ndarray[Any, Any], info: RecordInfo, staged: Staged, slot: Slot | None) -> None:
        """Write what stands for a tensor; its slot is free then, at the latest."""
        self._make_room(kept.nbytes, staged)
        with self._patiently(staged):
            self._rank_writer.write(kept, info=info, on_release=partial(self._let_go, kept.nbytes, slot))

    def _let_go(self, nbytes: int, slot: Slot | None) -> None:
        self._budget.give_back(nbytes)
        if slot is not None:
            self._ring.free(slot)

    def _make_room(self, nbytes: int, staged: Staged) -> None:
        """Take so much of the budget for what is held, at the cost of the oldest iteration if it must be.

        Raises:
            CaptureError: this is the iteration, or the time is over.
        """
        while not self._budget.take(nbytes):
            if self._failing_since() is not None and self._options.policy is Policy.HISTOGRAM:
                self._fail_oldest()
            else:
                self._start_flush()
            if staged.has_failed() or self._is_over():
                raise CaptureError(staged.failure or _TOO_LATE)
            time.sleep(_PAUSE_SECONDS)

    def _fail_oldest(self) -> None:
        with self._lock:
            if any(staged.has_failed() and staged.num_active for staged in self._open.values()):
                return  # what that one held comes back in a moment
            oldest = next((staged for staged in self._open.values() if not staged.has_failed()), None)
            if oldest is not None:
                oldest.refuse(_TOO_MUCH.format(nbytes=HELD_NBYTES))
        if oldest is not None:
            self.fail(oldest, _TOO_MUCH.format(nbytes=HELD_NBYTES))

    @contextmanager
    def _patiently(self, staged: Staged) -> Iterator[None]:
        """While this thread writes what was held of an iteration."""
        with self._patience.while_storing(self._gives_up(staged, seconds=self._held_seconds(staged))):
            yield

    def _start_flush(self) -> None:
        with self._lock:
            is_running = self._flush is not None and not self._flush.done()
            if not is_running and self._rank_writer.held_nbytes:
                self._flush = self._flushes.submit(self._flush_stacks)

    def _flush_stacks(self) -> None:
        with self._lock:
            waiting = [staged for staged in self._open.values() if not staged.has_failed()]
        # One after the other, so that one that fails takes none of the others with it; and counted as at work, so
        # that none is failed for the room that another one is about to give back.
        for staged in waiting:
            with self._patiently(staged):
                self._run(staged, partial(self._rank_writer.flush_stacks, staged.iteration))

    def _held_seconds(self, staged: Staged) -> float:
        return HOLD_SECONDS if staged.may_degrade else self._options.store_timeout_seconds

    def _gives_up(self, staged: Staged, *, seconds: float) -> Callable[[], bool]:
        """Whether the iteration has failed, or the store has not answered for so long, or the time is over."""
        began = time.monotonic()

        def gives_up() -> bool:
            since = self._failing_since()
            is_late = since is not None and time.monotonic() - max(since, began) > seconds
            return is_late or staged.has_failed() or self._is_over()

        return gives_up

    def _is_over(self) -> bool:
        return self.give_up_at is not None and time.monotonic() > self.give_up_at
