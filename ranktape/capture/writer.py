"""The writer process, which takes staged tensors from the ring and stores them, during the training and after it.

The trainer of each rank starts one, as `python -m ranktape.capture.writer`, in a separate session. It loads neither
torch nor zarr. It takes slots in order; measures, checksums and stores the tensors in a few threads (`storing.py`); and
commits an iteration once the trainer has finished it and all of its tensors are stored (`committing.py`). It exits when
the trainer has finished or died and everything that was staged is stored. If it is killed, the trainer starts another
one, which continues with what is stored and what is in the ring.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import select
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ranktape.analyze.numerics.histograms.moments import warm_up
from ranktape.capture.flight.flight import Flight
from ranktape.capture.flight.held import take_over
from ranktape.capture.staging.process import WriterConfig, signal_name
from ranktape.capture.staging.ring import RingConsumer
from ranktape.capture.staging.ring_file import NOTES, Counter, Slot, SlotKind, Words
from ranktape.capture.writing.committing import Committer, read_slots, site_of
from ranktape.capture.writing.coordinator import ASK_SECONDS, Coordinator, max_ask_seconds
from ranktape.capture.writing.storing import Staged, Storer
from ranktape.errors import RanktapeError, StorageError
from ranktape.storage.format.attempt import Attempt, IterationPlan, lost_message, read_attempt, read_plan
from ranktape.storage.format.layout import Mark
from ranktape.storage.places.backend import Backend
from ranktape.storage.places.failures import printable
from ranktape.storage.places.urls import open_backend
from ranktape.storage.recording.start import Lease, begin_attempt, claim_run, join_attempt

NICENESS = 19
"""Added to the niceness of the process, so that the training has priority."""

_IDLE_SECONDS = 0.2
_MAX_NOTICES = 16
"""Number of last notices that the trainer can still read."""

_CONSOLE_SECONDS = 10.0
"""Longest time for which the writer keeps the console of a dead trainer open. Until then, a pipe from it stays open."""

_OUTAGE_SECONDS = 3.0
"""Time after which a store that does not answer is reported."""


_EXIT_CODE = -1
"""The index of the last field of /proc/PID/stat: the status that a parent gets from `wait`."""

_INFO = struct.Struct("<QQ11Ii")
"""The struct that Linux fills for a pidfd: a mask of the fields that are set, ..., the exit status."""

_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_HAS_STATUS = 1 << 3


_END_SECONDS = 5.0
"""Longest wait for the last thread of a process that is exiting."""


class Trainer:
    """The training process, which started this one."""

    def __init__(self, pid: int) -> None:
        """Watch the process in a thread, because its status is gone once its parent, such as torchrun, has read it."""
        self._pid = pid
        self._descriptor: int | None = None
        self._status = -1
        # Not all systems have it. On others, the change of this process's parent shows the end a little later.
        with contextlib.suppress(AttributeError, OSError):
            self._descriptor = os.pidfd_open(pid)
        self._thread = threading.Thread(target=self._watch, name="ranktape-trainer", daemon=True)
        if self._descriptor is not None:
            self._thread.start()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that become readable once the process has ended."""
        return () if self._descriptor is None else (self._descriptor,)

    def has_ended(self) -> bool:
        """Whether the process has ended, even if its parent has not waited for it yet."""
        return self._descriptor is not None and bool(select.select([self._descriptor], [], [], 0)[0])

    def ending(self) -> str | None:
        """How the process ended, such as `killed by SIGKILL`, or that it is not known; None for exit code 0."""
        if self._descriptor is not None:
            # Its children get another parent some time before its last thread exits.
            self._thread.join(_END_SECONDS)
        if self._status < 0:
            return "how it ended is not known"
        if os.WIFSIGNALED(self._status):
            return f"killed by {signal_name(os.WTERMSIG(self._status))}"
        code = os.waitstatus_to_exitcode(self._status)
        return f"exit code {code}" if code else None

    def _watch(self) -> None:
        """Wait for the end of the process, and read its exit status at once."""
        assert self._descriptor is not None
        select.select([self._descriptor], [], [])
        self._status = self._read_status()

    def _read_status(self) -> int:
        """The exit status that the parent gets or got from `wait`; -1 if it is not available any more."""
        waiting = self._read_waiting()
        return self._read_reaped() if waiting < 0 else waiting

    def _read_reaped(self) -> int:
        """The status after the parent has waited for the process, which needs Linux 6.15; -1 if it is not available."""
        assert self._descriptor is not None
        query = _INFO.pack(_HAS_STATUS, *[0] * 13)
        try:
            known, *_, status = _INFO.unpack(fcntl.ioctl(self._descriptor, _GET_INFO, query))
        except OSError:
            return -1
        return int(status) if known & _HAS_STATUS else -1

    def _read_waiting(self) -> int:
        """The status before the parent has waited for the process; -1 if it is not available."""
        try:
            text = Path(f"/proc/{self._pid}/stat").read_text()
            name_end = text.rindex(")")
            fields = text[name_end + 2 :].split()
            # A live process that reuses the number is not in one of these states.
            return int(fields[_EXIT_CODE]) if fields[0] in {"Z", "X"} else -1
        except (OSError, ValueError):
            return -1


