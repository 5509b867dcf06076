"""What a capture puts on a training: hooks whose copies do nothing, and a mode that is passed calls of functions.

Between two optimizer steps a training copies, pickles or averages its model as it likes, and the hooks of the iteration
that is captured are on it then. A closure would be shared with the copy, and record it under the original's names; what
holds the capture itself cannot be copied. So all that is put on modules and tensors is a `Hook`.

A framework's own function is replaced where it is.
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

from ranktape.capture.passes.passes import is_traced
from ranktape.capture.torch_private import (
    global_forward_pre_hooks,
    is_default_device,
    mode_at,
    num_modes,
    pop_mode,
    push_mode,
)

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes from a function what takes its place."""


class _Thread(threading.local):
    """What the mode does on this thread."""

    def __init__(self) -> None:
        self.entered: list[tuple[nn.Module, Callable[[], Any]]] = []
        """The running modules at which the mode changed, and how each change is undone."""
        self.num_suspended = 0
        """How many compiled regions are running."""


class FunctionMode(TorchFunctionMode):
    """Passes the calls of torch's functions to the hooks of the captured iteration.

    It lies at the bottom of the thread's stack of modes, above a default device, which has to be lowest. So modes of
    the training that are entered before it and left within, or the other way round, stay in their order; and what they
    change of a call is seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hooks: Any = None
        """The `FunctionHooks` of the captured iteration; None outside of one."""
        self._thread = _Thread()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What the function returns."""
        hooks = self.hooks
        target = None if hooks is None else hooks.targets.get(func)
        if hooks is None or target is None or is_traced():
            return func(*args, **(kwargs or {}))
        return hooks.call(target, func, args, kwargs or {})

    def enter(self, module: nn.Module) -> None:
        """A module is running in which functions are recorded, until `leave`."""
        thread = self._thread
        if thread.entered and thread.entered[-1][0] is module:
            thread.entered.append((module, _nothing))  # it calls itself
        elif not thread.num_suspended and self.hooks is not None and not self.is_active:
            self._put_in()
            thread.entered.append((module, self._take_out))

    def leave(self, module: nn.Module) -> None:
        """A module has ended."""
        entered = self._thread.entered
        if entered and any(one is module for one, _ in entered):
            while True:  # those in which an exception passed by the hooks are undone, too
                one, undo = entered.pop()
                undo()
                if one is module:
                    return

    def stay(self) -> None:
        """Be active on this thread until `reset`: no hook tells where a forward ends that is called directly."""
        if self.hooks is not None and not self._thread.num_suspended and not self.is_active:
            self._put_in()

    def reset(self) -> None:
        """Be active on this thread no more, though modules were left without a call of their hooks."""
        self._thread.entered.clear()
        self._take_out()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Be active in this context, on this thread."""
        is_new = not self._thread.num_suspended and self.hooks is not None and not self.is_active
        if is_new:
            self._put_in()
        try:
            yield
        finally:
            if is_new:
                self._take_out()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Be inactive in this context, on this thread, whatever modules it enters."""
        self._thread.num_suspended += 1
        try:
            with self.inactive():
                yield
        finally:
            self._thread.num_suspended -= 1

    @contextlib.contextmanager
    def inactive(self) -> Iterator[None]:
        """Be inactive in this context, on this thread, until a module is entered; and after it, if no iteration is."""
        was_active = self._take_out()
        try:
            yield
        finally:
            if was_active and self.hooks is not None and not self.is_active:
                self._put_in()

    @property
    def is_active(self) -> bool:
        """Whether calls on this thread come here; not while one of them is handled."""
        for place in range(num_modes()):  # noqa: SIM110  (each module asks: a generator takes twice the time)
            if mode_at(place) is self:
                return True
        return False

    def _put_in(self) -> None:
        above = [pop_mode() for _ in range(num_modes())]
        if above and is_default_device(above[-1]):
            push_mode(above.pop())
        for mode in (self, *reversed(above)):
            push_mode(mode)

    def _take_out(self) -> bool:
        """Whether it was there."""
        if not self.is_active:
            return False
        modes = [pop_mode() for _ in range(num_modes())]
        for mode in reversed(modes):
            if mode is not self:
                push_mode(mode)
        return True


