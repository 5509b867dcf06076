"""How does a training get recorded from its first step to its last?

`Capture` follows the training's iterations, puts hooks on before an iteration that is wanted and takes them
off after it, and sees to it at the end that what was staged is stored. The training is never changed, and
never ended by a capture that fails inside.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ranktape.capture.budget import default_host_budget_nbytes
from ranktape.capture.clock import OptimizerClock
from ranktape.capture.console import Console
from ranktape.capture.ending import judge_end
from ranktape.capture.model import ModelHooks
from ranktape.capture.no_capture import NoCapture
from ranktape.capture.options import CaptureOptions, Policy
from ranktape.capture.process import WriterProcess
from ranktape.capture.recorder import Recorder, Role, Source, Tags, site_of
from ranktape.capture.rendezvous import find_place
from ranktape.capture.ring_file import SlotKind
from ranktape.capture.schedule import Schedule
from ranktape.capture.seed_environment import asked_for
from ranktape.capture.starting import ring_path, start_writer
from ranktape.capture.tracker import Tracker, checked_sample_ids
from ranktape.errors import CaptureError, UsageError
from ranktape.storage.backends.urls import open_backend
from ranktape.storage.layout import rank_iteration_path
from ranktape.storage.names import site_path
from ranktape.storage.status import Verdict

if TYPE_CHECKING:
    import argparse

    import torch
    from torch import nn

ABORT_TIMEOUT_SECONDS = 10.0
"""Longest wait at the end of a training that failed: torchrun kills what lingers for 30 s."""

VERDICT_SECONDS = 10.0
"""Added to each wait at the end: what the coordinator needs to write its verdict once it has waited."""


class Capture:
    """Records a training into the run at a URL.

    Use it as a context manager around the training loop. The first optimizer that steps advances the
    iteration; where there is no optimizer, `step` does.
    """

    current: ClassVar[Capture | None] = None
    """The capture that is running in this process; `save_tensor` records into it."""

    def __init__(self, url: str | os.PathLike[str], *, model: nn.Module | None = None, **options: Any) -> None:
        """Prepare; the context manager starts it.

        Args:
            url: A directory, or any URL that fsspec knows.
            model: What to capture; by default every model that the training enters.
            options: The fields of `CaptureOptions`.

        Raises:
            UsageError: an option is unknown or its value not allowed.
        """
        known = CaptureOptions.__dataclass_fields__
        if unknown := sorted(set(options) - set(known)):
            raise UsageError(f"{unknown[0]!r} is no option of a capture: use {', '.join(known)}")
        self.options = CaptureOptions(**options)
        self._url = os.fspath(url)
        self._model = model
        self._is_closing = False
        self._num_empty_steps = 0
        self._owner = os.getpid()
        self._tracker = Tracker()
        self._iteration = self.options.first_iteration
        self._is_surveyed = False
        self._silence: str | None = None
        self._num_recorded = 0
        self._news = 0
        self._disabled: str | None = None
        self._verdict: Verdict | None = None

    @classmethod
    def from_arguments(cls, args: argparse.Namespace, *, model: nn.Module | None = None) -> Capture | NoCapture:
        """The capture that `add_arguments`' options ask for; one that does nothing without `--capture`.

        Without `--capture` the older tools' variables are honoured: `TENSOR_SAVE_ENABLED`, `TENSOR_SAVE_DIR`,
        `TENSOR_SAVER_ITERATION`.

        Raises:
            UsageError: an option's value is not allowed.
        """
        url, values = asked_for(vars(args))
        if url is None:
            return NoCapture()
        options = CaptureOptions.from_mapping(values)
        return cls(url, model=model, **{name: getattr(options, name) for name in CaptureOptions.__dataclass_fields__})

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self._place.rank

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

    def __enter__(self) -> Self:
        """Start the writer, agree with the other ranks, and be ready for the first iteration.

        Raises:
            RunExistsError: there is a run at the URL; its text says the ways out.
            StorageError: the store cannot be reached or written.
            CaptureError: the writer cannot start, another rank cannot, or another capture is running.
        """
        if Capture.current is not None:
            raise CaptureError("a capture is running in this process already: end it first, or record into it")
        # Opened once: the program may change its working directory before the end.
        self._backend = open_backend(self._url, storage_options=self.options.storage_options)
        if not self._backend.is_shared:
            raise UsageError(
                f"{self._backend.url} exists inside of one process only, and a writer of its own records: "
                f"give a directory or a URL such as s3://bucket/run"
            )
        self._place = find_place()
        self._console = Console(rank=self._place.rank)
        self._console.warn_of(self.options)
        num_ranks = self._place.num_local_ranks
        budget = self.options.host_budget_nbytes or default_host_budget_nbytes(num_local_ranks=num_ranks)
        path = ring_path(self.options, rank=self._place.rank)
        self._process = WriterProcess(host_budget_nbytes=budget, ring_path=path)
        self._process.ring.on_long_wait = self._tell_of_wait
        self._recorder = Recorder(
            ring=self._process.ring, tracker=self._tracker, options=self.options, on_failure=self._disable
        )
        self._hooks = ModelHooks(
            options=self.options,
            recorder=self._recorder,
            tracker=self._tracker,
            is_given=self._model is not None,
        )
        if self._model is not None:
            self._hooks.add_root(self._model)
        words, self._rendezvous = start_writer(
            self._process, url=self._url, shown_url=self._backend.url, options=self.options, place=self._place
        )
        self._attempt = str(words["attempt"])
        self._schedule = Schedule(words)
        self._clock = OptimizerClock(self._on_optimizer_step)
        Capture.current = self
        self._begin_iteration()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the capture; wait, within bounds, until everything is stored."""
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.close()
        else:
            self.close(reason=f"the training failed ({type(error).__name__})")

    def step(self, iteration: int | None = None) -> None:
        """Advance the iteration by one, or to the number given; for trainings without an optimizer.

        Raises:
            UsageError: an optimizer advances the iteration already, or the number is not above the running one.
        """
        if iteration is None and self._clock.has_ticked:
            raise UsageError("the optimizer's step advances the iteration already: remove the call of capture.step()")
        following = self._iteration + 1 if iteration is None else int(iteration)
        if following <= self._iteration:
            raise UsageError(f"iteration {following} is not after the running one, {self._iteration}: give a later one")
        self._advance(following)

    def close(self, *, reason: str | None = None) -> Verdict:
        """End the capture, wait until everything that was staged is stored, and return the verdict.

        The wait is bounded by `finish_timeout_seconds`; when the training failed (`reason` says why), by
        some seconds. Called again it returns the same verdict.
        """
        if self._verdict is not None:
            return self._verdict
        if self._is_closing:
            # An interrupt ended the first wait: what is staged is the writer's, and it goes on without us.
            self._verdict = self._judge({**(self._process.ring.hear() or {}), "state": "late"}, waited_seconds=0)
            return self._verdict
        if os.getpid() != self._owner or Capture.current is not self:
            raise CaptureError("this capture is not running in this process: close it where it was started")
        is_interrupted = self.is_recording and self._tracker.num_passes > 0
        self._recorder.tally = None
        self._hooks.detach()
        self._clock.stop()
        self._recorder.drain()
        Capture.current = None
        self._is_closing = True
        ending = self._schedule.describe_end(
            iteration=self._iteration,
            num_steps=self._iteration - self.options.first_iteration,
            num_recorded=self._num_recorded,
            is_interrupted=is_interrupted,
        )
        timeout_seconds = self.options.finish_timeout_seconds
        if reason is not None:
            timeout_seconds = min(timeout_seconds, ABORT_TIMEOUT_SECONDS)
        words = self._process.finish(
            reason=self._disabled or reason or self._silence or ending,
            # The coordinator waits for the other ranks that long, and then has still to say so.
            timeout_seconds=timeout_seconds + VERDICT_SECONDS,
            on_progress=self._console.show_drain,
        )
        self._console.end_drain()
        self._verdict = self._judge(words, waited_seconds=timeout_seconds)
        self._process.close()
        return self._verdict

    def record(
        self,
        tensor: torch.Tensor,
        *,
        source: Source,
        role: Role,
        quant_type: str | None = None,
        sample_idx: int | None = None,
        metadata: str = "null",
    ) -> str | None:
        """Record a tensor by hand into the running iteration; its path, or None where none is being recorded."""
        if os.getpid() != self._owner or not self.is_watching:
            return None
        call = self._tracker.free_call(
            index=self._recorder.next_index(source, role), dtype=tensor.dtype, device_type=tensor.device.type
        )
        tags = Tags(quant_type=quant_type, sample_ids=None if sample_idx is None else (sample_idx,), metadata=metadata)
        self._recorder.record(source, role, tensor, call=call, tags=tags)
        if not self.is_recording:
            return None
        site = site_of(source, role, call=call, quant_type=tags.quant_type or self.options.quant_type)
        return f"{self._backend.url}/{rank_iteration_path(self._attempt, self.rank, self._iteration)}/{site_path(site)}"

    def set_sample_ids(self, sample_ids: Iterable[int | str] | torch.Tensor | None) -> None:
        """Name the samples of the coming microbatches, in the order of the batch; None ends it.

        Raises:
            UsageError: an identifier is neither a number nor text.
        """
        self._tracker.sample_ids = None if sample_ids is None else checked_sample_ids(sample_ids)

    def _on_optimizer_step(self) -> None:
        # Some libraries step an optimizer to initialise it: a step without a pass before it ends no iteration.
        is_empty = self.is_watching and not self.options.manual and self._tracker.num_passes == 0
        self._num_empty_steps = self._num_empty_steps + 1 if is_empty else 0
        if not is_empty or self._num_empty_steps > 1:
            self._advance(self._iteration + 1)

    def _advance(self, iteration: int) -> None:
        if self._disabled is not None:
            self._hooks.detach()
            self._iteration = iteration
            return
        if self.is_watching:
            self._end_iteration()
        self._iteration = iteration
        self._recorder.poll()
        ring = self._process.ring
        ring.set_step(self._iteration)
        if ring.news != self._news:
            self._news = ring.news
            for late in self._schedule.learn(ring.hear() or {}, iteration=iteration):
                reason = f"the rank learned of it only in iteration {iteration}"
                self._tell(SlotKind.SKIP, {"iteration": late, "reason": reason})
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        is_wanted = self._schedule.wants(self._iteration)
        if is_wanted and (reason := self._lacks_room()) is not None:
            self._tell(SlotKind.SKIP, {"iteration": self._iteration, "reason": reason})
            is_wanted = False
        if is_wanted:
            self._tell(SlotKind.BEGIN, {"iteration": self._iteration})
            self._listen()
        if self._disabled is not None:
            return
        if is_wanted or not self._is_surveyed:
            self._recorder.begin(self._iteration, is_staged=is_wanted)
            self._tracker.reset(self._iteration)
            if not self.options.manual:
                with self._recorder.guarded():
                    self._hooks.attach()
            if not self.is_watching:
                self._hooks.detach()  # attaching failed, and disabled the capture

    def _end_iteration(self) -> None:
        tally = self._recorder.tally
        assert tally is not None, "only called while an iteration is watched"
        summary = self._recorder.end()
        self._hooks.detach()
        if self._disabled is not None:
            return
        if tally.is_staged:
            self._num_recorded += 1
            self._tell(SlotKind.END, {"iteration": tally.iteration, "num_tensors": tally.num_tensors, **summary})
        if not self._is_surveyed:
            self._is_surveyed = True
            self._predicted_nbytes = tally.nbytes
            if tally.num_tensors == 0:
                self._report_silence()
                return
            self._console.show_matched(
                tally,
                iterations=self._schedule.iterations,
                min_iterations=self.options.min_iterations,
                budget_nbytes=self._process.ring.file.capacity,
                url=self._backend.url,
            )

    def _report_silence(self) -> None:
        """Warn that this rank has nothing to record, as a stage of a pipeline may.

        Raises:
            CaptureError: no rank has.
        """
        self._silence = (
            "nothing was recorded: save_tensor was not called in the first iteration"
            if self.options.manual
            else self._hooks.explain_silence()
        )
        if self._rendezvous.count_silent():
            raise CaptureError(self._silence)
        self._console.warn(self._silence, is_for_all_ranks=True)

    def _listen(self) -> None:
        """Once in each captured iteration: does the writer live, and has it trouble?"""
        if not self._process.is_alive():
            self._disable("the writer process ended")
            return
        self._console.pass_on(self._process.ring.hear() or {})

    def _tell_of_wait(self) -> None:
        """A training that stands still must not do so in silence."""
        self._console.pass_on(self._process.ring.hear() or {})
        limit = f"{self.options.block_timeout_seconds:g} s"
        self._console.warn_once(
            f"the training waits for the writer, at most {limit} each time: the host budget is full"
        )

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

    def _tell(self, kind: SlotKind, header: dict[str, Any]) -> None:
        try:
            self._process.put(kind, header, timeout_seconds=self.options.block_timeout_seconds)
        except CaptureError as error:
            self._disable(str(error))

    def _disable(self, reason: str) -> None:
        """Record nothing more; the training goes on, and the run says why."""
        if self._disabled is not None:
            return
        if not self._process.is_alive():
            reason = f"{reason} ({self._process.last_line()})"
        self._disabled = f"capture disabled itself in iteration {self._iteration}: {reason}"
        self._recorder.tally = None
        self._console.warn(self._disabled, is_for_all_ranks=True)

    def _judge(self, words: dict[str, Any], *, waited_seconds: float) -> Verdict:
        last_line = self._process.last_line()
        return judge_end(
            words,
            waited_seconds=waited_seconds,
            last_line=last_line,
            backend=self._backend,
            console=self._console,
            ring=self._process.ring.path,
            required=self.options.min_iterations,
        )
