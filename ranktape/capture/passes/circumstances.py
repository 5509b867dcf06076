"""Tells what runs now: a backward pass, a trace, a transform, and which calls are on Python's own stack.

Python's stack is asked only where hooks cannot tell: after an interrupt, in a hook that is given no keyword arguments,
in an optimizer that steps inside of another one's step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

# Torch has no public way to ask; its own module tracker asks the same. Looked up once: each tensor asks.
_current_graph_task_id = torch._C._current_graph_task_id  # noqa: SLF001
_get_dispatch_mode = torch._C._get_dispatch_mode  # noqa: SLF001
_get_tracing_state = torch._C._get_tracing_state  # noqa: SLF001
_maybe_current_level = torch._C._functorch.maybe_current_level  # noqa: SLF001
_FAKE = torch._C._TorchDispatchModeKey.FAKE  # noqa: SLF001

untraced = _disable_dynamo
"""Decorates what compiled code must not be traced into: torch's public decorator loads the compiler at once."""


def in_backward() -> bool:
    """Whether a backward pass is running on this thread; in a forward hook: whether this is a recomputation."""
    return _current_graph_task_id() != -1


def is_traced() -> bool:
    """Whether a graph is made of what runs, or it is asked for shapes: it has no values, and must not be changed."""
    if torch.compiler.is_compiling():
        return True  # torch looks into all that follows where it makes the graph of the source (torch.export)
    return _get_dispatch_mode(_FAKE) is not None or _get_tracing_state() is not None


def is_transformed() -> bool:
    """Whether what runs is inside of a transform of `torch.func`: its tensors are no values that could be stored."""
    return _maybe_current_level() is not None


TRANSFORMED = "it ran inside of a transform of torch.func, whose tensors are not recorded"
"""The reason that is told of such a call."""


_MODULE_CALL = nn.Module._call_impl.__code__  # noqa: SLF001  (torch has no public name for it)
_FUNCTION_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__


def _step(_: torch.optim.Optimizer) -> None:
    """Stands for an optimizer's step."""


_HOOKED: Callable[..., Any] = torch.optim.Optimizer.profile_hook_step(_step)
_OPTIMIZER_STEP = _HOOKED.__code__


def calls_itself(module: nn.Module) -> bool:
    """Whether more than one call of the module is running on this thread."""
    running = (frame.f_code is _MODULE_CALL and frame.f_locals.get("self") is module for frame in _frames())
    return sum(running) > 1


def keyword_arguments(module: nn.Module) -> dict[str, Any]:
    """Those of the innermost call of the module, for a hook that torch gives none."""
    for frame in _frames():
        if frame.f_code is _MODULE_CALL and frame.f_locals.get("self") is module:
            given = frame.f_locals.get("kwargs")
            return given if isinstance(given, dict) else {}
    return {}


def in_nested_step() -> bool:
    """Whether an optimizer's step is running inside of another one's."""
    return _count(_OPTIMIZER_STEP) > 1


def in_nested_backward() -> bool:
    """Whether the backward pass of a function is running, which may have begun another backward pass inside."""
    return _count(_FUNCTION_BACKWARD) > 0


def is_running(name: str) -> bool:
    """Whether a function of that name is running on this thread."""
    return any(frame.f_code.co_name == name for frame in _frames())


def _count(code: CodeType) -> int:
    return sum(frame.f_code is code for frame in _frames())


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  (Python has no public name for it)
    while frame is not None:
        yield frame
        frame = frame.f_back
