"""Marks in the graph that dynamo makes of a model where a function begins and ends that a registry gave.

Dynamo looks into such a function, and the graph has what it calls. So while dynamo looks, the registry gives functions
that say where they begin, with what, and where they end.
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
    """Stands in the graph in front of the function of a role; does nothing."""


@has_side_effect
@allow_in_graph  # type: ignore[untyped-decorator]  # as above
def mark_result(name: str, output: torch.Tensor) -> None:
    """Stands in the graph behind it; does nothing."""


@functools.cache
def marking(original: Callable[..., Any], role: FunctionRole) -> Callable[..., Any]:
    """In the place of a registry's method: gives what it gives, with marks around."""
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
    """An argument as a graph may hold it: the name of its class in the place of what is neither tensor nor plain."""
    is_held = value is None or isinstance(value, torch.Tensor | bool | int | float | str)
    return value if is_held else type(value).__name__
