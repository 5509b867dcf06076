"""Runs compiled code with taps in its graphs while hooks are attached, or eagerly if graphs do not show enough."""

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
"""Filter for the warning that global hooks run an extra time for compiled modules, which is harmless for this one."""


class IgnoredWarning:
    """Suppresses the warning of compiled code about global hooks, from its construction until `remove()`."""

    def __init__(self) -> None:
        # Not by `warnings.filterwarnings`, after which Python shows earlier warnings again.
        filters: Any = warnings.filters
        filters.insert(0, _HOOKS_WARNING)
        self._filters: list[Any] = filters

    def remove(self) -> None:
        """Show the warning again."""
        _remove(self._filters, _HOOKS_WARNING)


class EagerMode:
    """Runs compiled code eagerly or with taps, and suppresses the warning about global hooks, until `remove()`.

    This does not import torch's compiler. If the training imports it later, this takes effect then.
    """

    def __init__(self, begin: Callable[[], Any] | None = None) -> None:
        """`begin` is called once the compiler is imported. If it returns a handle, code runs with taps, not eagerly."""
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
        """The specification of the compiler's module when Python imports it; None for other modules."""
        spec = PathFinder.find_spec(name, path, target) if name == _COMPILER else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self._force()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # this loader loads no other module
        return spec

    def remove(self) -> None:
        """Undo everything."""
        self._stack.close()

    def _force(self) -> None:
        handle = None if self._begin is None else self._begin()
        if handle is not None:
            self._stack.callback(handle.remove)
            return
        self._stack.push(torch.compiler.set_stance("force_eager"))


_TESTED_VERSIONS = ("2.13.",)
"""The versions of torch for which tests have shown that recording graphs does not change bits in float32."""


def why_eager(options: CaptureOptions) -> str | None:
    """The reason why compiled code runs eagerly in captured iterations; None if it is recorded in its graphs."""
    if options.compiled == "eager":
        return "--compiled eager"
    if find_spec("ranktape.capture.compiled") is None:
        return "this build does not record graphs"
    is_tested = torch.__version__.startswith(_TESTED_VERSIONS)
    return None if is_tested else f"graphs of torch {torch.__version__} are not known"


_SHOWN_IN_GRAPHS = frozenset({torch.nn.Linear.forward, torch.nn.Embedding.forward})
"""The forwards of layers that call a single function of torch with their own parameters."""


def hidden_in_graphs(
    recorded: Iterable[torch.nn.Module], attached: Iterable[torch.nn.Module], function_roles: Iterable[FunctionRole]
) -> str | None:
    """The part of the models that graphs do not show, because they have functions but no calls of modules.

    None if graphs show everything.

    Args:
        recorded: The modules with a role that are recorded.
        attached: All modules with hooks.
        function_roles: The roles of functions.
    """
    kinds = {
        type(module)
        for module in recorded
        if type(module).forward not in _SHOWN_IN_GRAPHS or is_parametrized(module, "weight")
    }
    types = set(map(type, attached))
    # In graphs, the whole module is a single operator.
    kinds.update(kind for kind in types if issubclass(kind, torch.nn.MultiheadAttention))
    if kinds:
        return f"layers of the class {min(kind.__name__ for kind in kinds)}"
    attention: Any = torch.nn.functional.scaled_dot_product_attention
    if isinstance(attention, Around):
        packages = {kind.__module__.partition(".")[0] for kind in types}
        names = (role.name for role in function_roles if role.gives_function)
        return next((name for name in names if name.partition(".")[0] in packages), None)
    return None


def is_left_compiled(options: CaptureOptions) -> bool:
    """Whether this process has compiled something and the ends of its iterations are found without hooks on models."""
    return has_compiled() and options.advance_on != "forward" and Mode.TRAIN in options.wanted_modes


def has_compiled() -> bool:
    """Whether this process has called `torch.compile`."""
    # torch has no public way to ask. The entries of `torch.compiler.disable` are not callable.
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return any(callable(backend) for backend in backends.values())


def _remove(entries: list[Any], entry: object) -> None:
    # By identity. The entry may be missing: `warnings.catch_warnings` replaces the list temporarily.
    for index, known in enumerate(entries):
        if known is entry:
            del entries[index]
            return
