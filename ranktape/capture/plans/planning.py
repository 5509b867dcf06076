"""A capture that records nothing, and finds out what one of this training would cost.

The training runs for a few steps with everything in place but the writer: the hooks, the rules and the copies are the
capture's own, and what would be stored is freed at once. Several steps are captured so, as the first one of a program
is not like the others; the steps between them tell what a step takes without. Then the training is stopped.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from ranktape.capture.console import Console
from ranktape.capture.plans.forecast import Footprint, RankPlan, footprint_of
from ranktape.capture.rendezvous import Rendezvous
from ranktape.capture.session import Capture
from ranktape.capture.settings.rules import cadence_of
from ranktape.capture.staging.process import WriterProcess
from ranktape.capture.staging.ring import RingProducer
from ranktape.capture.staging.ring_file import PREFIX_NBYTES, Counter, Slot, SlotKind, aligned, unnamed_file
from ranktape.capture.starting import missing_folders, remove_folders
from ranktape.errors import CaptureError
from ranktape.storage.format.memory import available_nbytes
from ranktape.storage.places.retry import TIMEOUT_SECONDS
from ranktape.storage.recording.start import check_place

if TYPE_CHECKING:
    from types import TracebackType

    from torch import nn

    from ranktape.storage.places.backend import Backend

CAPTURED_STEPS = (0, 3, 5)
"""Steps of the training that are captured, counted from its first one."""

LAST_STEP = 6
"""The training is stopped after it."""

WINDOW_NBYTES = 64 << 20
"""Memory that the copies go through: they find it warm, as they would find the ring."""

PROBE_NBYTES = 8 << 20
PROBE_SECONDS = 1.0
"""Objects of this size are written to the store for about so long, and removed."""

MEET_SECONDS = 300.0
"""Longest wait for another rank."""

_LEAST_SECONDS = 3.0
"""A store that does not answer is waited for so long, were `store_timeout_seconds` shorter: it is asked but once."""

_MAX_NAMED = 1000

_MAX_LOOKED_AT = 256
"""Iterations among which that one is looked for in which most rules are due."""


class PlanRing(RingProducer):
    """A ring whose slots are free as soon as they are published; keeps what was said of them."""

    def __init__(self, budget_nbytes: int) -> None:
        super().__init__(min(budget_nbytes, WINDOW_NBYTES), keep_alive=lambda: None)
        self.headers: list[tuple[bytes, int]] = []
        """The header of each tensor of the running iteration, and the bytes of its slot."""
        self.ends: list[dict[str, Any]] = []
        """What the ends of iterations say."""

    def put(self, kind: SlotKind, header: dict[str, Any], *, timeout_seconds: float) -> None:  # noqa: ARG002
        """Keep what the end of an iteration says."""
        if kind is SlotKind.END:
            self.ends.append(header)

    def reserve(self, kind: SlotKind, header: bytes, payload_nbytes: int, *, timeout_seconds: float) -> Slot:
        """A slot to fill; memory of its own for one that does not fit."""
        nbytes = aligned(PREFIX_NBYTES + len(header)) + aligned(payload_nbytes)
        if kind is SlotKind.TENSOR:
            self.headers.append((header, nbytes))
        if nbytes > self.capacity:
            return Slot(kind=kind, header={}, payload=memoryview(bytearray(payload_nbytes)), end=0)
        return super().reserve(kind, header, payload_nbytes, timeout_seconds=timeout_seconds)

    def put_whole(self, kind: SlotKind, header: bytes, payload: bytes, *, timeout_seconds: float) -> None:
        """Keep what is said of it."""
        self.publish(self.reserve(kind, header, len(payload), timeout_seconds=timeout_seconds))

    def publish(self, slot: Slot) -> None:
        """Free the slot."""
        if slot.end:
            super().publish(slot)
            self.set_counter(Counter.FREED, self.counter(Counter.PUBLISHED))

    def cancel(self, slot: Slot) -> None:
        """Forget the slot."""
        self.headers.pop()
        if slot.end:
            super().cancel(slot)


class _NoProcess(WriterProcess):
    """In the place of the writer: what it would get is kept, and nothing is stored."""

    def __init__(self, budget_nbytes: int) -> None:
        self.ring: PlanRing = PlanRing(budget_nbytes)
        self._process = None
        self._stderr = unnamed_file("ranktape-plan")

    def is_alive(self) -> bool:
        """Always."""
        return True

    def keep_alive(self) -> None:
        """Nothing is to be done for that."""


class PlanningCapture(Capture):
    """A capture that is stopped after a few steps and leaves nothing behind; `plan` says what it found."""

    is_in_the_way = (
        "'ranktape plan' cannot run a script that begins a capture of its own: run one without it, and give the "
        "capture's options to the plan"
    )

    def __init__(self, url: str | os.PathLike[str], *, model: nn.Module | None = None, **options: Any) -> None:
        """As a capture.

        Raises:
            UsageError: an option is unknown or its value not allowed, or the options leave no iteration.
        """
        super().__init__(url, model=model, **options)
        cadence = cadence_of(self.options)
        held, after = self.options.record_last, self.options.record_after
        count = self.options.target_iterations if held is None else held + 1 + after
        self.iterations = list(cadence.following(count=count))
        """The iterations that the capture would take; a flight recorder when something happens."""
        if not self.iterations:
            raise CaptureError("the options leave no iteration to capture: check --iteration, --where and --every")
        # With every rule that is due at some time, as far as that can be: it is the largest that counts.
        self._number = max(self.iterations[:_MAX_LOOKED_AT], key=lambda iteration: sum(cadence.due(iteration)))
        self._iteration = self._number
        self._num_steps = 0
        self._durations: list[float] = []
        self._footprints: list[Footprint] = []
        self._layers: dict[str, dict[str, None]] = {}
        self._available = available_nbytes()

    def __enter__(self) -> Self:
        """As a capture's, with the same errors; the store is tried with some objects that are removed again.

        Raises:
            RunExistsError: there is a run at the URL.
            StorageError: the store cannot be reached or written.
            CaptureError: another rank cannot begin, or another capture is running.
        """
        super().__enter__()
        self._console = _Quiet(rank=self._place.rank)
        self._began = self._now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take everything off again."""
        if Capture.current is self and error is None and self._clock.ends_at_close:
            # Only another forward would have ended the last one.
            self._count_step()
        self._take_off()

    def plan(self) -> RankPlan:
        """What this rank has found out."""
        self._take_off()
        # The later one is warm; what it is about must not be smaller for it.
        footprint = max(self._footprints, key=lambda one: one.staged_nbytes, default=footprint_of([], self.options))
        end = self._ring.ends[-1] if self._ring.ends else {}
        steps = {number: seconds for number, seconds in enumerate(self._durations) if number not in CAPTURED_STEPS}
        # The quickest of each: what else the machine did is not the capture's.
        warm = [seconds for number, seconds in steps.items() if number > 1]
        captured = [self._durations[number] for number in CAPTURED_STEPS[1:] if number < len(self._durations)]
        # What thousands of ranks leave for rank 0 is in its memory together.
        max_named = _MAX_NAMED if self.rank else None
        return RankPlan(
            rank=self.rank,
            host=socket.gethostname(),
            num_local_ranks=self._place.num_local_ranks,
            num_steps=self._num_steps,
            num_layers={kind: len(modules) for kind, modules in sorted(self._layers.items())},
            layers={kind: list(modules)[:max_named] for kind, modules in sorted(self._layers.items())},
            footprint=footprint,
            num_expected=int(end.get("num_expected", 0)),
            silent_sites=dict(end.get("silent_sites", {})),
            coverage=end.get("coverage"),
            silence=None if footprint.num_tensors else self._silence or self._explain_silence(),
            problem=self._disabled,
            budget_nbytes=self._budget,
            available_nbytes=self._available,
            step_seconds=min(warm, default=None),
            captured_seconds=min(captured, default=None),
            write_rate=self._write_rate,
            free_nbytes=free_nbytes(self._backend),
        )

    @property
    def url(self) -> str:
        """Where it would record, without credentials."""
        return self._backend.url

    @property
    def rendezvous(self) -> Rendezvous:
        """Where the ranks have met."""
        return self._rendezvous

    def _new_process(self, budget_nbytes: int) -> WriterProcess:
        self._budget = budget_nbytes
        process = _NoProcess(budget_nbytes)
        self._ring = process.ring
        return process

    def _start(self) -> tuple[dict[str, Any], Rendezvous]:
        rendezvous = Rendezvous(self._place, seconds=MEET_SECONDS)
        seconds = min(max(self.options.store_timeout_seconds, _LEAST_SECONDS), TIMEOUT_SECONDS)
        self._backend = self._backend.with_deadline(timeout_seconds=seconds)
        try:
            check_place(self._backend, resume=self.options.resume or self.options.add, overwrite=self.options.overwrite)
            self._write_rate = self._probe(rendezvous)
        except BaseException as error:
            if self._place.rank == 0:
                rendezvous.report_failure(str(error))
            self._process.close()
            raise
        plan = {"iterations": [self._number], "is_done": False, "is_enough": False}
        return {"attempt": "", "completed": [], **plan}, rendezvous

    def _probe(self, rendezvous: Rendezvous) -> float:
        """Bytes per second that the store takes, while it takes from all ranks."""
        folders = missing_folders(self._backend)
        rendezvous.share("place", "")
        rendezvous.gather("place", seconds=MEET_SECONDS)
        try:
            rate = probe_rate(self._backend, name=f"plan-probe-{self._place.rank}-{secrets.token_hex(4)}")
        finally:
            rendezvous.share("probe", "")
            # Others may still be writing into the folder that was not there before.
            with contextlib.suppress(CaptureError):
                rendezvous.gather("probe", seconds=MEET_SECONDS)
            remove_folders(folders)
        return rate

    def _advance(self, iteration: int) -> None:  # noqa: ARG002  (the numbers are ours)
        self._count_step()
        if self._num_steps > LAST_STEP:
            self._take_off()
            # It is no failure, and a thread that ends by it says nothing; by a class of ours it would.
            raise SystemExit(0)
        # Any other number: that iteration is not captured.
        super()._advance(self._number if self._num_steps in CAPTURED_STEPS else self._number + 1)
        self._began = self._now()

    def _count_step(self) -> None:
        self._durations.append(self._now() - self._began)
        self._num_steps += 1
        if self.is_watching:
            self._end_iteration()

    def _begin_iteration(self) -> None:
        # One survey is enough for a capture; here every iteration that is not captured is as if it were past that.
        self._is_surveyed = self._is_surveyed or self._num_steps > 0
        self._ring.headers.clear()
        super()._begin_iteration()

    def _end_iteration(self) -> None:
        tally = self._recorder.tally
        assert tally is not None, "only called while an iteration is watched"
        for source in sorted(tally.sources, key=lambda one: (one.layer_stack, one.layer_idx, one.module)):
            self._layers.setdefault(source.layer_type, {})[source.module] = None
        super()._end_iteration()
        self._footprints.append(footprint_of(self._ring.headers, self.options))

    def _silence_of_all(self) -> None:
        self._silence = self._explain_silence()

    def _lacks_room(self) -> str | None:
        return None

    def _take_off(self) -> None:
        if Capture.current is self:
            super()._take_off()
            if self._peers is not None:
                self._peers.stop()
            self._process.close()

    def _now(self) -> float:
        # What a device still has to do belongs to the step that asked for it.
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()


class _Quiet(Console):
    """Warns, and says nothing else: the plan says it."""

    def say(self, text: str) -> None:
        """Nothing."""


def probe_rate(backend: Backend, *, name: str) -> float:
    """Bytes per second that a store takes in objects of some megabytes, which are removed again.

    Raises:
        StorageError: it takes none.
    """
    data = os.urandom(PROBE_NBYTES)
    number = 0
    began = time.perf_counter()
    try:
        while time.perf_counter() - began < PROBE_SECONDS:
            backend.put(f"{name}/{number}", [data])
            number += 1
        backend.flush()
        return number * PROBE_NBYTES / (time.perf_counter() - began)
    finally:
        backend.delete(name)


def free_nbytes(backend: Backend) -> int | None:
    """Room in a store; None for one that nobody can ask, as an object store."""
    if "://" in backend.url:
        return None
    folder = next(path for path in (Path(backend.url), *Path(backend.url).parents) if path.exists())
    try:
        return shutil.disk_usage(folder).free
    except OSError:  # it may be there and not tell
        return None
