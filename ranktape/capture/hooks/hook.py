"""Hooks whose copies do nothing, the mode that sees calls of functions, and replacements of functions.

Between two optimizer steps, a training may copy, pickle or average its model while the hooks of a captured iteration
are attached. If a hook were a closure, a copy of the model would share it and be recorded under the original's names.
Objects that refer to the capture cannot be copied. Therefore everything attached to modules and tensors is a `Hook`.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ranktape.capture.torch_private import (
    global_forward_pre_hooks,
    is_default_device,
    is_traced,
    mode_at,
    num_modes,
    pop_mode,
    push_mode,
)

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function that makes the replacement of a function."""


class _Thread(threading.local):
    """The state of the mode on one thread."""

    def __init__(self) -> None:
        self.entered: list[tuple[nn.Module, bool]] = []
        """The running modules that activated the mode (True), or that call themselves (False)."""
        self.num_suspended = 0
        """Number of nested contexts that suspend the mode."""


class FunctionMode(TorchFunctionMode):
    """Passes the calls of torch's functions to the hooks of the captured iteration.

    The mode is at the bottom of the thread's stack of modes, above only a default device, which must be lowest. Thus
    the modes of the training keep their order, even if one is entered before this mode and left inside it or vice
    versa, and the changes that they make to a call are seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hooks: Any = None
        """The `FunctionHooks` of the captured iteration; None if no iteration is being captured."""
        self._thread = _Thread()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, through the hooks if it has a role."""
        hooks = self.hooks
        target = None if hooks is None else hooks.targets.get(func)
        if hooks is None or target is None or is_traced():
            return func(*args, **(kwargs or {}))
        return hooks.call(target, func, args, kwargs or {})

    def enter(self, module: nn.Module) -> None:
        """Be active on this thread while a module runs, until `leave` is called with it."""
        entered = self._thread.entered
        calls_itself = bool(entered) and entered[-1][0] is module
        if calls_itself or self.activate():
            entered.append((module, not calls_itself))

    def leave(self, module: nn.Module) -> None:
        """Undo `enter`, after a module has returned or raised."""
        entered = self._thread.entered
        is_entered = any(running is module for running, _ in entered)
        while is_entered:  # also for inner modules whose hooks an exception skipped
            running, has_activated = entered.pop()
            if has_activated:
                self._remove()
            is_entered = running is not module

    def activate(self) -> bool:
        """Be active on this thread until `reset`, if an iteration is being captured and no context suspends the mode.

        Returns whether the mode was not active before.
        """
        if self.hooks is None or self._thread.num_suspended or self.is_active:
            return False
        above = [pop_mode() for _ in range(num_modes())]
        if above and is_default_device(above[-1]):
            push_mode(above.pop())
        for mode in (self, *reversed(above)):
            push_mode(mode)
        return True

    def reset(self) -> None:
        """Be inactive on this thread, even if modules were left without a call of their hooks."""
        self._thread.entered.clear()
        self._remove()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Be active in this context, on this thread."""
        is_new = self.activate()
        try:
            yield
        finally:
            if is_new:
                self._remove()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Be inactive in this context, on this thread, even if modules are entered."""
        with self.inactive():
            self._thread.num_suspended += 1
            try:
                yield
            finally:
                self._thread.num_suspended -= 1

    @contextlib.contextmanager
    def inactive(self) -> Iterator[None]:
        """Be inactive in this context, on this thread, until a module is entered, and after the iteration."""
        was_active = self._remove()
        try:
            yield
        finally:
            if was_active:
                self.activate()

    @property
    def is_active(self) -> bool:
        """Whether the mode is on this thread's stack. While it handles a call, it is not."""
        for index in range(num_modes()):  # noqa: SIM110  (runs for each module: a generator takes twice the time)
            if mode_at(index) is self:
                return True
        return False

    def _remove(self) -> bool:
        """Remove the mode from the stack. Returns whether it was on it."""
        if not self.is_active:
            return False
        modes = [pop_mode() for _ in range(num_modes())]
        for mode in reversed(modes):
            if mode is not self:
                push_mode(mode)
        return True


