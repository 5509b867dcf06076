"""Which pass, which microbatch and which module is the training in?

One fact carries it all: `torch._C._current_graph_task_id()` is -1 exactly when no backward pass is running.
A forward hook that fires while one runs belongs to a recomputation (activation checkpointing): its values
were recorded before, but under a reentrant checkpoint only its gradients' hooks will fire.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ranktape.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a module, bound to its gradients' hooks when it happens."""

    iteration: int
    """Training step."""
    microbatch: int
    """Index of the pass within the step."""
    index: int
    """How many calls of the module came before in the microbatch."""
    compute_dtype: str
    """What the operation computes in; autocast included."""
    batch_size: int | None
    """Samples in the microbatch; None where it is not known."""
    sample_ids: tuple[int | str, ...] | None = None
    """The user's identifiers of the samples; None where none were given."""

    @property
    def quant_type(self) -> str:
        """The tag of a run that names none: what the operation computes in."""
        return QUANT_TYPES.get(self.compute_dtype, self.compute_dtype)


QUANT_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
"""The field's short words for dtypes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A module that is running."""

    module: nn.Module
    """The module."""
    path: str
    """Its dotted path."""
    layer_idx: int
    """Its layer; -1 outside of the stack."""


def in_backward() -> bool:
    """Whether a backward pass is running on this thread; in a forward hook: whether this is a recomputation."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001  (torch's own module tracker asks the same)


class Tracker:
    """Follows the passes of one captured iteration."""

    def __init__(self) -> None:
        self.sample_ids: tuple[int | str, ...] | None = None
        """Identifiers of the samples of the passes to come."""
        self.reset(0)

    def reset(self, iteration: int) -> None:
        """Begin an iteration; forget what was left behind by passes that ended in an exception."""
        self._iteration = iteration
        self._stacks = threading.local()
        self.is_active = False
        self.microbatch = 0
        self.num_passes = 0
        self._batch_size: int | None = None
        self._backward_seen = False
        self._calls: defaultdict[tuple[str, int], list[Call]] = defaultdict(list)
        self._num_recomputed: defaultdict[tuple[str, int], int] = defaultdict(int)

    @property
    def _stack(self) -> list[Frame]:
        stack: list[Frame] | None = getattr(self._stacks, "frames", None)
        if stack is None:
            stack = self._stacks.frames = []
        return stack

    @property
    def batch_size(self) -> int | None:
        """Samples in the current microbatch; None where it is not known."""
        return self._batch_size

    def enter(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module begins; the outermost one begins a pass."""
        if not self._stack and not in_backward():
            self._begin_pass(frame.module, args, kwargs)
        self._stack.append(frame)

    def leave(self, module: nn.Module, output: Any) -> None:
        """A module ends, or was left by an exception together with what it had called."""
        stack = self._stack
        depth = len(stack)
        while depth and stack[depth - 1].module is not module:
            depth -= 1
        if depth:
            del stack[depth - 1 :]
        if not stack and not in_backward():
            if self.is_active:
                self._watch_backward(output)
            self.is_active = False

    def current(self) -> Frame | None:
        """The innermost module that is running; None outside of all."""
        return self._stack[-1] if self._stack else None

    def note_backward(self) -> None:
        """A gradient was seen: the next outermost forward begins another microbatch."""
        self._backward_seen = True

    def begin_call(self, key: str, *, dtype: torch.dtype, device_type: str) -> Call:
        """The call of a module or function that begins now; in a recomputation, the one that is repeated."""
        if in_backward():
            return self._repeated_call(key, dtype=dtype, device_type=device_type)
        calls = self._calls[key, self.microbatch]
        call = Call(
            iteration=self._iteration,
            microbatch=self.microbatch,
            index=len(calls),
            compute_dtype=_compute_dtype(dtype, device_type),
            batch_size=self._batch_size,
            sample_ids=self.sample_ids,
        )
        calls.append(call)
        return call

    def free_call(self, *, index: int, dtype: torch.dtype, device_type: str) -> Call:
        """The call of a tensor that is recorded by hand, outside of what is followed."""
        return Call(
            iteration=self._iteration,
            microbatch=self.microbatch,
            index=index,
            compute_dtype=_compute_dtype(dtype, device_type),
            batch_size=self._batch_size,
            sample_ids=self.sample_ids,
        )

    def _begin_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.is_active = module.training and torch.is_grad_enabled()
        if not self.is_active:
            return
        if self._backward_seen:
            self.microbatch += 1
            self._backward_seen = False
        self.num_passes += 1
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim)
        first = next(tensors, None)
        self._batch_size = None if first is None else int(first.shape[0])

    def _watch_backward(self, output: Any) -> None:
        """Notice the backward pass of a model of which nothing that is recorded has a gradient."""
        tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        first = next(tensors, None)
        if first is not None:
            first.register_hook(lambda _: self.note_backward())

    def _repeated_call(self, key: str, *, dtype: torch.dtype, device_type: str) -> Call:
        place = (key, self.microbatch)
        if calls := self._calls[place]:
            # Segments are recomputed from the last to the first.
            self._num_recomputed[place] += 1
            return calls[-self._num_recomputed[place] % len(calls)]
        return Call(
            iteration=self._iteration,
            microbatch=self.microbatch,
            index=0,
            compute_dtype=_compute_dtype(dtype, device_type),
            batch_size=self._batch_size,
            sample_ids=self.sample_ids,
        )


def _compute_dtype(dtype: torch.dtype, device_type: str) -> str:
    if dtype.is_floating_point and torch.is_autocast_enabled(device_type):
        return dtype_name(torch.get_autocast_dtype(device_type))
    return dtype_name(dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype in a record's words."""
    return str(dtype).removeprefix("torch.")


def checked_sample_ids(sample_ids: Iterable[int | str] | torch.Tensor) -> tuple[int | str, ...]:
    """The identifiers of samples as records carry them.

    Raises:
        UsageError: one is neither a number nor text.
    """
    # What a loader gives is often a tensor.
    listed = sample_ids.tolist() if hasattr(sample_ids, "tolist") else list(sample_ids)
    if wrong := [item for item in listed if not isinstance(item, int | str)]:
        raise UsageError(f"sample id {wrong[0]!r} is a {type(wrong[0]).__name__}: give whole numbers or text")
    return tuple(listed)
