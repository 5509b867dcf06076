"""The moment at which an outermost forward pass begins, also in iterations in which nothing is attached.

Where no optimizer ends the iterations, the next forward does: each model that is known has two light hooks for the
whole capture then. Forwards that several threads run at once belong to one iteration.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ranktape.capture.hooks.hook import Hook
from ranktape.capture.passes.circumstances import calls_itself, in_backward, is_traced

if TYPE_CHECKING:
    from torch import nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Those of a call: positional and by keyword."""


class _Running:
    """The models that a thread is running, outermost first."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []


class _ForwardThread(threading.local):
    """What a thread is running; `all_running` has that of each thread that lives."""

    def __init__(self, all_running: weakref.WeakSet[_Running]) -> None:
        self.running = _Running()
        all_running.add(self.running)


class ForwardClock:
    """Calls back when an outermost forward of a known model begins."""

    def __init__(
        self,
        on_forward: Callable[[nn.Module, Arguments], Arguments | None],
        *,
        on_late: Callable[[nn.Module, Arguments], Arguments | None],
    ) -> None:
        """Know no model yet.

        Args:
            on_forward: Called with the model and its arguments; the arguments to go on with, None for the same.
            on_late: Called so where another thread has put hooks on the model since this call of it began.
        """
        self._on_forward = on_forward
        self._on_late = on_late
        self._owner = os.getpid()
        self._all_running: weakref.WeakSet[_Running] = weakref.WeakSet()
        self._thread = _ForwardThread(self._all_running)
        self._lock = threading.RLock()
        self._handles: list[Any] = []

    @property
    def is_running(self) -> bool:
        """Whether a model is running on this thread."""
        return bool(self._thread.running.models)

    def watch(self, model: nn.Module, *, is_running: bool = False) -> None:
        """Listen to a model, from its next call on; to the end of this one where it is running."""
        self._handles.append(model.register_forward_pre_hook(Hook(self._begin), with_kwargs=True, prepend=True))
        self._handles.append(model.register_forward_hook(Hook(self._end), always_call=True))
        if is_running:
            self._thread.running.models.append(model)

    def stop(self) -> None:
        """Listen no more; torch would go wrong if a model were running."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Arguments | None:
        # Without keywords: torch's word for a hook that was taken off while the model runs.
        if kwargs is None or is_traced() or os.getpid() != self._owner or in_backward():
            return None
        own = self._thread.running
        running = own.models
        if running and running[0] is model and not calls_itself(model):
            running.clear()  # an interrupt took the last pass away, and no hook was called
        is_outermost = not running
        hooks = list(model._forward_pre_hooks)  # noqa: SLF001  (torch has no public way)
        with self._lock:
            is_shared = any(other.models for other in self._all_running if other is not own)
            running.append(model)
            if not is_outermost:
                return None
            if not is_shared:
                return self._on_forward(model, (args, kwargs))
            # Those that another thread put on while this one waited for it are not called for this call.
            is_late = hooks != list(model._forward_pre_hooks)  # noqa: SLF001  (as above)
            return self._on_late(model, (args, kwargs)) if is_late else None

    def _end(self, model: nn.Module, _args: Any, _output: Any) -> None:
        running = [] if is_traced() else self._thread.running.models
        if model in running:
            del running[running.index(model) :]
