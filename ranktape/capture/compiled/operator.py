"""The operator that stands in a compiled graph where a tensor is recorded: it reads the tensor, and gives nothing.

Its last operand but one is the ticket of a call of the graph, a number that the graph passes on to its backward pass:
one compiled graph stands for many layers, microbatches and iterations. What is to be done with the tensor is looked up
when it runs, by ticket and site; for a ticket that is over that is nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import has_side_effect

Take = Callable[[int, torch.Tensor], None]
"""Called with the number of a site, and the tensor there."""

_LIBRARY = torch.library.Library("ranktape", "FRAGMENT")

TICKETS: dict[int, Take] = {}
"""The calls of compiled graphs that are recorded, by their tickets."""


def is_of_gradient(site: int) -> bool:
    """Whether what is recorded at a site is a gradient: those have the odd numbers."""
    return bool(site % 2)


@functools.cache
def tap_operator() -> Any:
    """The operator `ranktape::tap(Tensor value, Tensor ticket, int site) -> ()`, defined with the first call."""
    # The tag keeps it out of CUDA graphs, which replay no Python: inductor splits its graphs there.
    _LIBRARY.define("tap(Tensor value, Tensor ticket, int site) -> ()", tags=(torch.Tag.cudagraph_unsafe,))
    _LIBRARY.impl("tap", _tap, "CompositeExplicitAutograd")  # on every device
    _LIBRARY.impl("tap", torch.library.fallthrough_kernel, "Autograd")
    _LIBRARY.impl("tap", lambda _value, _ticket, _site: None, "Meta")
    operator = torch.ops.ranktape.tap.default
    has_side_effect(operator)  # nobody may leave it out, though nothing uses what it gives
    return operator


def _tap(value: torch.Tensor, ticket: torch.Tensor, site: int) -> None:
    # A compiler may call it with tensors of its own, which have no values.
    take = TICKETS.get(int(ticket)) if type(ticket) is torch.Tensor else None
    if take is not None:
        take(site, value)