class Writer:
    """The loop of the writer process."""

    def __init__(self, config: WriterConfig, *, ring: RingConsumer, wake_read: int) -> None:
        self._config = config
        self._ring = ring
        self._wake_read = wake_read
        self._iterations: dict[int, Staged] = {}
        # Read the last words of the previous writer before this one replaces them.
        previous_status = {} if config.attempt is None else ring.hear(Words.WRITER) or {}
        self._status: dict[str, Any] = {"state": "starting", "num_committed": previous_status.get("num_committed", 0)}
        self._status_lock = threading.Lock()
        self._plan = IterationPlan(iterations=(), is_done=False)
        self._has_ended = threading.Event()
        self._is_outage_reported = False
        self._exit_stack = contextlib.ExitStack()
        self._lease: Lease | None = None
        self._flight: Flight | None = None
        self._trainer = Trainer(config.trainer_pid)
        self._death: str | None = None
        self._console_lock = threading.Lock()
        self._has_console = config.is_first
        self._report()

    def run(self) -> int:
        """Serve the trainer until it ends, and return the exit code."""
        with self._exit_stack:
            try:
                self._start()
            except RanktapeError as error:
                self._report(state="failed", kind=type(error).__name__, error=str(error))
                return 1
            try:
                reason = self._serve()
                self._end(reason)
            except RanktapeError as error:
                self._report(state="failed", kind=type(error).__name__, error=str(error))
                self._leave_console(str(error))
                return 1
            finally:
                self._committer.stop()
                self._storer.shutdown()
            return 0

    def _start(self) -> None:
        config, options = self._config, self._config.options
        backend = open_backend(config.url, storage_options=options.storage_options)
        if config.is_first and not options.adds:  # `adds` changes nothing in the run, so it needs no lease
            self._lease = self._exit_stack.enter_context(
                claim_run(backend, launch=config.launch, resume=options.resume, overwrite=options.overwrite)
            )
        if not config.is_first:
            warm_up()
        self._attempt = attempt = self._find_attempt(backend)
        if config.is_first:
            warm_up()
        planned = config.cadence.following(
            count=options.target_iterations - len(attempt.completed), without=attempt.completed
        )
        is_enough = len(attempt.completed) >= options.target_iterations
        self._plan = IterationPlan(iterations=planned, is_done=not planned, is_enough=is_enough)
        if config.attempt is not None:
            self._plan = read_plan(backend, attempt=attempt) or self._plan
        self._coordinator = self._start_coordinator(backend) if config.is_first else None
        self._storer = Storer(config, backend=backend, attempt=attempt, ring=self._ring)
        self._committer = Committer(
            self._storer,
            report=self._report,
            on_settled=self._coordinator.note_commit if self._coordinator is not None else lambda _: None,
            num_committed=self._status["num_committed"],
        )
        if options.record_last is not None:
            self._flight = Flight(self._storer, committer=self._committer, report=self._report)
        self._report(
            state="ready",
            attempt=attempt.path,
            completed=list(attempt.completed),
            **_plan_fields(self._plan),
        )
        if config.attempt is not None:
            self._ring.advance(Counter.NEWS)
            self._take_over()
        # Not in the thread that takes slots, because a store may answer slowly.
        threading.Thread(target=self._watch_plan, name="ranktape-plan", daemon=True).start()

    def _store_held(self, by: str) -> int | str:
        assert self._flight is not None, "only called for a flight recorder"
        return self._flight.request(by) or self._ring.counter(Counter.STEP)

    def _find_attempt(self, backend: Backend) -> Attempt:
        config, options = self._config, self._config.options
        if config.attempt is not None:
            attempt = read_attempt(backend, config.attempt)
            if attempt is None:
                raise StorageError(lost_message(backend))
            return attempt
        if not config.is_first:
            return join_attempt(backend, launch=config.launch, timeout_seconds=config.join_timeout_seconds)
        return begin_attempt(
            backend,
            launch=config.launch,
            options=config.document,
            environment=config.environment,
            resume=options.resume,
            overwrite=options.overwrite,
            add=options.adds,
        )

    def _start_coordinator(self, backend: Backend) -> Coordinator:
        coordinator = Coordinator(
            backend,
            attempt=self._attempt,
            options=self._config.options,
            cadence=self._config.cadence,
            plan=self._plan,
            step=lambda: self._ring.counter(Counter.STEP),
            given_up=lambda: {int(rank): text for rank, text in (self._ring.hear() or {}).get("given_up", {}).items()},
            lost=lambda: None if self._lease is None else self._lease.lost,
            store_held=self._store_held,
            is_successor=self._config.attempt is not None,
        )
        coordinator.start()
        return coordinator

    def _take_over(self) -> None:
        """Continue the work of a killed writer, given its tensors in the ring and in the store."""
        if self._flight is not None:
            if self._config.gives_all_up:
                self._give_up_ring()
            else:
                for slot in self._take_held_slots():
                    self._flight.handle(slot)
            return
        leftovers = read_slots(self._ring, ends=self._config.unsettled)
        # Tensors are stored in order: the last writer was working on the oldest iteration.
        at_work = min((iteration for iteration, leftover in leftovers.items() if leftover.skip is None), default=None)
        for iteration, leftover in leftovers.items():
            is_given_up = self._config.gives_all_up or (self._config.gives_up and iteration == at_work)
            if leftover.is_over and not is_given_up:
                self._committer.recover(iteration, leftover)
                continue
            if leftover.is_over:
                mark = Mark.FAILED if leftover.skip is None else Mark.SKIPPED
                self._committer.mark(iteration, mark, leftover.skip or self._give_up_reason)
            stored = set() if leftover.is_over else self._begin_again(iteration, is_given_up=is_given_up)
            for note in () if leftover.is_over else leftover.notes:
                self._storer.note(note.copy(), self._iterations[iteration])
            for slot in (*leftover.other_slots, *leftover.tensors):
                if leftover.is_over or slot.kind is not SlotKind.TENSOR or site_of(slot) in stored:
                    self._ring.free(slot)
                else:
                    self._storer.submit(slot, self._iterations[iteration])

    def _take_held_slots(self) -> list[Slot]:
        with self._storer.trying():
            return take_over(
                self._ring,
                committer=self._committer,
                ends=self._config.unsettled,
                given_up=self._give_up_reason if self._config.gives_up else None,
            )

    def _give_up_ring(self) -> None:
        """Free all slots of the ring, because one of them may have killed the previous writers."""
        while (slot := self._ring.take()) is not None:
            self._ring.free(slot)
        self._report(problem=self._give_up_reason)

    def _begin_again(self, iteration: int, *, is_given_up: bool) -> set[str]:
        """Continue an iteration that a killed writer had started; returns the sites of its stored tensors."""
        self._begin(iteration)
        staged = self._iterations[iteration]
        if is_given_up:
            self._storer.fail(staged, self._give_up_reason)
            return set()
        stored: set[str] = set()
        try:
            with self._storer.trying():
                stored = self._committer.adopt(iteration)
        except RanktapeError as error:
            self._storer.fail(staged, str(error))
        staged.num_tensors += len(stored)
        staged.num_stored += len(stored)
        return stored

    @property
    def _give_up_reason(self) -> str:
        return f"the writer process ended again without storing an iteration ({self._config.deaths[-1]})"

    def _serve(self) -> str:
        self._ring.waits_for_ends = self._flight is None
        while True:
            self._ring.sleep(self._wake_read, *self._trainer.descriptors, seconds=_IDLE_SECONDS)
            _drain(self._wake_read)
            # Check for the end before taking slots, so that everything published before the end is taken.
            is_finished = self._ring.counter(Counter.FINISHED)
            is_orphan = os.getppid() != self._config.trainer_pid or self._trainer.has_ended()
            while (is_finished or is_orphan or self._ring.is_due) and (slot := self._ring.take()) is not None:
                self._handle(slot)
            if is_finished:
                self._leave_console()
                return str((self._ring.hear() or {}).get("reason", "the training ended"))
            if is_orphan:
                self._death = self._trainer.ending()
                later = f"its writer still stores what was staged: see 'ranktape status {self._storer.retrying.url}'"
                timer = threading.Timer(_CONSOLE_SECONDS, self._leave_console, [later])
                timer.daemon = True
                timer.start()
                return "the training process died"
            if self._flight is not None:
                self._flight.tick()
            self._storer.relieve()
            self._report_outages()

    def _handle(self, slot: Slot) -> None:
        if self._flight is not None:
            self._flight.handle(slot)
            return
        iteration = int(slot.header["iteration"])
        if slot.kind in {SlotKind.TENSOR, SlotKind.END, *NOTES} and iteration not in self._iterations:
            self._begin_again(iteration, is_given_up=False)
        if slot.kind is SlotKind.TENSOR:
            self._storer.submit(slot, self._iterations[iteration])
        elif slot.kind in NOTES:
            self._storer.note(slot.copy(), self._iterations[iteration])
            self._ring.free(slot)
        elif slot.kind is SlotKind.BEGIN:
            self._begin(iteration)
            self._ring.free(slot)
        elif slot.kind is SlotKind.END:
            self._committer.commit(self._iterations.pop(iteration), slot)
        elif slot.kind is SlotKind.SKIP:
            if (staged := self._iterations.pop(iteration, None)) is not None:
                self._storer.finish(staged)
            self._committer.mark(iteration, Mark.SKIPPED, str(slot.header["reason"]))
            self._ring.free(slot)

    def _begin(self, iteration: int) -> None:
        self._iterations[iteration] = self._storer.begin(iteration)

    def _report_outages(self) -> None:
        since = self._storer.retrying.failing_since
        is_out = since is not None and time.monotonic() - since > _OUTAGE_SECONDS
        if is_out != self._is_outage_reported:
            self._is_outage_reported = is_out
            url = self._storer.retrying.url
            self._report(notice=f"{url} does not answer: trying again" if is_out else f"{url} answers again")

    def _watch_plan(self) -> None:
        """Poll for new plans of the coordinator, more often once all planned iterations are settled."""
        longest = max_ask_seconds(self._config.launch.world_size)
        pause = ASK_SECONDS
        while not self._has_ended.wait(pause):
            plan = self._plan
            is_waiting = not plan.is_done and self._ring.counter(Counter.SETTLED) >= len(plan.iterations)
            pause = min(longest, 1.25 * pause) if is_waiting else longest
            try:
                latest = read_plan(self._storer.backend, attempt=self._attempt)
            except RanktapeError as error:
                self._report(notice=f"the plan of further iterations cannot be read: {error}")
                continue
            if latest is not None and latest != plan:
                self._plan = latest
                self._report(**_plan_fields(latest))
                self._ring.advance(Counter.NEWS)
                pause = ASK_SECONDS

    def _end(self, reason: str) -> None:
        self._has_ended.set()
        self._storer.trainer_is_gone = True
        self._has_failed()
        self._storer.give_up_at = time.monotonic() + self._config.options.finish_timeout_seconds
        if self._flight is not None:
            unsent = (self._ring.hear() or {}).get("untold", ())
            self._flight.end(reason, death=self._death, unsent=unsent)
        for iteration in sorted(self._iterations):
            staged = self._iterations.pop(iteration)
            if self._config.options.manual and staged.num_tensors:
                self._committer.commit(staged, None)  # saved tensors are committed, however the process ended
                continue
            self._storer.finish(staged)
            self._committer.mark(iteration, Mark.FAILED, f"cut off after {staged.num_stored} tensors: {reason}")
        self._committer.close()
        with self._storer.trying():
            self._storer.rank_writer.close(reason=reason)
        if self._coordinator is not None:
            self._report(state="waiting")
            # A launch that was suspended for a long time may end before its next check of the lease.
            if self._lease is not None and (lost := self._lease.look(self._attempt)) is not None:
                self._report(notice=lost)
            ended = str((self._ring.hear() or {}).get("ended", ""))
            verdict = self._coordinator.finish(ended=ended, has_failed=self._has_failed)
            self._report(verdict=verdict.to_json())
            self._leave_console(f"{verdict.message()}: see 'ranktape status {self._storer.retrying.url}'")
        self._report(state="closed")

    def _leave_console(self, text: str | None = None) -> None:
        """Print how the run ended on the console of a dead trainer, and close it; later calls do nothing.

        If `text` is None, nothing is printed.
        """
        with self._console_lock:
            if not self._has_console:
                return
            self._has_console = False
            if text is not None:
                how = f" ({self._death})" if self._death else ""
                line = f"ranktape: the training process of rank 0 died{how}; {' '.join(text.split())}"
                with contextlib.suppress(OSError):  # its reader may be gone
                    os.write(1, f"{printable(line)}\n".encode())
            with open(os.devnull, "wb") as nowhere:  # noqa: PTH123  (no path)
                os.dup2(nowhere.fileno(), 1)

    def _has_failed(self) -> bool:
        """Whether the training has failed. If so, another launch is told that it may wait for the lease."""
        is_killed = self._death is not None or (self._trainer.has_ended() and self._trainer.ending() is not None)
        has_failed = is_killed or bool((self._ring.hear() or {}).get("has_failed"))
        if has_failed and self._lease is not None:
            self._lease.announce_end()
        return has_failed

    def _report(self, **changes: Any) -> None:
        with self._status_lock:
            if (problem := changes.pop("problem", None)) is not None:
                # The first problem is taken for the cause of the others, which are counted and become notices.
                first = self._status.get("problem")
                if first is None:
                    changes["problem"] = problem
                elif problem != first and problem not in self._status.get("notices", ()):
                    changes |= {"notice": problem, "num_more_problems": self._status.get("num_more_problems", 0) + 1}
            if (notice := changes.pop("notice", None)) is not None:
                # Several, because the trainer polls, and the last notice alone would hide its cause.
                changes["notices"] = [*self._status.get("notices", ()), notice][-_MAX_NOTICES:]
            self._status |= changes
            self._ring.say(self._status)


