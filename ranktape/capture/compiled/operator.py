"""The tap operator, which passes a tensor of a compiled graph to the recorder and returns nothing.

One compiled graph serves many layers, microbatches and iterations. Therefore each call of a graph has a ticket, a
number that the graph also passes to its backward pass. When the operator runs, it finds the function that takes the
tensor by its ticket. If the ticket has expired, it does nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import has_side_effect

Take = Callable[[int, torch.Tensor], None]
"""A function of the number of a site and the tensor at that site."""

_LIBRARY = torch.library.Library("ranktape", "FRAGMENT")

TICKETS: dict[int, Take] = {}
"""The function that takes the tensors of each recorded graph call, by ticket."""


def is_of_gradient(site: int) -> bool:
    """Whether a site is that of a gradient, which has an odd number."""
    return bool(site % 2)


@functools.cache
def tap_operator() -> Any:
    """The operator `ranktape::tap(Tensor value, Tensor ticket, int site) -> ()`, which the first call defines."""
    # CUDA graphs do not replay Python. With this tag, inductor splits its graphs at the operator.
    _LIBRARY.define("tap(Tensor value, Tensor ticket, int site) -> ()", tags=(torch.Tag.cudagraph_unsafe,))
    _LIBRARY.impl("tap", _tap, "CompositeExplicitAutograd")  # on every device
    _LIBRARY.impl("tap", torch.library.fallthrough_kernel, "Autograd")
    _LIBRARY.impl("tap", lambda _value, _ticket, _site: None, "Meta")
    operator = torch.ops.ranktape.tap.default
    has_side_effect(operator)  # otherwise it is eliminated as dead code
    return operator


def _tap(value: torch.Tensor, ticket: torch.Tensor, site: int) -> None:
    # A compiler may call it with fake tensors, which have no values.
    take = TICKETS.get(int(ticket)) if type(ticket) is torch.Tensor else None
    if take is not None:
        take(site, value)
