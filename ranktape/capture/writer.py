"""Who takes the staged tensors from the ring and stores them, while the training goes on and after it?

`python -m ranktape.capture.writer`, one for each rank, started by the trainer in a session of its own. It
loads neither torch nor zarr. It takes slots in order, measures, checksums and stores the tensors in a few
threads, and commits an iteration when the trainer said that it ended and all of it is stored. It ends when
the trainer has finished or died and everything that was staged is stored.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.histogram import measure, warm_up
from ranktape.capture.coordinator import Coordinator, Goal
from ranktape.capture.ring import RingConsumer, Slot, SlotKind
from ranktape.capture.writer_config import WriterConfig
from ranktape.errors import RanktapeError, StorageError
from ranktape.storage.attempt import Launch
from ranktape.storage.dtypes import numpy_dtype
from ranktape.storage.layout import Mark
from ranktape.storage.plan import Plan, read_plan
from ranktape.storage.progress import open_iteration
from ranktape.storage.record import RecordInfo
from ranktape.storage.start import begin_attempt, join_attempt
from ranktape.storage.urls import open_backend
from ranktape.storage.writer import RankWriter

if TYPE_CHECKING:
    from ranktape.storage.attempt import Attempt

NUM_THREADS = 4
"""Tensors in flight to the store."""

NICENESS = 19
"""Added to the process's niceness: the training comes first."""

_IDLE_SECONDS = 0.2
_PLAN_POLL_SECONDS = 1.0


@dataclass(slots=True)
class _Iteration:
    """An iteration that has begun and has not ended."""

    futures: list[Future[None]] = field(default_factory=list)
    """One for each tensor on its way to the store."""


def plan_iterations(*, start: int, every: int, count: int, completed: tuple[int, ...]) -> tuple[int, ...]:
    """The first iterations to capture: as many as are wanted, without those that earlier attempts completed."""
    wanted = count - len(completed)
    planned: list[int] = []
    iteration = start
    while len(planned) < wanted:
        if iteration not in completed:
            planned.append(iteration)
        iteration += every
    return tuple(planned)


