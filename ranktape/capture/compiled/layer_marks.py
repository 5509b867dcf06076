"""Marks the outputs of layers, and the input of the first layer, in the graphs that dynamo traces.

The graph has the functions that layers call, but not the layers. Therefore, while dynamo traces, the hooks on layers
are replaced by the traceable ones below. Later, taps replace the marks.
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
    """Mark in the graph, for the output of a layer or the input of the first layer. Does nothing."""


def mark_given(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the first layer."""
    for one in (*args, *kwargs.values()):
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            mark_layer(one, True)  # noqa: FBT003
            return


def mark_output(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ARG001
    """Forward hook of a layer."""
    tensor = tensor_in(output, None)
    if tensor is not None:
        mark_layer(tensor, False)  # noqa: FBT003
