"""Calls back when an iteration of the training has finished.

An iteration finishes when the optimizer has stepped, unless `advance_on` names another event. Without a training, each
outermost forward pass is an iteration, which finishes when the next one starts or when the capture stops.

If several optimizers step in an iteration, the one that stepped first is the leader and finishes it; the others are
followers. A follower that steps twice between two steps of the leader becomes the leader. A step inside the step of
another optimizer, which wraps it, is part of that. Optimizers that step in the backward pass, one for each parameter,
count as one step when that has finished. A step that a gradient scaler skips also finishes an iteration.

If forward passes finish iterations, each known model has two cheap hooks during the whole capture. Forward passes that
several threads run at the same time belong to one iteration.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ranktape.capture.hooks.hook import Hook, replace
from ranktape.capture.passes.python_stack import calls_itself, in_nested_backward, in_nested_step
from ranktape.capture.passes.tracker import Arguments, mode_of, unwind
from ranktape.capture.torch_private import (
    call_at_backward_end,
    current_graph_task_id,
    forward_pre_hooks_of,
    in_backward,
    is_traced,
    untraced,
)
from ranktape.storage.format.record_info import Mode

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ranktape.capture.settings.options import CaptureOptions


OnForward = Callable[["nn.Module", Arguments], Arguments | None]
"""A function of a model and its arguments that returns the arguments to continue with; None if they are unchanged."""


OnSkip = Callable[[torch.Tensor | None], None]
"""A function that is called with None for a skipped step, or with a tensor that is not 0 if the step is skipped."""


class _Models(list["nn.Module"]):
    """The models that are running on a thread, the outermost first."""


class _ForwardThread(threading.local):
    """The running models of a thread, also put into `all_models`, by the identifier of the thread."""

    def __init__(self, all_models: weakref.WeakValueDictionary[int, _Models]) -> None:
        self.models = all_models[threading.get_ident()] = _Models()


class ForwardClock:
    """Calls back when an outermost forward pass of a known model starts."""

    def __init__(self, on_forward: OnForward, *, on_late: OnForward) -> None:
        """`on_late` is called if another thread has put hooks on a model since its call started."""
        self._on_forward = on_forward
        self._on_late = on_late
        self._owner = os.getpid()
        self._all_models: weakref.WeakValueDictionary[int, _Models] = weakref.WeakValueDictionary()
        self._thread = _ForwardThread(self._all_models)
        self._lock = threading.RLock()
        self._handles: list[Any] = []

    @property
    def is_running(self) -> bool:
        """Whether a model is running on this thread."""
        return bool(self._thread.models)

    def watch(self, model: nn.Module, *, is_running: bool = False) -> None:
        """Follow a model from its next call on. If `is_running`, also the end of the call in progress."""
        self._handles.append(model.register_forward_pre_hook(Hook(self._begin), with_kwargs=True, prepend=True))
        self._handles.append(model.register_forward_hook(Hook(self._end), always_call=True))
        if is_running:
            self._thread.models.append(model)

    def stop(self) -> None:
        """Stop following models. None may be running, because torch fails if hooks are removed then."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Arguments | None:
        # If the hook was removed during the call of its model, torch calls it without keyword arguments.
        if kwargs is None or is_traced() or os.getpid() != self._owner or in_backward():
            return None
        running = self._thread.models
        if running and running[0] is model and not calls_itself(model):
            running.clear()  # an interrupt ended the last pass without a call of its hooks
        is_outermost = not running
        hooks = list(forward_pre_hooks_of(model))
        with self._lock:
            other_threads = (models() for models in self._all_models.valuerefs())
            is_shared = any(models_of_thread for models_of_thread in other_threads if models_of_thread is not running)
            running.append(model)
            if not is_outermost:
                return None
            if not is_shared:
                return self._on_forward(model, (args, kwargs))
            # Hooks that another thread attached while this one waited do not run for this call.
            is_late = hooks != list(forward_pre_hooks_of(model))
            return self._on_late(model, (args, kwargs)) if is_late else None

    def _end(self, model: nn.Module, _args: Any, _output: Any) -> None:
        if not is_traced():
            unwind(self._thread.models, lambda running: running is model)


_MAX_NAMED = 5
_MIN_FOLLOWED = 2
"""Number of iterations in which an optimizer steps as a follower before the user is told."""