MODE = FunctionMode()
"""The mode of this process."""


class Hook:
    """A hook on a module or a tensor. Its copies and pickles do nothing and do not refer to ranktape."""

    __slots__ = ("_call", "_keeps_mode")

    __torch_unserializable__ = True
    """Tells torch that a pickle may omit this tensor hook; otherwise, torch warns."""

    def __init__(self, call: Callable[..., Any], *, keeps_mode: bool = False) -> None:
        """Call a function. Unless `keeps_mode` is True, `MODE` is inactive during the call."""
        self._call = call
        self._keeps_mode = keeps_mode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if self._keeps_mode or num_modes() != 1 or mode_at(0) is not MODE:
            return self._call(*args, **kwargs)
        pop_mode()
        try:
            return self._call(*args, **kwargs)
        finally:
            if MODE.hooks is not None:  # else a signal has ended the capture in the call
                push_mode(MODE)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Copy as `contextlib.nullcontext.__exit__`, which takes any arguments and returns None.

        The context holds a handle that is newer than this hook's. When that is unpickled, torch numbers later hooks
        after it, so none of them gets the number, and with it the signature flags, of the copy of this hook.
        """
        last = RemovableHandle(OrderedDict())
        return getattr, (contextlib.nullcontext(last), "__exit__")


class Around:
    """A function that prepares operands and calls another function with them, which is the captured one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        """The captured function."""


def as_itself(value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The result of `__reduce__` for a replacement of `value`: copies are copies of the value, without ranktape."""
    return operator.getitem, ((value,), 0)


def replace(name: str, make: Make) -> Callable[[], None] | None:
    """Replace the function or method with a dotted name. Returns a function that restores the original.

    That function does nothing if the replacement has been replaced by others. The result is None if the name does not
    exist or its module is not loaded.
    """
    target = resolve(name)
    if target is None:
        return None
    owner, attribute = target
    original = getattr(owner, "__dict__", {}).get(attribute)
    if original is None:
        return lambda: None
    is_static = isinstance(original, staticmethod)
    new = staticmethod(make(original.__func__)) if is_static else make(original)
    setattr(owner, attribute, new)

    def undo() -> None:
        if owner.__dict__.get(attribute) is new:
            setattr(owner, attribute, original)

    return undo


class Replacements:
    """Replacements of functions of frameworks, each made once its module is loaded."""

    def __init__(self, wanted: Iterable[tuple[str, Make]]) -> None:
        """Takes dotted names with the functions that make replacements. `refresh()` makes them."""
        self._wanted = list(wanted)
        self._undo: list[Callable[[], None]] = []

    def refresh(self) -> bool:
        """Replace the functions that have been loaded since. Returns whether there were any."""
        wanted, self._wanted = self._wanted, []
        for name, make in wanted:
            undo = replace(name, make)
            if undo is None:
                self._wanted.append((name, make))
            else:
                self._undo.append(undo)
        return len(self._wanted) < len(wanted)

    def remove(self) -> None:
        """Restore the originals and replace nothing more."""
        self._wanted.clear()
        for undo in self._undo:
            undo()


@contextlib.contextmanager
def without_global_hooks(owner: object) -> Iterator[None]:
    """Context in which methods of an object are not among torch's global forward pre-hooks."""
    hooks = global_forward_pre_hooks()
    removed = {key: hook for key, hook in hooks.items() if getattr(hook, "__self__", None) is owner}
    for key in removed:
        del hooks[key]
    try:
        yield
    finally:
        hooks.update(removed)


def resolve(name: str) -> tuple[Any, str] | None:
    """The object that has the last attribute of a dotted name, and the attribute's name; None if it does not exist."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        owner: Any = sys.modules.get(".".join(parts[:length]))
        if isinstance(owner, ModuleType):
            for part in parts[length:-1]:
                owner = getattr(owner, part, None)
            return (owner, parts[-1]) if hasattr(owner, parts[-1]) else None
    return None