class Writer:
    """The loop of the writer process."""

    def __init__(self, config: WriterConfig, *, ring: RingConsumer, wake_read: int) -> None:
        self._config = config
        self._ring = ring
        self._wake_read = wake_read
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="ranktape-store")
        # Commits flush the disk: while they do, the tensors of the next iteration are stored.
        self._commits = ThreadPoolExecutor(1, thread_name_prefix="ranktape-commit")
        self._iterations: dict[int, _Iteration] = {}
        self._num_ended = 0
        self._words: dict[str, Any] = {"state": "starting"}
        self._words_lock = threading.Lock()
        self._plan: Plan | None = None
        self._next_plan_poll = 0.0
        self._say()

    def run(self) -> int:
        """Serve the trainer to its end; the exit code of the process."""
        try:
            self._start()
        except RanktapeError as error:
            self._say(state="failed", kind=type(error).__name__, error=str(error))
            return 1
        try:
            reason = self._serve()
            self._end(reason)
        except RanktapeError as error:
            self._say(state="failed", kind=type(error).__name__, error=str(error))
            return 1
        finally:
            self._commits.shutdown(cancel_futures=True)
            self._pool.shutdown(cancel_futures=True)
        return 0

    def _start(self) -> None:
        config = self._config
        launch = Launch(**config.launch)
        self._backend = open_backend(config.url, storage_options=config.storage_options)
        if config.rank == 0:
            self._attempt: Attempt = begin_attempt(
                self._backend,
                launch=launch,
                options=config.options,
                environment=config.environment,
                resume=config.resume,
                overwrite=config.overwrite,
            )
            warm_up()
        else:
            warm_up()
            self._attempt = join_attempt(self._backend, launch=launch, timeout_seconds=config.join_timeout_seconds)
        self._rank_writer = RankWriter(
            self._backend, attempt=self._attempt, rank=config.rank, environment=config.environment
        )
        planned = plan_iterations(
            start=config.start, every=config.every, count=config.target, completed=self._attempt.completed
        )
        self._plan = Plan(iterations=planned, is_done=not planned)
        self._coordinator: Coordinator | None = None
        if config.rank == 0:
            goal = Goal(
                planned=planned,
                every=config.every,
                target=config.target,
                finish_timeout_seconds=config.finish_timeout_seconds,
            )
            self._coordinator = Coordinator(
                self._backend, attempt=self._attempt, goal=goal, step=lambda: self._ring.step
            )
            self._coordinator.start()
        self._say(
            state="ready",
            attempt=self._attempt.path,
            completed=list(self._attempt.completed),
            iterations=list(planned),
            is_done=self._plan.is_done,
        )

    def _serve(self) -> str:
        while True:
            self._ring.sleep(self._wake_read, seconds=_IDLE_SECONDS)
            _drain(self._wake_read)
            # Look for the end before the slots: what was published before it is taken then.
            is_finished = self._ring.is_finished
            is_orphan = os.getppid() != self._config.trainer_pid
            while (slot := self._ring.take()) is not None:
                self._handle(slot)
            if is_finished:
                return str((self._ring.hear() or {}).get("reason", "the training ended"))
            if is_orphan:
                return "the training process died"
            self._poll_plan()

    def _handle(self, slot: Slot) -> None:
        iteration = int(slot.header["iteration"])
        if slot.kind is SlotKind.TENSOR:
            self._iterations[iteration].futures.append(self._pool.submit(self._store, slot))
            return
        self._ring.free(slot)
        if slot.kind is SlotKind.BEGIN:
            pending = self._iterations.setdefault(iteration, _Iteration())
            if self._config.rank == 0:
                pending.futures.append(self._pool.submit(self._open_iteration, iteration))
        elif slot.kind is SlotKind.END:
            self._commits.submit(self._commit, iteration, self._iterations.pop(iteration), slot.header)
        elif slot.kind is SlotKind.SKIP:
            self._commits.submit(self._mark, iteration, Mark.SKIPPED, str(slot.header["reason"]))

    def _store(self, slot: Slot) -> None:
        try:
            header = slot.header
            array = np.frombuffer(slot.payload, dtype=numpy_dtype(header["dtype"])).reshape(header["shape"])
            info = RecordInfo(
                **{**header, "shape": tuple(header["shape"])},
                rank=self._config.rank,
                attempt=self._attempt.number,
                nbytes=array.nbytes,
                overflow=measure(array, sample_dim=header["sample_dim"]),
                checksum="",
            )
            self._rank_writer.write(array, info=info)
        finally:
            self._ring.free(slot)

    def _open_iteration(self, iteration: int) -> None:
        open_iteration(self._backend, attempt=self._attempt, iteration=iteration)

    def _commit(self, iteration: int, pending: _Iteration, header: dict[str, Any]) -> None:
        try:
            for future in pending.futures:
                future.result()
            self._rank_writer.commit(iteration, expected=header["expected"], silent_sites=header["silent_sites"])
        except RanktapeError as error:
            self._mark(iteration, Mark.FAILED, str(error))
        except Exception as error:  # noqa: BLE001  # a defect of ours must cost the iteration, not what comes after it
            self._mark(iteration, Mark.FAILED, f"{type(error).__name__}: {error}")
            traceback.print_exc()
        else:
            self._ended(iteration)

    def _mark(self, iteration: int, mark: Mark, reason: str) -> None:
        self._say(problem=f"iteration {iteration} is not stored by rank {self._config.rank}: {reason}")
        try:
            if self._config.rank == 0:
                self._open_iteration(iteration)
            self._rank_writer.mark(iteration, mark=mark, attributes={"reason": reason})
        except StorageError as error:
            self._say(problem=f"iteration {iteration}: {reason}; and that cannot be written either: {error}")
        self._ended(iteration)

    def _ended(self, iteration: int) -> None:
        self._num_ended += 1
        if self._coordinator is not None:
            self._coordinator.note_commit(iteration)

    def _poll_plan(self) -> None:
        """Once everything planned has ended, learn whether that was enough."""
        plan = self._plan
        if plan is None or plan.is_done or self._num_ended < len(plan.iterations):
            return
        if time.monotonic() < self._next_plan_poll:
            return
        self._next_plan_poll = time.monotonic() + _PLAN_POLL_SECONDS
        try:
            news = read_plan(self._backend, attempt=self._attempt)
        except StorageError as error:
            self._say(problem=f"the plan of further iterations cannot be read: {error}")
            return
        if news is not None and news != plan:
            self._plan = news
            self._say(iterations=list(news.iterations), is_done=news.is_done)
            self._ring.announce()

    def _end(self, reason: str) -> None:
        self._commits.shutdown()
        for iteration in sorted(self._iterations):
            futures = self._iterations.pop(iteration).futures
            for future in futures:
                future.exception()
            stored = sum(future.exception() is None for future in futures)
            self._mark(iteration, Mark.FAILED, f"{reason} in the middle of the iteration (tensors stored: {stored})")
        self._rank_writer.close(reason=reason)
        if self._coordinator is not None:
            self._say(state="waiting")
            verdict = self._coordinator.finish()
            self._say(verdict=verdict.to_json())
        self._say(state="closed")

    def _say(self, **changes: Any) -> None:
        with self._words_lock:
            self._words |= changes
            self._ring.say(self._words)


def _drain(descriptor: int) -> None:
    while select.select([descriptor], [], [], 0)[0]:
        if not os.read(descriptor, 1 << 16):
            # Every writing end is closed; without a pause the loop would spin on the closed pipe.
            time.sleep(_IDLE_SECONDS)
            return


def _yield_to_the_training() -> None:
    os.nice(NICENESS)
    if hasattr(os, "SCHED_BATCH"):
        # Each staged tensor wakes us; without this the kernel takes the training's processor away for it.
        with contextlib.suppress(OSError):  # some sandboxes have no schedulers; the niceness stands
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main(arguments: list[str]) -> int:
    """Run the writer on the ring and the pipe whose descriptors are given; the configuration is on stdin."""
    ring_descriptor, wake_read = (int(argument) for argument in arguments)
    config = WriterConfig(**json.load(sys.stdin))
    _yield_to_the_training()
    return Writer(config, ring=RingConsumer(ring_descriptor), wake_read=wake_read).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
