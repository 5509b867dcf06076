"""The passes of a training, their calls, which of these are counted together, and what runs now.

Python's stack is asked only where hooks cannot tell: after an interrupt, in a hook that is given no keyword arguments,
in an optimizer that steps inside of another one's step, and where a script calls the forward of a module directly.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from ranktape.capture.torch_private import (
    FAKE,
    FUNCTION_BACKWARD,
    MODULE_CALL,
    current_graph_task_id,
    get_dispatch_mode,
    get_tracing_state,
    is_transformed_tensor,
    transform_level,
    untransformed,
)
from ranktape.errors import UsageError
from ranktape.storage.format.record_info import Mode

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Those of a call: positional and by keyword."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a module, bound to its gradients' hooks when it happens."""

    iteration: int
    """Training step."""
    microbatch: int
    """Index of the pass within the step, among those of its mode."""
    index: int
    """How many calls of the module came before in the microbatch."""
    compute_dtype: str
    """What the operation computes in; autocast included."""
    batch_size: int | None
    """Samples in the microbatch; None where it is not known."""
    sample_ids: tuple[int | str, ...] | None = None
    """The user's identifiers of the samples; None where none were given."""
    mode: Mode = Mode.TRAIN
    """Whether it was a training pass."""
    quantised_to: str = ""
    """The `quant_type` of a layer that quantises its operands itself; empty where that is not known of it."""
    key: tuple[Mode, int, int] = field(init=False, repr=False, compare=False)
    """Mode, microbatch and index: what it is counted by among the calls of its module in the iteration."""

    kind: tuple[str, int | None, Mode, str] = field(init=False, repr=False, compare=False)
    """What of it decides on the form of a record: computed in, samples, mode and quantised to."""

    def __post_init__(self) -> None:
        """Made once, and not for each of its tensors."""
        object.__setattr__(self, "key", (self.mode, self.microbatch, self.index))
        object.__setattr__(self, "kind", (self.compute_dtype, self.batch_size, self.mode, self.quantised_to))

    @property
    def quant_type(self) -> str:
        """The tag of a run that names none: what the operation computes in."""
        return self.quantised_to or QUANT_TYPES.get(self.compute_dtype, self.compute_dtype)


QUANT_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
"""The field's short words for dtypes."""


class Frame(NamedTuple):
    """A module and where it is in its model."""

    path: str
    """Its dotted path."""
    module: nn.Module
    """The module."""
    layer_idx: int
    """Its layer; -1 outside of the stack."""
    layer_stack: str = ""
    """Dotted path of the list that holds its layer, the same on every rank that has the layer; empty outside of any."""


@dataclass(slots=True)
class Microbatch:
    """What is counted of one microbatch."""

    mode: Mode
    index: int
    num_calls: dict[str, int] = field(default_factory=dict)
    """Calls so far, of each module or function."""
    num_failed: int = 0
    """Calls of those that have none yet: as many as the furthest had when a pass failed."""
    roots: set[int] = field(default_factory=set)
    """The outermost modules that were entered."""

    def count(self, key: str) -> int:
        """The index of the call that begins."""
        index = self.num_calls.get(key, self.num_failed)
        self.num_calls[key] = index + 1
        return index

    def fail(self) -> None:
        """A pass ended in an exception: the one that takes its place has calls of one number in all modules."""
        self.num_failed = max(self.num_calls.values(), default=self.num_failed)
        self.num_calls.clear()


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One outermost forward."""

    iteration: int
    microbatch: Microbatch
    batch_size: int | None = None
    sample_ids: tuple[int | str, ...] | None = None
    is_recorded: bool = True


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


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """The dtype in a record's words."""
    return str(dtype).removeprefix("torch.")


def in_backward() -> bool:
    """Whether a backward pass is running on this thread; in a forward hook: whether this is a recomputation."""
    return current_graph_task_id() != -1


def is_traced() -> bool:
    """Whether a graph is made of what runs, or it is asked for shapes: it has no values, and must not be changed."""
    if torch.compiler.is_compiling():
        return True  # torch looks into all that follows where it makes the graph of the source (torch.export)
    return get_dispatch_mode(FAKE) is not None or is_jit_traced()


