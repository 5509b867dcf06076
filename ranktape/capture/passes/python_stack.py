"""Questions about the running code that only Python's stack can answer.

It is inspected only if hooks cannot tell: after an interrupt, in a hook without keyword arguments, if an optimizer
steps inside another one's step, and if a script calls the `forward` of a module directly.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Container, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from ranktape.capture.torch_private import FUNCTION_BACKWARD, MODULE_CALL


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
            kwargs = frame.f_locals.get("kwargs")
            return kwargs if isinstance(kwargs, dict) else {}
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
    outermost: tuple[FrameType, nn.Module] | None = None
    for frame in _frames():
        module = _module_of(frame)
        if module is not None and is_known(module):
            outermost = frame, module
    if outermost is None:
        return None
    frame, module = outermost
    names = frame.f_code.co_varnames[1 : frame.f_code.co_argcount]
    return DirectCall(module, tuple(frame.f_locals.get(name) for name in names), id(frame))


def innermost_direct_call(known: Container[nn.Module], current: nn.Module | None) -> nn.Module | None:
    """The innermost known module whose `forward` was called directly inside the current module, if any."""
    current_code = None if current is None else _innermost_code(type(current).forward)
    for frame in _frames():
        if frame.f_code is MODULE_CALL or frame.f_code is current_code:
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
