"""A training, recorded from its first step to its last.

`Capture` follows the training's iterations, puts hooks on before an iteration that is wanted and takes them
off after it, and sees to it at the end that what was staged is stored. The training is never changed, and
never ended by a capture that fails inside.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

from ranktape.capture.console import Console
from ranktape.capture.flight.training import Peers, Signals
from ranktape.capture.guard import StrictCaptureError, failure_text
from ranktape.capture.hooks.compiled import has_compiled
from ranktape.capture.iterations import Iterations
from ranktape.capture.no_capture import NoCapture
from ranktape.capture.passes.passes import checked_sample_ids
from ranktape.capture.rendezvous import Rendezvous, StopGate, find_place
from ranktape.capture.settings.cadence import Schedule, ScheduleOfRecorder
from ranktape.capture.settings.config import given_arguments, options_of, resolve, stray_variables
from ranktape.capture.settings.options import CaptureOptions, CaptureSettings, check_layer_types
from ranktape.capture.settings.setting import MAX_NUMBER
from ranktape.capture.source import Source, Tags, TensorRole, site_of
from ranktape.capture.staging.process import WriterProcess, default_host_budget_nbytes
from ranktape.capture.staging.ring_file import Counter
from ranktape.errors import CaptureError, UsageError
from ranktape.storage.format.layout import rank_iteration_path, site_path
from ranktape.storage.places.backend import available_nbytes

if TYPE_CHECKING:
    import argparse

    import torch
    from torch import nn

    from ranktape.storage.format.progress import RunVerdict

ABORT_TIMEOUT_SECONDS = 10.0
"""Longest wait at the end of a training that failed: torchrun kills what lingers for 30 s."""

HANG_SECONDS = 5.0
"""Longest wait for the device at the end of a training that failed."""

VERDICT_SECONDS = 10.0
"""Added to each wait at the end: what the coordinator needs to write its verdict once it has waited."""


class Capture(Iterations):
    """Records a training into the run at a URL.

    Use it as a context manager around the training loop. The first optimizer that steps advances the
    iteration; where there is no optimizer, `step` does.
    """

    current: ClassVar[Capture | None] = None
    """The capture that is running in this process; `save_tensor` records into it."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        model: nn.Module | None = None,
        capture_config: str | os.PathLike[str] | None = None,
        options: CaptureOptions | None = None,
        **settings: Unpack[CaptureSettings],
    ) -> None:
        """Prepare; the context manager starts it.

        Args:
            url: A directory, or any URL that fsspec knows.
            model: What to capture; by default every model that the training enters.
            capture_config: A YAML or TOML file with settings, for those that are not given here.
            options: All settings, checked before; in place of the others.
            settings: The fields of `CaptureOptions`.

        Raises:
            UsageError: a setting is unknown or its value not allowed.
        """
        super().__init__(options or options_of(settings, capture_config=capture_config))
        self._url = os.fspath(url)
        self._model = model
        self._is_closing = False
        self._owner = os.getpid()
        self._verdict: RunVerdict | None = None
        self._signals: Signals | None = None
        self._peers: Peers | None = None

    @classmethod
    def from_arguments(cls, args: argparse.Namespace, *, model: nn.Module | None = None) -> Capture | NoCapture:
        """The capture that `add_arguments`' options ask for; one that does nothing where none is asked for.

        What is not given is taken from the environment (`RANKTAPE_CAPTURE`, `RANKTAPE_EVERY`) and from the file that
        `--capture-config` names. Where none of these says where to record, the legacy tools' variables are honoured:
        `TENSOR_SAVE_ENABLED`, `TENSOR_SAVE_DIR`, `TENSOR_SAVER_ITERATION`.

        Raises:
            UsageError: an option's value is not allowed.
        """
        found = resolve(given_arguments(args))
        return NoCapture() if found is None else cls(found[0], model=model, options=found[1])

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self._place.rank

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child, made by `fork`, of the one that is captured."""
        return os.getpid() != self._owner

    def __enter__(self) -> Self:
        """Start the writer, agree with the other ranks, and be ready for the first iteration.

        Raises:
            RunExistsError: there is a run at the URL; its text says the ways out.
            StorageError: the store cannot be reached or written.
            CaptureError: the writer cannot start, another rank cannot, or another capture is running.
            LateError: this rank waited for rank 0, or for its writer, for too long.
        """
        if Capture.current is not None and Capture.current.yields:
            Capture.current.close(reason="the training began a capture of its own")
        if Capture.current is not None:
            raise CaptureError(Capture.current.is_in_the_way)
        # Not at the top, here and below: a program that imports `Capture` loads what a capture needs when one begins.
        from ranktape.capture.roles.known import known_layer_types

        check_layer_types(self.options, known=known_layer_types())
        self._find_place()
        self._make_parts()
        words, self._rendezvous = self._start()
        self._attempt = str(words["attempt"])
        self._schedule = self._new_schedule(words)
        if self.options.stop_when_stored:
            is_first = self._place.rank == self._place.first_rank
            self._gate = StopGate(self._rendezvous, is_first=is_first, on_failure=self._console.warn_once)
        count = self.options.target_iterations - len(words["completed"])
        past = self.options.cadence.past(count=count, without=words["completed"])
        self._console.tell_of_past(self.options, past=past, planned=words["iterations"])
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
        """End the capture; wait, within bounds, until everything is stored; warn of an unmet minimum.

        Not of one that `close` has returned before; and a forked child that leaves the block ends nothing.
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
        """Advance the iteration by one, or to the number given; for trainings without an optimizer.

        Where an optimizer advances the iteration already, a call without a number is ignored, with one warning.

        Raises:
            UsageError: the number is not above the running one, or too large.
        """
        if iteration is None and self._clock.has_ticked:
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
        """Have all ranks store the iterations that they hold: for a capture with `record_last`.

        Where nothing is held, as all is stored anyway, that is nothing. The training does not wait.
        """
        self._tell_of_trigger("user", why)

    def close(self, *, reason: str | None = None, error: BaseException | None = None) -> RunVerdict:
        """End the capture, wait until everything that was staged is stored, and return the verdict.

        The wait is bounded by `finish_timeout_seconds`; when the training failed (`reason` says why, `error` with
        what), by some seconds. Called again it returns the same verdict.
        """
        if self._verdict is not None:
            return self._verdict
        if self._is_closing:
            # An interrupt ended the first wait: what is staged is the writer's, and it goes on without us.
            self._verdict = self._judge({**(self._process.ring.hear() or {}), "state": "late"}, waited_seconds=0)
            return self._verdict
        if self.is_forked or Capture.current is not self:
            raise CaptureError("this capture is not running in this process: close it where it was started")
        if self._is_over_at_close(reason):
            self._end_last_iteration()
        is_interrupted = self.is_recording and self._tracker.num_passes > 0
        self._take_off()
        if reason is not None:
            self._tell_of_trigger("exception", reason, error)
        self._tell_untold()
        # Only now: a device that hangs must not keep the writer from learning why.
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
        words = self._process.finish(
            reason=self._disabled or reason or self._ended or self._silence or ending,
            ended=self._ended,
            has_failed=reason is not None,
            # The coordinator waits for the other ranks that long, and then has still to say so.
            timeout_seconds=timeout_seconds + VERDICT_SECONDS,
            on_progress=self._show_end,
        )
        if words.get("state") not in {"closed", "late"}:
            # The rank will not be closed; the place where the ranks have met may be gone with the process group.
            why = f"its writer process ended: {words.get('error') or self._process.ending()}"
            try:
                self._rendezvous.give_up(why)
            except (RuntimeError, OSError) as refusal:
                self._console.warn(f"rank 0 could not be told that this rank records nothing: {failure_text(refusal)}")
        self._console.end_drain()
        if self._peers is not None:
            self._peers.stop()
        self._verdict = self._judge(words, waited_seconds=timeout_seconds)
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
        """Record a tensor by hand into the running iteration; its path, or None where none is being recorded."""
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
        """Name the samples of the coming microbatches, in the order of the batch; None ends it.

        A tensor is read at once: on an accelerator that waits for the device, so give one of the host, or a list.

        Raises:
            UsageError: an identifier is neither a number nor text.
        """
        self._tracker.sample_ids = None if sample_ids is None else checked_sample_ids(sample_ids)

    def _is_over_at_close(self, reason: str | None) -> bool:
        """Whether the running iteration has all it will have, so that nothing but the end is missing."""
        tally = self._recorder.tally
        # A program that saves by itself need not step an optimizer.
        is_by_hand = tally is not None and tally.is_by_hand
        return (is_by_hand and self.options.manual) or (reason is None and (is_by_hand or self._clock.ends_at_close))

    def _why_unended(self) -> str | None:
        """Why no iteration has ended, though the training ran, and what to do; None where one has, or nothing ran."""
        if self._clock.has_ticked or self._iteration > self.options.first_iteration:
            return None
        num_passes = self._tracker.num_train_passes
        # The passes of a compiled training are not counted before an iteration is captured.
        return self._clock.explain(num_passes) if num_passes or has_compiled() else None

    def _find_place(self) -> None:
        """Where the run is, and which rank this is of how many.

        Raises:
            UsageError: no other process could write there.
            StorageError: the store cannot be reached.
        """
        from ranktape.capture.starting import open_place

        # Opened once: the program may change its working directory before the end.
        self._backend = open_place(self._url, self.options)
        self._place = find_place()
        self._console = Console(rank=self._place.rank, wording=self.wording)
        self._console.warn_of(self.options)
        for line in stray_variables():
            self._console.warn(line)

    def _make_parts(self) -> None:
        """The writer's process, the recorder that it is fed by, and what finds tensors in the models."""
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
        self._process = self._new_process(budget)
        self._process.ring.set_counter(Counter.STEP, self._iteration)
        self._process.on_restart = self._console.warn_once
        self._process.ring.on_long_wait = self._tell_of_wait
        self._recorder = Recorder(
            ring=self._process.ring,
            tracker=self._tracker,
            options=self.options,
            selecting=Selecting(self.options, rank=self._place.rank),
            on_failure=self._disable,
            on_site_failure=self._console.warn_of_site,
        )
        self._hooks = ModelHooks(self._recorder, is_given=self._model is not None)
        if self._model is not None:
            self._hooks.add_root(self._model)

    def _follow(self) -> None:
        """Listen to what ends iterations, and to what the models turn out to be."""
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
        self._hooks.on_note = self._console.warn_once
        self._hooks.on_compiled = self._tell_of_compiled
        self._hooks.on_mistake = self._report_mistake
        self._hooks.tell_of_roots(self._clock.watch)
        if self._is_recorder:
            self._process.ring.is_patient = True
            self._signals = Signals(self._process.ring.signal)
            if (bulletin := self._rendezvous.bulletin("happened")) is not None:
                self._peers = Peers(bulletin, ring=self._process.ring, world_size=self._place.world_size)
        self._master = None
        if self.options.with_master:
            self._master = MasterWeights(self._recorder, placements=self._hooks.placements, weights=self._hooks.weights)

    def _take_off(self) -> None:
        """Look at nothing of the training any more; what was seen is published."""
        self._recorder.tally = None
        self._hooks.detach()
        self._clock.stop()
        if self._master is not None:
            self._master.stop()
        if self._signals is not None:
            self._signals.stop()
        Capture.current = None
        self._is_closing = True

    def _new_process(self, budget_nbytes: int) -> WriterProcess:
        return WriterProcess(host_budget_nbytes=budget_nbytes)

    def _start(self) -> tuple[dict[str, Any], Rendezvous]:
        """What the writer says once it is ready, and where the ranks have met."""
        from ranktape.capture.starting import start_writer

        return start_writer(
            self._process,
            url=self._url,
            options=self.options,
            place=self._place,
            on_wait=self._console.warn_once,
        )

    def _new_schedule(self, words: Mapping[str, Any]) -> Schedule:
        if self._is_recorder:
            return ScheduleOfRecorder(words, cadence=self.options.cadence)
        return Schedule(words)

    def _show_end(self, pending_nbytes: int, state: str) -> None:
        """How far the storing is; with that, the writer of rank 0 learns which ranks it need not wait for."""
        self._console.show_drain(pending_nbytes, state)
        if state == "waiting" and self.rank == 0:
            # The place where the ranks have met may be gone with the process group.
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
