"""Tracks the current pass, microbatch, module and call of the training.

This relies on one fact: `current_graph_task_id()` is -1 exactly if no backward pass is running. A forward hook that
runs during a backward pass belongs to a recomputation (activation checkpointing), unless a gradient hook called the
module. Its values have already been recorded, but under a reentrant checkpoint only its hooks will see gradients.

The state is stored for each thread, because autograd runs backward passes on its own threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from ranktape.capture.hooks.hook import Hook
from ranktape.capture.passes.python_stack import DirectCall, calls_itself, in_nested_backward, is_on_stack
from ranktape.capture.torch_private import in_backward, is_transformed, tree_leaves
from ranktape.storage.format.record_info import Mode

_Entry = TypeVar("_Entry")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a module or function. The hooks of its gradients refer to it."""

    iteration: int
    """Training step."""
    microbatch: int
    """Index of the microbatch in the iteration, separately for each mode."""
    index: int
    """Number of earlier calls of the module in the microbatch."""
    compute_dtype: str
    """Dtype in which the operation computes, with autocast taken into account."""
    batch_size: int | None
    """Number of samples in the microbatch; None if it is not known."""
    sample_ids: tuple[int | str, ...] | None = None
    """Identifiers of the samples; None if the user gave none."""
    mode: Mode = Mode.TRAIN
    """Mode of the pass."""
    quantised_to: str = ""
    """The `quant_type` if the layer quantises its operands itself; empty otherwise."""
    key: tuple[Mode, int, int] = field(init=False, repr=False, compare=False)
    """Mode, microbatch and index, which identify the call among those of its module in the iteration."""

    kind: tuple[str, int | None, Mode, str] = field(init=False, repr=False, compare=False)
    """The values that determine the form of a record: compute dtype, number of samples, mode and quantisation."""

    def __post_init__(self) -> None:
        """Compute the keys once, instead of for each tensor."""
        object.__setattr__(self, "key", (self.mode, self.microbatch, self.index))
        object.__setattr__(self, "kind", (self.compute_dtype, self.batch_size, self.mode, self.quantised_to))

    @property
    def quant_type(self) -> str:
        """The default tag: the type to which the layer quantises, or the compute dtype."""
        return self.quantised_to or QUANT_TYPES.get(self.compute_dtype, self.compute_dtype)


QUANT_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
"""The usual short names of dtypes."""


class Frame(NamedTuple):
    """A module and its position in the model."""

    path: str
    """Dotted path."""
    module: nn.Module
    """The module."""
    layer_idx: int
    """Number of the layer; -1 outside any stack of layers."""
    layer_stack: str = ""
    """Dotted path of the stack with the layer, the same on all ranks with the layer; empty outside any stack."""


@dataclass(slots=True)
class Microbatch:
    """The counts of one microbatch."""

    mode: Mode
    index: int
    num_calls: dict[str, int] = field(default_factory=dict)
    """Number of calls so far, by module or function."""
    num_failed: int = 0
    """The first index of calls after a pass failed: the largest number of calls of any module until then."""
    roots: set[int] = field(default_factory=set)
    """The identities of the outermost modules that were entered."""

    def count(self, key: str) -> int:
        """The index of a new call of a module or function."""
        index = self.num_calls.get(key, self.num_failed)
        self.num_calls[key] = index + 1
        return index

    def fail(self) -> None:
        """Note that a pass raised an exception, so that the calls of its repetition have one index in all modules."""
        self.num_failed = max(self.num_calls.values(), default=self.num_failed)
        self.num_calls.clear()


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One forward pass of an outermost module."""

    iteration: int
    microbatch: Microbatch
    batch_size: int | None = None
    sample_ids: tuple[int | str, ...] | None = None
    is_recorded: bool = True


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in records."""
    return str(dtype).removeprefix("torch.")


def unwind(running: list[_Entry], is_left: Callable[[_Entry], bool]) -> _Entry | None:
    """Remove and return the innermost matching call, and remove the calls inside it that an exception left."""
    for index in range(len(running) - 1, -1, -1):
        if is_left(entry := running[index]):
            del running[index:]
            return entry
    return None


