"""Marks in the graph that dynamo makes of a model what its layers are given and give: taps take the places of marks.

The graph has the functions that layers call, and not the layers. So while dynamo looks at them they have hooks of
another kind in the places of ours, which it can trace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._dynamo import allow_in_graph
from torch.fx.node import has_side_effect

from ranktape.capture.hooks.calls import tensor_in


@has_side_effect
@allow_in_graph  # type: ignore[untyped-decorator]  # torch's has no types
def mark_layer(value: torch.Tensor, is_first: bool) -> None:  # noqa: FBT001  (graphs call it by position)
    """Stands in the graph behind what a layer gives, or, of the first one, is given; does nothing."""


def mark_given(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook on the first layer."""
    for one in (*args, *kwargs.values()):
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            mark_layer(one, True)  # noqa: FBT003
            return


def mark_output(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ARG001
    """A forward hook on a layer."""
    tensor = tensor_in(output, None)
    if tensor is not None:
        mark_layer(tensor, False)  # noqa: FBT003
