"""The iterations of a training, and what happens between two of them.

At a boundary the writer learns that the iteration is whole and is asked what is wanted; the hooks come off, and go on
where the next iteration is, or stay on for it. A capture that fails inside is disabled here, and the training goes on.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ranktape.capture.expected import WITHOUT_GRADIENTS
from ranktape.capture.flight.training import Room
from ranktape.capture.guard import StrictCaptureError
from ranktape.capture.hooks.compiled import has_compiled, is_left_compiled, why_eager
from ranktape.capture.passes.tracker import Tracker
from ranktape.capture.rendezvous import Rendezvous, keep_process_groups
from ranktape.capture.settings.options import CaptureOptions, Policy
from ranktape.capture.staging.ring import InterruptedSlotError, NoRoomError
from ranktape.capture.staging.ring_file import Counter, SlotKind
from ranktape.errors import CaptureError, RanktapeError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ranktape.capture.console import Console
    from ranktape.capture.hooks.model import ModelHooks
    from ranktape.capture.passes.clock import Clock
    from ranktape.capture.passes.passes import Arguments
    from ranktape.capture.recorder import Recorder
    from ranktape.capture.rendezvous import StopGate
    from ranktape.capture.settings.cadence import Schedule
    from ranktape.capture.settings.selecting import Selecting
    from ranktape.capture.sites import IterationTally
    from ranktape.capture.staging.process import WriterProcess
    from ranktape.capture.tensors.master import MasterWeights
    from ranktape.storage.places.urls import RetryingBackend

_TRIGGER_SECONDS = 5.0
"""Longest wait for room for a word on what happened."""


class Iterations:
    """The iterations of a capture that has begun; what begins it sets the parts without a value here."""

    yields = False
    """Whether the environment asked for it, not the program: it ends no training, and when another one begins."""

    wording: Callable[[str], str] = staticmethod(str)
    """How a message names options, for whoever began the capture."""

    is_in_the_way = "a capture is running in this process already: end it first, or record into it"
    """The message to another capture that would begin meanwhile."""

    _process: WriterProcess
    _recorder: Recorder
    _hooks: ModelHooks
    _console: Console
    _schedule: Schedule
    _clock: Clock
    _rendezvous: Rendezvous
    _master: MasterWeights | None
    _backend: RetryingBackend
    _predicted_nbytes: int

    def __init__(self, options: CaptureOptions) -> None:
        self.options = options
        self._tracker = Tracker(modes=options.wanted_modes)
        self._iteration = options.first_iteration
        self._num_empty_steps = 0
        self._is_surveyed = False
        self._usual_passes: tuple[int, int] | None = None
        """The first iteration whose passes were counted, and how many of a training it had; None before one was."""
        self._is_merge_told = False
        self._silence: str | None = None
        self._num_recorded = 0
        self._keeps_weights = False
        self._news = 0
        self._disabled: str | None = None
        self._gate: StopGate | None = None
        self._ended = ""
        self._room = Room()
        self._untold: deque[dict[str, Any]] = deque()
        """Words on what happened that the writer has not had yet."""

    @property
    def iteration(self) -> int:
        """The training step that is running."""
        return self._iteration

    @property
    def is_recording(self) -> bool:
        """Whether tensors of the running iteration are being stored."""
        return self._recorder.tally is not None and self._recorder.tally.is_staged

    @property
    def is_watching(self) -> bool:
        """Whether tensors of the running iteration are being stored or counted."""
        return self._recorder.tally is not None

    def _on_optimizer_step(self) -> None:
        # Some libraries step an optimizer to initialise it: a step without a pass before it ends no iteration.
        is_blind = self.options.manual or (not self.is_recording and has_compiled())
        is_empty = self.is_watching and not is_blind and self._tracker.num_train_passes == 0
        self._num_empty_steps = self._num_empty_steps + 1 if is_empty else 0
        if not is_empty or self._num_empty_steps > 1:
            self._advance(self._iteration + 1)

    def _on_skipped_step(self, found_inf: torch.Tensor | None) -> None:
        if found_inf is not None:
            self._recorder.record_found_inf(found_inf)
            return
        if self._recorder.tally is not None:
            self._recorder.tally.step_skipped = True
        if self._master is not None:
            self._master.note_skip()

    def _on_forward(self, model: nn.Module, arguments: Arguments) -> Arguments | None:
        """A forward that begins has ended the iteration; the arguments to go on with."""
        self._advance(self._iteration + 1)
        return self._on_late_forward(model, arguments)

    def _on_late_forward(self, model: nn.Module, arguments: Arguments) -> Arguments | None:
        """A forward began before the hooks of its iteration were put on; the arguments to go on with."""
        if not self.is_watching or self.options.manual:
            return None
        with self._recorder.guarded():
            return self._hooks.enter_late(model, arguments)
        return None

    def _end_last_iteration(self) -> None:
        """The iteration that only another forward would have ended is over."""
        if self._disabled is None and self.is_watching:
            # Where nothing was recorded, the verdict says so.
            with contextlib.suppress(CaptureError):
                self._end_iteration()
        self._iteration += 1

    def _advance(self, iteration: int) -> None:
        with self._recorder.guarded():
            keep_process_groups()
        if self._disabled is None:
            self._settle(iteration)
        else:
            self._hooks.detach()
            self._iteration = iteration
            self._learn()
        self._stop_where_all_do()
        if self._disabled is None:
            self._begin_iteration()
        if not self.is_recording:
            self._hooks.put_back()

    def _settle(self, iteration: int) -> None:
        """The running iteration has ended, and another one is next."""
        self._tell_untold()
        if self.is_watching:
            self._end_iteration()
        for passed in self._schedule.between(self._iteration, iteration):
            self._skip(passed, f"the training went from iteration {self._iteration} to {iteration}")
        self._iteration = iteration
        self._clock.begin_iteration()
        try:
            # One that was killed is started again, also while nothing is captured: others may wait for it.
            self._process.keep_alive()
        except CaptureError as error:
            self._disable(str(error))
        self._process.ring.set_counter(Counter.STEP, self._iteration)
        for late in self._learn():
            self._skip(late, f"the rank learned of it only in iteration {iteration}")

    def _learn(self) -> list[int]:
        """Take over what the writer says of the plan, where that is new; the new iterations that are past already."""
        ring = self._process.ring
        # Grows when the writer has something to say about the plan; to look costs the training thread nothing.
        if (news := ring.counter(Counter.NEWS)) == self._news or (words := ring.hear()) is None:
            return []
        self._news = news
        self._keeps_weights = False  # an iteration failed, perhaps the one that has them
        return self._schedule.learn(words, iteration=self._iteration)

    def _stop_where_all_do(self) -> None:
        """End the training before an iteration before which all ranks end it.

        Raises:
            SystemExit: that is here; the exit code is 0.
        """
        gate = self._gate
        if gate is None or not gate.stops_before(self._iteration, is_wanted=self._schedule.is_enough):
            return
        self._ended = f"the training was ended before iteration {self._iteration} (--stop-when-stored)"
        self._console.say(f"everything is stored: {self._ended}")
        raise SystemExit(0)

    def _begin_iteration(self) -> None:
        is_wanted = self._disabled is None and self._schedule.wants(self._iteration)
        selecting = self._selecting_of_asked() if is_wanted else None
        if is_wanted and (reason := self._lacks_room()) is not None:
            self._skip(self._iteration, reason)
            is_wanted = False
        if is_wanted and self._is_recorder:
            is_wanted = self._may_hold()
        if is_wanted:
            self._tell(SlotKind.BEGIN, {"iteration": self._iteration})
            is_wanted = self._room.owed is None
            self._console.pass_on(self._process.ring.hear() or {})
        if self._disabled is not None:
            return
        # One that is not captured tells what a captured one costs; not in a training that would run eagerly for it.
        if is_wanted or not (self._is_surveyed or is_left_compiled(self.options)):
            is_reduced = is_wanted and self._is_crowded()
            self._recorder.begin(self._iteration, is_staged=is_wanted, selecting=selecting, is_reduced=is_reduced)
            self._tracker.reset(self._iteration)
            if not self.options.manual:
                with self._recorder.guarded():
                    if is_wanted:
                        self._hooks.attach(keeps_weights=self._keeps_weights)
                    else:
                        self._hooks.await_model()
            if not self.is_watching:
                self._hooks.detach()  # attaching failed, and disabled the capture
        if is_wanted or not self._is_surveyed:
            self._tell_of_eager()

    def _selecting_of_asked(self) -> Selecting | None:
        """What decides in an iteration that somebody asked for while the training ran; None in others."""
        settings = self._schedule.settings_of(self._iteration)
        if settings is None:
            return None
        with self._recorder.guarded():  # the coordinator has refused what is no selection
            from ranktape.capture.settings.selecting import Selecting

            return Selecting(self.options.asked(settings), rank=self._rendezvous.rank, is_asked=True)
        return None

    def _tell_of_eager(self) -> None:
        """Say of a training that compiles, and whose graphs are never asked, that it runs eagerly."""
        if has_compiled() and (why := why_eager(self.options)) is not None:
            self._tell_of_compiled(why)

    def _tell_of_compiled(self, why: str | None) -> None:
        """Say how compiled code is recorded that runs now: eagerly, and why, or with None inside of its graphs."""
        self._console.tell_of_compiled(self._schedule.iterations, why_eager=why)

    def _tell_of_merged(self, iteration: int) -> None:
        """Say once that an iteration has the training passes of several, as its script skips steps."""
        num_passes = self._tracker.num_train_passes
        if self._is_merge_told or not num_passes or not self._clock.has_ticked or not self._clock.is_single_step:
            return
        if self._usual_passes is None:
            self._usual_passes = iteration, num_passes
        other, usual = self._usual_passes
        if num_passes > usual and not num_passes % usual:
            self._is_merge_told = True
            self._console.say(
                f"iteration {iteration} has {num_passes} training passes, where iteration {other} had {usual}: no "
                f"optimizer stepped between them, as where a script skips its step; the iteration holds them all"
            )

    def _end_iteration(self) -> None:
        tally = self._recorder.tally
        assert tally is not None, "only called while an iteration is watched"
        self._tell_of_eager()
        self._tell_of_merged(tally.iteration)
        summary = self._recorder.end()
        summary |= {"compiled": self._hooks.compiled_way(), "step_skipped": tally.step_skipped}
        coverage = None
        with self._recorder.guarded():
            coverage = self._hooks.find_coverage()
        self._hooks.rest(stays=self._is_recorder and tally.is_staged and not self._clock.listens_to_forwards)
        if self._disabled is not None or self._is_lost(tally):
            return
        if not self._is_surveyed:
            with self._recorder.guarded():
                self._tell_of_unmatched()
        is_silent = not self._is_surveyed and tally.num_tensors == 0
        # Before the writer knows of the end: what no rank had anything to record of must not count as complete.
        mistake = self._silence_of_all() if is_silent else None
        refusal = None if tally.num_tensors else self._recorder.expected.main_refusal()
        reason = refusal if mistake is None else str(mistake)
        # What no optimizer updates is stored once: in a generation every token would bring it again.
        self._keeps_weights = not self._tracker.is_training and self.options.keep_last is None and reason is None
        if tally.is_staged and reason is not None:
            self._skip(tally.iteration, reason)
        elif tally.is_staged:
            self._num_recorded += 1
            if coverage is not None:
                summary["silent_sites"] |= coverage.unseen
                summary["coverage"] = coverage.text()
            self._tell(SlotKind.END, {"iteration": tally.iteration, "num_tensors": tally.num_tensors, **summary})
        if mistake is not None:
            self._is_surveyed = True
            self._report_mistake(mistake)
            return
        if not self._is_surveyed:
            self._is_surveyed = True
            self._predicted_nbytes = tally.nbytes
            if is_silent:
                return
            self._console.show_matched(
                tally,
                sources=self._recorder.expected.seen(),
                iterations=self._schedule.iterations,
                min_iterations=self.options.guaranteed_iterations,
                record_last=self.options.record_last,
                budget_nbytes=self._process.ring.capacity,
                url=self._backend.url,
                coverage=coverage,
                silent=[
                    f"{place}: {reason}"
                    for place, reason in summary["silent_sites"].items()
                    if reason == WITHOUT_GRADIENTS
                ],
            )
            for note in self._hooks.unmatched_roles():
                self._console.warn_once(note)

    def _tell_of_unmatched(self) -> None:
        """Warn of names in the selection that nothing has; of several ranks the last one to notice does."""
        notes = self._recorder.find_unmatched(self._hooks.paths)
        new = [note for note in notes if self._rendezvous.count(f"unmatched {note.partition(' matches ')[0]}")]
        self._console.warn_of_unmatched(new)

    def _silence_of_all(self) -> CaptureError | None:
        """Warn that this rank has nothing to record, as a stage of a pipeline may; a mistake where now no rank has."""
        self._silence = self._explain_silence()
        # What was refused with a reason is no mistake in the settings: it does not end the training.
        if self._recorder.expected.main_refusal() is None and self._rendezvous.count("silent"):
            return CaptureError(self._silence)
        self._console.warn(self._silence, is_for_all_ranks=True)
        return None

    def _explain_silence(self) -> str:
        if self.options.manual:
            return "nothing was recorded: save_tensor was not called in the first iteration"
        return self._hooks.explain_silence()

    def _report_mistake(self, error: RanktapeError) -> None:
        """Disable a capture that the environment asked for, because of something that a user can mend.

        Raises:
            RanktapeError: the program asked for it, or the launcher: it is the end of the training.
        """
        if not self.yields:
            raise error
        self._disable(str(error))

    def _tell_of_wait(self) -> None:
        """A training that stands still must not do so in silence."""
        self._console.pass_on(self._process.ring.hear() or {})
        limit = f"{self.options.block_timeout_seconds:g} s"
        self._console.warn_once(
            f"the training waits for the writer, at most {limit} each time: the host budget is full"
        )

    def _is_crowded(self) -> bool:
        """Whether a flight recorder has no room for the next iteration's values: the training is not to wait for it."""
        return self._is_recorder and self._is_surveyed and self._process.ring.free_nbytes < self._predicted_nbytes

    def _may_hold(self) -> bool:
        """Whether a flight recorder may have room for an iteration: more than for one that had too little."""
        if not self._room.may_suffice(self._process.ring.free_nbytes):
            return False
        if self._room.owed is not None:
            owed, self._room.owed = self._room.owed, None
            self._tell(SlotKind.SKIP, owed)
        return self._room.owed is None

    def _is_lost(self, tally: IterationTally) -> bool:
        """Whether a flight recorder had too little room for an iteration, and goes without it."""
        if tally.loss is not None:
            self._skip(tally.iteration, tally.loss)
            self._room.was_too_small(self._room.owed)
        return tally.loss is not None

    def _lacks_room(self) -> str | None:
        """Why the next iteration is skipped; None where it is taken."""
        if self.options.policy != Policy.SKIP or self._num_recorded < self.options.min_iterations:
            return None
        free = self._process.ring.free_nbytes
        if not self._is_surveyed or free >= self._predicted_nbytes:
            return None
        return (
            f"it takes {self._predicted_nbytes} bytes, {free} of the host budget are free: "
            f"raise --host-budget-nbytes or --every"
        )

    def _skip(self, iteration: int, reason: str) -> None:
        self._tell(SlotKind.SKIP, {"iteration": iteration, "reason": reason})

    @property
    def _is_recorder(self) -> bool:
        """Whether what is staged is held until something happens."""
        return self.options.record_last is not None

    def _tell_of_trigger(self, kind: str, text: str, error: BaseException | None = None) -> None:
        """Say to the writer that something happened, for which what is held is to be stored; a kind of trigger."""
        if not self._is_recorder or self._disabled is not None:
            return
        from ranktape.storage.format.live import MAX_TEXT

        header = {"iteration": self._iteration, "kind": kind, "text": text[:MAX_TEXT]}
        if error is not None and not isinstance(error, SystemExit):
            header["text"] = f"{type(error).__name__}: {error}"[:MAX_TEXT]
            header["traceback"] = "".join(traceback.format_exception(error))[-MAX_TEXT:]
        self._untold.append(header)
        self._tell_untold()

    def _tell_untold(self) -> None:
        """Say what happened; at the next boundary where a signal handler says it in the middle of a tensor."""
        while self._untold:
            header = self._untold.popleft()
            try:
                self._process.ring.put(SlotKind.TRIGGER, header, timeout_seconds=_TRIGGER_SECONDS)
            except InterruptedSlotError:
                self._untold.appendleft(header)
                return
            except CaptureError as failure:
                self._console.warn(f"what happened could not be told to the writer: {failure}", is_for_all_ranks=True)

    def _tell(self, kind: SlotKind, header: dict[str, Any]) -> None:
        try:
            self._process.ring.put(kind, header, timeout_seconds=self.options.block_timeout_seconds)
        except CaptureError as error:
            if not (self._is_recorder and isinstance(error, NoRoomError)):
                self._disable(str(error))
                return
            self._room.was_too_small({"iteration": header["iteration"], "reason": header.get("reason", str(error))})

    def _disable(self, reason: str) -> None:
        """Record nothing more; the training goes on, and the run says why.

        Raises:
            StrictCaptureError: the capture is strict: the training ends.
        """
        if self._disabled is not None:
            return
        from ranktape.storage.format.progress import DISABLED

        self._disabled = f"{DISABLED} in iteration {self._iteration}: {reason}"
        self._recorder.tally = None
        if self.options.strict:
            raise StrictCaptureError(self._disabled)
        self._console.warn(self._disabled, is_for_all_ranks=True)