class Clock:
    """Calls back when an iteration has finished, by a step of an optimizer or a forward pass."""

    def __init__(
        self,
        options: CaptureOptions,
        *,
        on_step: Callable[[], None],
        on_skip: OnSkip,
        on_forward: OnForward,
        on_late: OnForward,
        on_note: Callable[[str], None],
    ) -> None:
        """Follow all optimizers of the process, and models if forward passes may finish iterations.

        Args:
            options: `advance_on` is `optimizer` for the first one that steps, `optimizer:N` for the N-th, an optimizer,
                or the name of another event, in which case no step finishes an iteration.
            on_step: Called when an iteration has finished.
            on_skip: Called with None when a gradient scaler has skipped a step, before the end of the iteration. In
                each step of an optimizer that unscales in its kernel, called with the tensor that tells whether the
                step is skipped.
            on_forward: Called when a forward pass starts and the iteration before it has finished.
            on_late: Called for a forward pass that started before the hooks of its iteration were attached.
            on_note: Called with notes for the user about the optimizers.
        """
        self._on_step = on_step
        self._on_skip = on_skip
        self._on_forward = on_forward
        self._on_note = on_note
        self._advance_on = options.advance_on
        self._modes = options.wanted_modes
        self._owner = os.getpid()
        self._order: list[tuple[weakref.ref[Any], str]] = []
        """The optimizers, in the order of their first steps, with their names."""
        self._leader: weakref.ref[Any] | None = None
        self._followers: set[int] = set()
        self._num_followed: Counter[int] = Counter()
        """Number of iterations in which each optimizer stepped as a follower, by its number."""
        self._num_since_end = 0
        """Number of steps since an iteration finished."""
        self.is_single_step = True
        """Whether the last finished iteration had only a single step."""
        self._num_steps = 0
        self._stepped_in_backward: set[int] = set()
        """The optimizers that have stepped in the running backward pass. Together, they count as one: this clock."""
        self._graph_task_id = -1
        self.has_ended_by_step = False
        """Whether the step of an optimizer has finished an iteration."""
        self._num_forwards = 0
        self._handle = register_optimizer_step_post_hook(self._after_step)
        self._restore_scaler = replace("torch.amp.grad_scaler.GradScaler.step", self._around_scaler)
        self._forwards: ForwardClock | None = None
        # Without a training there is no optimizer, but a requested training has one.
        wants_training = (options.names_mode or not options.wants_layers) and Mode.TRAIN in self._modes
        is_inference = options.advance_on == "optimizer" and Mode.EVAL in self._modes and not wants_training
        if options.advance_on == "forward" or is_inference:
            self._forwards = ForwardClock(self._begin, on_late=on_late)
        self._is_counting = self._forwards is not None
        """Whether a forward pass may finish an iteration."""

    @property
    def listens_to_forwards(self) -> bool:
        """Whether the start of a forward pass may finish an iteration."""
        return self._forwards is not None

    @property
    def ends_at_close(self) -> bool:
        """Whether the running iteration is complete, because only the start of another forward pass would finish it."""
        return self._is_counting and self._num_forwards > 0

    def watch(self, model: nn.Module, *, is_running: bool = False) -> None:
        """Follow a model. `is_running` tells whether a call of it is in progress."""
        # A module without parameters, such as a loss, is not a model.
        if self._forwards is None or next(model.parameters(), None) is None:
            return
        self._forwards.watch(model, is_running=is_running)
        if is_running and self._counts(model):
            self._num_forwards += 1

    def begin_iteration(self) -> None:
        """Start an iteration."""
        self._num_forwards = 0
        if self._forwards is not None and not self._is_counting and not self._forwards.is_running:
            self._forwards.stop()
            self._forwards = None

    def step_by_hand(self) -> None:
        """Note that the program finishes iterations itself, so that forward passes no longer do."""
        self._is_counting &= self._advance_on == "forward"

    def stop(self) -> None:
        """Stop following optimizers and models."""
        self._handle.remove()
        if self._restore_scaler is not None:
            self._restore_scaler()
        if self._forwards is not None:
            self._forwards.stop()

    def _counts(self, model: nn.Module) -> bool:
        """Whether a forward pass that starts now is an iteration."""
        mode = mode_of(model)
        if self._advance_on != "forward" and (mode is Mode.TRAIN or self._order):
            self._is_counting = False  # it is a training
        return self._is_counting and mode in self._modes

    def _begin(self, model: nn.Module, arguments: Arguments) -> Arguments | None:
        if not self._counts(model):
            return None
        changed = self._on_forward(model, arguments) if self._num_forwards else None
        self._num_forwards += 1
        return changed

    def explain(self, num_passes: int = 0) -> str:
        """The reason why no iteration finishes, and the remedy. `num_passes` is 0 if passes were not counted."""
        passes = f" in {num_passes} training pass{'es' * (num_passes > 1)}" if num_passes else ""
        by_hand = "call capture.step() after each iteration"
        if self._advance_on == "step":
            return f"capture.step() was not called{passes}: call it after each iteration"
        if self._advance_on == "forward":
            return f"no call of a model ended one{passes}: call the model, not its forward(), or {by_hand}"
        remedy = f"give --advance-on forward, which ends one with each forward, or {by_hand}"
        if self._advance_on == "optimizer" or not self._order or self.has_ended_by_step:
            return f"no optimizer stepped{passes}: {remedy}"
        known = enumerate(self._order[:_MAX_NAMED])
        named = ", ".join(f"optimizer:{number} is {name}" for number, (_, name) in known)
        wanted = self._advance_on if isinstance(self._advance_on, str) else f"the {type(self._advance_on).__name__}"
        return (
            f"{wanted}, which --advance-on names, never stepped; in the order of their first steps {named}: "
            f"name one of them, or {by_hand}"
        )

    def _around_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            num_steps = self._num_steps
            result = original(scaler, optimizer, *args, **kwargs)
            # Gradients were not finite. The optimizer was not called, but the iteration is over.
            if self._num_steps == num_steps and os.getpid() == self._owner:
                self._on_skip(None)
                self._count_step(optimizer)
            return result

        return step

    @untraced
    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Mapping[str, Any]) -> None:
        if os.getpid() != self._owner:
            return
        self._num_steps += 1
        if isinstance(found_inf := getattr(optimizer, "found_inf", None), torch.Tensor):
            self._on_skip(found_inf)
        if in_backward():
            self._step_in_backward(optimizer)
        elif not in_nested_step():
            self._count_step(optimizer)

    def _count_step(self, optimizer: Any, *, parts: Collection[int] = ()) -> None:
        if self._stepped_in_backward:
            self._finish_backward()
        number = self._number(optimizer)
        self._num_since_end += 1
        event = self._advance_on
        if event == "optimizer":
            is_over = self._leads(optimizer, number)
        elif isinstance(event, str):
            is_over = event == f"optimizer:{number}"
        else:
            is_over = optimizer in (event, getattr(event, "optimizer", None)) or id(event) in parts
        if is_over:
            self.has_ended_by_step = True
            self.is_single_step, self._num_since_end = self._num_since_end == 1, 0
            self._on_step()

    def _leads(self, optimizer: Any, number: int) -> bool:
        leader = None if self._leader is None else self._leader()
        if leader is not None and leader is not optimizer and id(optimizer) not in self._followers:
            self._followers.add(id(optimizer))
            self._num_followed[number] += 1
            if self._num_followed[number] == _MIN_FOLLOWED:
                first = self._number(leader)
                self._on_note(
                    f"{self._order[number][1]} (optimizer:{number}) steps, too: "
                    f"{self._order[first][1]} (optimizer:{first}) ends the iteration, and what runs after its step "
                    f"belongs to the next one; --advance-on optimizer:{number} lets the other one end it"
                )
            return False
        self._leader = weakref.ref(optimizer)
        self._followers.clear()
        return True

    def _number(self, optimizer: Any) -> int:
        """The index of an optimizer in the order of first steps."""
        for number, (known, _) in enumerate(self._order):
            if known() is optimizer:
                return number
        name = "those that step in the backward pass" if optimizer is self else type(optimizer).__name__
        self._order.append((weakref.ref(optimizer), name))
        return len(self._order) - 1

    def _step_in_backward(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._stepped_in_backward:
            self._finish_backward()  # its last step was in another backward pass, whose end was not seen
        self._stepped_in_backward.add(id(optimizer))
        task = current_graph_task_id()  # identifies the backward pass
        if task != self._graph_task_id:
            self._graph_task_id = task
            call_at_backward_end(self._on_backward_end)

    def _on_backward_end(self) -> None:
        # A backward pass inside another one is that of a recomputed segment; the outer one continues.
        if self._stepped_in_backward and not in_nested_backward():
            self._finish_backward()

    def _finish_backward(self) -> None:
        parts, self._stepped_in_backward = self._stepped_in_backward, set()
        self._count_step(self, parts=parts)
