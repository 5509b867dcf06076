"""Marks the start and the end of functions from a registry in the graphs that dynamo traces.

Dynamo inlines such a function, so the graph has only the operations that it calls. Therefore, while dynamo traces, the
registry returns wrapped functions, which put a mark with the arguments before the call and one with the output after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import allow_in_graph
from torch.fx.node import has_side_effect

from ranktape.capture.hooks.calls import tensor_in
from ranktape.capture.roles.table import FunctionRole


@has_side_effect
@allow_in_graph  # type: ignore[untyped-decorator]  # torch's has no types
def mark_call(name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Mark in the graph, before a call of a function with a role. Does nothing."""


@has_side_effect
@allow_in_graph  # type: ignore[untyped-decorator]  # as above
def mark_result(name: str, output: torch.Tensor) -> None:
    """Mark in the graph, after a call of a function with a role. Does nothing."""


@functools.cache
def marking(original: Callable[..., Any], role: FunctionRole) -> Callable[..., Any]:
    """The replacement of a registry's method, which wraps the returned function with marks."""
    name, element = role.name, role.output

    def give(*given: Any, **options: Any) -> Any:
        function = original(*given, **options)

        def marked(*args: Any, **kwargs: Any) -> Any:
            mark_call(name, [_shown(one) for one in args], {key: _shown(one) for key, one in kwargs.items()})
            result = function(*args, **kwargs)
            output = tensor_in(result, element)
            if output is not None:
                mark_result(name, output)
            return result

        return marked

    return give


def _shown(value: Any) -> Any:
    """The argument of a mark: tensors, numbers, strings and None as they are, otherwise the name of the class."""
    is_held = value is None or isinstance(value, torch.Tensor | bool | int | float | str)
    return value if is_held else type(value).__name__
