"""Marks calls of functions and layers in the graphs that dynamo traces. Later, taps replace the marks.

A graph has the operations that functions and layers call, but neither the functions nor the layers. Therefore, while
dynamo traces, registries return functions with a mark before the call, which has the arguments, and one after it, which
has the output; and the hooks on layers are replaced by hooks that put marks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo import allow_in_graph
from torch.fx.node import has_side_effect

from ranktape.capture.roles.table import FunctionRole
from ranktape.capture.tensors.parts import first_floating, tensor_in


@has_side_effect
@allow_in_graph  # type: ignore[untyped-decorator]  # torch's has no types
def mark_call(name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Mark in the graph, before a call of a function with a role. Does nothing."""


@has_side_effect
@allow_in_graph  # type: ignore[untyped-decorator]  # as above
def mark_result(name: str, output: torch.Tensor) -> None:
    """Mark in the graph, after a call of a function with a role. Does nothing."""


@functools.cache
def with_marks(original: Callable[..., Any], role: FunctionRole) -> Callable[..., Any]:
    """The replacement of a registry's method, which wraps the returned function with marks."""
    name, element = role.name, role.output

    def get_function(*own_args: Any, **own_kwargs: Any) -> Any:
        function = original(*own_args, **own_kwargs)

        def marked(*args: Any, **kwargs: Any) -> Any:
            mark_call(name, list(map(_shown, args)), {key: _shown(value) for key, value in kwargs.items()})
            result = function(*args, **kwargs)
            output = tensor_in(result, element)
            if output is not None:
                mark_result(name, output)
            return result

        return marked

    return get_function


def _shown(value: Any) -> Any:
    """The argument of a mark: tensors, numbers, strings and None as they are, otherwise the name of the class."""
    is_constant = value is None or isinstance(value, torch.Tensor | bool | int | float | str)
    return value if is_constant else type(value).__name__


@has_side_effect
@allow_in_graph  # type: ignore[untyped-decorator]  # as above
def mark_layer(value: torch.Tensor, is_first: bool) -> None:  # noqa: FBT001  (graphs call it by position)
    """Mark in the graph, for the output of a layer or the input of the first layer. Does nothing."""


def mark_first_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the first layer."""
    tensor = first_floating(args, kwargs)
    if tensor is not None:
        mark_layer(tensor, True)  # noqa: FBT003


def mark_output(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ARG001
    """Forward hook of a layer."""
    tensor = tensor_in(output, None)
    if tensor is not None:
        mark_layer(tensor, False)  # noqa: FBT003