class _PassThread(threading.local):
    """The state of one thread."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.running: ForwardPass | None = None
        self.repeated: ForwardPass | None = None
        self.stage: tuple[int, int | None] | None = None
        """The microbatch that a pipeline schedule runs, and their number if it is known; None without a schedule."""
        self.is_rehearsing = False
        self.direct: int | None = None
        """The number of the direct call of a `forward` that started the pass; None if a module was called."""


def mode_of(module: nn.Module) -> Mode:
    """The mode of a pass that starts now with a module."""
    return Mode.TRAIN if module.training and torch.is_grad_enabled() else Mode.EVAL


class Tracker:
    """Tracks the passes of one captured iteration."""

    def __init__(self, *, modes: Collection[str] = (Mode.TRAIN,)) -> None:
        self._modes = frozenset(modes)
        self.sample_ids: tuple[int | str, ...] | None = None
        """Identifiers of the samples of the following passes."""
        self.before_pass: Callable[[], bool] | None = None
        """Called when a pass starts. Returns whether it is a pipeline schedule's rehearsal with meaningless data."""
        self.find_direct: Callable[[], tuple[Frame, DirectCall] | None] | None = None
        """Finds the outermost known module whose `forward` was called directly; None while no hooks are attached."""
        self.is_training = False
        """Whether any iteration had a training pass."""
        self.reset(0)

    def reset(self, iteration: int) -> None:
        """Start an iteration, and discard the state that failed passes left."""
        self._iteration = iteration
        self._thread = _PassThread()
        self.num_passes = 0
        """Number of forward passes that were recorded or are training passes."""
        self.num_train_passes = 0
        """Number of training passes, recorded or not."""
        self.num_unended = 0
        """Number of passes after which an optimizer should step. In a training, validation passes do not count."""
        self.is_adding_weights = False
        """Whether a pipeline schedule runs a backward pass again for weight gradients, on any thread."""
        self._is_backward_seen = False
        self._is_staged = False
        self._microbatches: dict[tuple[Mode, int], Microbatch] = {}
        self._latest: dict[Mode, ForwardPass] = {}
        self._none_yet = self._last = ForwardPass(iteration, self._microbatch(Mode.TRAIN, 0))
        self._calls: defaultdict[tuple[str, Mode, int], list[Call]] = defaultdict(list)
        self._num_recomputed: defaultdict[tuple[str, Mode, int], int] = defaultdict(int)

    @property
    def is_active(self) -> bool:
        """Whether the code that is running on this thread is recorded, or, in a recomputation, its first pass was."""
        thread = self._thread
        self._drop_ended(thread)
        if thread.repeated is None and in_backward():
            # A recomputation that no known checkpoint announced runs in the backward of an `autograd.Function`. A
            # module that a gradient hook calls is not a recomputation.
            return self._unfollowed.is_recorded and in_nested_backward()
        return self.is_in_recorded_pass

    @property
    def is_in_recorded_pass(self) -> bool:
        """Whether the pass that is running on this thread, or whose gradients are being computed, is recorded."""
        thread = self._thread
        running = thread.repeated or (self._unfollowed if in_backward() else thread.running)
        return running is not None and running.is_recorded

    @property
    def microbatch(self) -> int:
        """Index of the current microbatch, separately for each mode."""
        return self._present.microbatch.index

    @property
    def mode(self) -> Mode:
        """The mode of the current or last pass."""
        return self._present.microbatch.mode

    def records(self, module: nn.Module) -> bool:
        """Whether a pass that starts now with this module would be recorded."""
        return mode_of(module) in self._modes and not self._thread.is_rehearsing

    def pass_over(self, module: nn.Module) -> None:
        """Count a pass that starts with this module and is not recorded."""
        if mode_of(module) is Mode.TRAIN and not self._thread.is_rehearsing:
            self._count_pass(Mode.TRAIN)

    def enter(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Enter a module. An outermost module starts a pass."""
        thread = self._thread
        if not in_backward():
            self._drop_ended(thread)
            if thread.frames and thread.frames[0].module is frame.module and not calls_itself(frame.module):
                thread.frames.clear()  # an interrupt ended the last pass without a call of its hooks
                thread.direct = None
            self.begin_direct_pass()
            if not thread.frames:
                self._begin_pass(thread, frame.module, args, kwargs)
        thread.frames.append(frame)

    def begin_direct_pass(self) -> None:
        """Start the pass of a known module whose `forward` was called directly, if no pass is running."""
        thread = self._thread
        if thread.frames or thread.repeated is not None or in_backward() or self.find_direct is None:
            return
        direct = self.find_direct()
        if direct is not None:
            frame, call = direct
            self._begin_pass(thread, call.module, call.args, {})
            thread.frames.append(frame)
            thread.direct = call.number

    def _drop_ended(self, thread: _PassThread) -> None:
        """Finish the pass of a `forward` that was called directly, once it has returned, as no hook runs then."""
        # A new call may have the number of a finished one. A backward pass separates two passes of a training.
        if thread.direct is None or (is_on_stack(thread.direct) and not self._is_backward_seen) or in_backward():
            return
        thread.frames.clear()
        thread.running = thread.direct = None

    def leave(self, module: nn.Module, output: Any) -> None:
        """Leave a module, together with inner modules that an exception left."""
        thread = self._thread
        unwind(thread.frames, lambda frame: frame.module is module)
        if not thread.frames and not in_backward():
            ended, thread.running = thread.running, None
            if ended is None or not ended.is_recorded:
                return
            if output is None:
                ended.microbatch.fail()
            elif not is_transformed():
                self._watch_backward(output)

    @property
    def is_outermost(self) -> bool:
        """Whether exactly one module is running on this thread, and it was called with its hooks."""
        return len(self._thread.frames) == 1 and self._thread.direct is None

    @property
    def is_direct(self) -> bool:
        """Whether a `forward` that was called directly is running on this thread."""
        return self._thread.direct is not None

    def current(self) -> Frame | None:
        """The innermost running module; None outside all modules."""
        self._drop_ended(self._thread)
        frames = self._thread.frames
        return frames[-1] if frames else None

    def note_backward(self) -> None:
        """Note that a gradient was computed, so that the next forward pass starts another microbatch."""
        self._is_backward_seen = True

    def begin_call(self, key: str, *, dtype: torch.dtype, device_type: str) -> Call:
        """A new call of a module or function; in a recomputation, the call that is repeated."""
        thread = self._thread
        compute_dtype = _compute_dtype(dtype, device_type)
        if thread.repeated is not None:
            return self._call(thread.repeated, thread.repeated.microbatch.count(key), compute_dtype)
        if in_backward():
            return self._repeated_call(key, compute_dtype)
        running = thread.running or self._last
        microbatch = running.microbatch
        call = self._call(running, microbatch.count(key), compute_dtype)
        self._calls[key, microbatch.mode, microbatch.index].append(call)
        return call

    def free_call(self, *, index: int, dtype: torch.dtype, device_type: str) -> Call:
        """The call for a tensor that is recorded by hand."""
        call = self._call(self._present, index, _compute_dtype(dtype, device_type))
        return call if call.sample_ids is not None else dataclasses.replace(call, sample_ids=self.sample_ids)

    def repetition(self) -> Callable[[], AbstractContextManager[None]]:
        """A function that returns contexts, in which the code repeats the forward pass from the present moment on."""
        thread = self._thread
        running = thread.repeated or (self._unfollowed if in_backward() else thread.running or self._last)
        if thread.is_rehearsing:  # perhaps in a model without hooks
            running = ForwardPass(self._iteration, Microbatch(Mode.TRAIN, 0), is_recorded=False)
        now = running.microbatch
        num_calls, num_failed, frames = dict(now.num_calls), now.num_failed, list(thread.frames)

        def repeating() -> AbstractContextManager[None]:
            microbatch = Microbatch(now.mode, now.index, dict(num_calls), num_failed)
            repeated = dataclasses.replace(running, microbatch=microbatch)
            return _with_attributes(self._thread, repeated=repeated, frames=list(frames))

        return repeating

    def staged(self, microbatch: int, *, of: int | None) -> AbstractContextManager[None]:
        """Context in which passes on this thread are those of a pipeline stage for this one of `of` microbatches."""
        return _with_attributes(self._thread, stage=(microbatch, of))

    def adding_weights(self) -> AbstractContextManager[None]:
        """Context for a backward pass that has already run without the gradients of weights."""
        return _with_attributes(self, is_adding_weights=True)

    def rehearsing(self) -> AbstractContextManager[None]:
        """Context in which passes on this thread are rehearsals with meaningless data, and not recorded."""
        return _with_attributes(self._thread, is_rehearsing=True)

    @property
    def _present(self) -> ForwardPass:
        thread = self._thread
        # After a validation, tensors that are recorded by hand belong to the training again.
        last = self._unfollowed if torch.is_grad_enabled() else self._last
        return thread.repeated or thread.running or last

    @property
    def _unfollowed(self) -> ForwardPass:
        """The pass to which a recomputation belongs if no known checkpoint announced it."""
        return self._latest.get(Mode.TRAIN, self._none_yet)

    def _begin_pass(
        self, thread: _PassThread, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        is_rehearsal = thread.is_rehearsing or (self.before_pass is not None and self.before_pass())
        mode = mode_of(module)
        if is_rehearsal or (mode is Mode.EVAL and mode not in self._modes):
            unseen = Microbatch(mode, self._microbatch_index(mode))
            thread.running = ForwardPass(self._iteration, unseen, is_recorded=False)
            if not is_rehearsal:
                self._last = thread.running
            return
        microbatch = self._next_microbatch(mode, module, thread.stage)
        microbatch.roots.add(id(module))
        self.num_passes += 1
        self._count_pass(mode)
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim)
        first = next(tensors, None)
        thread.running = self._last = self._latest[mode] = ForwardPass(
            self._iteration,
            microbatch,
            batch_size=None if first is None else int(first.shape[0]),
            sample_ids=_samples_of_stage(self.sample_ids, thread.stage),
            is_recorded=mode in self._modes,
        )

    def _next_microbatch(self, mode: Mode, module: nn.Module, stage: tuple[int, int | None] | None) -> Microbatch:
        if stage is not None:
            self._is_staged = True
            return self._microbatch(mode, stage[0])
        current = self._microbatch(mode, self._microbatch_index(mode))
        if self._is_staged:
            return current  # the schedule counts microbatches; this is the loss, or another model beside the stages
        scheduled = _scheduled_microbatch(module)
        if scheduled is not None:
            return self._microbatch(mode, scheduled)
        if mode is Mode.TRAIN:
            is_over, self._is_backward_seen = self._is_backward_seen, False
        else:
            is_over = id(module) in current.roots
        return self._microbatch(mode, current.index + 1) if is_over else current

    def _count_pass(self, mode: Mode) -> None:
        self.num_train_passes += mode is Mode.TRAIN
        self.is_training |= mode is Mode.TRAIN
        self.num_unended = self.num_train_passes if self.is_training else self.num_passes

    def _microbatch_index(self, mode: Mode) -> int:
        latest = self._latest.get(mode)
        return 0 if latest is None else latest.microbatch.index

    def _microbatch(self, mode: Mode, index: int) -> Microbatch:
        return self._microbatches.setdefault((mode, index), Microbatch(mode, index))

    def _call(self, running: ForwardPass, index: int, compute_dtype: str) -> Call:
        return Call(
            iteration=running.iteration,
            microbatch=running.microbatch.index,
            index=index,
            compute_dtype=compute_dtype,
            batch_size=running.batch_size,
            sample_ids=running.sample_ids,
            mode=running.microbatch.mode,
        )

    def _watch_backward(self, output: Any) -> None:
        """Notice the backward pass even if no recorded tensor of the model has a gradient."""
        tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        if (first := next(tensors, None)) is not None:
            first.register_hook(Hook(lambda _: self.note_backward()))

    def _repeated_call(self, key: str, compute_dtype: str) -> Call:
        """The call that is repeated by a recomputation that no known checkpoint announced."""
        running = self._unfollowed
        call_key = (key, running.microbatch.mode, running.microbatch.index)
        if calls := self._calls[call_key]:
            # Segments are recomputed from the last to the first.
            self._num_recomputed[call_key] += 1
            return calls[-self._num_recomputed[call_key] % len(calls)]
        return self._call(running, 0, compute_dtype)


@contextlib.contextmanager
def _with_attributes(holder: Any, **values: Any) -> Iterator[None]:
    """Context in which attributes have other values."""
    saved = {name: getattr(holder, name) for name in values}
    for name, value in values.items():
        setattr(holder, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(holder, name, value)


def _scheduled_microbatch(module: nn.Module) -> int | None:
    """The microbatch that Megatron Core's schedules set on layers; None if there is none."""
    for part in module.modules():
        number = part.__dict__.get("current_microbatch")
        if isinstance(number, int) and number >= 0:
            return number
    return None


def _samples_of_stage(
    sample_ids: tuple[int | str, ...] | None, stage: tuple[int, int | None] | None
) -> tuple[int | str, ...] | None:
    """The identifiers of the samples of a pass, which is a share of the batch if a schedule has split it."""
    if sample_ids is None or stage is None or stage[1] is None:
        return sample_ids
    size, rest = divmod(len(sample_ids), stage[1])
    begin = stage[0] * size + min(stage[0], rest)
    return sample_ids[begin : begin + size + (stage[0] < rest)]


def _compute_dtype(dtype: torch.dtype, device_type: str) -> str:
    if dtype.is_floating_point and torch.is_autocast_enabled(device_type):
        return dtype_name(torch.get_autocast_dtype(device_type))
    return dtype_name(dtype)
