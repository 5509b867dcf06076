"""Whether what runs now runs in a backward pass, while a graph is made of it, or inside of a transform."""

from __future__ import annotations

import torch
from torch._compile import _disable_dynamo

# Torch has no public way to ask; its own module tracker asks the same. Looked up once: each tensor asks.
_current_graph_task_id = torch._C._current_graph_task_id  # noqa: SLF001
_get_dispatch_mode = torch._C._get_dispatch_mode  # noqa: SLF001
_get_tracing_state = torch._C._get_tracing_state  # noqa: SLF001
_maybe_current_level = torch._C._functorch.maybe_current_level  # noqa: SLF001
_FAKE = torch._C._TorchDispatchModeKey.FAKE  # noqa: SLF001

untraced = _disable_dynamo
"""Decorates what compiled code must not be traced into: torch's public decorator loads the compiler at once."""


def in_backward() -> bool:
    """Whether a backward pass is running on this thread; in a forward hook: whether this is a recomputation."""
    return _current_graph_task_id() != -1


def is_traced() -> bool:
    """Whether a graph is made of what runs, or it is asked for shapes: it has no values, and must not be changed."""
    if torch.compiler.is_compiling():
        return True  # torch looks into all that follows where it makes the graph of the source (torch.export)
    return _get_dispatch_mode(_FAKE) is not None or _get_tracing_state() is not None


def is_transformed() -> bool:
    """Whether what runs is inside of a transform of `torch.func`: its tensors are no values that could be stored."""
    return _maybe_current_level() is not None


TRANSFORMED = "it ran inside of a transform of torch.func, whose tensors are not recorded"
"""The reason that is told of such a call."""