def _plan_fields(plan: IterationPlan) -> dict[str, Any]:
    """The part of the writer's words that describes a plan."""
    return {
        "iterations": list(plan.iterations),
        "is_done": plan.is_done,
        "is_enough": plan.is_enough,
        "asked": [{"iterations": request.iterations, "settings": dict(request.settings)} for request in plan.asked],
    }


def _drain(descriptor: int) -> None:
    while select.select([descriptor], [], [], 0)[0]:
        if not os.read(descriptor, 1 << 16):
            # Every writing end is closed. Without a pause, the loop would spin on the closed pipe.
            time.sleep(_IDLE_SECONDS)
            return


def _yield_to_the_training() -> None:
    os.nice(NICENESS)
    if hasattr(os, "SCHED_BATCH"):
        # Without this, the kernel would preempt the training each time that it wakes the writer.
        with contextlib.suppress(OSError):  # some sandboxes allow no other scheduler; the niceness still applies
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main(arguments: list[str]) -> int:
    """Run the writer, given the descriptors of the ring and of the pipe that wakes it; stdin is the configuration."""
    ring_descriptor, wake_read = (int(argument) for argument in arguments)
    config: WriterConfig = pickle.load(sys.stdin.buffer)  # noqa: S301  (written by the trainer)
    writer = Writer(config, ring=RingConsumer(ring_descriptor), wake_read=wake_read)
    # Only now, and only for this thread: the thread that waits for the trainer's end has to run in time.
    _yield_to_the_training()
    return writer.run()


if __name__ == "__main__":
    # If scipy is installed, numba imports it for matrix products, which our kernels do not use. The import would be a
    # quarter of the start time.
    sys.modules["scipy"] = None  # type: ignore[assignment]  # makes `import scipy` raise ImportError
    sys.exit(main(sys.argv[1:]))
