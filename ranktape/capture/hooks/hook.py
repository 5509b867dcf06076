"""What a capture puts on a model: hooks whose copies do nothing, and functions in the place of a framework's own.

Between two optimizer steps a training copies, pickles or averages its model as it likes, and the hooks of the iteration
that is captured are on it then. A closure would be shared with the copy, and record it under the original's names; what
holds the capture itself cannot be copied. So all that is put on modules and tensors is a `Hook`.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Self

from torch.utils.hooks import RemovableHandle


class Hook:
    """A hook on a module or a tensor; its copies and pickles do nothing, and name nothing of ours."""

    __slots__ = ("_call",)

    __torch_unserializable__ = True
    """Torch's word for tensor hooks that are not missed in a pickle: without it there is a warning."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the hook returns."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The exit of a context that is none takes any arguments and returns nothing, which changes nothing.

        It holds a handle that was issued after ours: where it is unpickled, torch numbers later hooks after it, so that
        none takes the place, and with it the signature, of what is left of ours.
        """
        last = RemovableHandle(OrderedDict())
        return getattr, (contextlib.nullcontext(last), "__exit__")


def as_itself(value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """For `__reduce__` of what stands for something else: a copy of it is a copy of that, without our name in it."""
    return operator.getitem, ((value,), 0)


class Replacement:
    """A function, or a method of a class, under whose name another one stands."""

    def __init__(self, owner: Any, name: str, original: Any, replacement: Any) -> None:
        self._owner = owner
        self._name = name
        self._original = original
        self._replacement = replacement
        setattr(owner, name, replacement)

    @classmethod
    def put(cls, module: str, path: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Self | None:
        """Replace what a loaded module has under a dotted path; None where it has nothing there.

        Args:
            module: Name of the module.
            path: A function, or a class and its method.
            make: Makes the replacement from the original.
        """
        owner: Any = sys.modules[module]
        *owners, name = path.split(".")
        for part in owners:
            owner = getattr(owner, part, None)
        original = getattr(owner, "__dict__", {}).get(name)
        if original is None:
            return None
        if isinstance(original, staticmethod):
            return cls(owner, name, original, staticmethod(make(original.__func__)))
        return cls(owner, name, original, make(original))

    def remove(self) -> None:
        """Put the original back, unless somebody has replaced the replacement."""
        if self._owner.__dict__.get(self._name) is self._replacement:
            setattr(self._owner, self._name, self._original)
