"""What of our hooks does a copy of the model take along that is made while they are on it? Nothing that does anything.

Between two optimizer steps a training copies, pickles or averages its model as it likes, and the hooks of the iteration
that is captured are on it then. A closure would be shared with the copy, and record it under the original's names; what
holds the capture itself cannot be copied. So all that is put on modules and tensors is a `Hook`.
"""

from __future__ import annotations

import contextlib
import operator
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

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