MODE = FunctionMode()
"""The one of this process."""


def _nothing() -> None:
    """Undo of what changed nothing."""


class Hook:
    """A hook on a module or a tensor; its copies and pickles do nothing, and name nothing of ours."""

    __slots__ = ("_call", "_keeps_mode")

    __torch_unserializable__ = True
    """Torch's word for tensor hooks that are not missed in a pickle: without it there is a warning."""

    def __init__(self, call: Callable[..., Any], *, keeps_mode: bool = False) -> None:
        """Call what is given; unless it `keeps_mode`, with our function mode off."""
        self._call = call
        self._keeps_mode = keeps_mode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the hook returns."""
        if self._keeps_mode or num_modes() != 1 or mode_at(0) is not MODE:
            return self._call(*args, **kwargs)
        pop_mode()
        try:
            return self._call(*args, **kwargs)
        finally:
            if MODE.hooks is not None:  # else a signal ended the capture meanwhile
                push_mode(MODE)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The exit of a context that is none takes any arguments and returns nothing, which changes nothing.

        It holds a handle that was issued after ours: where it is unpickled, torch numbers later hooks after it, so that
        none takes the place, and with it the signature, of what is left of ours.
        """
        last = RemovableHandle(OrderedDict())
        return getattr, (contextlib.nullcontext(last), "__exit__")


class Around:
    """A function that prepares operands for another one, which computes with them: that one is captured."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        """The other one."""


def as_itself(value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """For `__reduce__` of what stands for something else: a copy of it is a copy of that, without our name in it."""
    return operator.getitem, ((value,), 0)


def replace(name: str, make: Make) -> Callable[[], None] | None:
    """Have another function, or method of a class, under the dotted name of one; what puts the original back.

    Where somebody has replaced the replacement, that does nothing. None where the name is not loaded.
    """
    found = resolve(name)
    if found is None:
        return None
    owner, attribute = found
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
    """Functions of frameworks under whose names others stand, each from when its module is loaded."""

    def __init__(self, wanted: Iterable[tuple[str, Make]]) -> None:
        """Know the dotted names, and what makes the replacements; `refresh` puts them in place."""
        self._wanted = list(wanted)
        self._undo: list[Callable[[], None]] = []

    def refresh(self) -> bool:
        """Put in place those that were loaded since; whether there were any."""
        wanted, self._wanted = self._wanted, []
        for name, make in wanted:
            undo = replace(name, make)
            if undo is None:
                self._wanted.append((name, make))
            else:
                self._undo.append(undo)
        return len(self._wanted) < len(wanted)

    def remove(self) -> None:
        """Put the originals back; nothing takes their places after that."""
        self._wanted.clear()
        for undo in self._undo:
            undo()


@contextlib.contextmanager
def without_global_hooks(owner: object) -> Iterator[None]:
    """In it no method of an object is among torch's hooks that are called before each module."""
    hooks = global_forward_pre_hooks()
    own = {key: hook for key, hook in hooks.items() if getattr(hook, "__self__", None) is owner}
    for key in own:
        del hooks[key]
    try:
        yield
    finally:
        hooks.update(own)


def resolve(name: str) -> tuple[Any, str] | None:
    """What holds the attribute of a dotted name, and the attribute; None where it is not loaded, or is not there."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        holder: Any = sys.modules.get(".".join(parts[:length]))
        if isinstance(holder, ModuleType):
            for part in parts[length:-1]:
                holder = getattr(holder, part, None)
            return (holder, parts[-1]) if hasattr(holder, parts[-1]) else None
    return None
