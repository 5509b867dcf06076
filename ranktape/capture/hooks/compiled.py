"""How does compiled code run as written while hooks are attached, which are not part of what was compiled?"""

from __future__ import annotations

import contextlib
import re
import warnings
from typing import Any

import torch

_HOOKS_WARNING = (
    "ignore",
    re.compile(r"Using `torch.compile\(module\)` when there are global hooks", re.IGNORECASE),
    Warning,
    None,
    0,
)
"""A compiled module warns of our global hook, which is there for this iteration and never calls a hook twice."""


def run_eagerly() -> contextlib.ExitStack:
    """Have compiled code run as written, and say nothing of our global hook, until the stack is closed."""
    stack = contextlib.ExitStack()
    stack.push(torch.compiler.set_stance("force_eager"))
    # Not by `warnings.filterwarnings`: Python forgets then what it has shown, and shows all of it again.
    filters: Any = warnings.filters
    filters.insert(0, _HOOKS_WARNING)
    stack.callback(_remove, filters)
    return stack


def _remove(filters: list[Any]) -> None:
    # By identity: another list takes its place within `warnings.catch_warnings`, and it is gone after that.
    for place, one in enumerate(filters):
        if one is _HOOKS_WARNING:
            del filters[place]
            return
