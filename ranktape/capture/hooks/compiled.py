"""While hooks are attached compiled code runs with taps in its graphs, or as written where graphs show too little."""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.parametrize import is_parametrized

from ranktape.capture.hooks.hook import Around
from ranktape.storage.format.record_info import Mode

if TYPE_CHECKING:
    from ranktape.capture.roles.table import FunctionRole
    from ranktape.capture.settings.options import CaptureOptions

_COMPILER = "torch._dynamo"

_HOOKS_WARNING = (
    "ignore",
    re.compile(r"Using `torch.compile\(module\)` when there are global hooks", re.IGNORECASE),
    Warning,
    None,
    0,
)
"""A compiled module warns of our global hook, which is there for this iteration and never calls a hook twice."""


class IgnoredWarning:
    """Has compiled code say nothing of our global hook, from when it is made until it is removed."""

    def __init__(self) -> None:
        # Not by `warnings.filterwarnings`: Python forgets then what it has shown, and shows all of it again.
        filters: Any = warnings.filters
        filters.insert(0, _HOOKS_WARNING)
        self._filters: list[Any] = filters

    def remove(self) -> None:
        """End."""
        _remove(self._filters, _HOOKS_WARNING)


class EagerMode:
    """Has compiled code run as written, and says nothing of our global hook, from when it is made until it is removed.

    torch's compiler is not loaded for that; where the training loads it meanwhile, it is met then.
    """

    def __init__(self, begin: Callable[[], Any] | None = None) -> None:
        """Begin; `begin` is called once the compiler is there, for what is to be removed in the end."""
        self._begin = begin
        self._stack = contextlib.ExitStack()
        self._stack.callback(IgnoredWarning().remove)
        if _COMPILER in sys.modules:
            self._force()
        else:
            sys.meta_path.insert(0, self)
            self._stack.callback(_remove, sys.meta_path, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Python asks for a module that is being imported; ours is the compiler alone."""
        spec = PathFinder.find_spec(name, path, target) if name == _COMPILER else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self._force()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this loader, which loads nothing else
        return spec

    def remove(self) -> None:
        """End."""
        self._stack.close()

    def _force(self) -> None:
        handle = None if self._begin is None else self._begin()
        if handle is not None:
            self._stack.callback(handle.remove)
            return
        self._stack.push(torch.compiler.set_stance("force_eager"))


def is_proven() -> bool:
    """Whether graphs of this version of torch are known to be recorded without another bit, in float32."""
    return torch.__version__.startswith(_PROVEN)


_PROVEN = ("2.13.",)


def why_eager(options: CaptureOptions) -> str | None:
    """Why compiled code runs eagerly where it is captured; None where it is recorded inside of its graphs."""
    if options.compiled == "eager":
        return "--compiled eager"
    if find_spec("ranktape.capture.compiled") is None:
        return "this build does not record graphs"
    return None if is_proven() else f"graphs of torch {torch.__version__} are not known"


_SHOWN_IN_GRAPHS = frozenset({torch.nn.Linear.forward, torch.nn.Embedding.forward})
"""Layers that are one function of torch on their own parameters."""


def hidden_in_graphs(
    recorded: Iterable[torch.nn.Module], attached: Iterable[torch.nn.Module], found: Iterable[FunctionRole]
) -> str | None:
    """What of the models compiled code cannot be asked for: it shows functions of torch, and no calls of layers.

    Asked of the modules that are recorded themselves, of all that have hooks, and of the roles that functions have.
    """
    kinds = {
        type(module)
        for module in recorded
        if type(module).forward not in _SHOWN_IN_GRAPHS or is_parametrized(module, "weight")
    }
    types = set(map(type, attached))
    # One operator in graphs, products and attention and all.
    kinds.update(kind for kind in types if issubclass(kind, torch.nn.MultiheadAttention))
    if kinds:
        return f"layers of the class {min(kind.__name__ for kind in kinds)}"
    attention: Any = torch.nn.functional.scaled_dot_product_attention
    if isinstance(attention, Around):
        packages = {kind.__module__.partition(".")[0] for kind in types}
        given = (role.name for role in found if role.gives_function)
        return next((name for name in given if name.partition(".")[0] in packages), None)
    return None


def is_left_compiled(options: CaptureOptions) -> bool:
    """Whether this process has compiled something, and its iterations end without a look at its models."""
    return has_compiled() and options.advance_on != "forward" and Mode.TRAIN in options.wanted_modes


def has_compiled() -> bool:
    """Whether this process has given something to `torch.compile`."""
    # torch has no public way to ask. What `torch.compiler.disable` leaves there cannot be called.
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return any(callable(backend) for backend in backends.values())


def _remove(entries: list[Any], entry: object) -> None:
    # By identity: another list takes its place within `warnings.catch_warnings`, and it is gone after that.
    for place, one in enumerate(entries):
        if one is entry:
            del entries[place]
            return
