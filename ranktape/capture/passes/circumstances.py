"""Does what runs now run in a backward pass, while a graph is made of it, or inside of a transform?"""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Whether a backward pass is running on this thread; in a forward hook: whether this is a recomputation."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001  (torch's own module tracker asks the same)


def is_traced() -> bool:
    """Whether a graph is made of what runs, or it is asked for shapes: it has no values, and must not be changed."""
    if torch.compiler.is_compiling():
        return True  # torch looks into all that follows where it makes the graph of the source (torch.export)
    fake = torch._C._TorchDispatchModeKey.FAKE  # noqa: SLF001  (torch has no public way to ask)
    is_fake = torch._C._get_dispatch_mode(fake) is not None  # noqa: SLF001  (as above)
    return is_fake or torch._C._get_tracing_state() is not None  # noqa: SLF001  (as above)


def is_transformed() -> bool:
    """Whether what runs is inside of a transform of `torch.func`: its tensors are no values that could be stored."""
    return torch._C._functorch.maybe_current_level() is not None  # noqa: SLF001  (torch has no public way to ask)


TRANSFORMED = "it ran inside of a transform of torch.func, whose tensors are not recorded"
"""The reason that is told of such a call."""
