"""When does an iteration of the training end?

When its optimizer has stepped, unless `advance_on` names another event. Where there is no training at all, with each
outermost forward: an iteration ends when the next one begins, or with the capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ranktape.capture.passes.forwards import Arguments, ForwardClock
from ranktape.capture.passes.optimizers import OptimizerClock
from ranktape.capture.passes.tracker import mode_of
from ranktape.capture.settings.setting import is_given
from ranktape.storage.record import Mode

if TYPE_CHECKING:
    from torch import nn

    from ranktape.capture.settings.options import CaptureOptions


class Clock:
    """Calls back when an iteration has ended."""

    def __init__(
        self,
        options: CaptureOptions,
        *,
        on_step: Callable[[], None],
        on_skip: Callable[[], None],
        on_forward: Callable[[nn.Module, Arguments], Arguments | None],
        on_late: Callable[[nn.Module, Arguments], Arguments | None],
    ) -> None:
        """Listen from now on.

        Args:
            options: Of the capture.
            on_step: Called when an optimizer's step has ended an iteration.
            on_skip: Called before that where a gradient scaler has skipped the step.
            on_forward: Called when a forward that begins has; gets the model and its arguments, and may give others.
            on_late: Called so in a forward that began before the hooks of its iteration were put on.
        """
        self._modes = options.wanted_modes
        self._is_by_forward = options.advance_on == "forward"
        is_asked = is_given(options.modes) or not options.wants_layers
        self._is_over_training = is_asked and Mode.TRAIN in self._modes
        self._on_forward = on_forward
        self._num_forwards = 0
        self._optimizers = OptimizerClock(on_step, advance_on=options.advance_on, on_skip=on_skip)
        self._forwards: ForwardClock | None = None
        # Without a training there is no optimizer; one that was asked for will have one.
        is_inference = options.advance_on == "optimizer" and Mode.EVAL in self._modes and not self._is_over_training
        if self._is_by_forward or is_inference:
            self._forwards = ForwardClock(self._begin, on_late=on_late)
        self._is_counting = self._forwards is not None

    @property
    def has_ticked(self) -> bool:
        """Whether the step of an optimizer has ended an iteration."""
        return self._optimizers.has_ticked

    @property
    def ends_at_close(self) -> bool:
        """Whether the running iteration has all it will have: nothing but another forward would end it."""
        return self._is_counting and self._num_forwards > 0

    def explain(self) -> str:
        """Why no iteration ends, and the way out."""
        return self._optimizers.explain()

    def watch(self, model: nn.Module, *, is_running: bool = False) -> None:
        """Know a model; `is_running` where it became known in a call of it."""
        # A loss is a module too, and no model.
        if self._forwards is None or next(model.parameters(), None) is None:
            return
        self._forwards.watch(model, is_running=is_running)
        if is_running and self._counts(model):
            self._num_forwards += 1

    def begin_iteration(self) -> None:
        """An iteration begins, whatever has ended the one before."""
        self._num_forwards = 0
        if self._forwards is not None and not self._is_counting and not self._forwards.is_running:
            self._forwards.stop()
            self._forwards = None

    def step_by_hand(self) -> None:
        """The program ends the iterations itself: forwards do not any more."""
        self._is_counting &= self._is_by_forward

    def stop(self) -> None:
        """Listen no more."""
        self._optimizers.stop()
        if self._forwards is not None:
            self._forwards.stop()

    def _counts(self, model: nn.Module) -> bool:
        """Whether a forward that begins now is one of those that end iterations."""
        mode = mode_of(model)
        if not self._is_by_forward and (mode is Mode.TRAIN or self._optimizers.has_stepped):
            self._is_counting = False  # it is a training
        return self._is_counting and mode in self._modes

    def _begin(self, model: nn.Module, arguments: Arguments) -> Arguments | None:
        if not self._counts(model):
            return None
        changed = self._on_forward(model, arguments) if self._num_forwards else None
        self._num_forwards += 1
        return changed
