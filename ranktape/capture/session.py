"""Captures a training from its start to its end.

`Capture` follows the iterations of the training. At the end of an iteration, it tells the writer process that the
iteration is complete, and learns which iterations to record. Hooks are attached only in iterations that are recorded or
counted. At the end of the training, it waits until all staged tensors are stored. It never changes the results of the
training, and an internal failure stops the training only if the capture is strict.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

from ranktape.capture.console import Console
from ranktape.capture.expected import WITHOUT_GRADIENTS
from ranktape.capture.flight.training import Peers, Room, Signals
from ranktape.capture.guard import StrictCaptureError, failure_text
from ranktape.capture.hooks.compiled import has_compiled, is_left_compiled, why_eager
from ranktape.capture.no_capture import NoCapture
from ranktape.capture.passes.tracker import Arguments, Tracker
from ranktape.capture.rendezvous import StopGate, find_place, keep_process_groups
from ranktape.capture.settings.cadence import RecorderSchedule, Schedule
from ranktape.capture.settings.config import given_arguments, options_of, resolve, stray_variables
from ranktape.capture.settings.options import CaptureOptions, CaptureSettings, Policy, check_layer_types
from ranktape.capture.settings.setting import MAX_NUMBER
from ranktape.capture.source import Source, Tags, TensorRole, site_of
from ranktape.capture.staging.process import WriterProcess, default_host_budget_nbytes
from ranktape.capture.staging.ring import InterruptedSlotError, NoRoomError
from ranktape.capture.staging.ring_file import Counter, SlotKind
from ranktape.errors import CaptureError, RanktapeError, UsageError
from ranktape.storage.format.layout import rank_iteration_path, site_path
from ranktape.storage.places.backend import available_nbytes

if TYPE_CHECKING:
    import argparse

    import torch
    from torch import nn

    from ranktape.capture.settings.selecting import Selecting
    from ranktape.capture.sites import IterationTally
    from ranktape.capture.tensors.master import MasterWeights
    from ranktape.storage.format.progress import RunVerdict

ABORT_TIMEOUT_SECONDS = 10.0
"""Timeout at the end of a failed training. torchrun kills processes that do not exit within 30 s."""

HANG_SECONDS = 5.0
"""Timeout for the device at the end of a failed training."""

VERDICT_SECONDS = 10.0
"""Added to each timeout at the end, for the coordinator to write its verdict after it has waited itself."""

_TRIGGER_SECONDS = 5.0
"""Timeout for free space in the ring for a trigger."""


class Capture:
    """Records a training into the run at a URL.

    Use it as a context manager around the training loop. Each step of the optimizer, or of the first one if there are
    several, advances the iteration. Without an optimizer, call `step()`.
    """

    current: ClassVar[Capture | None] = None
    """The running capture of this process, into which `save_tensor` records; None if there is none."""

    is_optional = False
    """Whether the environment requested the capture, not the program. Then it never stops the training, and closes if
    the program starts another capture."""

    wording: Callable[[str], str] = staticmethod(str)
    """A function that rewords the options in messages for the way in which the capture was started."""

    conflict_message = "a capture is running in this process already: end it first, or record into it"
    """The message of the error if another capture is started."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        model: nn.Module | None = None,
        capture_config: str | os.PathLike[str] | None = None,
        options: CaptureOptions | None = None,
        **settings: Unpack[CaptureSettings],
    ) -> None:
        """Check the settings. The capture starts when the context is entered.

        Args:
            url: A directory, or any URL that fsspec supports.
            model: The model to capture; by default every model that the training runs.
            capture_config: A YAML or TOML file with the settings that are not given here.
            options: All settings, already checked. The other settings are then ignored.
            settings: The fields of `CaptureOptions`.

        Raises:
            UsageError: a setting is unknown, or its value is not allowed.
        """
        self.options = options or options_of(settings, capture_config=capture_config)
        self._url = os.fspath(url)
        self._model = model
        self._is_closing = False
        self._owner = os.getpid()
        self._verdict: RunVerdict | None = None
        self._signals: Signals | None = None
        self._peers: Peers | None = None
        self._master: MasterWeights | None = None
        self._stop_gate: StopGate | None = None
        self._tracker = Tracker(modes=self.options.wanted_modes)
        self._iteration = self.options.first_iteration
        self._num_recorded = self._num_empty_steps = 0
        self._is_surveyed = False
        """Whether the size of an iteration is known, in `_predicted_nbytes`."""
        self._usual_passes: tuple[int, int] | None = None
        """The first iteration with training passes, and their number; None until there is one."""
        self._is_merge_reported = False
        self._keeps_weights = False
        self._plan_number = 0
        self._disabled: str | None = None
        self._why_silent: str | None = None
        self._ended = ""
        self._room = Room()
        self._unsent_triggers: deque[dict[str, Any]] = deque()
        """The triggers that have not been sent to the writer yet."""

    @classmethod
    def from_arguments(cls, args: argparse.Namespace, *, model: nn.Module | None = None) -> Capture | NoCapture:
        """The capture that the options of `add_arguments` request, or a `NoCapture` if they request none.

        Options that are not given are taken from the environment, such as `RANKTAPE_CAPTURE` and `RANKTAPE_EVERY`, and
        from the file of `--capture-config`. If none of them names a URL, the variables of the legacy tools are used:
        `TENSOR_SAVE_ENABLED`, `TENSOR_SAVE_DIR`, `TENSOR_SAVER_ITERATION`.

        Raises:
            UsageError: the value of an option is not allowed.
        """
        resolved = resolve(given_arguments(args))
        return NoCapture() if resolved is None else cls(resolved[0], model=model, options=resolved[1])

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self._place.rank

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the captured one."""
        return os.getpid() != self._owner

    @property
    def iteration(self) -> int:
        """Number of the running iteration."""
        return self._iteration

    @property
    def is_recording(self) -> bool:
        """Whether tensors of the running iteration are stored."""
        return self._recorder.tally is not None and self._recorder.tally.is_staged

    @property
    def is_watching(self) -> bool:
        """Whether tensors of the running iteration are stored or counted."""
        return self._recorder.tally is not None

    def __enter__(self) -> Self:
        """Start the writer process, agree with the other ranks, and start the first iteration.

        Raises:
            RunExistsError: there is a run at the URL; the message names the options.
            StorageError: the store cannot be reached or written.
            CaptureError: the writer of this or another rank cannot start, or another capture is running.
            LateError: waiting for rank 0 or for the writer timed out.
        """
        if Capture.current is not None and Capture.current.is_optional:
            Capture.current.close(reason="the training began a capture of its own")
        if Capture.current is not None:
            raise CaptureError(Capture.current.conflict_message)
        # Imported here and below so that `import Capture` is fast; a capture loads its parts when it starts.
        from ranktape.capture.roles.known import known_layer_types
        from ranktape.capture.starting import start_writer

        check_layer_types(self.options, known=known_layer_types())
        self._find_place()
        self._make_parts()
        agreement, self._rendezvous = start_writer(
            self._process,
            url=self._url,
            options=self.options,
            place=self._place,
            on_wait=self._console.warn_once,
        )
        self._attempt = str(agreement["attempt"])
        self._schedule = self._new_schedule(agreement)
        if self.options.stop_when_stored:
            is_first = self._place.rank == self._place.first_rank
            self._stop_gate = StopGate(self._rendezvous, is_first=is_first, on_failure=self._console.warn_once)
        count = self.options.target_iterations - len(agreement["completed"])
        past = self.options.cadence.past(count=count, without=agreement["completed"])
        self._console.tell_of_past(self.options, past=past, planned=agreement["iterations"])
        self._follow()
        Capture.current = self
        try:
            self._begin_iteration()
        except StrictCaptureError as error:
            self.close(reason=str(error))
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the capture, and warn if fewer iterations were stored than guaranteed.

        Does nothing if `close` has been called, or in a forked child.
        """
        if self._verdict is not None or self.is_forked:
            return
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            verdict = self.close()
            if not verdict.met:
                self._console.warn(verdict.message())
        elif isinstance(error, StrictCaptureError):
            self.close(reason=str(error))
        else:
            self.close(reason=f"the training failed ({type(error).__name__})", error=error)

    def step(self, iteration: int | None = None) -> None:
        """Advance the iteration by one, or to a given number, in trainings without an optimizer.

        If an optimizer advances the iteration, a call without a number is ignored, with one warning. In a forked child,
        this does nothing.

        Raises:
            UsageError: the number is not greater than the running iteration's, or too large.
        """
        if self.is_forked:
            return
        if iteration is None and self._clock.has_ended_by_step:
            self._console.warn_once(
                "capture.step() is ignored, because the optimizer's step advances the iteration: remove the call, or "
                "give --advance-on step to count by it alone",
                is_for_all_ranks=False,
            )
            return
        following = self._iteration + 1 if iteration is None else int(iteration)
        if not self._iteration < following <= MAX_NUMBER:
            raise UsageError(
                f"iteration {following} is not allowed: give one after the running one, {self._iteration}, and "
                f"{MAX_NUMBER} at most"
            )
        self._clock.step_by_hand()
        self._advance(following)

    def trigger(self, why: str) -> None:
        """Have all ranks store the iterations that they hold in memory, in a capture with `record_last`.

        In other captures, and in a forked child, this does nothing. The training does not wait.
        """
        if not self.is_forked:
            self._trigger("user", why)

    def close(self, *, reason: str | None = None, error: BaseException | None = None) -> RunVerdict:
        """Stop the capture, wait until all staged tensors are stored, and return the verdict.

        The timeout is `finish_timeout_seconds`, or some seconds if the training failed, for a `reason` and possibly
        with an `error`. Later calls return the same verdict.
        """
        if self._verdict is not None:
            return self._verdict
        if self._is_closing:
            # An interrupt ended the first wait. The writer continues to store the staged tensors without this process.
            self._verdict = self._judge({**(self._process.ring.hear() or {}), "state": "late"}, waited_seconds=0)
            return self._verdict
        if self.is_forked or Capture.current is not self:
            raise CaptureError("this capture is not running in this process: close it where it was started")
        if self._is_over_at_close(reason):
            self._end_last_iteration()
        is_interrupted = self.is_recording and self._tracker.num_passes > 0
        self._detach()
        if reason is not None:
            self._trigger("exception", reason, error)
        self._send_triggers()
        # After the trigger, because the device may hang.
        self._recorder.close(
            timeout_seconds=HANG_SECONDS if reason is not None else self.options.finish_timeout_seconds
        )
        ending = self._schedule.describe_end(
            iteration=self._iteration,
            num_steps=self._iteration - self.options.first_iteration,
            num_recorded=self._num_recorded,
            is_interrupted=is_interrupted,
            why_unended=self._why_unended(),
        )
        timeout_seconds = self.options.finish_timeout_seconds
        if reason is not None:
            timeout_seconds = min(timeout_seconds, ABORT_TIMEOUT_SECONDS)
        reply = self._process.finish(
            reason=self._disabled or reason or self._ended or self._why_silent or ending,
            ended=self._ended,
            has_failed=reason is not None,
            # The coordinator waits for the other ranks that long and then has to report.
            timeout_seconds=timeout_seconds + VERDICT_SECONDS,
            on_progress=self._show_end,
            # Closed by a signal handler in the middle of a tensor: its slot is filled only after that.
            untold=[*self._process.ring.held_up(SlotKind.TRIGGER), *self._unsent_triggers],
        )
        if reply.get("state") not in {"closed", "late"}:
            # The rank will not be closed. The store of the process group may no longer exist.
            why = f"its writer process ended: {reply.get('error') or self._process.ending()}"
            try:
                self._rendezvous.give_up(why)
            except (RuntimeError, OSError) as refusal:
                self._console.warn(f"rank 0 could not be told that this rank records nothing: {failure_text(refusal)}")
        self._console.end_drain()
        if self._peers is not None:
            self._peers.stop()
        self._verdict = self._judge(reply, waited_seconds=timeout_seconds)
        self._process.close()
        return self._verdict

    def record(
        self,
        tensor: torch.Tensor,
        *,
        source: Source,
        role: TensorRole,
        quant_type: str | None = None,
        sample_idx: int | None = None,
        metadata: str = "null",
    ) -> str | None:
        """Record a tensor by hand in the running iteration. Returns its path, or None if it is not stored."""
        if self.is_forked or not self.is_watching:
            return None
        call = self._tracker.free_call(
            index=self._recorder.next_index(source, role), dtype=tensor.dtype, device_type=tensor.device.type
        )
        tags = Tags(quant_type=quant_type, sample_ids=None if sample_idx is None else (sample_idx,), metadata=metadata)
        is_stored = self._recorder.record(source, role, tensor, call=call, tags=tags)
        if (tally := self._recorder.tally) is not None:
            tally.is_by_hand |= tally.is_staged
        if not is_stored:
            return None
        site = site_of(source, role, call=call, quant_type=tags.quant_type or self.options.quant_type)
        return f"{self._backend.url}/{rank_iteration_path(self._attempt, self.rank, self._iteration)}/{site_path(site)}"

    def set_sample_ids(self, sample_ids: Iterable[int | str] | torch.Tensor | None) -> None:
        """Set the identifiers of the samples of the following microbatches, in the order of the batch; None for none.

        A tensor is read at once, which waits for its device. Pass a CPU tensor or a list to avoid that.

        Raises:
            UsageError: an identifier is neither an integer nor a string.
        """
        if sample_ids is None:
            self._tracker.sample_ids = None
            return
        # Data loaders often return a tensor.
        listed = sample_ids.tolist() if hasattr(sample_ids, "tolist") else list(sample_ids)
        if wrong := [item for item in listed if not isinstance(item, int | str)]:
            raise UsageError(f"sample id {wrong[0]!r} is a {type(wrong[0]).__name__}: give whole numbers or text")
        self._tracker.sample_ids = tuple(listed)

    def _find_place(self) -> None:
        """Open the store, and find the rank and the number of ranks.

        Raises:
            UsageError: other processes cannot write to the URL.
            StorageError: the store cannot be reached.
        """
        from ranktape.capture.starting import open_shared_store

        # Opened once: the program may change its working directory before the end.
        self._backend = open_shared_store(self._url, self.options)
        self._place = find_place()
        self._console = Console(rank=self._place.rank, wording=self.wording)
        self._console.warn_of(self.options)
        for line in stray_variables():
            self._console.warn(line)

    def _make_parts(self) -> None:
        """Create the writer process, the recorder and the hooks."""
        from ranktape.capture.hooks.model import ModelHooks
        from ranktape.capture.recorder import Recorder
        from ranktape.capture.settings.selecting import Selecting

        num_ranks = self._place.num_local_ranks
        budget = self.options.host_budget_nbytes or default_host_budget_nbytes(num_local_ranks=num_ranks)
        if self.options.host_budget_nbytes is not None and budget > (available := available_nbytes()):
            raise CaptureError(
                f"--host-budget-nbytes {budget} is more than the memory that is available on this host, {available} "
                f"bytes: give {available // num_ranks} or less for each of {num_ranks} ranks"
            )
        self._process = WriterProcess(host_budget_nbytes=budget)
        self._process.ring.set_counter(Counter.STEP, self._iteration)
        self._process.on_restart = self._console.warn_once
        self._process.ring.on_long_wait = self._report_wait
        self._recorder = Recorder(
            ring=self._process.ring,
            tracker=self._tracker,
            options=self.options,
            selecting=Selecting(self.options, rank=self._place.rank),
            on_failure=self._disable,
            on_site_failure=self._console.warn_of_site,
        )
        self._hooks = ModelHooks(
            self._recorder,
            is_given=self._model is not None,
            on_note=self._console.warn_once,
            on_compiled=self._report_compiled,
            on_mistake=self._report_mistake,
        )
        if self._model is not None:
            self._hooks.add_root(self._model)

    def _new_schedule(self, words: Mapping[str, Any]) -> Schedule:
        if self._is_recorder:
            return RecorderSchedule(words, cadence=self.options.cadence)
        return Schedule(words)

    def _follow(self) -> None:
        """Start following the iterations and the models of the training."""
        from ranktape.capture.passes.clock import Clock
        from ranktape.capture.tensors.master import MasterWeights

        self._clock = Clock(
            self.options,
            on_step=self._on_optimizer_step,
            on_skip=self._on_skipped_step,
            on_forward=self._on_forward,
            on_late=self._on_late_forward,
            on_note=self._console.say,
        )
        self._recorder.explain_endless = self._clock.explain
        self._hooks.watch_roots(self._clock.watch)
        if self._is_recorder:
            self._process.ring.is_patient = True
            self._signals = Signals(self._process.ring.signal)
            if (bulletin := self._rendezvous.bulletin("happened")) is not None:
                self._peers = Peers(bulletin, ring=self._process.ring, world_size=self._place.world_size)
        if self.options.with_master:
            self._master = MasterWeights(self._recorder, placements=self._hooks.placements, weights=self._hooks.weights)

    def _on_optimizer_step(self) -> None:
        # Some libraries step an optimizer to initialise it. A step without a preceding pass finishes no iteration.
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
        """Advance the iteration when a forward pass starts. Returns the arguments to continue with."""
        self._advance(self._iteration + 1)
        return self._on_late_forward(model, arguments)

    def _on_late_forward(self, model: nn.Module, arguments: Arguments) -> Arguments | None:
        """Handle a forward pass that started before the hooks of its iteration. Returns the arguments, if changed."""
        if not self.is_watching or self.options.manual:
            return None
        with self._recorder.guarded():
            return self._hooks.enter_late(model, arguments)
        return None

    def _advance(self, iteration: int) -> None:
        with self._recorder.guarded():
            keep_process_groups()
        if self._disabled is None:
            self._finish_until(iteration)
        else:
            self._hooks.detach()
            self._iteration = iteration
            self._learn()
        self._stop_with_all_ranks()
        if self._disabled is None:
            self._begin_iteration()
        if not self.is_recording:
            self._hooks.remove_kept()

    def _finish_until(self, iteration: int) -> None:
        """Finish the running iteration and go to another one, without starting it."""
        self._send_triggers()
        if self.is_watching:
            self._end_iteration()
        for passed in self._schedule.between(self._iteration, iteration):
            self._skip(passed, f"the training went from iteration {self._iteration} to {iteration}")
        self._iteration = iteration
        self._clock.begin_iteration()
        try:
            # Restarts a killed writer even if nothing is captured, because other ranks may wait for it.
            self._process.keep_alive()
        except CaptureError as error:
            self._disable(str(error))
        self._process.ring.set_counter(Counter.STEP, self._iteration)
        for late in self._learn():
            self._skip(late, f"the rank learned of it only in iteration {iteration}")

    def _learn(self) -> list[int]:
        """Take over changes of the plan from the writer. Returns the new iterations that are already past."""
        ring = self._process.ring
        # The writer increments this counter when the plan changes. Reading it costs the training thread nothing.
        if (plan_number := ring.counter(Counter.NEWS)) == self._plan_number or (message := ring.hear()) is None:
            return []
        self._plan_number = plan_number
        self._keeps_weights = False  # an iteration failed, perhaps the one with the stored weights
        return self._schedule.update(message, iteration=self._iteration)

    def _stop_with_all_ranks(self) -> None:
        """Stop the training if all ranks stop before the running iteration, as with `--stop-when-stored`.

        Raises:
            SystemExit: the training stops here, with exit code 0.
        """
        stop_gate = self._stop_gate
        if stop_gate is None or not stop_gate.stops_before(self._iteration, is_wanted=self._schedule.is_enough):
            return
        self._ended = f"the training was ended before iteration {self._iteration} (--stop-when-stored)"
        self._console.say(f"everything is stored: {self._ended}")
        raise SystemExit(0)

    def _begin_iteration(self) -> None:
        is_wanted = self._disabled is None and self._schedule.wants(self._iteration)
        selecting = self._requested_selection() if is_wanted else None
        is_wanted = is_wanted and self._has_room() and self._send_beginning()
        if self._disabled is not None:
            return
        # Until the size of an iteration is known, the others are counted, too, unless that would run them eagerly.
        if is_wanted or not (self._is_surveyed or is_left_compiled(self.options)):
            # If the ring has no room for the values, a flight recorder does not wait, but takes statistics.
            is_crowded = self._is_surveyed and self._process.ring.free_nbytes < self._predicted_nbytes
            is_reduced = is_wanted and self._is_recorder and is_crowded
            self._recorder.begin(self._iteration, is_staged=is_wanted, selecting=selecting, is_reduced=is_reduced)
            self._tracker.reset(self._iteration)
            if not self.options.manual:
                with self._recorder.guarded():
                    if is_wanted:
                        self._hooks.attach(keeps_weights=self._keeps_weights)
                    else:
                        self._hooks.attach_when_called()
            if not self.is_watching:
                self._hooks.detach()  # attaching failed, and disabled the capture
        if is_wanted or not self._is_surveyed:
            self._report_eager()

    def _requested_selection(self) -> Selecting | None:
        """The selection of an iteration that was requested during the training; None for other iterations."""
        settings = self._schedule.settings_of(self._iteration)
        if settings is None:
            return None
        with self._recorder.guarded():  # the coordinator has already refused invalid selections
            from ranktape.capture.settings.selecting import Selecting

            return Selecting(self.options.for_request(settings), rank=self._rendezvous.rank, is_requested=True)
        return None

    def _has_room(self) -> bool:
        """Whether the ring may have room for the next iteration. If not, the iteration is reported as skipped."""
        free = self._process.ring.free_nbytes
        may_skip = self.options.policy == Policy.SKIP and self._num_recorded >= self.options.min_iterations
        if may_skip and self._is_surveyed and free < self._predicted_nbytes:
            self._skip(
                self._iteration,
                f"it takes {self._predicted_nbytes} bytes, {free} of the host budget are free: "
                f"raise --host-budget-nbytes or --every",
            )
            return False
        if not self._is_recorder:
            return True
        # A flight recorder needs more room than was too little before.
        if not self._room.may_suffice(free):
            return False
        if self._room.owed is not None:
            owed, self._room.owed = self._room.owed, None
            self._send(SlotKind.SKIP, owed)
        return self._room.owed is None

    def _send_beginning(self) -> bool:
        """Tell the writer that the iteration starts. Returns whether the ring had room for the message."""
        self._send(SlotKind.BEGIN, {"iteration": self._iteration})
        self._console.pass_on(self._process.ring.hear() or {})
        return self._room.owed is None

    def _end_iteration(self) -> None:
        tally = self._recorder.tally
        assert tally is not None, "only called while an iteration is watched"
        self._report_eager()
        self._report_merged(tally.iteration)
        summary = self._recorder.end()
        summary |= {"compiled": self._hooks.compiled_summary(), "step_skipped": tally.step_skipped}
        coverage = None
        with self._recorder.guarded():
            coverage = self._hooks.find_coverage()
        self._hooks.end_iteration(
            keeps_hooks=self._is_recorder and tally.is_staged and not self._clock.listens_to_forwards
        )
        if self._disabled is not None or self._skip_if_lost(tally):
            return
        if not self._is_surveyed:
            with self._recorder.guarded():
                self._report_unmatched()
        is_silent = not self._is_surveyed and tally.num_tensors == 0
        # Before the writer is told: an iteration in which no rank recorded anything must not count as complete.
        mistake = self._report_silence() if is_silent else None
        refusal = None if tally.num_tensors else self._recorder.expected.main_refusal()
        reason = refusal if mistake is None else str(mistake)
        # Without an optimizer, weights are stored once, because each token of a generation may be an iteration.
        self._keeps_weights = not self._tracker.is_training and self.options.keep_last is None and reason is None
        if tally.is_staged and reason is not None:
            self._skip(tally.iteration, reason)
        elif tally.is_staged:
            self._num_recorded += 1
            if coverage is not None:
                summary["silent_sites"] |= coverage.unseen
                summary["coverage"] = coverage.text()
            self._send(SlotKind.END, {"iteration": tally.iteration, "num_tensors": tally.num_tensors, **summary})
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

    def _report_eager(self) -> None:
        """Report that a compiled training runs eagerly, if its graphs are not recorded at all."""
        if has_compiled() and (why := why_eager(self.options)) is not None:
            self._report_compiled(why)

    def _report_compiled(self, why: str | None) -> None:
        """Report how compiled code is recorded: eagerly for a reason, or, if that is None, in its graphs."""
        self._console.tell_of_compiled(self._schedule.iterations, why_eager=why)

    def _report_merged(self, iteration: int) -> None:
        """Report once that an iteration has a multiple of the usual training passes, as if the script skips steps."""
        num_passes = self._tracker.num_train_passes
        is_single_step = self._clock.has_ended_by_step and self._clock.is_single_step
        if self._is_merge_reported or not num_passes or not is_single_step:
            return
        if self._usual_passes is None:
            self._usual_passes = iteration, num_passes
        first, usual = self._usual_passes
        if num_passes > usual and not num_passes % usual:
            self._is_merge_reported = True
            self._console.say(
                f"iteration {iteration} has {num_passes} training passes, where iteration {first} had {usual}: no "
                f"optimizer stepped between them, as where a script skips its step; the iteration holds them all"
            )

    def _report_unmatched(self) -> None:
        """Warn of names in the selection that match nothing. Only the last of several ranks to notice warns."""
        notes = self._recorder.find_unmatched(self._hooks.paths)
        new = [note for note in notes if self._rendezvous.count(f"unmatched {note.partition(' matches ')[0]}")]
        self._console.warn_of_unmatched(new)

    def _report_silence(self) -> CaptureError | None:
        """Warn that this rank has nothing to record, as may be so for a pipeline stage; an error if no rank has."""
        self._why_silent = (
            "nothing was recorded: save_tensor was not called in the first iteration"
            if self.options.manual
            else self._hooks.explain_silence()
        )
        # If tensors were refused for a reason, the settings are correct, and the training continues.
        if self._recorder.expected.main_refusal() is None and self._rendezvous.count("silent"):
            return CaptureError(self._why_silent)
        self._console.warn(self._why_silent, is_for_all_ranks=True)
        return None

    def _report_mistake(self, error: RanktapeError) -> None:
        """Disable the capture because of a user's mistake, if the capture was requested by the environment.

        Raises:
            RanktapeError: the program or the launcher requested the capture; the training stops.
        """
        if not self.is_optional:
            raise error
        self._disable(str(error))

    def _report_wait(self) -> None:
        """Warn that the training is waiting for the writer."""
        self._console.pass_on(self._process.ring.hear() or {})
        limit = f"{self.options.block_timeout_seconds:g} s"
        self._console.warn_once(
            f"the training waits for the writer, at most {limit} each time: the host budget is full"
        )

    def _skip_if_lost(self, tally: IterationTally) -> bool:
        """Whether a flight recorder lost the iteration for lack of room. Reports it as skipped."""
        if tally.loss is not None:
            self._skip(tally.iteration, tally.loss)
            self._room.was_too_small(self._room.owed)
        return tally.loss is not None

    def _skip(self, iteration: int, reason: str) -> None:
        self._send(SlotKind.SKIP, {"iteration": iteration, "reason": reason})

    @property
    def _is_recorder(self) -> bool:
        """Whether the capture is a flight recorder, which holds iterations until a trigger."""
        return self.options.record_last is not None

    def _trigger(self, kind: str, text: str, error: BaseException | None = None) -> None:
        """Send a trigger to the writer, which stores the iterations that it holds. `kind` is the kind of trigger."""
        if not self._is_recorder or self._disabled is not None:
            return
        from ranktape.storage.format.live import MAX_TEXT

        header = {"iteration": self._iteration, "kind": kind, "text": text[:MAX_TEXT]}
        if error is not None and not isinstance(error, SystemExit):
            header["text"] = f"{type(error).__name__}: {error}"[:MAX_TEXT]
            header["traceback"] = "".join(traceback.format_exception(error))[-MAX_TEXT:]
        self._unsent_triggers.append(header)
        self._send_triggers()

    def _send_triggers(self) -> None:
        """Send the triggers to the writer, or, if a signal handler interrupted a write to the ring, do it later."""
        while self._unsent_triggers:
            try:
                header = self._unsent_triggers.popleft()
            except IndexError:
                return  # a signal handler, or another thread, has just told it
            try:
                self._process.ring.put(SlotKind.TRIGGER, header, timeout_seconds=_TRIGGER_SECONDS)
            except InterruptedSlotError:
                self._unsent_triggers.appendleft(header)
                return
            except CaptureError as failure:
                self._console.warn(f"what happened could not be told to the writer: {failure}", is_for_all_ranks=True)

    def _send(self, kind: SlotKind, header: dict[str, Any]) -> None:
        try:
            self._process.ring.put(kind, header, timeout_seconds=self.options.block_timeout_seconds)
        except CaptureError as error:
            if not (self._is_recorder and isinstance(error, NoRoomError)):
                self._disable(str(error))
                return
            self._room.was_too_small({"iteration": header["iteration"], "reason": header.get("reason", str(error))})

    def _disable(self, reason: str) -> None:
        """Stop recording, and report the reason in the run. The training continues.

        Raises:
            StrictCaptureError: the capture is strict, so the training stops.
        """
        if self._disabled is not None:
            return
        from ranktape.storage.format.progress import DISABLED

        self._disabled = f"{DISABLED} in iteration {self._iteration}: {reason}"
        self._recorder.tally = None
        if self.options.strict:
            raise StrictCaptureError(self._disabled)
        self._console.warn(self._disabled, is_for_all_ranks=True)

    def _is_over_at_close(self, reason: str | None) -> bool:
        """Whether the running iteration is complete when the capture closes."""
        tally = self._recorder.tally
        # A program that saves tensors by hand need not step an optimizer.
        is_by_hand = tally is not None and tally.is_by_hand
        return (is_by_hand and self.options.manual) or (reason is None and (is_by_hand or self._clock.ends_at_close))

    def _why_unended(self) -> str | None:
        """The reason why no iteration has finished, and the remedy; None if one has, or if nothing ran."""
        if self._clock.has_ended_by_step or self._iteration > self.options.first_iteration:
            return None
        num_passes = self._tracker.num_train_passes
        # The passes of a compiled training are not counted until an iteration is captured.
        return self._clock.explain(num_passes) if num_passes or has_compiled() else None

    def _end_last_iteration(self) -> None:
        """Finish an iteration that only the start of another forward pass would have finished."""
        if self._disabled is None and self.is_watching:
            # If nothing was recorded, the verdict reports it.
            with contextlib.suppress(CaptureError):
                self._end_iteration()
        self._iteration += 1

    def _detach(self) -> None:
        """Detach from the training."""
        self._recorder.tally = None
        self._hooks.detach()
        self._clock.stop()
        if self._master is not None:
            self._master.stop()
        if self._signals is not None:
            self._signals.stop()
        Capture.current = None
        self._is_closing = True

    def _show_end(self, pending_nbytes: int, state: str) -> None:
        """Show the progress of storing. On rank 0, also tell the writer which ranks have given up."""
        self._console.show_drain(pending_nbytes, state)
        if state == "waiting" and self.rank == 0:
            # The store of the process group may no longer exist.
            with contextlib.suppress(Exception):
                if ranks := self._rendezvous.given_up():
                    self._process.tell_of_given_up(ranks)

    def _judge(self, words: Mapping[str, Any], *, waited_seconds: float) -> RunVerdict:
        from ranktape.capture.starting import verdict_of

        return verdict_of(
            words,
            rank=self.rank,
            backend=self._backend,
            process=self._process,
            console=self._console,
            required=self.options.guaranteed_iterations,
            waited_seconds=waited_seconds,
        )
