"""The passes of a training, their microbatches and calls, and questions about the code that is running.

Python's stack is inspected only if hooks cannot tell: after an interrupt, in a hook without keyword arguments, if an
optimizer steps inside another one's step, and if a script calls the `forward` of a module directly.
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


def checked_sample_ids(sample_ids: Iterable[int | str] | torch.Tensor) -> tuple[int | str, ...]:
    """The identifiers of samples as a tuple, as they are stored.

    Raises:
        UsageError: an identifier is neither an integer nor a string.
    """
    # Data loaders often return a tensor.
    listed = sample_ids.tolist() if hasattr(sample_ids, "tolist") else list(sample_ids)
    if wrong := [item for item in listed if not isinstance(item, int | str)]:
        raise UsageError(f"sample id {wrong[0]!r} is a {type(wrong[0]).__name__}: give whole numbers or text")
    return tuple(listed)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in records."""
    return str(dtype).removeprefix("torch.")


def in_backward() -> bool:
    """Whether a backward pass is running on this thread. In a forward hook, this means a recomputation."""
    return current_graph_task_id() != -1


def is_traced() -> bool:
    """Whether the running code is traced or has fake tensors, which have no values and must not be changed."""
    if torch.compiler.is_compiling():
        return True  # dynamo, as in torch.export, would trace the code below
    return get_dispatch_mode(FAKE) is not None or is_jit_traced()


def is_jit_traced() -> bool:
    """Whether `torch.jit.trace` is tracing the running code."""
    return get_tracing_state() is not None


def is_transformed() -> bool:
    """Whether the running code is inside a transform of `torch.func`, whose tensors cannot be stored."""
    return transform_level() is not None


def without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside all wrappers of `torch.func` transforms; the tensor itself if there are none."""
    inner = tensor
    while is_transformed_tensor(inner):
        inner = untransformed(inner)
    return inner


TRANSFORMED = "it ran inside of a transform of torch.func, whose tensors are not recorded"
"""The reason why such a call is not recorded."""


def _step(_: torch.optim.Optimizer) -> None:
    """Do nothing. Wrapped like the step of an optimizer, to find the code of the wrapper."""


_HOOKED: Callable[..., Any] = torch.optim.Optimizer.profile_hook_step(_step)
_OPTIMIZER_STEP = _HOOKED.__code__


def calls_itself(module: nn.Module) -> bool:
    """Whether more than one call of the module is running on this thread."""
    return sum(frame.f_locals.get("self") is module for frame in _frames(MODULE_CALL)) > 1


def keyword_arguments(module: nn.Module) -> dict[str, Any]:
    """The keyword arguments of the innermost call of a module, for a hook to which torch does not pass them."""
    for frame in _frames(MODULE_CALL):
        if frame.f_locals.get("self") is module:
            given = frame.f_locals.get("kwargs")
            return given if isinstance(given, dict) else {}
    return {}


class DirectCall(NamedTuple):
    """A running call of the `forward` of a module, which does not run the module's hooks."""

    module: nn.Module
    """The module."""
    args: tuple[Any, ...]
    """The arguments, by position."""
    number: int
    """The identity of the call among those that are running on the thread."""


def outermost_direct_call(is_known: Callable[[nn.Module], bool]) -> DirectCall | None:
    """The outermost running `forward` of a known module on this thread, given that none was called with its hooks."""
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
    """The innermost known module whose `forward` was called directly inside the current module, if any."""
    own = None if current is None else _innermost_code(type(current).forward)
    for frame in _frames():
        if frame.f_code is MODULE_CALL or frame.f_code is own:
            return None
        module = _module_of(frame)
        if module is not None and module in known:
            return module
    return None


def is_on_stack(number: int) -> bool:
    """Whether the direct call with this number is still running on this thread."""
    return any(id(frame) == number for frame in _frames())


def _module_of(frame: FrameType) -> nn.Module | None:
    """The module if the frame is a call of its `forward`. Other frames are skipped early, as `f_locals` is slow."""
    code = frame.f_code
    if code.co_name != "forward" or not code.co_argcount:
        return None
    module = frame.f_locals.get(code.co_varnames[0])
    return module if isinstance(module, nn.Module) else None


@functools.cache
def _innermost_code(function: Callable[..., Any]) -> CodeType | None:
    """The code of a function inside its decorators."""
    return getattr(inspect.unwrap(function), "__code__", None)


def in_nested_step() -> bool:
    """Whether the step of an optimizer is running inside the step of another one."""
    return len(list(_frames(_OPTIMIZER_STEP))) > 1


def in_nested_backward() -> bool:
    """Whether the `backward` of an `autograd.Function` is running, inside which another backward pass may run."""
    return any(_frames(FUNCTION_BACKWARD))


def is_running(name: str) -> bool:
    """Whether a function with this name is running on this thread."""
    return any(frame.f_code.co_name == name for frame in _frames())


def _frames(code: CodeType | None = None) -> Iterator[FrameType]:
    """The running calls on this thread, or only those of `code`, the innermost first."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  (Python has no public name for it)
    while frame is not None:
        if code is None or frame.f_code is code:
            yield frame
        frame = frame.f_back
