"""Which tensors must not be replaced by an alias, and how are the gradients of weights among them seen all the same?

Autocast casts a parameter once for all its uses: their gradients are added up in the lower precision. An alias of the
parameter would be cast anew with each use, and the sum be one of float32: other bits. The gradient of such a weight is
seen on the weight itself: what one graph adds up, under the last call of the backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ranktape.capture.hooks.hook import Hook

if TYPE_CHECKING:
    from collections.abc import Callable

    from ranktape.capture.hooks.calls import Taking
    from ranktape.capture.hooks.ports import Port
    from ranktape.capture.passes.tracker import Call, Tracker
    from ranktape.capture.recorder import Recorder
    from ranktape.capture.source import Source

CACHED = "autocast casts it once for all its uses: one gradient for all of them"
"""Why the gradient of an operand is not recorded."""


def is_cached_by_autocast(tensor: torch.Tensor) -> bool:
    """Whether autocast, as it is now, keeps its cast of this tensor for later uses."""
    if tensor.dtype != torch.float32 or not (tensor.requires_grad and tensor.is_leaf) or tensor._is_view():  # noqa: SLF001
        return False
    kind = tensor.device.type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return is_on and torch.is_autocast_cache_enabled()


class Leaves:
    """The hooks on weights and biases of bare products for one iteration."""

    def __init__(self, *, recorder: Recorder, tracker: Tracker) -> None:
        self._recorder = recorder
        self._tracker = tracker
        self._calls: dict[tuple[Source, str], Call] = {}
        self._handles: dict[Source, dict[str, Any]] = {}

    def watch(self, taking: Taking, port: Port, weight: torch.Tensor) -> None:
        """See the gradient of a weight on the weight itself."""
        source = taking.source
        handles = self._handles.setdefault(source, {})
        if port.name in handles:
            return

        def hook(grad: torch.Tensor) -> None:
            with self._recorder.guarded(source, port.grad):
                # The hook of a leaf knows no call: the gradient of this product's output came just before.
                call = self._calls.pop((source, port.name), None)
                if call is not None:
                    taking.record_grad_now(port, grad, call)
                elif self._tracker.is_active:
                    self._recorder.refuse(source, port.grad, "no gradient of the product's output came before it")

        handles[port.name] = weight.register_hook(Hook(hook))

    def on_grad_output(self, source: Source) -> Callable[[Call], None] | None:
        """What is to be called with the gradient of the output; None where no weight of that source is watched."""
        if source not in self._handles:
            return None

        def note(call: Call) -> None:
            self._calls.update(dict.fromkeys([(source, name) for name in self._handles.get(source, ())], call))

        return note

    def remove(self) -> None:
        """Detach everything."""
        for handles in self._handles.values():
            for handle in handles.values():
                handle.remove()
        self._handles.clear()