def is_jit_traced() -> bool:
    """Whether `torch.jit.trace` makes a graph of what runs."""
    return get_tracing_state() is not None


def is_transformed() -> bool:
    """Whether what runs is inside of a transform of `torch.func`: its tensors are no values that could be stored."""
    return transform_level() is not None


def without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor of a transform of `torch.func` stands for; another one itself."""
    inner = tensor
    while is_transformed_tensor(inner):
        inner = untransformed(inner)
    return inner


TRANSFORMED = "it ran inside of a transform of torch.func, whose tensors are not recorded"
"""The reason that such a call is not recorded."""


def _step(_: torch.optim.Optimizer) -> None:
    """Stands for an optimizer's step."""


_HOOKED: Callable[..., Any] = torch.optim.Optimizer.profile_hook_step(_step)
_OPTIMIZER_STEP = _HOOKED.__code__


def calls_itself(module: nn.Module) -> bool:
    """Whether more than one call of the module is running on this thread."""
    return sum(frame.f_locals.get("self") is module for frame in _frames(MODULE_CALL)) > 1


def keyword_arguments(module: nn.Module) -> dict[str, Any]:
    """Those of the innermost call of the module, for a hook that torch gives none."""
    for frame in _frames(MODULE_CALL):
        if frame.f_locals.get("self") is module:
            given = frame.f_locals.get("kwargs")
            return given if isinstance(given, dict) else {}
    return {}


class DirectCall(NamedTuple):
    """A forward that runs though its module was not called, so that no hook of the module did."""

    module: nn.Module
    """The module."""
    args: tuple[Any, ...]
    """Its arguments."""
    number: int
    """Tells it from other calls that are running on its thread."""


def outermost_direct_call(is_known: Callable[[nn.Module], bool]) -> DirectCall | None:
    """The outermost forward of a known module on this thread; asked where no module is known to have been called."""
    found: tuple[FrameType, nn.Module] | None = None
    for frame in _frames():
        module = _module_of(frame)
        if module is not None and is_known(module):
            found = frame, module
    if found is None:
        return None
    frame, module = found
    names = frame.f_code.co_varnames[1 : frame.f_code.co_argcount]
    return DirectCall(module, tuple(frame.f_locals.get(name) for name in names), id(frame))


def innermost_direct_call(known: Container[nn.Module], current: nn.Module | None) -> nn.Module | None:
    """The known module whose forward runs inside of the current one, which was called; None where none does."""
    own = None if current is None else _innermost_code(type(current).forward)
    for frame in _frames():
        if frame.f_code is MODULE_CALL or frame.f_code is own:
            return None
        module = _module_of(frame)
        if module is not None and module in known:
            return module
    return None


def is_on_stack(number: int) -> bool:
    """Whether a direct call is still running on this thread."""
    return any(id(frame) == number for frame in _frames())


def _module_of(frame: FrameType) -> nn.Module | None:
    """The module whose forward a call is: other functions are not asked, as Python copies all names of one for that."""
    code = frame.f_code
    if code.co_name != "forward" or not code.co_argcount:
        return None
    module = frame.f_locals.get(code.co_varnames[0])
    return module if isinstance(module, nn.Module) else None


@functools.cache
def _innermost_code(function: Callable[..., Any]) -> CodeType | None:
    """That of a function, inside of what decorates it."""
    return getattr(inspect.unwrap(function), "__code__", None)


def in_nested_step() -> bool:
    """Whether an optimizer's step is running inside of another one's."""
    return len(list(_frames(_OPTIMIZER_STEP))) > 1


def in_nested_backward() -> bool:
    """Whether the backward pass of a function is running, which may have begun another backward pass inside."""
    return any(_frames(FUNCTION_BACKWARD))


def is_running(name: str) -> bool:
    """Whether a function of that name is running on this thread."""
    return any(frame.f_code.co_name == name for frame in _frames())


def _frames(code: CodeType | None = None) -> Iterator[FrameType]:
    """The calls that are running on this thread, the innermost first; with `code`, those of one function."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  (Python has no public name for it)
    while frame is not None:
        if code is None or frame.f_code is code:
            yield frame
        frame = frame.f_back
