"""When does an iteration of the training end?

When its optimizer has stepped. Two optimizers, or one that wraps another, step once each in an iteration:
the first one that stepped leads, and the others follow. One that steps twice while the leader does not has
taken its place.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from torch.optim import Optimizer


class OptimizerClock:
    """Calls back when an iteration has ended."""

    def __init__(self, on_tick: Callable[[], None]) -> None:
        """Listen to every optimizer of the process from now on."""
        self._on_tick = on_tick
        self._owner = os.getpid()
        self._leader: weakref.ref[Optimizer] | None = None
        self._followers: set[int] = set()
        # A compiled optimizer step must not be traced into what we do at its end.
        on_step = torch.compiler.disable(self._on_step)
        self._handle = register_optimizer_step_post_hook(on_step)

    @property
    def has_ticked(self) -> bool:
        """Whether some optimizer has stepped."""
        return self._leader is not None

    def stop(self) -> None:
        """Listen no more."""
        self._handle.remove()

    def _on_step(self, optimizer: Optimizer, _args: Any, _kwargs: Mapping[str, Any]) -> None:
        if os.getpid() != self._owner:
            return
        leader = None if self._leader is None else self._leader()
        if leader is not None and leader is not optimizer and id(optimizer) not in self._followers:
            self._followers.add(id(optimizer))
            return
        self._leader = weakref.ref(optimizer)
        self._followers.clear()
        self._on_tick()
